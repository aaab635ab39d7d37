"""The process behind ``LimitedCalls``: forks a child for each call. ``python -m foredraft.serve.fork_server SOCKET``.

It has one thread, so its children may do anything after the fork. It ends when its server has closed the socket.
"""

import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from foredraft.serve.limited_calls import PAUSABLE_CALL, PAUSE, RESUME, STATUS, Limits, give_way

_CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL


def main() -> None:
    """Serve calls until the other end of the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which closes the socket
        signal.signal(each, signal.SIG_IGN)
    context = pickle.loads(_exactly(control, struct.unpack("<Q", _exactly(control, 8))[0]))()
    gc.collect()
    gc.freeze()  # collections in children copy no pages
    _ForkServer(control, context).run()


class _ForkServer:
    """The loop: starts a child for each connection that arrives, kills those whose connection is closed."""

    def __init__(self, control: socket.socket, context: Any) -> None:
        self._control = control
        self._context = context
        self._children: dict[int, socket.socket] = {}  # connections, by process
        self._pausable: set[int] = set()  # of the children
        self._woken, waker = socket.socketpair()
        for each in (self._woken, waker):
            each.setblocking(False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the control socket is closed."""
        while True:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            owners = {connection.fileno(): child for child, connection in self._children.items()}
            for file in owners:
                poll.register(file, 0)  # only that the other end is closed
            for file, event in poll.poll():
                if file == self._control.fileno():
                    if not self._obey():
                        return
                elif file == self._woken.fileno():
                    self._woken.recv(4096)
                elif event & _CLOSED:
                    os.kill(owners[file], signal.SIGKILL)
                    self._children[owners[file]].close()
                    del self._children[owners[file]]
            self._reap()

    def _obey(self) -> bool:
        """Do what the server says; False if it has closed the socket."""
        received, files, _, _ = socket.recv_fds(self._control, 1, 1)
        if not received:
            signal.set_wakeup_fd(-1)
            for child in self._children:
                os.kill(child, signal.SIGKILL)
            return False
        if received in (PAUSE, RESUME):
            for child in self._pausable & self._children.keys():
                os.kill(child, signal.SIGSTOP if received == PAUSE else signal.SIGCONT)
        else:
            self._start(socket.socket(fileno=files[0]), pausable=received == PAUSABLE_CALL)
        return True

    def _start(self, connection: socket.socket, *, pausable: bool) -> None:
        """Start the child of a new call."""
        child = os.fork()
        if child == 0:
            self._answer(connection)
        self._children[child] = connection
        if pausable:
            self._pausable.add(child)

    def _answer(self, connection: socket.socket) -> None:
        """Run a call, as the child, and end the process."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._control, self._woken, self._waker, *self._children.values()):
                other.close()
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)  # native code writes there why it aborts
            with connection:
                _call(connection, self._context)
            status = 0
        except BrokenPipeError:  # the caller is gone
            pass
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Tell those who wait how children have ended."""
        with suppress(ChildProcessError):
            while True:
                child, status = os.waitpid(-1, os.WNOHANG)
                if child == 0:
                    return
                self._pausable.discard(child)
                if child in self._children:
                    with self._children.pop(child) as connection, suppress(OSError):
                        connection.sendall(STATUS.pack(status))


def _call(connection: socket.socket, context: Any) -> None:
    """Read a call, run it within its limits, and write its result, or what it raised."""
    received = b""
    while more := connection.recv(2**20):
        received += more
    function, args, limits = pickle.loads(received)
    _limit(limits)
    try:
        answer = False, function(context, *args)
    except MemoryError:
        raise
    except Exception as error:
        answer = True, error
    connection.sendall(pickle.dumps(answer))


def _limit(limits: Limits) -> None:
    """Limit this process."""
    if not limits.pausable:
        give_way()
    if limits.seconds is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # SIGPROF ends the process
    if limits.memory_bytes is not None and sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _exactly(connection: socket.socket, count: int) -> bytes:
    """The next bytes. Ends the process if the other end is closed before."""
    received = bytearray()
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            sys.exit()
        received += more
    return bytes(received)


if __name__ == "__main__":
    main()
