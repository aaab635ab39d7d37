"""The host's work for single rows before and after a step. An error in it ends the row's request alone."""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from foredraft.core.drafter import Plan, View
from foredraft.engine.grammar_masks import matchers_of
from foredraft.engine.request import Sequence, failure
from foredraft.engine.state import Batch
from foredraft.engine.step import Drafted, StepInputs, Stepper, StepResult
from foredraft.model.kv.cache import SlotCache


class RowFaults:
    """Ends requests whose own work failed. ``first``: the first error, which is raised when the step has ended."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def end(self, sequence: Sequence, error: Exception) -> None:
        """End a request with an error."""
        self.first = self.first or error
        sequence.fail(failure(error))


def together_or_apart(
    work: Callable[[Mapping[int, Sequence]], object], rows: Mapping[int, Sequence], faults: RowFaults
) -> None:
    """Do this for all rows at once, or, if that fails, for one after another; those for which it fails end."""
    try:
        work(rows)
    except Exception:
        for row, sequence in rows.items():
            try:
                work({row: sequence})
            except Exception as error:
                faults.end(sequence, error)


class Prepared(NamedTuple):
    """What a step needs of its rows: the view, the most draft tokens of each, and ``Plan.copies``."""

    view: View
    limits: list[int]
    copies: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, stepper: Stepper) -> "Prepared":
        """Prepare a step of the batch."""
        view, context = batch.view(stepper.cache.kv_size), stepper.target.max_length
        limits = [sequence.draft_limit(context) for sequence in batch.sequences]
        copies = stepper.drafter.copies(view, limits)
        return cls(view, limits, copies if any(copies) else ())

    @property
    def allowed(self) -> list[int]:
        """The most tokens that may be planned for each row: none beside a copy."""
        if not self.copies:
            return self.limits
        return [0 if copy else limit for limit, copy in zip(self.limits, self.copies, strict=True)]

    def inputs(self, batch: Batch, plan: Plan, drafted: Drafted | None) -> StepInputs:
        """The inputs of the step with this plan, and with the copies."""
        return StepInputs(
            view=self.view,
            plan=replace(plan, copies=self.copies) if self.copies else plan,
            drafted=drafted,
            matchers=matchers_of(batch.sequences),
            choices=batch.sequences[0].choices,
            batch=batch,
            logits=any(sequence.params.logprobs is not None for sequence in batch.sequences),
        )


def extend(sequences: Seq[Sequence], step: StepResult, faults: RowFaults) -> list[int]:
    """Add a step's results to its requests; the number of tokens that each has kept."""
    kept = []
    for index, sequence in enumerate(sequences):
        try:
            kept.append(_extend(sequence, index, step))
        except Exception as error:
            faults.end(sequence, error)
            kept.append(0)
    return kept


def _extend(sequence: Sequence, index: int, step: StepResult) -> int:
    result = step.rows[index]
    if (error := sequence.processors_error or step.errors.get(index)) is not None:
        raise error
    trace = partial(step.trace, index) if sequence.params.record_steps else None
    if not result.healthy:
        if trace is not None:
            sequence.steps.append(trace(0))
        sequence.fail_without_token()
        return 0
    kept = sequence.extend(result.emitted, result.accepted, copied=result.copied, trace=trace)
    if step.logits is not None:
        sequence.add_logprobs(step.logits[index], result.emitted[:kept])
    return kept


def zero_unhealthy(cache: SlotCache, rows: Seq[int], step: StepResult) -> None:
    """Clear rows of the cache whose NaN would leak into their next requests."""
    if sick := [row for row, result in zip(rows, step.rows, strict=True) if not result.healthy]:
        cache.zero(sick)


def count(sequences: Seq[Sequence], step: StepResult, kept: Seq[int], seconds: float, faults: RowFaults) -> None:
    """Add a step, which took ``seconds``, to the statistics of its requests."""
    for sequence, result, tokens in zip(sequences, step.rows, kept, strict=True):
        try:
            sequence.counters.add(result, tokens, step.draft_seconds, step.verify_seconds, seconds)
        except Exception as error:
            faults.end(sequence, error)
