"""Prefill: read known tokens of many rows of different lengths, in bounded memory."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.transfer import to_device
from foredraft.core.tree import TokenTree
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache

CATCH_UP = 16
"""Rows further behind than this many tokens catch up in their own forward, so that the others need no padding. On an
accelerator, a step always reads this many: shapes that repeat are worth more than a narrow forward."""
CHUNK = 512
"""Most tokens per row and forward; bounds the masks and activations of a long prompt."""

_FORWARD = 32
"""Fixed cost of a forward, in tokens."""
_MOST = 4 * CHUNK
"""Most tokens of a forward over several rows, padding included."""


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows for prefill with the least total cost of padding and forwards.

    Splits the rows, sorted by length, by dynamic programming. A forward costs ``_FORWARD`` tokens on top of its own,
    and has at most ``_MOST``.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best: list[tuple[int, int]] = [(0, 0)]  # best[n]: cost of the first n rows, and start of their last group
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        forwards = -(-longest // CHUNK) * _FORWARD
        starts = [end - 1, *(i for i in range(end - 1) if (end - i) * min(longest, CHUNK) <= _MOST)]
        best.append(min((best[start][0] + forwards + (end - start) * longest, start) for start in starts))
    groups: list[list[int]] = []
    end = len(order)
    while end:
        start = best[end][1]
        groups.append(sorted(order[start:end]))
        end = start
    return groups


def prefill(
    model: TargetModel,
    cache: SlotCache,
    rows: Sequence[int],
    tokens: Int[Tensor, "B T"],
    starts: Sequence[int],
    receive: Callable[[int, Mapping[int, Tensor]], None] = lambda begin, hidden: None,
) -> None:
    """Write known tokens to the cache; row b starts at slot ``starts[b]``.

    Rows are padded on the right. Padding is written after a row's tokens, where it is never attended to and the next
    forward overwrites it.

    Args:
        receive: called after each part of the tokens with its first column and the hidden states [B, N, H] of the
            tapped layers.
    """
    width = tokens.shape[1]
    cache.reserve(rows, [start + width for start in starts])
    bases = to_device(starts, tokens.device)
    first = torch.zeros(1, dtype=torch.long, device=tokens.device)
    for begin in range(0, width, CHUNK):
        piece = tokens[:, begin : begin + CHUNK]
        used_slots = max(starts) + begin + piece.shape[1]
        step = model.address(TokenTree.chain(piece), bases + begin, rows, used_slots)
        out = model.forward(step, cache, keep=first)  # these logits are unused; one node is the minimum
        receive(begin, out.hidden)
