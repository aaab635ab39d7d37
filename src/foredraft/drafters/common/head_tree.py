"""Draft trees of EAGLE heads, built level by level in the head's cache."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.drafters.common.feature_cache import FeatureCache, TreeSlots
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.drafters.common.tree_ops import at_places, ranked
from foredraft.heads.nets.eagle import EagleNet
from foredraft.model.base import widened
from foredraft.model.masks import StepIn, Visible


class HeadTree:
    """The draft tree of one proposal in the head's cache: each node attends to its ancestors and the committed tokens.

    Nodes have the slots from the root's on, in the order in which they are added. Masks grow with the tree: that of a
    node is its parent's with the node itself. Node 0 is the root's entry.
    """

    def __init__(self, cache: FeatureCache, view: View, slots: TreeSlots) -> None:
        device = view.lengths.device
        self._cache = cache
        self._bases = (view.lengths - 2).clamp(min=0)[:, None]
        self._rows = view.rows
        self._extent = slots.extent
        self._index = torch.arange(slots.nodes, device=device)
        self._slots = self._bases + self._index
        self._nodes = 1
        self._starts = [0]  # the first node of each level
        self._family = (self._index == 0).expand(len(view.rows), 1, -1)  # ancestors of the newest level, and itself
        self._mask: Tensor | None = None  # of the newest level, where forwards read masks

    def add_level(
        self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"], states: Float[Tensor, "B G K"]
    ) -> Float[Tensor, "B F H"]:
        """The states of another level of nodes.

        Args:
            places: the positions of their parents on the level before.
            states: of the level before; they replace the target's features, which do not exist yet.
        """
        depth, count = len(self._starts), tokens.shape[1]
        added = slice(self._nodes, self._nodes + count)
        self._starts.append(self._nodes)
        self._nodes += count
        tables = self._cache.reads_tables
        step = StepIn(
            tokens=tokens,
            positions=(self._bases + depth).expand(-1, count),
            slots=self._slots[:, added],
            visible={"rows": self._visible(depth, added, places)} if tables else {},
            rows=self._rows,
            extent=self._extent,
        )
        mask = None if tables else self._grown(depth, added, places, states.dtype)
        return self._cache.forward(step, at_places(states, places), mask)

    def _visible(self, depth: int, added: slice, places: Int[Tensor, "B F"]) -> Visible:
        """What the nodes of a new level attend to."""
        own = self._index[added, None].expand(len(self._rows), -1, -1)
        self._family = at_places(self._family, places).scatter_(2, own, True)
        begin, window = None, self._cache.window
        if window is not None:
            begin = (self._bases + (depth - window + 1)).expand_as(places)
            if depth >= window:
                self._family[..., : self._starts[depth - window + 1]] = False
        return Visible(begin, self._bases, self._bases, self._family)

    def _grown(
        self, depth: int, added: slice, places: Int[Tensor, "B F"], dtype: torch.dtype
    ) -> Float[Tensor, "B 1 F S"]:
        """The same as a mask."""
        if self._mask is None:
            self._mask = Visible(None, self._bases, self._bases, self._family).mask(self._extent, dtype)[:, 0]
        self._mask = at_places(self._mask, places).scatter_(2, self._slots[:, added, None], 0.0)
        window = self._cache.window
        if window is not None:
            first = depth - window + 1  # of the nodes' own depths that they attend to, or of the positions before
            begin = self._bases + (self._starts[first] if first > 0 else first)
            outside = torch.arange(self._extent, device=places.device) < begin[:, None]
            self._mask.masked_fill_(outside, torch.finfo(dtype).min)
        return self._mask[:, None]


@final
class HeadTreeBuilder(TreeBuilder):
    """A tree built with an EAGLE head: each node reads its parent's state. ``states`` are those of
    ``FeatureCache.extend``, after the root."""

    def __init__(self, net: EagleNet, tree: HeadTree, view: View, states: Float[Tensor, "B 1 H"]) -> None:
        super().__init__(view, net.logits(states), net.target.vocab_size)
        self._net = net
        self._tree = tree
        self._states = states

    def target_logits(self) -> Float[Tensor, "B F V"]:
        vocabulary, logits = self._net.vocabulary, self.logits
        if vocabulary is None:
            return widened(logits, self.vocab_size)
        wide = logits.new_full((*logits.shape[:-1], self.vocab_size), torch.finfo(logits.dtype).min)
        return wide.index_copy(-1, vocabulary, widened(logits, logits.shape[-1]))

    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        ids, scores = ranked(self.logits, count, self.view.warp)
        return ids if self._net.vocabulary is None else self._net.vocabulary[ids], scores

    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F v"]:
        self._states = self._tree.add_level(tokens, places, self._net.carry(self._states))
        return self._net.logits(self._states)
