"""Keys and values from a cache into a part of it, row by row beside it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.model.cache import SlotCache

_SHORT = 32
"""Rows with no more new tokens than this are copied together, slot by slot; others are copied as a piece each."""


class New(NamedTuple):
    """What is to be copied of a row: tokens ``begin`` to ``end``; ``left`` of those before are not in the part."""

    left: int
    begin: int
    end: int


def take_in(full: SlotCache, part: SlotCache, copies: Mapping[int, New], layers: Iterable[int]) -> None:
    """Copy tokens as the model wrote them, over whatever stands in their slots.

    Args:
        copies: what is new, by row.
    """
    short = {row: new for row, new in copies.items() if 0 < new.end - new.begin <= _SHORT}
    long: dict[New, list[int]] = {}
    for row, new in copies.items():
        if new.end - new.begin > _SHORT:
            long.setdefault(new, []).append(row)
    if not short and not long:
        return
    table = None
    for layer in layers:
        stored = full.stored(layer)
        if short and table is None:
            table = _table(short, stored[0].device)
        for source, target in zip(stored, part.buffers(layer, *stored), strict=True):
            if table is not None:
                rows, taken, put = table
                target[rows, :, put] = source[rows, :, taken]
            for new, group in long.items():
                target[group, :, new.begin - new.left : new.end - new.left] = source[group, :, new.begin : new.end]


def _table(
    copies: Mapping[int, New], device: torch.device
) -> tuple[Int[Tensor, "B 1"], Int[Tensor, "B W"], Int[Tensor, "B W"]]:
    """Rows, slots that are read and slots that are written; a row with fewer than others has its last one again."""
    lines = [(row, new.left, new.begin, new.end - 1) for row, new in copies.items()]
    width = max(last + 1 - begin for _, _, begin, last in lines)
    rows, left, begin, last = torch.tensor(lines, device=device)[..., None].unbind(1)
    taken = (begin + torch.arange(width, device=device)).minimum(last)
    return rows, taken, taken - left
