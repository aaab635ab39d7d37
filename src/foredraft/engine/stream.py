"""Outputs in pieces, as they become certain: for threads, and for asyncio."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence as Seq

from foredraft.core.errors import UsageError
from foredraft.core.sampling.stop import FinishReason
from foredraft.engine.driver import Driver
from foredraft.engine.engine import Engine
from foredraft.engine.request import Piece, Sequence
from foredraft.engine.results import Result


class Source(ABC):
    """Where streams come from: the generator, which is held as long as one of them."""

    engine: Engine
    driver: Driver

    @abstractmethod
    def result_of(self, sequence: Sequence, taken: Seq[Piece] = ()) -> Result:
        """The result of a request that has ended, of which a stream has taken pieces already."""


class Stream(Iterator[Piece]):
    """Pieces of one text as they become certain; ``result`` afterwards, or whenever it was closed.

    A stream that is dropped, as by ``break`` in a ``for`` loop that made it, is cancelled at the next step.
    """

    def __init__(self, source: Source, sequence: Sequence) -> None:
        self._source = source
        self._sequence = sequence
        self._taken: list[Piece] = []

    def __repr__(self) -> str:
        return f"Stream({_state(self._sequence, self.finish_reason)})"

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        sequence, engine = self._sequence, self._source.engine
        while not sequence.pieces and not sequence.finished:
            try:
                engine.step()
            except BaseException:
                self.close()
                raise
        if not sequence.pieces:
            with engine.exclusive():  # another thread may still be in the step that ended it
                pass
        if sequence.pieces:
            self._taken.append(sequence.pieces.popleft())
            return self._taken[-1]
        if sequence.error is not None:
            raise sequence.error
        raise StopIteration

    def close(self) -> None:
        """Cancel what is still running; what was generated stays in ``result``."""
        self._source.engine.cancel([self._sequence])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None while it runs."""
        return self._sequence.finish_reason

    @property
    def result(self) -> Result:
        """All of it so far; ends the stream if it is still running."""
        self.close()
        return self._source.result_of(self._sequence, self._taken)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._sequence.finished:
            self._source.engine.abandon([self._sequence])


class AsyncStream(AsyncIterator[Piece]):
    """``Stream`` for asyncio: steps run in a thread that all streams and calls of the generator share.

    A stream that is closed or dropped, and one whose waiting task is cancelled, is cancelled at the next step.
    """

    def __init__(self, source: Source, sequence: Sequence) -> None:
        self._source = source
        self._sequence = sequence
        self._taken: list[Piece] = []
        self._ended = False  # seen between two steps, so that nothing is added any more

    def __repr__(self) -> str:
        return f"AsyncStream({_state(self._sequence, self.finish_reason)})"

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Piece:
        sequence = self._sequence
        while not sequence.pieces and not self._ended:
            await self._source.driver.more(sequence)
            self._ended = sequence.finished and not sequence.pieces
        if sequence.pieces:
            self._taken.append(sequence.pieces.popleft())
            return self._taken[-1]
        if sequence.error is not None:
            raise sequence.error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel what is still running, and wait until it has ended; what was generated stays in ``result``."""
        if not self._ended:
            self._source.engine.abandon([self._sequence])
            await self._source.driver.ended([self._sequence])
            self._ended = True

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None while it runs."""
        return self._sequence.finish_reason if self._ended else None

    @property
    def result(self) -> Result:
        """All of it, once the stream has been read to its end or closed.

        Raises:
            UsageError: it is still running.
        """
        if not self._ended:
            raise UsageError("The stream is still running: read it to its end, or await aclose(), before its result.")
        return self._source.result_of(self._sequence, self._taken)

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._sequence.finished:
            self._source.engine.abandon([self._sequence])


def _state(sequence: Sequence, reason: FinishReason | None) -> str:
    state = "running" if reason is None else f"finish_reason={reason}"
    return f"tokens={len(sequence.tokens)}, {state}"
