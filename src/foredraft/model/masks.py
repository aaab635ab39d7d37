"""Tree and lengths to addresses: positions, slots, and who attends to whom, by layer type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.tree import PAD, TokenTree, ancestors

GRAIN = 64
"""A forward reads the cache up to a multiple of this many slots, so that shapes repeat."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the layers of a model attend. ``kinds`` maps each layer type to its reach in tokens, None for no bound.

    ``by_type``: the model takes a dict of masks, one a layer type; otherwise one mask serves all its layers.
    """

    kinds: Mapping[str, int | None]
    by_type: bool
    chunked: frozenset[str] = frozenset()  # layer types that see only their own chunk of so many positions


@dataclass(frozen=True, slots=True)
class StepIn:
    """One forward: N nodes for each of B rows, over the first S slots of the cache.

    ``masks`` are additive (0 where a node may look, the dtype's least number where not), one a layer type.
    ``rows`` are cache rows; ``prefix`` is B if they are just 0 .. B-1, else None.
    """

    tokens: Int[Tensor, "B N"]
    positions: Int[Tensor, "B N"]
    slots: Int[Tensor, "B N"]
    masks: Mapping[str, Float[Tensor, "B 1 N S"]]
    rows: Int[Tensor, "B"]
    prefix: int | None
    extent: int


def address(
    tree: TokenTree,
    bases: Int[Tensor, "B"],
    rows: Sequence[int],
    reach: int,
    layout: Layout,
    *,
    dtype: torch.dtype,
    max_position: int,
    start: int = 0,
) -> StepIn:
    """Give every node of a tree its address.

    Args:
        bases: slot and position of each row's root; everything before it is committed and stays visible.
        reach: on the host, the largest of ``bases`` plus N: how far the forward has to look.
        max_position: positions are clamped below it; only padding ever gets so far.
        start: the forward is for the nodes from this one on; those before it are in the cache already.
    """
    nodes = tree.tokens.shape[1]
    device = tree.tokens.device
    extent = extent_of(reach)
    index = torch.arange(nodes, device=device)
    slots = bases[:, None] + index
    offsets = torch.arange(extent, device=device) - bases[:, None]  # slot, seen from the root's
    if tree.linear:
        steps = index.expand_as(slots)
        visible = offsets[:, None] <= index[:, None]
    else:
        family = ancestors(tree.parents)
        steps = family.sum(-1) - 1
        inside = family.gather(2, offsets.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1))
        visible = (offsets < 0)[:, None] | (inside & ((offsets >= 0) & (offsets < nodes))[:, None])
    positions = bases[:, None] + torch.where(tree.parents == PAD, 0, steps)
    masks = {}
    for kind, bound in layout.kinds.items():
        seen = visible[:, start:]
        if bound is not None:
            where = _positions_of_slots(positions, slots, extent)
            seen = seen & _near(positions[:, start:], where, bound, kind in layout.chunked)
        masks[kind] = _additive(seen, dtype)
    positions = positions[:, start:].clamp(max=max_position - 1)
    return StepIn(tree.tokens[:, start:], positions, slots[:, start:], masks, *_rows(rows, device), extent)


def beside(
    tokens: Int[Tensor, "B N"],
    positions: Int[Tensor, "B N"],
    roots: Int[Tensor, "B N"],
    behind: int,
    rows: Sequence[int],
    layout: Layout,
    *,
    dtype: torch.dtype,
) -> StepIn:
    """Give pieces of a text that is in the cache a second address, beside it. A node sees the text before its piece,
    as the text's own forward has left it, and of its piece what stands before it, and itself.

    So one forward says what many drafts would be, each begun at another place of the text, if the tokens drafted so far
    were those of the text.

    Args:
        roots: where the piece of each node begins; -1 for padding.
        behind: the texts end before this slot; the nodes stand from there on.
    """
    nodes, device = tokens.shape[1], tokens.device
    extent = extent_of(behind + nodes)
    slots = (behind + torch.arange(nodes, device=device)).expand_as(tokens)
    index = torch.arange(extent, device=device)
    text = index < roots[..., None].clamp(max=behind)
    piece = (roots[:, :, None] == roots[:, None]) & (positions[:, None] <= positions[:, :, None])
    visible = text | torch.nn.functional.pad(piece, (behind, extent - behind - nodes))
    masks = {}
    for kind, bound in layout.kinds.items():
        seen = visible
        if bound is not None:
            where = _positions_of_slots(positions, slots, extent)
            seen = seen & _near(positions, where, bound, kind in layout.chunked)
        masks[kind] = _additive(seen, dtype)
    return StepIn(tokens, positions, slots, masks, *_rows(rows, device), extent)


def extent_of(reach: int) -> int:
    """How many slots a forward reads that has to look so far."""
    return -(-reach // GRAIN) * GRAIN


def _additive(seen: Bool[Tensor, "B N S"], dtype: torch.dtype) -> Float[Tensor, "B 1 N S"]:
    blank = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return blank.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def _rows(rows: Sequence[int], device: torch.device) -> tuple[Int[Tensor, "B"], int | None]:
    """Cache rows as a tensor, and how many they are if they are just 0, 1, ..., which then need no copy that waits."""
    count = len(rows)
    if list(rows) == list(range(count)):
        return torch.arange(count, device=device), count
    return torch.tensor(list(rows), device=device), None


def _positions_of_slots(positions: Int[Tensor, "B N"], slots: Int[Tensor, "B N"], extent: int) -> Int[Tensor, "B S"]:
    """Position of the token in each slot: the slot itself where committed, the node's own within the tree."""
    committed = torch.arange(extent, device=positions.device).expand(positions.shape[0], -1)
    return committed.scatter(1, slots, positions)


def _near(queries: Int[Tensor, "B N"], keys: Int[Tensor, "B S"], bound: int, chunked: bool) -> Bool[Tensor, "B N S"]:
    if chunked:
        return (
            torch.div(queries, bound, rounding_mode="floor")[:, :, None]
            == torch.div(keys, bound, rounding_mode="floor")[:, None]
        )
    return queries[:, :, None] - keys[:, None] < bound
