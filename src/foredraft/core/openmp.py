"""OpenMP's threads, which are idle in the wrong place if operators run in more than one thread."""

import ctypes
import os
from functools import cache

_PAUSE_HARD = 2


def release_threads() -> None:
    """End the OpenMP threads that ran operators for the calling thread; its next operator starts new ones.

    OpenMP keeps a team of threads for each thread that ever ran a large operator. As soon as all teams have more
    threads than the machine has cores, libgomp lets them sleep between operators instead of spinning, and waking them
    halves the speed of steps on a CPU. A thread that leaves the steps to another one calls this. Without effect where
    OpenMP's library is another one.
    """
    pause = _pause_function()
    if pause is not None:
        pause(_PAUSE_HARD)


@cache
def _pause_function() -> "ctypes._NamedFuncPointer | None":
    """``omp_pause_resource_all`` (OpenMP 5.0) of libgomp, which ends the calling thread's team only.

    LLVM's library has a function of this name that shuts down all teams; there, None.
    """
    if os.name != "posix":
        return None
    loaded = ctypes.CDLL(None)
    return None if hasattr(loaded, "__kmpc_fork_call") else getattr(loaded, "omp_pause_resource_all", None)
