"""The number of threads of steps on a CPU that other programs use, too.

A step is some hundred parallel operators, at whose ends the threads wait for each other by spinning. While another
program holds the core of one of them, each operator takes as long as the scheduler's slices: a thread too many makes
steps several times slower. Sleeping in place of spinning would slow down a process that is alone.
"""

import logging
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foredraft.model.threads import threads_of

_LOOK, _CALM, _STALE = 0.25, 1.0, 10.0
"""Seconds between two looks at the cores; for which one must be free before it gets a thread again; and without a step
after which what others did meanwhile says nothing. A step with a thread too many may take longer than any of these."""
SPARE = 0.35
"""What others may use of a core that has a thread. A program that never waits gets half of such a core."""
_STAT = Path("/proc/stat")

_log = logging.getLogger(__name__)


class CpuUsage(NamedTuple):
    """What ``cores`` did until ``clock``: CPU seconds in which any program ran, and those of this process."""

    clock: float
    busy: float
    own: float
    cores: int


class SharedCores:
    """Chooses the threads of steps: one for each core of this process that other programs leave free.

    Fewer at the first look that finds a core in use, more when it has been free for a second. Where the use of cores is
    unknown, the number is torch's.
    """

    def __init__(self, *, watch: bool) -> None:
        self._next_look = 0.0 if watch else math.inf
        self._last: CpuUsage | None = None
        self._taken = 0  # cores that others use
        self._used_at = 0.0  # when as many as that were last in use
        self._ended = 0.0  # when the latest step did
        self._warned = False

    def step(self) -> AbstractContextManager[None]:
        """Inside, operators and kernels of the calling thread have as many threads as find a core, at most torch's."""
        most = torch.get_num_threads()
        if most == 1:
            return nullcontext()
        if time.monotonic() >= self._next_look:
            self._look(most)
        count = self._count(most)
        return _Step(self, threads_of(count) if count < most else nullcontext())

    def ended(self) -> None:
        """A step has ended."""
        self._ended = time.monotonic()

    def _count(self, most: int) -> int:
        return most if self._last is None else max(1, min(most, self._last.cores - self._taken))

    def _look(self, most: int) -> None:
        last, now = self._last, read_usage()
        self._last, self._next_look = now, math.inf if now is None else now.clock + _LOOK
        if last is None or now is None or now.clock - self._ended > _STALE:
            return
        others = others_between(last, now)
        taken = max(0, math.ceil(others - SPARE))
        if taken >= self._taken:
            self._used_at = now.clock
        elif now.clock - self._used_at < _CALM:
            return
        before, self._taken = self._count(most), taken
        count = self._count(most)
        if count < before and not self._warned:
            self._warned = True
            _log.warning(
                f"Other programs use {others:.1f} of {now.cores} cores, so steps run in {count} instead of {before} "
                "threads while they do. OMP_NUM_THREADS sets a fixed number."
            )
        elif count != before:
            _log.info(f"Steps run in {count} {'thread' if count == 1 else 'threads'}.")


class _Step(AbstractContextManager[None]):
    """A context whose end is noted; faster than a generator, since every step enters one."""

    __slots__ = ("_cores", "_inner")

    def __init__(self, cores: SharedCores, inner: AbstractContextManager[None]) -> None:
        self._cores, self._inner = cores, inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._cores.ended()


def read_usage() -> CpuUsage | None:
    """``cpu_usage``; None where the environment sets the number of threads or how they wait."""
    return None if "OMP_NUM_THREADS" in os.environ or "OMP_WAIT_POLICY" in os.environ else cpu_usage()


def others_between(before: CpuUsage, after: CpuUsage) -> float:
    """The cores that other programs used on average between two moments."""
    busy, own = after.busy - before.busy, after.own - before.own
    return (busy - own) / max(after.clock - before.clock, 1e-9)


def cpu_usage() -> CpuUsage | None:
    """What the cores of this process have done so far, on Linux; None elsewhere."""
    if not _STAT.exists():
        return None
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    counts = [
        [int(count) for count in line[1:9]] for line in lines if line[0] in cores
    ]  # without guests: counted twice
    busy = sum(sum(each) - sum(each[3:5]) for each in counts)  # without those two, in which nothing ran
    return CpuUsage(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time(), len(counts))
