"""The OpenMP threads of a process whose steps run in several threads in turn: only the latest has any."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment

SCRIPT = """
import asyncio, os, time
import foredraft

def threads():
    count, still = -1, 0
    while still < 5:  # a thread that was told to end takes a moment
        count, before = len(os.listdir("/proc/self/task")), count
        still = still + 1 if count == before else 0
        time.sleep(0.05)
    return count

g = foredraft.load("sample", "eagle3")
loaded = threads()
for _ in range(2):
    asyncio.run(g.agenerate("in the driver's thread", max_new_tokens=4))
    print(threads() - loaded)
    g.generate("in this one", max_new_tokens=4)
    print(threads() - loaded)
"""


def counts(openmp_threads: int) -> list[int]:
    """Threads of the process beyond those after loading: after steps in the driver, in the main thread, and again."""
    several = {**environment(), "OMP_NUM_THREADS": str(openmp_threads)}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=several, check=True)
    return [int(count) for count in run.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_thread_gives_its_openmp_threads_back_when_it_leaves_the_steps_to_another_one():
    one, two = counts(1), counts(2)
    assert len(set(one)) == 1, "with one thread there is no team"
    assert two[::2] == one[::2], "nobody waits for the driver, and its team is gone"
    assert two[1::2] == [count + 1 for count in one[1::2]], "the main thread has its team of two"
