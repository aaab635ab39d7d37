"""Running a program that a model wrote, against tests: in a process of its own, with limits, and with no trust.

It limits accidents; it is not a jail against an attacker. Programs that loop, fork, fill memory, print without end,
exit early, delete files or kill processes are stopped (``cell`` says how, and on what the kernel's part depends). What
is not stopped: files that the user may read can be read, though nothing gets out; without seccomp (macOS, other
processors) only limits and Python's own audit hook are left, which native code gets around, so that network and files
are not guaranteed there; and tests run in the interpreter of what they test, so that an answer that looks for the
nonce, or returns objects that equal everything, passes. Who needs more runs the benchmark in a virtual machine.
"""

import importlib.util
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foredraft.bench import cell
from foredraft.core.errors import OptionError

Reason = Literal["passed", "failed", "timed out", "refused"]
SECONDS = 5.0
"""Of processor time for a program and its tests. human-eval gives 3 on the clock, but a machine that also runs a model
is slower, and unevenly so: both arms must fare the same."""
WAITING = 4.0
MEMORY = 1 << 30
STARTING = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """How a program fared. ``refused`` says nothing of the program: it was not run, for the reason in ``detail``."""

    reason: Reason
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.reason == "passed"


def check_platform() -> None:
    """Raises:
    OptionError: no resource limits here (Windows), or no interpreter to start.
    """
    if os.name != "posix" or importlib.util.find_spec("resource") is None:
        raise OptionError(
            f"Programs cannot be executed on {sys.platform}: Python's resource module, which limits them, is absent. "
            "Leave execution off, or use Linux."
        )
    if not sys.executable:
        raise OptionError("Programs cannot be executed: Python does not know its own interpreter (sys.executable).")


def try_program(
    programs: Sequence[str], test: str, entry_point: str, *, seconds: float = SECONDS, memory: int = MEMORY
) -> Trial:
    """Run the first of ``programs`` that is Python, then ``test``, then ``check(entry_point)``.

    Args:
        programs: readings of one answer, the likeliest first.
        seconds: of processor time, rounded up; on the clock four times that, from when the interpreter is ready.
        memory: bytes of address space, the interpreter's own (some 30 MB) among them.

    Raises:
        OptionError: the platform has no such limits.
    """
    check_platform()
    nonce = secrets.token_hex(16)
    task = {"programs": list(programs), "test": test, "entry_point": entry_point, "nonce": nonce}
    said, late, status = _run(json.dumps({**task, "seconds": seconds, "memory": memory}).encode(), WAITING * seconds)
    if said == cell.READY + nonce.encode():
        return Trial("passed")
    if not said.startswith(cell.READY):
        return Trial("refused", said.removeprefix(cell.REFUSED).decode(errors="replace") or "it did not start")
    return Trial("timed out" if late or status == -signal.SIGXCPU else "failed")


def _run(task: bytes, seconds: float) -> tuple[bytes, bool, int]:
    """What the process wrote on its one channel, whether it was late, and what it ended with."""
    command = [sys.executable, "-s", "-S", "-B", "-c", Path(cell.__file__).read_text("utf-8")]
    settled = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}  # -I would ignore these, and sets would differ between arms
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="foredraft-") as folder, tempfile.TemporaryFile() as stdin:
        stdin.write(task)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                [*command, str(writer)],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=settled,
                pass_fds=(writer,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            said, late = _listen(reader, seconds)
        finally:
            os.close(reader)
            status = _kill(process)
    return said, late, status


def _listen(reader: int, seconds: float) -> tuple[bytes, bool]:
    """Read until the channel is shut or time is up; the clock starts anew when the interpreter is ready."""
    said, most = b"", 1024
    end = time.monotonic() + STARTING
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while len(said) < most:
            if not selector.select(max(0.0, end - time.monotonic())):
                return said, True
            part = os.read(reader, most)
            if not part:
                break
            if not said:
                end = time.monotonic() + seconds
            said += part
    return said, False


def _kill(process: subprocess.Popen[bytes]) -> int:
    """End the whole group and say what its first process ended with: before it is waited for, its number is its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    return process.wait()
