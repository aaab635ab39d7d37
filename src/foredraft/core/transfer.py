"""Copies between the host and a device that neither waits for before it must."""

import itertools
from array import array
from collections.abc import Sequence
from typing import Any, cast, final

import torch
from jaxtyping import Int
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "*n"]:
    """Numbers, or rows of as many numbers, as a tensor on the device.

    ``torch.tensor(values, device=...)`` copies from pageable memory, which waits until the device has done all its
    work; from pinned memory the copy takes its turn.
    """
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return on_host(values)
    pinned = torch.tensor(list(values), dtype=torch.long, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def on_host(values: Sequence[int] | Sequence[Sequence[int]]) -> Int[Tensor, "*n"]:
    """``to_device`` on a CPU, with few operators: after a forward each one waits for its code to be in the caches."""
    rows = [row for row in values if not isinstance(row, int)]
    shape = (len(values), len(rows[0])) if rows else (len(values),)
    flat = array("q", itertools.chain.from_iterable(rows) if rows else cast(Sequence[int], values))
    if not flat:
        return torch.empty(shape, dtype=torch.long)
    tensor = torch.frombuffer(flat, dtype=torch.long)  # the same memory
    return tensor.view(shape) if rows else tensor


@final
class HostCopy:
    """A copy of a tensor on the host. On CUDA it takes its turn in the stream when this is made, so ``wait`` does not
    wait for work that is launched afterwards. Of other devices it is the tensor itself, which is copied when it is
    read."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._event: Any = None
        if tensor.device.type == "cuda":
            self._copy = tensor.to("cpu", non_blocking=True)  # to pinned memory
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The copy, as soon as it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
