"""Measurements outside the timed comparison: which drafted nodes were accepted, and the cost of forwards."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from foredraft.bench.measure.arms import BenchArm, LoopArm
from foredraft.bench.measure.records import Cost, RunFile, Watched
from foredraft.bench.measure.run import Settings
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import ForedraftError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.cost_model import measure_bandwidth, measure_costs
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Policy
from foredraft.engine.step import StepResult
from foredraft.model.base import TargetModel

_LONGEST = 64
"""Nodes of the largest forward that is timed."""


@final
class AcceptanceRecorder(Policy):
    """Always drafts the largest size. Counts [judged, accepted] for nodes whose parent was accepted or is the root; see
    ``records.Watched``.

    Sibling ranks follow the drafter's order.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.places: dict[str, list[int]] = {}
        self.confidence: dict[str, list[int]] = {}

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan(tuple(min(self._longest, limit) for limit in limits))

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        for result in step.rows:
            parents, scores, accepted = result.nodes.parents, result.nodes.scores, {0, *result.path}
            ways, children = {0: ""}, [0] * len(parents)
            for node, parent in enumerate(parents):
                if node == 0 or parent < 0:
                    continue
                children[parent] += 1
                ways[node] = f"{ways[parent]}-{children[parent]}" if parent else str(children[parent])
                if parent in accepted:
                    hit = int(node in accepted)
                    _count(self.places, ways[node], hit)
                    if scores is not None:
                        chance = math.exp(scores[node] - scores[parent])
                        _count(self.confidence, str(min(99, int(100 * chance))), hit)


@dataclass(frozen=True, slots=True)
class ExtraMeasurements:
    """Measurements besides the runs.

    ``batches``: batch sizes for which to time forwards; ``prompts``: prompts on which to watch drafts. Either may be
    empty. ``seconds``: time budget per cost table.
    """

    arms: Sequence[BenchArm]
    settings: Settings
    temperatures: Sequence[float]
    batches: Sequence[int]
    prompts: Sequence[BenchPrompt]
    cached: Sequence[int] = (128, 1024)
    seconds: float = 3.0

    def lines(self, known: RunFile) -> Iterator[dict[str, Any]]:
        """The lines that the file lacks."""
        timed = {(cost.batch, cost.cached) for cost in known.costs}
        target = next(arm for arm in self.arms if isinstance(arm, LoopArm)).generator.engine.target
        sizes = [(batch, cached) for batch in self.batches for cached in self.cached]
        for cost in costs(target, [size for size in sizes if size not in timed], self.seconds):
            yield cost.line()
        seen = {(each.arm, each.task, each.prompt, each.temperature) for each in known.watched}
        for arm in self.arms:
            if isinstance(arm, LoopArm) and arm.generator.engine.drafter.needs.max_nodes:
                for number, prompt in enumerate(self.prompts):
                    for temperature in self.temperatures:
                        if (arm.name, prompt.task, prompt.name, temperature) not in seen:
                            params = self.settings.params(temperature, number)
                            with contextlib.suppress(ForedraftError):  # its run has recorded the error
                                yield watch(arm, prompt, params).line()


def watch(arm: LoopArm, prompt: BenchPrompt, params: SamplingParams) -> Watched:
    """Continue a prompt with drafts of the arm's full length, and count accepted nodes."""
    engine = arm.generator.engine
    recorder = AcceptanceRecorder(engine.drafter.needs.longest)
    watched = Engine(engine.target, engine.drafter, recorder, max_rows=1)
    Generator(watched, arm.generator.tokenizer, arm.generator.eos_token_ids, arm.generator.kind).batch(
        [prompt.prompt], params
    )
    return Watched(arm.name, prompt.task, prompt.name, params.temperature, recorder.places, recorder.confidence)


def costs(target: TargetModel, sizes: Sequence[tuple[int, int]], budget: float) -> Iterator[Cost]:
    """Forward times by nodes per row, one table per (rows, cached tokens) that fits the context.

    Args:
        budget: seconds per table.
    """
    possible = [(batch, cached) for batch, cached in sizes if cached + _LONGEST < target.max_length]
    bandwidth = measure_bandwidth(target.device) if possible else 0.0
    for batch, cached in possible:
        with torch.inference_mode():
            table = measure_costs(target, cached, budget, _LONGEST, batch)
        nodes = tuple(rows // batch for rows in table.rows)
        yield Cost(batch, cached, nodes, table.seconds, target.weight_bytes, bandwidth)


def _count(table: dict[str, list[int]], key: str, hit: int) -> None:
    entry = table.setdefault(key, [0, 0])
    entry[0] += 1
    entry[1] += hit
