"""Which drafter, how long, up to which batch? Predicted for everything, measured for the best, on your own prompts."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from foredraft.bench.tune.candidates import Family, families
from foredraft.bench.tune.predict import Prediction, StepModel, predict
from foredraft.bench.tune.probe import Probe, Tap, typical
from foredraft.compose.load import Spec, load
from foredraft.core.errors import OptionError, UsageError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.cost_model import CostTable, measure_costs
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator, Result

PAYS = 1.02
"""A drafter must be so many times as fast as plain decoding to be worth its memory."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration: what was predicted for it and, where it was run, what came of it.

    ``acceptance_length``: tokens of a forward, measured where it was run, else predicted.
    """

    family: str
    spec: str
    predicted: Prediction
    measured: float | None = None
    acceptance_length: float = 0.0

    @property
    def error(self) -> float | None:
        """By how much of the measured speed-up the prediction is too high."""
        return None if self.measured is None else self.predicted.speed_up / self.measured - 1.0


class BatchPoint(NamedTuple):
    """Speed-up of the chosen drafter where so many texts are generated at once."""

    batch: int
    speed_up: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found. ``trials``: the best prediction first. ``chosen``: None where plain decoding is the best.

    ``skipped``: drafters that could not be loaded, and why. ``off_from``: the batch size from which plain decoding is
    as good; None if drafting pays at all that were tried. ``learned``: the state of the chosen drafter's policy.
    """

    trials: tuple[Trial, ...]
    chosen: Trial | None
    batches: tuple[BatchPoint, ...]
    off_from: int | None
    costs: tuple[CostTable, ...]
    skipped: tuple[str, ...]
    learned: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """On what, and how thoroughly.

    ``prompts`` are asked by every configuration, ``verify`` so many of which are run; ``batches``: sizes to try.
    """

    prompts: Sequence[Any]
    params: SamplingParams
    verify: int = 3
    batches: Sequence[int] = (1, 2, 4, 8, 16)


class Tuner:
    """Measures one target.

    Args:
        plain: the target with plain decoding, with room for the largest batch.
        names: drafters as ``load`` takes them, without sizes; with some, those stay.
        model: what the target is called: bundled ones have drafts of their own.
    """

    def __init__(self, plain: Generator, names: Sequence[str], model: str, tell: Tell = lambda what: None) -> None:
        self._plain = plain
        self._target = plain.engine.target
        found = (family for name in names for family in families(name, model))
        self._families = list(dict.fromkeys(found))  # each once
        self._tell = tell
        if not self._families:
            raise OptionError("There is nothing to tune: name at least one drafter.")

    def run(self, question: Question) -> Tuning:
        """All of it.

        Raises:
            OptionError: none of the drafters can be had, or there are no prompts.
        """
        prompts = [self._plain.encode(prompt) for prompt in question.prompts]
        if not prompts:
            raise OptionError("There are no prompts to tune on.")
        self._tell("costs of forwards")
        context = round(statistics.fmean(map(len, prompts))) + question.params.max_new_tokens // 2
        tables = self._costs(question.batches, context)
        self._plain.batch(prompts[:1], question.params)  # warms up
        trials: list[Trial] = []
        skipped: list[str] = []
        for family in self._families:
            self._tell(family.probe)
            try:
                trials += self._predicted(family, prompts, question.params, tables[0])
            except UsageError as error:
                skipped.append(f"{family.name}: {error}")
        if not trials:
            raise OptionError(f"None of the drafters can be had. {skipped[0]}")
        trials.sort(key=lambda trial: -trial.predicted.speed_up)
        trials = self._verified(trials, prompts, question)
        best = max((trial for trial in trials if trial.measured), key=lambda trial: trial.measured or 0.0)
        chosen = best if (best.measured or 0.0) >= PAYS else None
        batches, learned = self._batches(chosen, prompts, question) if chosen else ((), {})
        # that it pays for a text alone is known better than from its batches
        off_from = next((point.batch for point in batches if point.batch > 1 and point.speed_up < PAYS), None)
        return Tuning(tuple(trials), chosen, tuple(batches), off_from, tables, tuple(dict.fromkeys(skipped)), learned)

    def _costs(self, batches: Sequence[int], context: int) -> tuple[CostTable, ...]:
        with torch.inference_mode():
            return tuple(
                measure_costs(self._target, context, 3.0, 64, batch) for batch in {1: 1, **dict.fromkeys(batches)}
            )

    def _predicted(
        self, family: Family, prompts: Sequence[list[int]], params: SamplingParams, costs: CostTable
    ) -> list[Trial]:
        """Run a family's probe beside plain decoding, and read all of its sizes off it."""
        loaded = load(self._target, family.probe, tokenizer=self._plain.tokenizer)
        try:
            plain, drafting = self._watched(self._plain, 0.0), self._watched(loaded, _confidence(family.probe))
            drafting.ask(prompts[:1], params)
            drafting.forget()  # it has warmed up
            for prompt in prompts:
                plain.ask([prompt], params)
                drafting.ask([prompt], params)
            for drafting.probe.short in (1, 2):
                drafting.ask(prompts[:1], params)
        finally:
            loaded.close()
        steps = drafting.probe.steps
        if not any(step.depths for step in steps):
            raise OptionError("no step drafted anything; give longer texts with more new tokens.")
        model = StepModel.of(steps, costs, drafting.other, padded=self._target.device.type == "cpu")
        plain_step = typical([s.draft_seconds + s.verify_seconds for s in plain.probe.steps]) + plain.other
        predictions = [predict(steps, model, each.shape, plain_step) for each in family.candidates]
        return [
            Trial(family.name, each.spec, prediction, None, prediction.tokens)
            for each, prediction in zip(family.candidates, predictions, strict=True)
        ]

    def _watched(self, generator: Generator, confidence: float) -> "_Watched":
        tap = Tap(generator.engine.drafter)
        probe = Probe(tap, confidence)
        engine = Engine(self._target, tap, probe, max_rows=1)
        return _Watched(Generator(engine, None, self._plain.eos_token_ids, generator.kind), probe)

    def _verified(self, trials: list[Trial], prompts: Sequence[list[int]], question: Question) -> list[Trial]:
        """Run the best of each family, then the next best, and the best family's own schedule."""
        alike: dict[tuple[str, Prediction], Trial] = {}  # larger ones that never drafted more are not run
        heads: dict[str, Trial] = {}
        for trial in trials:
            alike.setdefault((trial.family, trial.predicted), trial)
            heads.setdefault(_family(trial), trial)
        others = (trial for trial in alike.values() if trial not in heads.values())
        order = [*heads.values(), *others][: question.verify]
        adaptive = replace(trials[0], spec=trials[0].family)
        chosen = [*order, *([adaptive] if adaptive.spec not in {trial.spec for trial in order} else [])]
        self._tell(f"running {len(chosen)} of {len(trials)} configurations")
        measured = self._measured([trial.spec for trial in chosen], prompts, question.params)
        results = {
            trial.spec: replace(trial, measured=m, acceptance_length=a)
            for trial, (m, a) in zip(chosen, measured, strict=True)
        }
        known = [results.pop(trial.spec, trial) for trial in trials]
        return known + list(results.values())

    def _measured(
        self, specs: Sequence[str], prompts: Sequence[list[int]], params: SamplingParams
    ) -> list[tuple[float, float]]:
        """Speed-up and acceptance length of each, side by side with plain decoding; of two tries the faster one."""
        generators = [self._plain, *(load(self._target, spec, tokenizer=self._plain.tokenizer) for spec in specs)]
        try:
            for generator in generators:
                generator.batch(prompts[:1], params)
            best: dict[tuple[int, int], Result] = {}
            for turn in range(2 * len(prompts)):
                prompt = turn % len(prompts)
                for shift in range(len(generators)):
                    arm = (turn + shift) % len(generators)
                    result = generators[arm].batch([prompts[prompt]], params)[0]
                    before = best.get((arm, prompt), result)
                    best[arm, prompt] = min(before, result, key=lambda each: each.stats.seconds)
            kept = [[best[arm, prompt] for prompt in range(len(prompts))] for arm in range(len(generators))]
            speeds = [_tokens(results) / _seconds(results) for results in kept]
            lengths = [_tokens(results) / sum(r.stats.target_forwards for r in results) for results in kept]
            return [(speed / speeds[0], length) for speed, length in zip(speeds[1:], lengths[1:], strict=True)]
        finally:
            for generator in generators[1:]:
                generator.close()

    def _batches(
        self, chosen: Trial, prompts: Sequence[list[int]], question: Question
    ) -> tuple[list[BatchPoint], dict[str, Any]]:
        """Speed-up of the chosen drafter by batch size, and what its policy has learned."""
        generator = load(
            self._target, chosen.spec, tokenizer=self._plain.tokenizer, max_batch_size=max(question.batches)
        )
        found = []
        try:
            for batch in sorted(question.batches):
                self._tell(f"batches of {batch}")
                some = [prompts[i % len(prompts)] for i in range(-(-len(prompts) // batch) * batch)]
                calls = [some[i : i + batch] for i in range(0, len(some), batch)]
                rates: dict[Generator, float] = {}
                for repeat in range(3):  # the first one of this size warms up
                    for each in (self._plain, generator):
                        done = [each.batch(call, question.params) for call in calls]
                        rate = sum(map(_tokens, done)) / sum(map(_longest, done))
                        rates[each] = max(rate, rates.get(each, 0.0) if repeat > 1 else 0.0)
                found.append(BatchPoint(batch, rates[generator] / rates[self._plain]))
        finally:
            generator.close()
        return found, generator.engine.policy.state()


@dataclass(slots=True)
class _Watched:
    """A loop that is watched step by step. ``other``: seconds a step that went neither into drafts nor the target."""

    generator: Generator
    probe: Probe
    _forwards: int = 0
    _other: float = 0.0

    def ask(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        for result in self.generator.batch(prompts, params):
            self._forwards += result.stats.target_forwards
            self._other += result.stats.other_seconds

    def forget(self) -> None:
        """Begin anew."""
        self.probe.steps.clear()
        self._forwards, self._other = 0, 0.0

    @property
    def other(self) -> float:
        return self._other / max(self._forwards, 1)


def _family(trial: Trial) -> str:
    """Chains and trees of one head are two, as servers see them."""
    return trial.family + (" chain" if "top_k=1" in trial.spec.split(",") else "")


def _confidence(spec: str) -> float:
    return Spec.parse(spec).options.confidence


def _seconds(results: Sequence[Result]) -> float:
    return sum(r.stats.seconds - r.stats.prefill_seconds for r in results)


def _longest(results: Sequence[Result]) -> float:
    """Of texts that ran side by side."""
    return max(r.stats.seconds - r.stats.prefill_seconds for r in results)


def _tokens(results: Sequence[Result]) -> int:
    return sum(len(r.tokens) for r in results)
