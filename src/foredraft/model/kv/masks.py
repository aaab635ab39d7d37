"""Addresses of tree nodes: positions, cache slots, and attention masks by layer type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.transfer import on_host
from foredraft.core.tree import TokenTree

GRAIN = 64
"""A forward reads a multiple of this many cache slots (on CUDA a power of two), so that shapes repeat."""
MAX_TABLE_NODES = 128
"""Most nodes of a forward that attends by tables; others, such as prefill, are matrix products with a mask."""
WORD = 64
"""Tree nodes per word of a ``Visible.table``."""
TABLE_COLUMNS = 5
"""Columns of a ``Visible.table`` before the words."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the layers of a model attend. ``kinds`` maps each layer type to its attention window in tokens; None means
    unbounded.

    ``by_type``: the model takes a dict with one mask per layer type; otherwise one mask for all layers.
    """

    kinds: Mapping[str, int | None]
    by_type: bool
    chunked: frozenset[str] = frozenset()  # layer types that attend within chunks, of ``kinds`` positions


@dataclass(frozen=True, slots=True)
class Visible:
    """The slots that N nodes attend to in layers of one type: those in [begin, end), and nodes of a tree.

    ``begin``: None for 0. ``tree[b, i, j]``: node i attends to slot ``base[b] + j``; None if ``end`` covers all nodes.
    """

    begin: Int[Tensor, "B N"] | None
    end: Int[Tensor, "B #N"]
    base: Int[Tensor, "B 1"]
    tree: Bool[Tensor, "B N T"] | None = None

    def mask(self, kv_extent: int, dtype: torch.dtype) -> Float[Tensor, "B 1 N S"]:
        """The additive mask over the first S slots: 0 where a node attends, the dtype's minimum elsewhere."""
        index = torch.arange(kv_extent, device=self.end.device)
        seen = index < self.end[..., None]
        if self.begin is not None:
            seen = seen & (index >= self.begin[..., None])
        if self.tree is not None:
            places = (self.base + index[: self.tree.shape[2]])[:, None].expand_as(self.tree)
            seen = seen.expand(-1, self.tree.shape[1], -1).scatter(2, places, self.tree)
        mask = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=seen.device)
        return mask.masked_fill_(seen, 0.0)[:, None]

    def table(self, buffer_rows: Int[Tensor, "B"]) -> Int[Tensor, "B 1 N C"]:
        """The same as a table for kernels that read the cache as it is stored.

        Columns: the row's index in the cache's buffers; the slot of tree node 0; the end of all slots that the row's
        nodes attend to; begin; end; and the tree as bits, ``WORD`` nodes per word, lowest first. The first three are
        the same for all nodes.
        """
        nodes = self.end.shape[1] if self.tree is None else self.tree.shape[1]
        last = self.end[:, -1:] if self.tree is None else self.base + self.tree.shape[2]
        begin = torch.zeros_like(self.end) if self.begin is None else self.begin.clamp(min=0)
        columns = [column.expand(-1, nodes) for column in (buffer_rows[:, None], self.base, last, begin, self.end)]
        table = torch.stack(columns, dim=-1)
        if self.tree is not None:
            table = torch.cat([table, _words(self.tree)], dim=-1)
        return table[:, None]


@dataclass(frozen=True, slots=True)
class StepIn:
    """One forward: N nodes for each of B rows, over the first S slots of the cache.

    ``visible``: what the nodes attend to, by layer type. ``rows``: B cache rows. ``kv_extent``: S.
    """

    tokens: Int[Tensor, "B N"]
    positions: Int[Tensor, "B N"]
    slots: Int[Tensor, "B N"]
    visible: Mapping[str, Visible]
    rows: tuple[int, ...]
    kv_extent: int

    def masks(self, dtype: torch.dtype) -> dict[str, Float[Tensor, "B 1 N S"]]:
        """The additive masks by layer type."""
        return {kind: visible.mask(self.kv_extent, dtype) for kind, visible in self.visible.items()}

    def tables(self, buffer_rows: Int[Tensor, "B"]) -> dict[str, Int[Tensor, "B 1 N C"]]:
        """The ``Visible.table`` of each layer type; ``buffer_rows`` are those of the rows in the cache."""
        return {kind: visible.table(buffer_rows) for kind, visible in self.visible.items()}

    @property
    def few(self) -> bool:
        """Whether this is the forward of a tree or a short chain, and not a prefill."""
        return self.tokens.shape[1] <= MAX_TABLE_NODES

    def within(self, slots: int) -> "StepIn":
        """The same step over at most ``slots`` slots, as a cache has."""
        return self if self.kv_extent <= slots else replace(self, kv_extent=slots)


def address(
    tree: TokenTree,
    bases: Int[Tensor, "B"],
    rows: Sequence[int],
    used_slots: int,
    layout: Layout,
    *,
    max_position: int,
    start: int = 0,
) -> StepIn:
    """Compute the position and slot of every node of a tree, and what it attends to.

    Args:
        bases: slot and position of each row's root; everything before it is committed and visible.
        used_slots: the largest of ``bases`` plus N, on the host: how many slots the forward must cover.
        max_position: positions are clamped below it; only padding exceeds it.
        start: the forward's first node; earlier nodes are already in the cache.
    """
    tokens, depths = tree.tokens, tree.host_depths
    nodes, device = tokens.shape[1], tokens.device
    if depths is None:
        root = bases[:, None]
        slots = root if nodes == 1 else root + torch.arange(nodes, device=device)
        positions = slots if tree.linear else root + tree.depths
        end = slots + 1 if tree.linear else root
    else:  # without operators
        firsts = bases.tolist()
        root, slots = on_host([[first] for first in firsts]), on_host([range(first, first + nodes) for first in firsts])
        below = [[first + depth for depth in own] for first, own in zip(firsts, depths, strict=True)]
        positions = slots if tree.linear else on_host(below)
        end = on_host([range(first + 1, first + 1 + nodes) for first in firsts]) if tree.linear else root
    placed, on_path = positions, None if tree.linear else tree.on_path
    if start:
        tokens, slots, positions = (each[:, start:] for each in (tokens, slots, positions))
        on_path, end = (None, end[:, start:]) if on_path is None else (on_path[:, start:], end)
    visible = _visible(layout, positions, placed, end, root, on_path)
    if used_slots > max_position:
        positions = positions.clamp(max=max_position - 1)
    return StepIn(tokens, positions, slots, visible, tuple(rows), kv_extent_of(used_slots, device))


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
    end = roots.clamp(0, first_slot)
    visible = _visible(layout, positions, positions, end, slots[:, :1], segment)
    return StepIn(tokens, positions, slots, visible, tuple(rows), kv_extent_of(first_slot + nodes, device))


def kv_extent_of(used_slots: int, device: torch.device) -> int:
    """Number of slots that a forward with masks reads to cover ``used_slots`` slots; a cache may have fewer."""
    if device.type == "cuda":
        return max(GRAIN, 1 << (used_slots - 1).bit_length())
    return -(-used_slots // GRAIN) * GRAIN


def _words(tree: Bool[Tensor, "B N T"]) -> Int[Tensor, "B N W"]:
    """Tree nodes as bits."""
    padded = torch.nn.functional.pad(tree, (0, -tree.shape[2] % WORD)).unflatten(2, (-1, WORD))
    return (padded.long() << torch.arange(WORD, device=tree.device)).sum(-1)


def _visible(
    layout: Layout,
    positions: Int[Tensor, "B N"],
    placed: Int[Tensor, "B T"],
    end: Int[Tensor, "B #N"],
    base: Int[Tensor, "B 1"],
    tree: Bool[Tensor, "B N T"] | None,
) -> dict[str, Visible]:
    """What nodes attend to, by layer type: no more of ``tree``, whose columns are at ``placed``, than the windows."""
    visible = {}
    for kind, bound in layout.kinds.items():
        begin, seen = None, tree
        if bound is not None:
            chunked = kind in layout.chunked
            begin = positions.div(bound, rounding_mode="floor") * bound if chunked else positions - (bound - 1)
            seen = None if tree is None else tree & (placed[:, None] >= begin[..., None])
        visible[kind] = Visible(begin, end, base, seen)
    return visible
