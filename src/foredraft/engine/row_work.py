"""The host's work for single rows before and after a step. An error in it ends the row's request alone."""

from collections.abc import Callable, Mapping, Sequence as Seq
from typing import NamedTuple

from foredraft.core.drafter import View
from foredraft.engine.prediction import Chains, copies
from foredraft.engine.request import Sequence, failure
from foredraft.engine.state import Batch
from foredraft.engine.step import StepDone, Stepper


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
    """What a step needs of its rows: the view, the most draft tokens of each, and their copies (``with_copies``)."""

    view: View
    limits: list[int]
    chains: Chains

    @classmethod
    def of(cls, batch: Batch, stepper: Stepper, context: int) -> "Prepared":
        """Prepare a step of the batch.

        Args:
            context: the most tokens that the target reads.
        """
        view = batch.view(stepper.cache.room)
        limits = [sequence.draft_limit(context) for sequence in batch.sequences]
        predictions = [sequence.prediction for sequence in batch.sequences]
        nodes = stepper.copied_nodes(view) if any(predictions) else 0
        return cls(view, limits, copies(predictions, limits, nodes))


def end_unprepared(batch: Batch, context: int, faults: RowFaults) -> bool:
    """End the requests that cannot be prepared for a step, each tried alone; False if there are none."""
    found = batch.faulty()
    for index, sequence in enumerate(batch.sequences):
        try:
            limit = sequence.draft_limit(context)
            copies([sequence.prediction], [limit], limit + 1)
        except Exception as error:
            found[index] = error
    for index, error in found.items():
        faults.end(batch.sequences[index], error)
    return bool(found)


def extend(sequences: Seq[Sequence], done: StepDone, faults: RowFaults) -> list[int]:
    """Add a step's results to its requests; the number of tokens that each has kept."""
    kept = []
    for index, sequence in enumerate(sequences):
        try:
            kept.append(_extend(sequence, index, done))
        except Exception as error:
            faults.end(sequence, error)
            kept.append(0)
    return kept


def _extend(sequence: Sequence, index: int, done: StepDone) -> int:
    result = done.rows[index]
    if index in done.errors:
        raise done.errors[index]
    if sequence.params.record_steps:
        sequence.steps.append(done.recorded(index))
    if not result.healthy:
        sequence.fail_without_token()
        return 0
    kept = sequence.extend(result.emitted, result.accepted, result.drafted * result.copied)
    if done.logprobs is not None:
        sequence.add_logprobs(done.logprobs[index], result.emitted[:kept])
    return kept


def count(sequences: Seq[Sequence], done: StepDone, kept: Seq[int], seconds: float, faults: RowFaults) -> None:
    """Add a step that took so many seconds to the statistics of its requests."""
    for sequence, result, tokens in zip(sequences, done.rows, kept, strict=True):
        try:
            sequence.counters.add(result, tokens, done.draft_seconds, done.verify_seconds, seconds)
        except Exception as error:
            faults.end(sequence, error)
