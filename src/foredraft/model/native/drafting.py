"""Draft trees of heads and draft models as one call of the kernels; see ``kernels/draft.h``."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import LevelPrice, View
from foredraft.core.tree import TokenTree
from foredraft.model.kv.cache import SlotCache
from foredraft.model.native import library as c
from foredraft.model.native.ops import MOST_GUESSES
from foredraft.model.native.runner import Runner
from foredraft.model.threads import kernel_threads

_MOST_READ = 1024
"""Most nodes of a level that the kernels read."""


class TreeSize(NamedTuple):
    """Limits of a dynamic tree: its nodes and levels, the nodes of a level that are read, and their scored children.

    ``level_price``: see ``Plan``. ``allowed``: levels of each row. ``sharpest``: temperature of greedy rows.
    """

    nodes: int
    depth: int
    top_k: int
    children: int
    level_price: LevelPrice
    allowed: Sequence[int]
    sharpest: float

    @property
    def fits(self) -> bool:
        """Whether the kernels build such a tree."""
        return self.top_k <= _MOST_READ and self.children <= MOST_GUESSES and self.nodes <= 1 << 16


class UnreadStates(NamedTuple):
    """What a draft reads first: the last ``width`` committed entries of each row.

    Entry j reads token j + ``ahead`` and, for heads, the state of this place in ``states``. ``fresh``: those that are
    made first, by their rows and slots, and for each the addresses of what it is made of.
    """

    width: int
    ahead: int
    states: Float[Tensor, "R S H"] | None = None
    fresh: Sequence[tuple[int, int, list[int]]] = ()


@dataclass(frozen=True, eq=False, slots=True)
class TreeDrafter:
    """Builds dynamic trees with packed layers.

    Args:
        model: the layers with their output layer.
        windows: of the types of layers, in tokens; 0 for all.
        fused: makes states of heads of several ones; None where they need no product.
        carried: the number of the layer whose states a node's children read, the number of layers plus one for the
            final norm's; see ``c.Tap``.
        count: outputs that are tokens.
        ids: the target's ids of the outputs; None if they are the same.
    """

    runner: Runner
    model: c.Model
    fused: c.Matrix | None
    windows: "ctypes.Array[c.c_int64]"
    carried: int
    count: int
    ids: Int[Tensor, "v"] | None = None

    def draft(self, view: View, cache: SlotCache, unread: UnreadStates, size: TreeSize) -> Draft:
        """The tree of ``build_dynamic_tree``, for rows without penalties, bans and truncation.

        The cache has room for what is read, and the rotary tables for its positions.
        """
        rows, width, history, lengths = len(view.rows), 1 + size.nodes, view.history, view.lengths.contiguous()
        tokens, parents = torch.empty(rows, width, dtype=torch.long), torch.empty(rows, width, dtype=torch.long)
        scores, drafted = torch.empty(rows, width), c.numbers((0, 0))
        temperatures = (c.c_float * rows)(*view.warp.temperature_list(size.sharpest))
        rotary, positions = self.runner.tables()
        given = c.DraftStruct(
            rows=rows,
            width=unread.width,
            history=history.data_ptr(),
            history_stride=history.stride(0) if rows > 1 else history.shape[1],
            lengths=lengths.data_ptr(),
            buffer_rows=c.numbers(cache.buffer_rows(view.rows)),
            ahead=unread.ahead,
            cache=self.runner.cache_pointers(cache),
            cache_rows=cache.rows,
            cache_slots=cache.slots,
            rotary=rotary,
            rotary_positions=positions,
            windows=self.windows,
            carried=self.carried,
            nodes=size.nodes,
            depth=size.depth,
            expanded=size.top_k,
            children=size.children,
            level_price=size.level_price.level,
            node_price=size.level_price.node,
            allowed=c.numbers(size.allowed),
            count=self.count,
            ids=c.pointer(self.ids),
            temperatures=ctypes.addressof(temperatures),
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            scores=scores.data_ptr(),
            drafted=drafted,
        )
        if unread.states is not None:
            given.states, given.places = unread.states.data_ptr(), c.numbers(view.rows)
            given.state_rows, given.state_slots = unread.states.shape[:2]
        if unread.states is not None and unread.fresh:
            parts = [address for _, _, sources in unread.fresh for address in sources]
            given.fresh, given.parts = len(unread.fresh), len(unread.fresh[0][2])
            given.sources = (c.c_void_p * len(parts))(*parts)
            given.targets = c.numbers([row * given.state_slots + slot for row, slot, _ in unread.fresh])
            given.fused = None if self.fused is None else ctypes.pointer(self.fused)
        if not view.warp.greedy:
            noise, greedy = view.noise, view.warp.greedy_rows
            held = noise.seeds.contiguous(), noise.positions.contiguous(), None if greedy is None else ~greedy
            given.seeds, given.numbers, given.raced = (c.pointer(each) for each in held)
        engine = self.runner.engine
        with engine.lock:
            c.check(engine.library.draft(engine.handle, self.model, given, kernel_threads()))
        kept, depth = 1 + drafted[0], drafted[1]
        if kept < width:
            tokens, parents, scores = (each[:, :kept] for each in (tokens, parents, scores))
        return Draft(TokenTree(tokens, parents, depth, size.children == 1), Law.FIXED, scores=scores)
