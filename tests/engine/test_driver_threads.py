"""The OpenMP threads of a process whose steps run in the driver's thread: one team, however many threads ran before."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment

SCRIPT = """
import asyncio, os, time
import foredraft

def threads():
    return len(os.listdir("/proc/self/task"))

g = foredraft.load("sample", "eagle3")
asyncio.run(g.agenerate("once", max_new_tokens=4))
one = threads()
g.generate("twice", max_new_tokens=4)
two = threads()
asyncio.run(g.agenerate("thrice", max_new_tokens=4))
deadline = time.monotonic() + 10
while threads() > one and time.monotonic() < deadline:
    time.sleep(0.05)
print(two - one, threads() - one)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_the_thread_that_leaves_the_steps_to_the_driver_gives_its_openmp_threads_back() -> None:
    several = {**environment(), "OMP_NUM_THREADS": "3"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=several, check=True)
    more, left = map(int, run.stdout.split())
    assert more > 0
    assert left == 0
