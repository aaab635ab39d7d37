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
from typing import NamedTuple

import torch

from foredraft.model.threads import threads_of

_LOOK, _CALM = 0.25, 1.0
"""Seconds between two looks at the cores, and for which one must be free before it gets a thread again."""
_SPARE = 0.35
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
        self._warned = False

    def step(self) -> AbstractContextManager[None]:
        """Inside, operators and kernels of the calling thread have as many threads as find a core, at most torch's."""
        most = torch.get_num_threads()
        if most == 1:
            return nullcontext()
        if time.monotonic() >= self._next_look:
            self._look(most)
        count = self._count(most)
        return threads_of(count) if count < most else nullcontext()

    def _count(self, most: int) -> int:
        return most if self._last is None else max(1, min(most, self._last.cores - self._taken))

    def _look(self, most: int) -> None:
        last, now = self._last, read_usage()
        self._last, self._next_look = now, math.inf if now is None else now.clock + _LOOK
        if last is None or now is None or now.clock - last.clock > _CALM:  # no step ran for a while
            return
        others = (now.busy - last.busy - now.own + last.own) / (now.clock - last.clock)
        taken = max(0, math.ceil(others - _SPARE))
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


def read_usage() -> CpuUsage | None:
    """On Linux; None elsewhere, and where the environment sets the number of threads or how they wait."""
    if "OMP_NUM_THREADS" in os.environ or "OMP_WAIT_POLICY" in os.environ or not _STAT.exists():
        return None
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    counts = [
        [int(count) for count in line[1:9]] for line in lines if line[0] in cores
    ]  # without guests: counted twice
    busy = sum(sum(each) - sum(each[3:5]) for each in counts)  # without those two, in which nothing ran
    return CpuUsage(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time(), len(counts))
