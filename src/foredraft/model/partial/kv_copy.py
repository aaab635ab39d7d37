"""Copies keys and values from the full cache to a partial cache with the same rows."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.model.cache import SlotCache

_SHORT = 32
"""Rows with at most this many new tokens are copied in one indexed copy; longer ones as one slice each."""


class Copy(NamedTuple):
    """The tokens ``begin`` to ``end`` of a row; ``left_out`` tokens before them are not in the partial cache."""

    left_out: int
    begin: int
    end: int


def copy_tokens(full: SlotCache, part: SlotCache, copies: Mapping[int, Copy], layers: Iterable[int]) -> None:
    """Copy keys and values of new tokens to the partial cache, overwriting their slots.

    Args:
        copies: the tokens to copy, by row.
    """
    short = {row: copy for row, copy in copies.items() if 0 < copy.end - copy.begin <= _SHORT}
    long: dict[Copy, list[int]] = {}
    for row, copy in copies.items():
        if copy.end - copy.begin > _SHORT:
            long.setdefault(copy, []).append(row)
    if not short and not long:
        return
    table = None
    for layer in layers:
        stored = full.stored(layer)
        if short and table is None:
            table = _table(short, stored[0].device)
        for source, target in zip(stored, part.buffers(layer, *stored), strict=True):
            if table is not None:
                rows, read, written = table
                target[rows, :, written] = source[rows, :, read]
            for (left_out, begin, end), group in long.items():
                target[group, :, begin - left_out : end - left_out] = source[group, :, begin:end]


def _table(
    copies: Mapping[int, Copy], device: torch.device
) -> tuple[Int[Tensor, "B 1"], Int[Tensor, "B W"], Int[Tensor, "B W"]]:
    """Rows, slots to read and slots to write; rows with fewer tokens repeat their last one."""
    lines = [(row, copy.left_out, copy.begin, copy.end - 1) for row, copy in copies.items()]
    width = max(last + 1 - begin for _, _, begin, last in lines)
    rows, left_out, begin, last = torch.tensor(lines, device=device)[..., None].unbind(1)
    read = (begin + torch.arange(width, device=device)).minimum(last)
    return rows, read, read - left_out
