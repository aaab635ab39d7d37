"""A background thread that steps an engine for all asyncio tasks that await its requests."""

import asyncio
import threading
from collections.abc import Sequence as Seq
from contextlib import suppress

from foredraft.engine.engine import Engine
from foredraft.engine.request import Sequence
from foredraft.model.threads import release_threads


class Driver:
    """Steps an engine in one thread while any task awaits a request; all tasks share its batch.

    An event loop never waits for a step, and the thread ends when no task waits. Tasks are woken only between steps,
    so they see consistent state.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # guards the next two fields; taken after the engine's lock, never for long
        self._waiters: set[_Waiter] = set()
        self._stepping = False

    async def ended(self, sequences: Seq[Sequence]) -> None:
        """Wait until all of these have ended. Cancelling the waiting task cancels them at the next step."""
        await self._wait(_Waiter(sequences, first_piece=False))

    async def more(self, sequence: Sequence) -> None:
        """Wait until there is a piece to take, or the sequence has ended. For a cancelled task see ``ended``."""
        await self._wait(_Waiter([sequence], first_piece=True))

    def end(self, sequences: Seq[Sequence]) -> None:
        """Cancel these between steps, also when no task awaits a request any more. Called by an event loop."""
        self._engine.abandon(sequences)
        waiter = _Waiter(sequences, first_piece=False)
        waiter.future.cancel()  # nobody awaits it
        self._add(waiter)

    async def _wait(self, waiter: "_Waiter") -> None:
        self._add(waiter)
        try:
            await waiter.future
        except asyncio.CancelledError:
            self.end(waiter.sequences)
            raise
        except BaseException:  # no lock: a coroutine may be collected at any moment
            self._engine.abandon(waiter.sequences)
            raise

    def _add(self, waiter: "_Waiter") -> None:
        with self._lock:
            self._waiters.add(waiter)
            if not self._stepping:
                self._stepping = True
                release_threads()  # this thread may have loaded the model or stepped; now another one does
                threading.Thread(target=self._run, name="foredraft").start()

    def _run(self) -> None:
        fault: Exception | None = None
        while True:
            try:
                self._engine.process_queue()  # a task that only waits for a cancellation needs no step
            except Exception as error:
                fault = error
            if not self._wake(fault):
                release_threads()  # the next step may run in another thread
                return
            fault = None
            try:
                self._engine.contained_step()
            except Exception as error:
                fault = error

    def _wake(self, fault: Exception | None) -> bool:
        """Wake the waiters that are done, or all of them with an error that no request holds.

        Returns:
            True if others still wait.
        """
        with self._engine.exclusive(), self._lock:
            woken = [waiter for waiter in self._waiters if waiter.done() or fault is not None]
            self._waiters.difference_update(woken)
            self._stepping = others = bool(self._waiters)
        by_loop: dict[asyncio.AbstractEventLoop, list[_Waiter]] = {}
        for waiter in woken:
            by_loop.setdefault(waiter.future.get_loop(), []).append(waiter)
        for loop, waiters in by_loop.items():  # one call each: a call interrupts the loop's wait
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(_wake_all, waiters, fault)
        return others


class _Waiter:
    """Waits for requests to end, or for the next piece of one. That of a cancelled task waits until they have ended."""

    def __init__(self, sequences: Seq[Sequence], *, first_piece: bool) -> None:
        self.sequences = sequences
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = list(sequences)
        self._first_piece = first_piece

    def done(self) -> bool:
        while self._open and (self._open[-1].finished or (self._first_piece and self._open[-1].pieces)):
            self._open.pop()  # never checked again
        return not self._open

    def wake(self, fault: Exception | None) -> None:
        if self.future.done():
            return
        if fault is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(fault)


def _wake_all(waiters: Seq[_Waiter], fault: Exception | None) -> None:
    for waiter in waiters:
        waiter.wake(fault)
