"""Speed-up before it is measured: tokens that a draft of some shape brings, over what its step costs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.bench.tune.probe import Fit, Shape, Step
from foredraft.engine.cost_model import CostTable
from foredraft.engine.step import round_up


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a shape: tokens and seconds of a step, and how many times as fast as plain decoding that is."""

    tokens: float
    seconds: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """What a step of one drafter costs: the forward from the table, and what steps here have taken beside it.

    ``drafting``: seconds of a draft by its levels. ``beside``: seconds of verification over those of the forward, by
    the rows of the forward. ``other``: of the loop around both. ``reading``: what the first draft of a text takes more
    than others, since the drafter reads the prompt, shared out over the text's tokens.
    """

    costs: CostTable
    rows: Callable[[int], int]
    drafting: Fit
    beside: Fit
    other: float
    reading: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[Step], costs: CostTable, other: float, padded: bool) -> "StepModel":
        """From the steps of a probe; ``padded``: forwards are run with the next larger number of nodes."""

        def rows(nodes: int) -> int:
            return round_up(1 + nodes) if padded else 1 + nodes

        timed = [step for step in steps if not step.first]
        levels = Fit.through([(float(step.levels), step.draft_seconds) for step in timed if step.depths])
        forwards = [(rows(len(step.depths)), step.verify_seconds) for step in timed]
        beside = Fit.through([(float(count), seconds - costs(count)) for count, seconds in forwards])
        firsts = [step.draft_seconds - levels(step.levels) for step in steps if step.first and not step.short]
        said = sum(1 + len(step.path) for step in steps if not step.short)
        return cls(costs, rows, levels, beside, other, max(0.0, sum(firsts)) / max(said, 1))

    def seconds(self, nodes: int, levels: int) -> float:
        """Of one step with such a draft, the reading of a prompt apart."""
        count = self.rows(nodes)
        drafting = max(0.0, self.drafting(levels))
        return max(self.costs(count) + self.beside(count), self.costs(1) / 2) + drafting + self.other


def predict(steps: Sequence[Step], model: StepModel, shape: Shape, plain_seconds: float) -> Prediction:
    """What drafts of this shape bring on the texts that the steps are of.

    Args:
        steps: of a probe; the short ones only show what levels cost.
        plain_seconds: of one step of plain decoding, in the same minutes.
    """
    outcomes = [step.under(shape) for step in steps if not step.short]
    tokens = statistics.fmean(outcome.tokens for outcome in outcomes)
    seconds = statistics.fmean(model.seconds(outcome.nodes, outcome.levels) for outcome in outcomes)
    seconds += model.reading * tokens
    return Prediction(tokens, seconds, tokens * plain_seconds / seconds)
