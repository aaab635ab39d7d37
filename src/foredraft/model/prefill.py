"""Reading tokens that are already known, many rows of different lengths at once, in bounded memory."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.model.base import TargetModel
from foredraft.model.cache import SlotCache

CHUNK = 512
"""Tokens a forward: bounds the masks and activations of a long prompt."""


_FORWARD = 32
"""What a forward costs beside its tokens, in tokens: reading so much padding is no worse than another forward."""
_MOST = 4 * CHUNK
"""Tokens of a forward over several rows, padding included."""


def like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Which rows to read together: so that padding and further forwards together cost the least.

    Rows sorted by length are parted where that is cheapest, a forward counting as ``_FORWARD`` tokens; none has more
    than ``_MOST``.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best: list[tuple[int, int]] = [(0, 0)]  # of the first so many rows: what they cost, and where the last group begins
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
) -> dict[int, Float[Tensor, "B T H"]]:
    """Write known tokens to the cache, row b's in the slots from ``starts[b]`` on.

    Rows are padded on the right: what stands beyond a row's own tokens is written behind them, where the next
    forward overwrites it and nothing looks before.

    Returns:
        the hidden states of the tapped layers; an empty dict when there are none.
    """
    width = tokens.shape[1]
    cache.reserve(max(rows) + 1, max(starts) + width)
    bases = torch.tensor(list(starts), device=tokens.device)
    first = torch.zeros(1, dtype=torch.long, device=tokens.device)
    chunks: list[dict[int, Tensor]] = []
    for begin in range(0, width, CHUNK):
        piece = tokens[:, begin : begin + CHUNK]
        reach = max(starts) + begin + piece.shape[1]
        step = model.address(TokenTree.chain(piece), bases + begin, rows, reach)
        out = model.forward(step, cache, keep=first)  # nobody reads these logits, so one node's are enough
        chunks.append(dict(out.hidden))
    if not chunks:
        return model.empty_hidden(len(rows))
    return {layer: torch.cat([chunk[layer] for chunk in chunks], dim=1) for layer in chunks[0]}
