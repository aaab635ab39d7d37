"""Search for the fastest drafter, its size, and its largest useful batch: predict all, measure the best."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from foredraft.bench.tune.candidates import CandidateFamily, families
from foredraft.bench.tune.predict import StepModel, StepPrediction, predict
from foredraft.bench.tune.probe import Probe, typical
from foredraft.compose.load import Spec, load
from foredraft.core.errors import OptionError, UsageError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.cost_model import CostTable, measure_costs
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator, Result

PAYS = 1.02
"""Smallest speed-up that is worth a drafter's memory."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Configuration:
    """A drafter spec with its prediction and, if it was run, its measured speed-up.

    ``family``: the name of its ``CandidateFamily``. ``acceptance_length``: tokens per forward, measured if it was run,
    else predicted.
    """

    family: str
    spec: str
    predicted: StepPrediction
    measured: float | None = None
    acceptance_length: float = 0.0

    @property
    def error(self) -> float | None:
        """Relative error of the predicted speed-up."""
        return None if self.measured is None else self.predicted.speed_up / self.measured - 1.0


class BatchPoint(NamedTuple):
    """Speed-up of the chosen drafter at a batch size."""

    batch: int
    speed_up: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Result of a search.

    ``trials``: best prediction first. ``chosen``: None if plain decoding is fastest. ``skipped``: drafters that could
    not be tried, with reasons. ``off_from``: the smallest batch size at which drafting does not pay; None if it pays at
    all sizes. ``learned``: the state of the chosen drafter's policy.
    """

    trials: tuple[Configuration, ...]
    chosen: Configuration | None
    batches: tuple[BatchPoint, ...]
    off_from: int | None
    costs: tuple[CostTable, ...]
    skipped: tuple[str, ...]
    learned: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """Prompts for every configuration, number of configurations to run, and batch sizes to test."""

    prompts: Sequence[Any]
    params: SamplingParams
    verify: int = 3
    batches: Sequence[int] = (1, 2, 4, 8, 16)


class Tuner:
    """Tunes the drafter of one target.

    Args:
        plain: plain decoding of the target, with room for the largest batch.
        names: drafter specs; sizes given as options stay fixed.
        model: the target's name, to find the heads of a bundled model.

    Raises:
        OptionError: no drafter, or one that cannot be tuned.
    """

    def __init__(self, plain: Generator, names: Sequence[str], model: str, report: Report = lambda what: None) -> None:
        self._plain = plain
        self._target = plain.engine.target
        found = (family for name in names for family in families(name, model))
        self._families = list(dict.fromkeys(found))
        self._report = report
        if not self._families:
            raise OptionError("Nothing to tune: name at least one drafter.")

    def run(self, config: TuneConfig) -> Tuning:
        """Time forwards, probe each family, run the best candidates, and test batch sizes.

        Raises:
            OptionError: no drafter could be loaded, or there are no prompts.
        """
        prompts = [self._plain.encode(prompt) for prompt in config.prompts]
        if not prompts:
            raise OptionError("No prompts to tune on: give at least one.")
        self._report("costs of forwards")
        context = round(statistics.fmean(map(len, prompts))) + config.params.max_new_tokens // 2
        tables = self._costs(config.batches, context)
        self._plain.batch(prompts[:1], config.params)  # warms up
        trials: list[Configuration] = []
        skipped: list[str] = []
        for family in self._families:
            self._report(family.probe)
            try:
                trials += self._predicted(family, prompts, config.params, tables[0])
            except UsageError as error:
                skipped.append(f"{family.name}: {error}")
        if not trials:
            raise OptionError(f"No drafter could be loaded: {skipped[0]}")
        trials.sort(key=lambda trial: -trial.predicted.speed_up)
        trials = self._verified(trials, prompts, config)
        best = max((trial for trial in trials if trial.measured), key=lambda trial: trial.measured or 0.0)
        chosen = best if (best.measured or 0.0) >= PAYS else None
        batches, learned = self._batches(chosen, prompts, config) if chosen else ((), {})
        # batch 1 has already been measured more precisely
        off_from = next((point.batch for point in batches if point.batch > 1 and point.speed_up < PAYS), None)
        return Tuning(tuple(trials), chosen, tuple(batches), off_from, tables, tuple(dict.fromkeys(skipped)), learned)

    def _costs(self, batches: Sequence[int], context: int) -> tuple[CostTable, ...]:
        with torch.inference_mode():
            return tuple(
                measure_costs(self._target, context, 3.0, 64, batch) for batch in {1: 1, **dict.fromkeys(batches)}
            )

    def _predicted(
        self, family: CandidateFamily, prompts: Sequence[list[int]], params: SamplingParams, costs: CostTable
    ) -> list[Configuration]:
        """Run a family's probe alternating with plain decoding, and predict all its candidates."""
        loaded = load(self._target, family.probe, tokenizer=self._plain.tokenizer)
        try:
            plain, drafting = (
                self._probed(self._plain, 0.0),
                self._probed(loaded, Spec.parse(family.probe).options.confidence),
            )
            drafting.run(prompts[:1], params)  # warm-up
            drafting.clear()
            for prompt in prompts:
                plain.run([prompt], params)
                drafting.run([prompt], params)
            for short in (1, 2):
                drafting.probe.short = short
                drafting.run(prompts[:1], params)
        finally:
            loaded.close()
        steps = drafting.probe.steps
        if not any(step.depths for step in steps):
            raise OptionError("no step drafted anything; raise --max-new-tokens or give longer prompts.")
        model = StepModel.of(steps, costs, drafting.other, padded=self._target.device.type == "cpu")
        plain_step = typical([s.draft_seconds + s.verify_seconds for s in plain.probe.steps]) + plain.other
        predictions = [predict(steps, model, each.shape, plain_step) for each in family.candidates]
        return [
            Configuration(family.name, each.spec, prediction, None, prediction.tokens)
            for each, prediction in zip(family.candidates, predictions, strict=True)
        ]

    def _probed(self, generator: Generator, confidence: float) -> "_Probed":
        drafter = generator.engine.drafter
        probe = Probe(drafter.needs.longest, confidence)
        engine = Engine(self._target, drafter, probe, max_rows=1)
        return _Probed(Generator(engine, None, self._plain.eos_token_ids, generator.kind), probe)

    def _verified(
        self, trials: list[Configuration], prompts: Sequence[list[int]], config: TuneConfig
    ) -> list[Configuration]:
        """Run the best of each family, then the next best, and the best family with its default schedule."""
        # equal predictions: larger sizes never drafted more
        distinct: dict[tuple[str, StepPrediction], Configuration] = {}
        best: dict[str, Configuration] = {}
        for trial in trials:
            distinct.setdefault((trial.family, trial.predicted), trial)
            best.setdefault(_family(trial), trial)
        others = (trial for trial in distinct.values() if trial not in best.values())
        order = [*best.values(), *others][: config.verify]
        adaptive = replace(trials[0], spec=trials[0].family)
        chosen = [*order, *([adaptive] if adaptive.spec not in {trial.spec for trial in order} else [])]
        self._report(f"running {len(chosen)} of {len(trials)} configurations")
        measured = self._measured([trial.spec for trial in chosen], prompts, config.params)
        results = {
            trial.spec: replace(trial, measured=m, acceptance_length=a)
            for trial, (m, a) in zip(chosen, measured, strict=True)
        }
        known = [results.pop(trial.spec, trial) for trial in trials]
        return known + list(results.values())

    def _measured(
        self, specs: Sequence[str], prompts: Sequence[list[int]], params: SamplingParams
    ) -> list[tuple[float, float]]:
        """Speed-up over plain decoding and acceptance length of each; the faster of two runs per prompt counts."""
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
        self, chosen: Configuration, prompts: Sequence[list[int]], config: TuneConfig
    ) -> tuple[list[BatchPoint], dict[str, Any]]:
        """Speed-up of the chosen drafter by batch size, and what its policy has learned."""
        generator = load(self._target, chosen.spec, tokenizer=self._plain.tokenizer, max_batch_size=max(config.batches))
        found = []
        try:
            for batch in sorted(config.batches):
                self._report(f"batches of {batch}")
                some = [prompts[i % len(prompts)] for i in range(-(-len(prompts) // batch) * batch)]
                calls = [some[i : i + batch] for i in range(0, len(some), batch)]
                rates: dict[Generator, float] = {}
                for repeat in range(3):  # the first repeat is a warm-up
                    for each in (self._plain, generator):
                        results = [each.batch(call, config.params) for call in calls]
                        rate = sum(map(_tokens, results)) / sum(map(_longest, results))
                        rates[each] = max(rate, rates.get(each, 0.0) if repeat > 1 else 0.0)
                found.append(BatchPoint(batch, rates[generator] / rates[self._plain]))
        finally:
            generator.close()
        return found, generator.engine.policy.state()


@dataclass(slots=True)
class _Probed:
    """A generator with a probe. ``other``: seconds per step outside drafting and verification."""

    generator: Generator
    probe: Probe
    _forwards: int = 0
    _other: float = 0.0

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        for result in self.generator.batch(prompts, params):
            self._forwards += result.stats.target_forwards
            self._other += result.stats.other_seconds

    def clear(self) -> None:
        self.probe.steps.clear()
        self._forwards, self._other = 0, 0.0

    @property
    def other(self) -> float:
        return self._other / max(self._forwards, 1)


def _family(trial: Configuration) -> str:
    """Family, with chains and trees of one head kept apart."""
    return trial.family + (" chain" if "top_k=1" in trial.spec.split(",") else "")


def _seconds(results: Sequence[Result]) -> float:
    return sum(r.stats.seconds - r.stats.prefill_seconds for r in results)


def _longest(results: Sequence[Result]) -> float:
    """Decoding seconds of a batch: its slowest row's."""
    return max(r.stats.seconds - r.stats.prefill_seconds for r in results)


def _tokens(results: Sequence[Result]) -> int:
    return sum(len(r.tokens) for r in results)
