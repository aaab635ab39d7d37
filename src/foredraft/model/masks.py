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
class Visible:
    """The slots that N nodes attend to in layers of one type: those in [begin, end), and nodes of a tree.

    ``begin``: None for 0. ``tree[b, i, j]``: node i attends to slot ``base[b] + j``; None if ``end`` covers all nodes.
    """

    begin: Int[Tensor, "B N"] | None
    end: Int[Tensor, "B N"] | Int[Tensor, "B 1"]
    base: Int[Tensor, "B 1"]
    tree: Bool[Tensor, "B N T"] | None = None

    def mask(self, extent: int, dtype: torch.dtype) -> Float[Tensor, "B 1 N S"]:
        """The additive mask over the first ``extent`` slots: 0 where a node attends, the dtype's minimum elsewhere."""
        index = torch.arange(extent, device=self.end.device)
        seen = index < self.end[..., None]
        if self.begin is not None:
            seen = seen & (index >= self.begin[..., None])
        if self.tree is not None:
            places = (self.base + index[: self.tree.shape[2]])[:, None].expand_as(self.tree)
            seen = seen.expand(-1, self.tree.shape[1], -1).scatter(2, places, self.tree)
        mask = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=seen.device)
        return mask.masked_fill_(seen, 0.0)[:, None]


@dataclass(frozen=True, slots=True)
class StepIn:
    """One forward: N nodes for each of B rows, over the first S slots of the cache.

    ``visible``: what the nodes attend to, by layer type. ``rows``: cache rows. ``prefix``: B if the rows are 0 .. B-1,
    else None. ``extent``: S.
    """

    tokens: Int[Tensor, "B N"]
    positions: Int[Tensor, "B N"]
    slots: Int[Tensor, "B N"]
    visible: Mapping[str, Visible]
    rows: Int[Tensor, "B"]
    prefix: int | None
    extent: int

    def masks(self, dtype: torch.dtype) -> dict[str, Float[Tensor, "B 1 N S"]]:
        """The additive masks by layer type."""
        return {kind: visible.mask(self.extent, dtype) for kind, visible in self.visible.items()}


def address(
    tree: TokenTree,
    bases: Int[Tensor, "B"],
    rows: Sequence[int],
    reach: int,
    layout: Layout,
    *,
    max_position: int,
    start: int = 0,
) -> StepIn:
    """Compute the position and slot of every node of a tree, and what it attends to.

    Args:
        bases: slot and position of each row's root; everything before it is committed and visible.
        reach: the largest of ``bases`` plus N, on the host: how many slots the forward must cover.
        max_position: positions are clamped below it; only padding exceeds it.
        start: the forward's first node; earlier nodes are already in the cache.
    """
    nodes = tree.tokens.shape[1]
    device = tree.tokens.device
    index = torch.arange(nodes, device=device)
    root = bases[:, None]
    slots = root + index
    on_path = None if tree.linear else ancestors(tree.parents)
    steps = index if on_path is None else on_path.sum(-1) - 1
    positions = root + torch.where(tree.parents == PAD, 0, steps)
    end = slots[:, start:] + 1 if on_path is None else root
    visible = {}
    for kind, bound in layout.kinds.items():
        begin, seen = None, on_path if on_path is None else on_path[:, start:]
        if bound is not None:
            begin = _begin(positions[:, start:], bound, kind in layout.chunked)
            seen = seen if seen is None else seen & (positions[:, None] >= begin[..., None])
        visible[kind] = Visible(begin, end, root, seen)
    positions = positions[:, start:].clamp(max=max_position - 1)
    return StepIn(tree.tokens[:, start:], positions, slots[:, start:], visible, *_rows(rows, device), extent_of(reach))


def address_segments(
    tokens: Int[Tensor, "B N"],
    positions: Int[Tensor, "B N"],
    roots: Int[Tensor, "B N"],
    first_slot: int,
    rows: Sequence[int],
    layout: Layout,
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
    slots = (first_slot + torch.arange(nodes, device=device)).expand_as(tokens)
    segment = (roots[:, :, None] == roots[:, None]) & (positions[:, None] <= positions[:, :, None])
    end = roots.clamp(max=first_slot)
    visible = {}
    for kind, bound in layout.kinds.items():
        begin = None if bound is None else _begin(positions, bound, kind in layout.chunked)
        seen = segment if begin is None else segment & (positions[:, None] >= begin[..., None])
        visible[kind] = Visible(begin, end, slots[:, :1], seen)
    return StepIn(tokens, positions, slots, visible, *_rows(rows, device), extent_of(first_slot + nodes))


def extent_of(reach: int) -> int:
    """Number of slots that a forward reads to cover ``reach`` slots."""
    return -(-reach // GRAIN) * GRAIN


def _rows(rows: Sequence[int], device: torch.device) -> tuple[Int[Tensor, "B"], int | None]:
    """Cache rows as a tensor, and their number if they are 0, 1, ... (which avoids a blocking copy)."""
    count = len(rows)
    if list(rows) == list(range(count)):
        return torch.arange(count, device=device), count
    return torch.tensor(list(rows), device=device), None


def _begin(positions: Int[Tensor, "B N"], bound: int, chunked: bool) -> Int[Tensor, "B N"]:
    """The first position that each node attends to."""
    if chunked:
        return torch.div(positions, bound, rounding_mode="floor") * bound
    return positions - (bound - 1)
