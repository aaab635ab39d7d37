"""Calls in processes that can be ended: each has limits of time and memory, and a low priority.

One process, ``fork_server``, imports what the calls need. It forks a child for each call, so a call that is ended, or
one that crashes, costs the others nothing.
"""

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

STATUS = struct.Struct("<i")
"""How a child ended, as ``os.waitpid`` says it."""
CALL, PAUSABLE_CALL, PAUSE, RESUME = b"c", b"p", b"s", b"r"
"""Commands of the fork server; calls come with their connection."""
_STOP_SECONDS = 5.0
_NICENESS = 10
"""A tenth of the time of a core that something else wants."""


def give_way() -> None:
    """Lower the priority of this thread on Linux, elsewhere that of this process."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a call: CPU time, and on Linux memory beyond that of an idle child; None: no limit.

    ``pausable``: it rests while calls are paused, see ``LimitedCalls.pause``, and has the usual priority.
    """

    seconds: float | None = None
    memory_bytes: int | None = None
    pausable: bool = False


class TookTooLong(Exception):
    """A call took more than its CPU time."""


class Failed(Exception):
    """A call needed more than its memory, or crashed."""


class _Lost(Exception):
    """The fork server has ended."""


class LimitedCalls:
    """Runs functions in processes of their own. The fork server starts with the first call, which waits for it.

    Args:
        make: picklable; the fork server calls it once, and each function gets its result as first argument.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._started: asyncio.Future[_Server] | None = None

    async def run(self, function: Callable[..., Any], *args: Any, limits: Limits = Limits()) -> Any:
        """What a function returns; it, its arguments and its result can be pickled. Cancelling ends the process.

        Raises:
            TookTooLong, Failed: the call exceeded its limits.
            Exception: what the function raised.
        """
        call = pickle.dumps((function, args, limits))
        kind = PAUSABLE_CALL if limits.pausable else CALL
        try:
            return await self._run(kind, call)
        except _Lost:  # somebody has killed it; start another
            return await self._run(kind, call)

    def pause(self) -> None:
        """Stop the pausable calls that run now; they use no CPU time."""
        self._tell(PAUSE)

    def resume(self) -> None:
        """Let paused calls go on."""
        self._tell(RESUME)

    def _tell(self, message: bytes) -> None:
        if (server := self._server) is not None:
            with suppress(OSError):  # it has ended, and its calls with it
                server.control.send(message)

    @property
    def _server(self) -> "_Server | None":
        """The fork server, once it has started."""
        started = self._started
        return started.result() if started and started.done() and started.exception() is None else None

    async def _run(self, kind: bytes, call: bytes) -> Any:
        if self._started is None:
            self._started = asyncio.get_running_loop().run_in_executor(None, _Server.start, self._make)
        started = self._started
        try:
            server = await asyncio.shield(started)
            answer = await server.answer(kind, call)
        except (OSError, _Lost):
            if self._started is started:
                self.close()
            raise _Lost from None
        return _returned(answer)

    def close(self) -> None:
        """End the fork server and all calls."""
        if (server := self._server) is not None:
            server.close()
        self._started = None


@dataclass(frozen=True, slots=True)
class _Server:
    """A fork server and the socket that controls it."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket

    @classmethod
    def start(cls, make: Callable[[], Any]) -> "_Server":
        """Start it; returns when it has read ``make``."""
        payload = pickle.dumps(make)
        control, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))  # with the folder of remote code, if a tokenizer has any
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "foredraft.serve.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        control.sendall(struct.pack("<Q", len(payload)) + payload)
        return cls(process, control)

    async def answer(self, kind: bytes, call: bytes) -> bytes:
        """The answer to a call, and how its process has ended. Raises ``OSError`` or ``_Lost``: the server has."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                socket.send_fds(self.control, [kind], [theirs.fileno()])
                theirs.close()
                writer.write(call)
                writer.write_eof()
                answer = await reader.read()
            finally:
                writer.close()  # a process that still runs is killed
        if len(answer) < STATUS.size:
            raise _Lost
        return answer

    def close(self) -> None:
        """End it."""
        self.control.close()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _returned(answer: bytes) -> Any:
    """The result in an answer: the child's pickled result, then how the child ended."""
    (status,) = STATUS.unpack(answer[-STATUS.size :])
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        raise TookTooLong
    if status != 0:
        raise Failed(f"The process of a call ended with status {status}.")
    raised, value = pickle.loads(answer[: -STATUS.size])
    if raised:
        raise value
    return value
