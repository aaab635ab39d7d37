"""Owns the generator: which requests run, which wait, which are refused."""

import asyncio
from collections.abc import AsyncIterator, Sequence as Seq
from dataclasses import dataclass

from foredraft.engine.generator import Generator
from foredraft.engine.request import Piece, Sequence, TokenLogprobs
from foredraft.engine.results import Result
from foredraft.engine.stream import AsyncStream
from foredraft.serve.convert import Job
from foredraft.serve.errors import ApiError

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of output ``index``: text that is final and its tokens; at the end its ``result``."""

    index: int
    pieces: list[Piece]
    logprobs: list[TokenLogprobs]
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]


class Service:
    """Runs jobs on one generator. All methods are called by one event loop.

    Args:
        max_queue: the most outputs that wait for a row of the batch.
    """

    def __init__(self, generator: Generator, max_queue: int) -> None:
        self.generator = generator
        self._capacity = generator.engine.max_rows + max_queue
        self._open: set[Sequence] = set()
        self.draining = False

    def start(self, job: Job) -> "Outputs":
        """Queue a job.

        Raises:
            ApiError: the queue is full, or the server is about to stop.
            UsageError: a prompt does not fit the model, or an option names a token that it does not have.
        """
        if self.draining:
            raise ApiError(503, "The server is about to stop.", retry_after=_RETRY_SECONDS)
        wanted = len(job.prompts) * job.count
        if wanted > self._capacity:
            raise ApiError(400, f"{wanted} outputs are more than the {self._capacity} that the server can hold.")
        if len(self._open) + wanted > self._capacity:
            raise ApiError(429, "The queue is full.", retry_after=_RETRY_SECONDS)
        sequences = self.generator.submit(job.prompts, job.params, job.count)
        self._open.update(sequences)
        return Outputs(self, sequences)

    def close(self, sequences: Seq[Sequence]) -> None:
        """Forget these, and cancel those that still run at the next step."""
        self._open.difference_update(sequences)
        running = [sequence for sequence in sequences if not sequence.finished]
        if running:
            self.generator.engine.abandon(running)


class Outputs:
    """The outputs of one request, prompt by prompt. Leaving the context cancels those that still run."""

    def __init__(self, service: Service, sequences: list[Sequence]) -> None:
        self._service = service
        self.sequences = sequences

    def __enter__(self) -> "Outputs":
        return self

    def __exit__(self, *error: object) -> None:
        self._service.close(self.sequences)

    async def results(self) -> list[Result]:
        """Wait for all results.

        Raises:
            ForedraftError: the error that ended one of them.
        """
        generator = self._service.generator
        await generator.driver.ended(self.sequences)
        return [generator.result_of(sequence) for sequence in self.sequences]

    async def updates(self) -> AsyncIterator[Update]:
        """Yield each output's updates as they come; the last one of each has its result.

        Raises:
            ForedraftError: the error that ended one of them.
        """
        if len(self.sequences) == 1:
            async for update in self._one(0):
                yield update
            return
        queue: asyncio.Queue[Update | BaseException] = asyncio.Queue()

        async def forward(index: int) -> None:
            try:
                async for update in self._one(index):
                    queue.put_nowait(update)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(forward(index)) for index in range(len(self.sequences))]
        left = len(tasks)
        try:
            while left:
                update = await queue.get()
                if isinstance(update, BaseException):
                    raise update
                left -= update.result is not None
                yield update
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, index: int) -> AsyncIterator[Update]:
        sequence = self.sequences[index]
        stream = AsyncStream(self._service.generator, sequence)
        wants = sequence.params.logprobs is not None
        held: list[Piece] = []
        sent = 0  # log-probabilities already yielded
        async for piece in stream:
            held.append(piece)
            if sequence.pieces:  # the rest of this step
                continue
            count = sum(len(piece.tokens) for piece in held)
            if wants and len(sequence.logprobs) < sent + count:  # a step in progress has not set them yet
                continue
            logprobs = sequence.logprobs[sent : sent + count] if wants else []
            sent += len(logprobs)
            yield Update(index, held, logprobs)
            held = []
        yield Update(index, held, sequence.logprobs[sent:], stream.result)
