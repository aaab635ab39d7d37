"""Who converts what where, so that no request waits for the work of another.

Short bodies take milliseconds: a thread converts them. Long ones are converted in processes, and answers with many
log-probabilities are written there. Grammars are compiled in a process, within limits of time and memory. Those that
kept to them are handed over if they are small; the others, which compile quickly for their size, are compiled again in
the server, whose native code cannot be interrupted.
"""

import asyncio
import functools
import hashlib
import heapq
import itertools
import json
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.engine.results import Result
from foredraft.model.text.grammar import CompiledGrammar, GrammarCompiler
from foredraft.serve.convert import Converter
from foredraft.serve.errors import ApiError
from foredraft.serve.limited_calls import Failed, LimitedCalls, Limits, TookTooLong, give_way
from foredraft.serve.options import ServeOptions
from foredraft.serve.render import Renderer

_SHORT_BYTES = 32 * 1024
"""Bodies that the thread converts, in at most 25 ms on a slow core."""
_SHORT_VALUES = 2000
"""Tokens with log-probabilities that the event loop renders, in about 25 ms."""
_FIRST_SECONDS = (0.1, 1.0)
"""CPU time of a grammar's first tries. One that needs more begins again, and waits only for others that do."""
_WORK_SECONDS, _REST_SECONDS = 0.02, 0.08
"""Grammars are tried a fifth of the time while requests run, so these lose at most a fifth of theirs."""
_REFUSED = 1024
"""Grammars over the limits that are remembered."""
T = TypeVar("T")


class Turns:
    """Lets one call run at a time. Of those that wait, the smallest goes next and the oldest after it, by turns.

    So a small call waits for few large ones, and one that has k older ones before it for at most 2k + 1 turns.
    """

    def __init__(self) -> None:
        self._free = True
        self._by_size: list[tuple[int, int, asyncio.Future[None]]] = []
        self._by_age: deque[asyncio.Future[None]] = deque()
        self._oldest_next = False
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for a turn, which the context holds."""
        if self._free:
            self._free = False
        else:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._by_size, (size, next(self._numbers), future))
            self._by_age.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled():  # the turn had come
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._by_age and self._by_age[0].done():
            self._by_age.popleft()
        while self._by_size and self._by_size[0][2].done():
            heapq.heappop(self._by_size)
        if not self._by_age:
            self._free = True
            return
        (self._by_age[0] if self._oldest_next else self._by_size[0][2]).set_result(None)
        self._oldest_next = not self._oldest_next


class Apart:
    """What the processes have: a converter, and a compiler for the same tokens."""

    def __init__(self, converter: Converter) -> None:
        self.converter = converter
        self.compiler = GrammarCompiler(converter.given, converter.vocab_size, threads=1)
        with suppress(OptionError):  # without a tokenizer or xgrammar; a grammar is refused with the reason
            self.compiler.prepare()

    def convert(self, method: str, kind: type[BaseModel], raw: bytes) -> Any:
        """What a method of the converter makes of a body of this kind, which is valid."""
        return getattr(self.converter, method)(kind.model_validate(json.loads(raw)))

    def render(self, renderer: Renderer, results: Seq[bytes]) -> str:
        """The answer in JSON; each result is pickled."""
        renderer.tokenizer = self.converter.given
        return renderer.whole([pickle.loads(each) for each in results]).json_text()

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


class _GrammarQueue:
    """Grammars that take up to ``seconds`` of CPU time, one at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.turns = Turns()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="foredraft-grammar", initializer=_thread_gives_way)


class Conversions:
    """Conversions for one server. All methods are called by one event loop, and end when they are cancelled.

    Args:
        compiler: of the engine, which finds there what has been compiled here.
        busy: whether requests run, which grammars then give way to.
    """

    def __init__(
        self, converter: Converter, compiler: GrammarCompiler, options: ServeOptions, busy: Callable[[], bool]
    ) -> None:
        self._converter = converter
        self._busy = busy
        self._compiler = compiler
        compiler.delay_seconds = options.grammar_delay_seconds
        self._options = options
        self._calls = LimitedCalls(functools.partial(Apart, converter))
        self._long, self._answers = Turns(), Turns()
        most = options.grammar_seconds
        self._levels = [_GrammarQueue(each) for each in (*(first for first in _FIRST_SECONDS if first < most), most)]
        self._trying = 0  # grammars, in processes
        self._pacing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foredraft-convert")
        self._flights: dict[Grammar, _Flight] = {}
        self._here_now: set[Future[CompiledGrammar | None]] = set()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    async def convert(self, method: Callable[[Converter, Any], T], body: BaseModel, raw: bytes) -> T:
        """What a method of the converter makes of a body, which came as ``raw`` (quicker to send than ``body``)."""
        if len(raw) <= _SHORT_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._thread, method, self._converter, body)
        async with self._long.turn(len(raw)):
            return await self._calls.run(Apart.convert, method.__name__, type(body), raw)

    async def answer(self, renderer: Renderer, results: Seq[Result]) -> str:
        """The whole answer in JSON."""
        values = renderer.values(results)
        if values <= _SHORT_VALUES:
            return renderer.whole(results).json_text()
        async with self._answers.turn(values):
            written = [await self.in_thread(pickle.dumps, each) for each in results]
            return await self._calls.run(Apart.render, renderer.portable(), written)

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
        """Whether a thread compiles a grammar, for which Python would wait at its end, also after ``close``."""
        return any(each.running() for each in self._here_now)

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
            limits = Limits(level.seconds, self._options.grammar_memory_bytes, pausable=True)
            async with level.turns.turn(len(grammar.text)):
                try:
                    async with self._paced():
                        written = await self._calls.run(Apart.try_grammar, grammar, limits=limits)
                except TookTooLong:
                    continue
                if written is not None:
                    return await self.in_thread(self._compiler.read, grammar, written)
                return await self._here(level.thread, grammar)
        raise TookTooLong

    @asynccontextmanager
    async def _paced(self) -> AsyncIterator[None]:
        """Inside, a call that can be paused gives way to requests."""
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
        """Let calls that can be paused rest for a part of the time while requests run."""
        while True:
            await asyncio.sleep(_WORK_SECONDS)
            if self._busy():
                self._calls.pause()
                try:
                    await asyncio.sleep(_REST_SECONDS)
                finally:
                    self._calls.resume()

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
        self._calls.close()
        for pool in (self._thread, *(level.thread for level in self._levels)):
            pool.shutdown(wait=False, cancel_futures=True)


def _thread_gives_way() -> None:
    """Give this thread the priority of the processes; only Linux has priorities of threads."""
    if sys.platform == "linux":
        give_way()
