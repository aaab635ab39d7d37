"""Any number of prompts through one generator, a batch full at a time."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ForedraftError, PromptError
from foredraft.engine.request import Sequence
from foredraft.engine.results import Completed, Result, named
from foredraft.engine.stream import Source

Submit = Callable[[int, Any], Sequence]
"""Queues the prompt with this number; raises a ``PromptError`` if it is a bad one."""
if TYPE_CHECKING:
    Progress = Callable[[int, int], object]
else:  # users get a sentence for what is none
    Progress = Any
"""Told after each prompt how many are done, and how many new tokens these have in all."""


def completions(
    source: Source, submit: Submit, prompts: Iterable[Any], progress: Progress | None
) -> Iterator[Completed]:
    """Run prompts, which are asked for only as rows become free, and hand out each when it is done."""
    done = tokens = 0
    for completed in _completions(source, submit, prompts):
        done += 1
        tokens += len(completed.outcome.tokens) if isinstance(completed.outcome, Result) else 0
        if progress is not None:
            progress(done, tokens)
        yield completed


def _completions(source: Source, submit: Submit, prompts: Iterable[Any]) -> Iterator[Completed]:
    engine = source.engine
    numbered = enumerate(prompts)
    running: dict[int, Sequence] = {}
    more = True
    try:
        while more or running:
            while more and len(running) < engine.max_rows:
                number, prompt = next(numbered, (-1, None))
                more = number >= 0
                try:
                    if more:
                        running[number] = submit(number, prompt)
                except PromptError as error:
                    yield Completed(number, named(error, number))
            if running:
                engine.contained_step()
            yield from _ended(source, running)
    finally:  # of a loop that was left as well; it may be the garbage collector that runs this
        engine.abandon(running.values())


def _ended(source: Source, running: dict[int, Sequence]) -> list[Completed]:
    """Take those that have ended out of the running ones."""
    with source.engine.exclusive():  # between two steps, which another thread may run
        ended = [number for number, sequence in running.items() if sequence.finished]
        return [Completed(number, _outcome(source, running.pop(number), number)) for number in ended]


def _outcome(source: Source, sequence: Sequence, number: int) -> Result | ForedraftError:
    return source.result_of(sequence) if sequence.error is None else named(sequence.error, number)
