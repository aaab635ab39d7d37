"""Run any number of prompts through one generator, at most a batch at a time."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import PromptError
from foredraft.engine.request import Sequence
from foredraft.engine.results import Completed, Result, named
from foredraft.engine.stream import StreamSource

Submit = Callable[[int, Any], Sequence]
"""Queues the prompt with this number; raises a ``PromptError`` if it is invalid."""
if TYPE_CHECKING:
    Progress = Callable[[int, int], object]
else:  # at run time the generator checks the type
    Progress = Any
"""Called after each prompt with the number of prompts done and the number of their new tokens."""


def completions(
    source: StreamSource, submit: Submit, prompts: Iterable[Any], progress: Progress | None
) -> Iterator[Completed]:
    """Run prompts, reading each only when a row is free, and yield them as they complete."""
    count = tokens = 0
    for completed in _completions(source, submit, prompts):
        count += 1
        tokens += len(completed.outcome.tokens) if isinstance(completed.outcome, Result) else 0
        if progress is not None:
            progress(count, tokens)
        yield completed


def _completions(source: StreamSource, submit: Submit, prompts: Iterable[Any]) -> Iterator[Completed]:
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
    finally:  # also runs when the caller leaves the loop, possibly in the garbage collector
        engine.abandon(running.values())


def _ended(source: StreamSource, running: dict[int, Sequence]) -> list[Completed]:
    """Remove the ended sequences from ``running``."""
    with source.engine.exclusive():  # another thread may be in a step
        ended = [number for number, sequence in running.items() if sequence.finished]
        sequences = {number: running.pop(number) for number in ended}
    return [
        Completed(number, source.result_of(each) if each.error is None else named(each.error, number))
        for number, each in sequences.items()
    ]
