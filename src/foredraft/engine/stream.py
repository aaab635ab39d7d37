"""Streams of one request's output, for threads and for asyncio."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence as Seq

from foredraft.core.errors import UsageError
from foredraft.core.sampling.stop import FinishReason
from foredraft.engine.driver import Driver
from foredraft.engine.engine import Engine
from foredraft.engine.request import Piece, Sequence
from foredraft.engine.results import Result


class StreamSource(ABC):
    """What streams need of the generator, which each stream keeps alive."""

    engine: Engine
    driver: Driver

    @abstractmethod
    def result_of(self, sequence: Sequence, taken: Seq[Piece] = ()) -> Result:
        """The result of an ended request from which a stream has already taken these pieces."""


class _OneOutput:
    """The output of one request, taken piece by piece; it is cancelled if the object is garbage-collected."""

    def __init__(self, source: StreamSource, sequence: Sequence) -> None:
        self._source = source
        self._sequence = sequence
        self._taken: list[Piece] = []

    def __repr__(self) -> str:
        state = "running" if self.finish_reason is None else f"finish_reason={self.finish_reason}"
        return f"{self.__class__.__name__}(tokens={len(self._sequence.tokens)}, {state})"

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        return self._sequence.finish_reason

    def _take(self) -> Piece | None:
        """The next piece; None after the last one, or the error that ended the request."""
        if self._sequence.pieces:
            self._taken.append(self._sequence.pieces.popleft())
            return self._taken[-1]
        if self._sequence.error is not None:
            raise self._sequence.error
        return None

    def __del__(self) -> None:
        if not self._sequence.finished:
            self._source.engine.abandon([self._sequence])


class Stream(_OneOutput, Iterator[Piece]):
    """Yields the pieces of one output as their text becomes final; ``result`` holds all of it.

    A stream that is garbage-collected, for example after ``break`` in a ``for`` loop, is cancelled at the next step.
    """

    def __next__(self) -> Piece:
        sequence, engine = self._sequence, self._source.engine
        while not sequence.pieces and not sequence.finished:
            try:
                engine.contained_step([sequence])
            except BaseException:
                self.close()
                raise
        if not sequence.pieces:
            with engine.exclusive():  # another thread may still be in the step that ended it
                pass
        piece = self._take()
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel the request if it is still running; its output so far stays in ``result``."""
        self._source.engine.cancel([self._sequence])

    @property
    def result(self) -> Result:
        """The output so far; closes the stream if it is still running."""
        self.close()
        return self._source.result_of(self._sequence, self._taken)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncStream(_OneOutput, AsyncIterator[Piece]):
    """``Stream`` for asyncio: steps run in a thread that all streams and calls of the generator share.

    A stream is cancelled at the next step if it is closed or garbage-collected, or if its waiting task is cancelled.
    """

    _ended = False  # set between steps, when no more pieces can come

    async def __anext__(self) -> Piece:
        sequence = self._sequence
        while not sequence.pieces and not self._ended:
            await self._source.driver.more(sequence)
            self._ended = sequence.finished and not sequence.pieces
        piece = self._take()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Cancel the request, and wait until it has ended; its output so far stays in ``result``."""
        if not self._ended:
            self._source.engine.abandon([self._sequence])
            await self._source.driver.ended([self._sequence])
            self._ended = True

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        return self._sequence.finish_reason if self._ended else None

    @property
    def result(self) -> Result:
        """The output, once the stream has been read to its end or closed.

        Raises:
            UsageError: the stream is still running.
        """
        if not self._ended:
            raise UsageError("The stream is still running: read it to its end or await aclose() to get its result.")
        return self._source.result_of(self._sequence, self._taken)

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
