"""Python processes of their own, killed or in pairs, and a disk that is full."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import foredraft


def environment(*folders: Path) -> dict[str, str]:
    """For a process that imports foredraft, these tests' modules and those in ``folders``; one thread, no GPU."""
    paths = os.pathsep.join(map(str, (*folders, Path(foredraft.__path__[0]).parent, Path(__file__).parent)))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def killed_after(lines: list[str], script: str, *arguments: str | Path, folder: Path) -> None:
    """Run a script that prints these lines and then waits for its standard input, and kill it there."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(folder), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        printed = [next(process.stdout, "").strip() for _ in lines]
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL and printed == lines


def torchrun(*arguments: Path | str) -> list[str]:
    """The command that starts a script, or ``-m`` and a module, in two processes that train or generate together."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, "-m", *launcher, *map(str, arguments)]


def two_processes(script: Path | str, *arguments: Path | str, folder: Path) -> str:
    """What a script, or ``-m`` and a module, prints in two processes; skips where processes cannot meet."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    command = torchrun(script, *arguments)
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=300)
    if done.returncode and "Address" in done.stderr:
        pytest.skip(f"processes cannot meet here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextmanager
def disk_for(size: int) -> Iterator[None]:
    """No file may grow beyond this size: writing more raises OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
