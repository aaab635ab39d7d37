"""Who converts what where, so that no request waits for the work of another.

Short bodies take milliseconds: a thread converts them. Long ones are converted in processes. Grammars are first
compiled in a process, within limits of time and memory; only those that kept to them are compiled in the server, whose
native code cannot be interrupted. (Compiled grammars cannot be handed over: written out, one of 0.8 MB takes 15 MB.)
"""

import asyncio
import functools
import hashlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.model.grammar import CompiledGrammar, GrammarCompiler
from foredraft.serve.convert import Converter
from foredraft.serve.errors import ApiError
from foredraft.serve.limited_calls import Failed, LimitedCalls, Limits, Returned, TookTooLong
from foredraft.serve.options import ServeOptions
from foredraft.serve.turns import Turns

_SHORT_BYTES = 32 * 1024
"""Bodies that the thread converts, in at most 25 ms on a slow core."""
_FIRST_SECONDS = 0.25
"""Of a grammar's first try. Those that need more wait for each other, and the others do not wait for them."""
_REFUSED = 1024
"""Grammars over the limits that are remembered."""
_NICENESS = 10
T = TypeVar("T")


class Apart:
    """What the processes have: a converter, and a compiler for the same tokens."""

    def __init__(self, converter: Converter) -> None:
        self.converter = converter
        self.compiler = GrammarCompiler(converter.given, converter.vocab_size, threads=1)
        with suppress(OptionError):  # without a tokenizer or xgrammar; a grammar is refused with the reason
            self.compiler.prepare()

    def convert(self, method: str, body: Any) -> Any:
        """What a method of the converter makes of a body."""
        return getattr(self.converter, method)(body)

    def try_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar; it stays here."""
        self.compiler(grammar)


@dataclass
class _Flight:
    """A grammar that is being compiled, and how many requests wait for it."""

    task: "asyncio.Task[CompiledGrammar]"
    waiting: int = 0


class Conversions:
    """Conversions for one server. All methods are called by one event loop, and end when they are cancelled.

    Args:
        compiler: of the engine, which finds there what has been compiled here.
    """

    def __init__(self, converter: Converter, compiler: GrammarCompiler, options: ServeOptions) -> None:
        self._converter = converter
        self._compiler = compiler
        compiler.delay_seconds = options.grammar_delay_seconds
        self._options = options
        self._calls = LimitedCalls(functools.partial(Apart, converter))
        self._long = Turns()
        self._first_tries, self._tries = Turns(), Turns()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foredraft-convert")
        self._compilers = [
            ThreadPoolExecutor(1, thread_name_prefix=f"foredraft-grammar-{kind}", initializer=_be_nice)
            for kind in ("short", "long")
        ]
        self._flights: dict[Grammar, _Flight] = {}
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    async def convert(self, method: Callable[[Converter, Any], T], body: Any, size: int) -> T:
        """What a method of the converter makes of a body that had ``size`` bytes."""
        if size <= _SHORT_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._thread, method, self._converter, body)
        async with self._long.turn(size):
            found: T = (await self._calls.run(Apart.convert, method.__name__, body)).value
            return found

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

    async def _compile(self, grammar: Grammar) -> CompiledGrammar:
        digest = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode()).digest()
        if digest in self._refused:
            raise ApiError(400, self._refused[digest])
        try:
            seconds = await self._tried(grammar)
        except (TookTooLong, Failed) as error:
            self._refused[digest] = self._reason(error)
            if len(self._refused) > _REFUSED:
                self._refused.popitem(last=False)
            raise ApiError(400, self._refused[digest]) from None
        thread = self._compilers[seconds > _FIRST_SECONDS]
        compiled = await asyncio.get_running_loop().run_in_executor(thread, self._compiler, grammar)
        assert compiled is not None
        return compiled

    async def _tried(self, grammar: Grammar) -> float:
        """Compile a grammar in a process; return the seconds of CPU time that it took."""
        most = self._options.grammar_seconds
        if most > _FIRST_SECONDS:
            with suppress(TookTooLong):
                async with self._first_tries.turn(len(grammar.text)):
                    return (await self._try(grammar, _FIRST_SECONDS)).seconds
        async with self._tries.turn(len(grammar.text)):
            return (await self._try(grammar, most)).seconds

    async def _try(self, grammar: Grammar, seconds: float) -> Returned:
        limits = Limits(seconds, self._options.grammar_memory_bytes)
        return await self._calls.run(Apart.try_grammar, grammar, limits=limits)

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
        for pool in (self._thread, *self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)


def _be_nice() -> None:
    """Give this thread the priority of the processes; only Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
