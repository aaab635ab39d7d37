"""Owns the generator: which requests run, which wait, which are refused."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from foredraft.core.errors import DrafterError, LawError, NumericsError, PromptError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine import scoring
from foredraft.engine.generator import Generator
from foredraft.engine.request import Piece, Request, Sequence, TokenLogprobs
from foredraft.engine.results import Result
from foredraft.engine.stream import AsyncStream
from foredraft.model.threads import release_threads
from foredraft.serve.convert import Converter
from foredraft.serve.errors import RETRY_SECONDS, ApiError, late, stopped, stopping
from foredraft.serve.job import Job
from foredraft.serve.metrics import ServerMetrics
from foredraft.serve.options import ServeOptions
from foredraft.serve.updates import Update

_FEW_TOKENS = 2**14
"""Of prompts that are checked on the event loop, in 5 ms."""


def requests_of(job: Job, generator: Generator) -> list[Request]:
    """The requests of a job, for each prompt; none if only prompts are repeated. Scores are the caller's, see
    ``engine.scoring``.

    Raises:
        UsageError: a prompt does not fit the model, or an option names a token that it does not have.
    """
    if job.generates:
        return generator.requests(job.prompts, job.params, job.shown)
    for prompt in job.prompts:
        generator.engine.check_tokens(prompt)
    return []


def queued(job: Job, requests: Seq[Request], generator: Generator, *, tenant: str = "") -> list[Sequence]:
    """Queue the outputs of a job, whose requests these are."""
    return generator.queue(requests, job.count, priority=job.priority, tenant=tenant) if requests else []


def converter_for(
    generator: Generator, default_max_tokens: int, *, tool_prompt: bool = True, most_outputs: int | None = None
) -> Converter:
    """The converter of bodies for a generator; of its last fields see there."""
    target = generator.engine.target
    given, ends = generator.tokenizer, generator.eos_token_ids
    lengths = {"max_length": target.max_length, "default_max_tokens": default_max_tokens}
    more = {"tool_prompt": tool_prompt, "most_outputs": most_outputs, "defaults": dict(generator.defaults)}
    return Converter(given, ends, target.vocab_size, **lengths, **more)


class Service:
    """Runs jobs on one generator. All methods are called by one event loop.

    Raises:
        LawError: the generator's rule is lossy and ``require_lossless`` is set.
        DrafterError: its drafter drafts from other clients' text and ``shared_text`` is not set.
    """

    def __init__(self, generator: Generator, options: ServeOptions) -> None:
        if options.require_lossless and not generator.kind.lossless:
            raise LawError("The verification rule is lossy: leave out --verifier or --require-lossless.")
        if generator.engine.drafter.needs.shares_text and not options.shared_text:
            raise DrafterError(
                f"{generator.kind.method} drafts from the text of all requests, so acceptance may tell one client "
                "about another's text. Choose options that keep requests apart, another drafter, or --shared-text if "
                "all clients may know of each other's text."
            )
        self.generator = generator
        self.metrics = ServerMetrics(generator)
        self._options = options
        self.capacity = generator.engine.max_rows + options.max_queue
        self._open: dict[Sequence, float] = {}  # when each was submitted
        self._ended = 0
        self._scoring = 0  # prompts that wait for their scores
        self._scored = 0  # chunks
        self._scorer = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foredraft-score")
        self._seen: tuple[int, int, int] = (0, 0, 0)  # outputs, tokens and chunks at the last change
        self._changed_at = time.monotonic()
        self.draining = False

    async def start(self, job: Job, *, tenant: str = "", timeout: float | None = None) -> "Outputs":
        """Queue a job; for ``tenant`` see ``Generator.submit``. ``timeout``: default ``request_timeout``.

        Raises:
            ApiError: the queue is full, or the server is about to stop.
            UsageError: a prompt does not fit the model, or an option names a token that it does not have.
        """
        self._admit(job)
        if sum(map(len, job.prompts)) <= _FEW_TOKENS:
            requests = requests_of(job, self.generator)
        else:
            requests = await asyncio.to_thread(requests_of, job, self.generator)
            self._admit(job)
        sequences = queued(job, requests, self.generator, tenant=tenant)
        self._open.update(dict.fromkeys(sequences, time.perf_counter()))
        seconds = self._options.request_timeout if timeout is None else timeout
        return Outputs(self, job.params, sequences, seconds)

    async def scores(self, job: Job) -> list[list[TokenLogprobs | None]]:
        """Log-probabilities of the tokens of each prompt, with ``job.scored`` alternatives.

        Prompts are scored one at a time, in a thread, so there is one more cache. Cancelling ends it after a chunk.

        Raises:
            ApiError: too many prompts wait, they took too long, or the server is about to stop.
            PromptError: a prompt does not fit the model.
        """
        self._admit(job)
        for prompt in job.prompts:
            scoring.check(self.generator.engine, prompt)
        self._scoring += len(job.prompts)
        try:
            return await asyncio.wait_for(self._scores(job), self._options.request_timeout)
        except asyncio.TimeoutError:
            raise late() from None
        finally:
            self._scoring -= len(job.prompts)

    async def _scores(self, job: Job) -> list[list[TokenLogprobs | None]]:
        loop = asyncio.get_running_loop()
        scores = []
        for prompt in job.prompts:
            found: list[TokenLogprobs | None] = []
            async with self._scorer:
                parts = scoring.score(self.generator.engine, prompt, job.scored or 0)
                try:
                    while (part := await loop.run_in_executor(self._pool, next, parts, None)) is not None:
                        found += part
                        self._scored += 1
                finally:
                    self._pool.submit(release_threads)
            scores.append(found)
        return scores

    def _admit(self, job: Job) -> None:
        """Check that the server can take a job now.

        Raises:
            ApiError: the queue is full, or the server is about to stop.
            PromptError: a prompt is too long for this server.
        """
        if self.draining:
            raise stopping()
        longest, limit = max(map(len, job.prompts)), self._options.max_prompt_tokens
        if limit is not None and longest > limit:
            raise PromptError(f"The prompt has {longest} tokens; this server takes at most {limit}.")
        if len(self._open) + self._scoring + len(job.prompts) * job.count > self.capacity:
            raise ApiError(429, "The queue is full.", retry_after=RETRY_SECONDS)

    def shut_down(self) -> None:
        """End the thread that scores prompts."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self, sequences: Seq[Sequence]) -> None:
        """Count these and forget them; those that still run are cancelled between steps."""
        now = time.perf_counter()
        running = [sequence for sequence in sequences if not sequence.finished]
        if running:
            self.generator.driver.end(running)
        for sequence in sequences:
            started = self._open.pop(sequence, None)
            if started is not None:
                self._ended += 1
                self.metrics.ended(sequence, started, now)

    @property
    def idle(self) -> bool:
        """No output is open, and no prompt is being scored."""
        return not self._open and not self._scoring

    def look(self) -> None:
        """Note whether anything has changed since the last call; called at intervals."""
        seen = (self._ended, sum(len(sequence.tokens) for sequence in self._open), self._scored)
        if seen != self._seen or self.idle:
            self._seen, self._changed_at = seen, time.monotonic()

    @property
    def healthy(self) -> bool:
        """False while the server stops, or if nothing has moved for ``stall_seconds`` with outputs open."""
        return not self.draining and time.monotonic() - self._changed_at <= self._options.stall_seconds


class Outputs:
    """The outputs of one request, prompt by prompt. Leaving the context cancels those that still run.

    After ``timeout`` seconds all of them are cancelled.
    """

    def __init__(self, service: Service, params: SamplingParams, sequences: list[Sequence], timeout: float) -> None:
        self._service = service
        self._params = params
        self.sequences = sequences
        self._late = False
        self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out)

    def __enter__(self) -> "Outputs":
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._service.close(self.sequences)

    def _time_out(self) -> None:
        self._late = True
        self._service.generator.driver.end(self.sequences)

    async def results(self) -> list[Result]:
        """Wait for all results.

        Raises:
            ForedraftError: the error that ended one of them.
            ApiError: they took too long, or the server stops.
        """
        generator = self._service.generator
        await generator.driver.ended(self.sequences)
        with _explained(self._params):
            return [self._checked(generator.result_of(sequence)) for sequence in self.sequences]

    async def updates(self) -> AsyncIterator[Update]:
        """Yield each output's updates as they come; the last one of each has its result.

        Raises:
            ForedraftError: the error that ended one of them.
            ApiError: they took too long, or the server stops.
        """
        if len(self.sequences) == 1:
            with _explained(self._params):
                async for update in self._one(0):
                    yield update
            return
        queue: asyncio.Queue[Update | BaseException] = asyncio.Queue()

        async def forward(index: int) -> None:
            try:
                with _explained(self._params):
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
        sent = steps = 0  # log-probabilities and steps already yielded
        before = 0.0
        async for piece in stream:
            held.append(piece)
            if sequence.pieces:  # the rest of this step
                continue
            count = sum(len(piece.tokens) for piece in held)
            if wants and len(sequence.logprobs) < sent + count:  # a step in progress has not set them yet
                continue
            logprobs = sequence.logprobs[sent : sent + count] if wants else []
            sent += len(logprobs)
            now = time.perf_counter()
            if before:
                self._service.metrics.chunk(now - before, count)
            before = now
            traces = sequence.steps[steps:]
            steps += len(traces)
            yield Update(index, held, logprobs, steps=traces)
            held = []
        yield Update(index, held, sequence.logprobs[sent:], self._checked(stream.result), sequence.steps[steps:])

    def _checked(self, result: Result) -> Result:
        """The result, unless it was cut short."""
        if result.finish_reason != "cancelled":
            return result
        if self._late:
            raise late()
        raise stopped()


@contextmanager
def _explained(params: SamplingParams) -> Iterator[None]:
    """Where a request's own bans left no token to choose, the fault is the request's."""
    try:
        yield
    except NumericsError as error:
        if params.may_ban_all:
            raise ApiError(400, str(error)) from error
        raise
