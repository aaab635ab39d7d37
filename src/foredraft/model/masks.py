"""Addresses of tree nodes: positions, cache slots, and attention masks by layer type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.tree import PAD, TokenTree, ancestors

GRAIN = 64
"""A forward reads a multiple of this many cache slots, so that shapes repeat."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the layers of a model attend. ``kinds`` maps each layer type to its reach in tokens; None means unbounded.

    ``by_type``: the model takes a dict with one mask per layer type; otherwise one mask for all layers.
    """

    kinds: Mapping[str, int | None]
    by_type: bool
    chunked: frozenset[str] = frozenset()  # layer types that attend within chunks of ``reach`` positions


@dataclass(frozen=True, slots=True)
class StepIn:
    """One forward: N nodes for each of B rows, over the first S slots of the cache.

    ``masks``: additive, one per layer type: 0 where a node attends, the dtype's minimum elsewhere. ``rows``: cache
    rows. ``prefix``: B if the rows are 0 .. B-1, else None. ``extent``: S.
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
    """Compute the position, slot and mask of every node of a tree.

    Args:
        bases: slot and position of each row's root; everything before it is committed and visible.
        reach: the largest of ``bases`` plus N, on the host: how many slots the forward must cover.
        max_position: positions are clamped below it; only padding exceeds it.
        start: the forward's first node; earlier nodes are already in the cache.
    """
    nodes = tree.tokens.shape[1]
    device = tree.tokens.device
    extent = extent_of(reach)
    index = torch.arange(nodes, device=device)
    slots = bases[:, None] + index
    offsets = torch.arange(extent, device=device) - bases[:, None]  # slots relative to the root
    if tree.linear:
        steps = index.expand_as(slots)
        visible = offsets[:, None] <= index[:, None]
    else:
        on_path = ancestors(tree.parents)
        steps = on_path.sum(-1) - 1
        inside = on_path.gather(2, offsets.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1))
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


def address_segments(
    tokens: Int[Tensor, "B N"],
    positions: Int[Tensor, "B N"],
    roots: Int[Tensor, "B N"],
    first_slot: int,
    rows: Sequence[int],
    layout: Layout,
    *,
    dtype: torch.dtype,
) -> StepIn:
    """Addresses for segments of a cached sequence, written after it. A node attends to the cached tokens before its
    segment, to the earlier nodes of its segment, and to itself.

    One forward then computes many drafts that start at different positions of the sequence, as if each draft's tokens
    so far were those of the sequence.

    Args:
        roots: start position of each node's segment; -1 for padding.
        first_slot: slot of the first node; the sequences must end before it.
    """
    nodes, device = tokens.shape[1], tokens.device
    extent = extent_of(first_slot + nodes)
    slots = (first_slot + torch.arange(nodes, device=device)).expand_as(tokens)
    index = torch.arange(extent, device=device)
    prefix = index < roots[..., None].clamp(max=first_slot)
    segment = (roots[:, :, None] == roots[:, None]) & (positions[:, None] <= positions[:, :, None])
    visible = prefix | torch.nn.functional.pad(segment, (first_slot, extent - first_slot - nodes))
    masks = {}
    for kind, bound in layout.kinds.items():
        seen = visible
        if bound is not None:
            where = _positions_of_slots(positions, slots, extent)
            seen = seen & _near(positions, where, bound, kind in layout.chunked)
        masks[kind] = _additive(seen, dtype)
    return StepIn(tokens, positions, slots, masks, *_rows(rows, device), extent)


def extent_of(reach: int) -> int:
    """Number of slots that a forward reads to cover ``reach`` slots."""
    return -(-reach // GRAIN) * GRAIN


def _additive(seen: Bool[Tensor, "B N S"], dtype: torch.dtype) -> Float[Tensor, "B 1 N S"]:
    blank = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return blank.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def _rows(rows: Sequence[int], device: torch.device) -> tuple[Int[Tensor, "B"], int | None]:
    """Cache rows as a tensor, and their number if they are 0, 1, ... (which avoids a blocking copy)."""
    count = len(rows)
    if list(rows) == list(range(count)):
        return torch.arange(count, device=device), count
    return torch.tensor(list(rows), device=device), None


def _positions_of_slots(positions: Int[Tensor, "B N"], slots: Int[Tensor, "B N"], extent: int) -> Int[Tensor, "B S"]:
    """Position of the token in each slot: the slot number for committed tokens, the node's position in the tree."""
    committed = torch.arange(extent, device=positions.device).expand(positions.shape[0], -1)
    return committed.scatter(1, slots, positions)


def _near(queries: Int[Tensor, "B N"], keys: Int[Tensor, "B S"], bound: int, chunked: bool) -> Bool[Tensor, "B N S"]:
    if chunked:
        return (
            torch.div(queries, bound, rounding_mode="floor")[:, :, None]
            == torch.div(keys, bound, rounding_mode="floor")[:, None]
        )
    return queries[:, :, None] - keys[:, None] < bound
