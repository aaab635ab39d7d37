"""Copies from the host to a device that the host does not wait for."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "*n"]:
    """Numbers, or rows of as many numbers, as a tensor on the device.

    ``torch.tensor(values, device=...)`` copies from pageable memory, which waits until the device has done all its
    work; from pinned memory the copy takes its turn.
    """
    made = torch.tensor(list(values), dtype=torch.long, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)
