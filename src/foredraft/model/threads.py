"""OpenMP's threads, which are idle in the wrong place if operators run in more than one thread."""

import ctypes
import os
import threading
from contextlib import AbstractContextManager
from functools import cache

import torch

_PAUSE_HARD = 2
_kernels = threading.local()


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


def operators_in_one_thread() -> AbstractContextManager[None]:
    """Inside, torch's operators of the calling thread run in it alone, and ``kernel_threads`` is torch's count outside.

    For steps whose time is in kernels with threads of their own: OpenMP's threads spin for milliseconds after each
    large operator, and take the cores from these.
    """
    return _Threads(1, kernel_threads())


def threads_of(count: int) -> AbstractContextManager[None]:
    """Inside, operators and kernels that the calling thread runs have ``count`` threads."""
    return _Threads(count, count)


class _Threads(AbstractContextManager[None]):
    """A context with these numbers of threads; faster than a generator, since every step enters one."""

    def __init__(self, operators: int, kernels: int) -> None:
        self._inside = operators, kernels
        self._outside = torch.get_num_threads(), getattr(_kernels, "count", None)

    def __enter__(self) -> None:
        self._set(*self._inside)

    def __exit__(self, *error: object) -> None:
        self._set(*self._outside)

    def _set(self, operators: int, kernels: int | None) -> None:
        _kernels.count = kernels
        if self._inside[0] != self._outside[0]:
            torch.set_num_threads(operators)


def kernel_threads() -> int:
    """The number of threads for kernels that have their own."""
    return getattr(_kernels, "count", None) or torch.get_num_threads()


@cache
def _pause_function() -> "ctypes._NamedFuncPointer | None":
    """``omp_pause_resource_all`` (OpenMP 5.0) of libgomp, which ends the calling thread's team only.

    LLVM's library has a function of this name that shuts down all teams; there, None.
    """
    if os.name != "posix":
        return None
    loaded = ctypes.CDLL(None)
    return None if hasattr(loaded, "__kmpc_fork_call") else getattr(loaded, "omp_pause_resource_all", None)
