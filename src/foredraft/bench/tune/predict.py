"""Predicted speed-up of a draft shape: expected tokens per step over the step's cost."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.bench.tune.probe import DraftSize, Fit, ProbeStep
from foredraft.engine.cost_model import CostTable
from foredraft.engine.fitting import round_up


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Tokens and seconds per step, and speed-up over plain decoding."""

    tokens: float
    seconds: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step cost of one drafter: the forward's cost from a table, and measured overheads.

    ``drafting``: seconds of a draft by its levels. ``overhead``: seconds of verification minus the table's forward, by
    rows. ``other``: seconds of the loop around both. ``prefill``: extra seconds of a request's first draft, in which
    the drafter reads the prompt, per output token.
    """

    costs: CostTable
    rows: Callable[[int], int]
    drafting: Fit
    overhead: Fit
    other: float
    prefill: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[ProbeStep], costs: CostTable, other: float, padded: bool) -> "StepModel":
        """Fit to the steps of a probe; ``padded``: forwards are padded to the next larger size."""

        def rows(nodes: int) -> int:
            return round_up(1 + nodes) if padded else 1 + nodes

        timed = [step for step in steps if not step.first]
        drafted = [step for step in timed if step.depths and not step.copied]
        levels = Fit.through([(float(step.levels), step.draft_seconds) for step in drafted])
        forwards = [(rows(len(step.depths)), step.verify_seconds) for step in timed]
        overhead = Fit.through([(float(count), seconds - costs(count)) for count, seconds in forwards])
        firsts = [
            step.draft_seconds - levels(step.levels)
            for step in steps
            if step.first and not step.short and not step.copied
        ]
        tokens = sum(1 + len(step.path) for step in steps if not step.short)
        return cls(costs, rows, levels, overhead, other, max(0.0, sum(firsts)) / max(tokens, 1))

    def seconds(self, nodes: int, levels: int) -> float:
        """Seconds of a step with such a draft, without the drafter's prefill."""
        count = self.rows(nodes)
        drafting = max(0.0, self.drafting(levels))
        return max(self.costs(count) + self.overhead(count), self.costs(1) / 2) + drafting + self.other


def predict(steps: Sequence[ProbeStep], model: StepModel, shape: DraftSize, plain_seconds: float) -> StepPrediction:
    """Predict drafts of this shape from a probe's steps.

    Args:
        steps: the probe's steps; short ones are only used to fit costs.
        plain_seconds: seconds of a plain decoding step, measured alongside.
    """
    whole = [step for step in steps if not step.short]
    outcomes = [step.under(shape) for step in whole]
    tokens = statistics.fmean(outcome.tokens for outcome in outcomes)
    seconds = statistics.fmean(
        step.draft_seconds + step.verify_seconds + model.other
        if step.copied
        else model.seconds(outcome.nodes, outcome.levels)
        for step, outcome in zip(whole, outcomes, strict=True)
    )
    seconds += model.prefill * tokens
    return StepPrediction(tokens, seconds, tokens * plain_seconds / seconds)
