"""Where a step's time goes: operators, host waits and milliseconds of each phase, by method.

Runs every method on one prompt with a fixed draft length, so that every step drafts. One run counts operators (without
views and allocations) and waits; others measure CPU time, which excludes other programs. The floor of a
forward is the bytes of the target's weights over the measured memory bandwidth. Waits are counted on a CPU: branches
for CPUs, where reading is free, are included.

    python -m benchmarks step --methods eagle1 hydra:HEAD --batch 4
"""

import statistics
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, option
from benchmarks.kit.operators import HostReads, Operators
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, read
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.engine import step as step_module, tail as tail_module
from foredraft.engine.cost_model import measure_bandwidth
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant

PHASES = ("propose", "address", "forward", "warp", "verify", "compact", "read back", "other")
"""``compact`` includes the drafter's ``commit``; ``other`` is the rest of a step."""
METHODS = (
    "none",
    "prompt_lookup",
    "draft_model",
    "draft_model,branching=4x2x2x1",
    "eagle1",
    "eagle2",
    "eagle3",
    "medusa",
    "lookahead",
)
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return "
_WARM_UP = 4


class Recorder:
    """Sums by phase and step; work inside a phase belongs to the outermost one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[float]]] = []
        self._inside = False

    @contextmanager
    def step(self, now: Callable[[], list[float]]) -> Iterator[None]:
        self.steps.append(defaultdict(lambda: [0.0, 0.0, 0.0]))
        before = now()
        yield
        named = [sum(values) for values in zip(*self.steps[-1].values(), strict=True)]
        self._add("other", [b - a - own for a, b, own in zip(before, now(), named, strict=True)])

    def phase(self, name: str, function: Callable[..., Any], now: Callable[[], list[float]]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self.steps:
                return function(*args, **kwargs)
            self._inside, before = True, now()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self._add(name, [b - a for a, b in zip(before, now(), strict=True)])

        return run

    def _add(self, name: str, values: list[float]) -> None:
        self.steps[-1][name] = [a + b for a, b in zip(self.steps[-1][name], values, strict=True)]

    def medians(self, kind: int) -> dict[str, float]:
        steps = self.steps[_WARM_UP:] or self.steps
        return {phase: statistics.median(step[phase][kind] for step in steps) for phase in PHASES}


def record(generator: Generator, params: SamplingParams, batch: int, operators: Operators | None) -> Recorder:
    """Run the prompt and record every step: counts with ``operators``, else seconds."""
    engine, recorder = generator.engine, Recorder()
    target, drafter, cache = type(engine.target), type(engine.drafter), step_module.SlotCache
    places = (
        ("propose", step_module.Stepper, "_propose"),
        ("address", target, "address"),
        ("forward", target, "compute"),
        ("warp", Warp, "__call__"),
        ("verify", tail_module, "verify"),
        ("compact", cache, "compact"),
        ("compact", drafter, "commit"),
        ("read back", tail_module, "read_back"),
    )

    def now() -> list[float]:
        return [operators.count, operators.waits, 0.0] if operators else [0.0, 0.0, time.process_time()]

    launch, read, whole = step_module.Stepper.launch, step_module.Stepper.read, ExitStack()

    def begin(*args: Any) -> Any:
        if not recorder._inside:  # a nested loop's step belongs to the phase that runs it
            whole.enter_context(recorder.step(now))
        return launch(*args)

    def end(*args: Any) -> Any:
        done = read(*args)
        if not recorder._inside:
            whole.close()
        return done

    with ExitStack() as stack:
        for name, owner, attribute in places:
            function = getattr(owner, attribute)
            stack.enter_context(patch.object(owner, attribute, recorder.phase(name, function, now)))
        stack.enter_context(patch.object(step_module.Stepper, "launch", begin))
        stack.enter_context(patch.object(step_module.Stepper, "read", end))
        if operators:
            stack.enter_context(operators)
            stack.enter_context(HostReads(operators))
        generator.generate([PROMPT] * batch, params)
    return recorder


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    """Counts and CPU milliseconds by phase of each method and temperature."""
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    generators = dict(zip(methods, foredraft.load_many(args.target, methods), strict=True))
    target = generators[methods[0]].engine.target
    with patch.object(time, "perf_counter", time.process_time):
        bandwidth = measure_bandwidth(target.device)
    yield {"kind": "provenance", "weight_bytes": target.weight_bytes, "bandwidth": bandwidth}
    for cell in cells:
        generator = generators[cell["method"]]
        generator.engine.policy = Constant(generator.engine.drafter.needs.longest)
        limits: dict[str, Any] = {"max_new_tokens": args.new_tokens, "temperature": cell["temperature"]}
        params = SamplingParams(**limits, seed=0, eos_token_id=())
        counted = record(generator, params, args.batch, Operators())
        timed = [record(generator, params, args.batch, None) for _ in range(args.repeats)]
        milliseconds = {phase: 1e3 * statistics.median(each.medians(2)[phase] for each in timed) for phase in PHASES}
        yield {**cell, "operators": counted.medians(0), "waits": counted.medians(1), "milliseconds": milliseconds}


def table(path: Path = RESULTS / "step.jsonl") -> str:
    """The tables of docs/performance.md."""
    kinds = read(path)
    origin, steps = kinds["provenance"][0], kinds["step"]
    floor = 1e3 * origin["weight_bytes"] / origin["bandwidth"]
    facts = (
        f"The floor is {origin['weight_bytes'] / 1e6:.0f} MB of weights at {origin['bandwidth'] / 1e9:.1f} GB/s. Batch "
        f"{steps[0]['batch']}, {origin_line(origin)}. Made by `{origin['command']}`."
    )
    tables = [_columns(steps, "operators", 0), _columns(steps, "waits", 0), _columns(steps, "milliseconds", 2, floor)]
    return "\n\n".join([*tables, facts])


def _columns(steps: list[dict[str, Any]], key: str, digits: int, floor: float | None = None) -> str:
    """One kind of number by phase, the sum last; ``floor`` beside the forward."""
    titles = [*PHASES, "total"]
    if floor is not None:
        titles.insert(titles.index("forward") + 1, "floor")
    lines = []
    for step in steps:
        values = step[key] | {"total": sum(step[key].values()), "floor": floor}
        cells = [f"{values[title]:.{digits}f}" for title in titles]
        lines.append([f"{step['method']}, T={step['temperature']:g}", *cells])
    return "\n".join(markdown_table([key, *titles], lines))


EXPERIMENT = Experiment(
    name="step",
    question="where a step's time goes: performance.md",
    options={
        "target": option("sample"),
        "methods": option(METHODS, "specs of drafters"),
        "temperatures": option([0.0, 1.0]),
        "batch": option(1),
        "new_tokens": option(48),
        "repeats": option(3, "timed runs"),
    },
    cells=lambda args: [
        {"kind": "step", "method": method, "temperature": heat, "batch": args.batch}
        for method in args.methods
        for heat in args.temperatures
    ],
    measure=measure,
    facts=lambda args: {"target": Path(args.target).name},
    shown=table,
    threads=None,
    tables={"docs/performance.md": {"step": table}},
    hours=0.2,
)
