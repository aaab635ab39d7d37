"""Who converts what where, so that no request waits for the work of another.

Short bodies take milliseconds: a thread reads them. Longer ones are read in a process, and answers with many
log-probabilities are written in one. Grammars are compiled in a process, within limits of time and memory. Those that
kept to them are handed over if they are small; the others, which compile quickly for their size, are compiled again in
the server, whose native code cannot be interrupted. Each kind of work has a process of its own, which does one after
the other, so that each waits for its own kind only.
"""

import asyncio
import functools
import hashlib
import os
import pickle
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.engine.request import TokenLogprobs
from foredraft.engine.results import Result
from foredraft.model.text.grammar import CompiledGrammar, GrammarCompiler
from foredraft.serve.bodies import SHORT_BYTES
from foredraft.serve.errors import ApiError
from foredraft.serve.options import ServeOptions
from foredraft.serve.reading import BodyReader
from foredraft.serve.render import Renderer
from foredraft.serve.workers import Failed, Limits, TookTooLong, Worker

_MIDDLE_BYTES = 256 * 1024
"""Bodies that do not wait for larger ones."""
_NICENESS = 10
"""Of what needs no pauses: it gets a tenth of the time of a core that something else wants."""
_SHORT_VALUES = 2000
"""Tokens with log-probabilities that the event loop renders, in about 25 ms."""
_FIRST_SECONDS = (0.1, 1.0)
"""CPU time of a grammar's first tries. One that needs more begins again, and waits only for others that do."""
_WORK_SECONDS, _REST_SECONDS = 0.02, 0.08
"""Grammars are tried a fifth of the time while requests run, so these lose at most a fifth of theirs."""
_REFUSED = 1024
"""Grammars over the limits that are remembered."""
T = TypeVar("T")
Scores = Seq[TokenLogprobs | None]
"""Of the tokens of one prompt."""


class Apart:
    """What the processes have: a reader of bodies, and a compiler for the same tokens."""

    def __init__(self, reader: BodyReader) -> None:
        self.reader = reader
        converter = reader.converter
        self.compiler = GrammarCompiler(converter.given, converter.vocab_size, cache_bytes=0, threads=1)
        with suppress(OptionError):  # without a tokenizer or xgrammar; a grammar is refused with the reason
            self.compiler.prepare()

    def read(self, method: str, raw: bytes, *args: Any) -> Any:
        """What a method of the reader makes of a body."""
        return getattr(self.reader, method)(raw, *args)

    def render(self, renderer: Renderer, results: Seq[bytes], scores: Seq[bytes]) -> bytes:
        """The answer in JSON; each result, and the scores of each prompt, are pickled."""
        renderer.tokenizer = self.reader.converter.given
        renderer.scores = [pickle.loads(each) for each in scores]
        return renderer.whole([pickle.loads(each) for each in results]).json_text().encode()

    def try_grammar(self, grammar: Grammar) -> str | None:
        """Compile a grammar; None if it is too large to be handed over."""
        compiled = self.compiler(grammar)
        assert compiled is not None
        return compiled.written()


@dataclass
class _Flight:
    """A grammar that is being compiled, and how many requests wait for it."""

    task: "asyncio.Task[CompiledGrammar]"
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Level:
    """Compiles grammars that take up to ``seconds`` of CPU time, one at a time, and again in the thread."""

    seconds: float
    worker: Worker
    thread: ThreadPoolExecutor


class Conversions:
    """Conversions for one server. All methods are called by one event loop, and end when they are cancelled.

    Args:
        compiler: of the engine, which finds there what has been compiled here.
        busy: whether requests run, which grammars then give way to.
    """

    def __init__(
        self, reader: BodyReader, compiler: GrammarCompiler, options: ServeOptions, busy: Callable[[], bool]
    ) -> None:
        self._reader = reader
        self._busy = busy
        self._compiler = compiler
        compiler.delay_seconds = options.grammar_delay_seconds
        self._options = options
        given = reader.converter.given
        imports = [__name__, "xgrammar", *([type(given.inner).__module__] if given is not None else [])]
        worker = functools.partial(Worker, functools.partial(Apart, reader), imports)
        self._middle, self._long, self._answers = (worker(_NICENESS) for _ in range(3))
        most = options.grammar_seconds
        self._levels = [
            _Level(seconds, worker(), ThreadPoolExecutor(1, "foredraft-grammar", _thread_gives_way))
            for seconds in (*(first for first in _FIRST_SECONDS if first < most), most)
        ]
        self._trying = 0  # grammars, in processes
        self._pacing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foredraft-convert")
        self._flights: dict[Grammar, _Flight] = {}
        self._here_now: set[Future[CompiledGrammar | None]] = set()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    async def read(self, method: Callable[..., T], raw: bytes, *args: Any) -> T:
        """What a method of the reader makes of a body."""
        if len(raw) <= SHORT_BYTES:
            return await self.in_thread(method, self._reader, raw, *args)
        worker = self._middle if len(raw) <= _MIDDLE_BYTES else self._long
        return await worker.run(Apart.read, method.__name__, raw, *args)

    async def answer(self, renderer: Renderer, results: Seq[Result]) -> bytes:
        """The whole answer in JSON."""
        if renderer.values(results) <= _SHORT_VALUES:
            return renderer.whole(results).json_text().encode()
        written = [[await self.in_thread(pickle.dumps, each) for each in part] for part in (results, renderer.scores)]
        return await self._answers.run(Apart.render, renderer.portable(), *written)

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run short work in the thread of short bodies."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar; as long as it is held, the engine finds it too.

        Raises:
            OptionError: the grammar is not valid.
            ApiError: it takes more time or memory than the options allow.
        """
        known = self._compiler.known(grammar)
        if known is not None:
            return known
        flight = self._flights.get(grammar)
        if flight is None:
            flight = self._flights[grammar] = _Flight(asyncio.ensure_future(self._compile(grammar)))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                flight.task.cancel()
                del self._flights[grammar]

    @property
    def compiling(self) -> int:
        """Grammars that are being compiled, or wait for that."""
        return len(self._flights)

    @property
    def uninterruptible(self) -> bool:
        """Whether a thread compiles a grammar or waits for a process, for which Python would wait at its end."""
        return any(each.running() for each in self._here_now) or any(worker.busy for worker in self._workers)

    @property
    def _workers(self) -> list[Worker]:
        return [self._middle, self._long, self._answers, *(level.worker for level in self._levels)]

    async def _compile(self, grammar: Grammar) -> CompiledGrammar:
        digest = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode()).digest()
        if digest in self._refused:
            raise ApiError(400, self._refused[digest])
        try:
            return await self._limited(grammar)
        except (TookTooLong, Failed) as error:
            self._refused[digest] = self._reason(error)
            if len(self._refused) > _REFUSED:
                self._refused.popitem(last=False)
            raise ApiError(400, self._refused[digest]) from None

    async def _limited(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar within its limits, first in a process.

        Raises:
            TookTooLong, Failed: it is over a limit.
        """
        for level in self._levels:
            limits = Limits(level.seconds, self._options.grammar_memory_bytes)
            try:
                async with self._paced():
                    written = await level.worker.run(Apart.try_grammar, grammar, limits=limits)
            except TookTooLong:
                continue
            if written is not None:
                return await self.in_thread(self._compiler.read, grammar, written)
            return await self._here(level.thread, grammar)
        raise TookTooLong

    @asynccontextmanager
    async def _paced(self) -> AsyncIterator[None]:
        """Inside, a process that tries a grammar gives way to requests."""
        if not self._trying:
            self._pacing = asyncio.ensure_future(self._pace())
        self._trying += 1
        try:
            yield
        finally:
            self._trying -= 1
            if not self._trying and self._pacing is not None:
                self._pacing.cancel()

    async def _pace(self) -> None:
        """Let the processes that try grammars rest for a part of the time while requests run.

        A low priority does not do it: the threads of a step wait for each other, and one of them shares its core.
        """
        while True:
            await asyncio.sleep(_WORK_SECONDS)
            if self._busy():
                try:
                    self._tell(signal.SIGSTOP)
                    await asyncio.sleep(_REST_SECONDS)
                finally:
                    self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        for level in self._levels:
            level.worker.signal(number)

    async def _here(self, thread: ThreadPoolExecutor, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar in the server. Cancelling waits for the end, so that the turn is held as long."""
        running = thread.submit(self._compiler, grammar)
        self._here_now.add(running)
        running.add_done_callback(self._here_now.discard)
        compiling = asyncio.wrap_future(running)
        try:
            compiled = await asyncio.shield(compiling)
        finally:
            await asyncio.wait({compiling})
        assert compiled is not None
        return compiled

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TookTooLong):
            seconds = self._options.grammar_seconds
            return (
                f"The grammar takes more than {seconds:g} s to compile, the limit of this server (--grammar-seconds)."
            )
        limit = self._options.grammar_memory_bytes // 2**20
        return (
            f"The grammar is too large to compile in {limit} MiB, the limit of this server (--grammar-memory-bytes), "
            "or nested too deep."
        )

    def close(self) -> None:
        """End all conversions."""
        for worker in self._workers:
            worker.close()
        for thread in (self._thread, *(level.thread for level in self._levels)):
            thread.shutdown(wait=False, cancel_futures=True)


def _thread_gives_way() -> None:
    """Give this thread the priority of the processes; only Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
