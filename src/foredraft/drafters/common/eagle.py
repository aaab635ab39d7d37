"""Base classes of drafters with an EAGLE head, and their draft trees, built level by level in the head's cache."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Trainable, View
from foredraft.core.options import option
from foredraft.core.tree import TokenTree
from foredraft.drafters.states.feature_cache import FeatureCache, TreeSlots
from foredraft.drafters.trees.builder import TreeBuilder
from foredraft.drafters.trees.candidates import at_places
from foredraft.drafters.trees.dynamic import build_dynamic_tree
from foredraft.drafters.trees.shapes import Level, TreeLimits, TreeOptions, best_template
from foredraft.drafters.trees.static import build_static_tree
from foredraft.heads.layers import described
from foredraft.heads.nets.eagle import EagleNet
from foredraft.model.kv.masks import StepIn, Visible
from foredraft.model.linear.packed import any_weight
from foredraft.model.ops import TORCH, Ops
from foredraft.model.recording.segment import Segment


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """To be mixed in: corrections of the head's config."""

    rope_theta: float | None = option(
        None, "base of the head's rotary positions, if its config is wrong.", unset="from its config"
    )
    taps: tuple[int, ...] | None = option(
        None,
        "hidden layers of the target that the head reads, such as 2x16x29, if missing or wrong in its files.",
        unset="from its files",
    )
    norm_output: bool | None = option(
        None,
        "whether drafted positions read the head's normed state, if its config is wrong; no for EAGLE-3 heads that "
        "SpecForge wrote before 15 September 2026 with true.",
        unset="from its config",
    )


class EagleDrafter(Trainable):
    """A drafter with an EAGLE head. Subclasses implement ``propose``, by ``_draft``, and say how a tree is built."""

    def __init__(self, net: EagleNet, needs: Needs, ops: Ops) -> None:
        layers, sizes = ops.head_layers(described(net)), {"depth": net.depth, "window": net.window}
        self._state = FeatureCache(net, layers, net.features, net.taps, **sizes)
        super().__init__(needs, self._state)
        self._net = net
        self._ops = ops
        self._built = Segment("tree", self._build, self._state.rows)

    @property
    def network(self) -> EagleNet:
        return self._net

    @abstractmethod
    def _tree(self, builder: TreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        """The tree; ``allowed`` is the number of levels that each row may have."""

    def _draft(self, view: View, plan: Plan, nodes: int, limits: TreeLimits) -> Draft:
        """The tree, or the root alone if nothing is planned.

        Args:
            nodes: the most that it reads, the root's entry included.
        """
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        states, known = self._state.extend(view, nodes)
        allowed, slots = plan.on(view.lengths.device) * known, self._state.slots_of(view, nodes)
        return self._built(view, states, slots, allowed, limits)

    def _build(
        self,
        view: View,
        states: Float[Tensor, "B 1 H"],
        slots: TreeSlots,
        allowed: Int[Tensor, "B"],
        limits: TreeLimits,
    ) -> Draft:
        return self._tree(HeadTreeBuilder(self._net, self._state, view, states, slots, self._ops), allowed, limits)


ACCEPTANCE = (0.56, 0.095, 0.048, 0.03, 0.018, 0.012, 0.01, 0.008)
"""Acceptance of the first, second, ... drawn sibling if the parent is accepted: that of the bundled EAGLE-3 head at
temperature 1 on HumanEval, GSM8K and MT-bench. It gives the shape of drawn trees, as in Sequoia (arXiv:2402.12374)."""


@dataclass(frozen=True, slots=True)
class DynamicOptions(EagleOptions, TreeOptions):
    """The shape of the tree. In EAGLE's published code, nodes is total_token - 1, and depth is its depth + 1."""

    value: bool = option(True, "expand the nodes whose paths are likeliest; no: whose tokens are (EAGLE-2's ablation).")
    rerank: bool = option(
        True, "keep the likeliest of all scored nodes; no: those that were expanded (EAGLE-2's ablation)."
    )
    law = Law.WITHOUT_REPLACEMENT

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(self.nodes, self.depth, self.top_k, value=self.value, rerank=self.rerank)


class DynamicTreeDrafter(EagleDrafter):
    """A tree of the head's best guesses. If drafts are drawn, sampled rows get a static tree."""

    def __init__(self, options: DynamicOptions, net: EagleNet, ops: Ops = TORCH) -> None:
        self._limits = options.limits
        template = best_template((ACCEPTANCE,) * options.depth, options.nodes)
        self._drawn = Level.all_of(template, any_weight(net).device)
        needs = Needs(max_nodes=options.nodes, max_depth=options.depth, scored=True, ahead=True)
        super().__init__(net, needs, ops)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        limits = self._limits.within(plan, view, cheap=True)
        nodes = 1 + max(self._limits.nodes * view.draws, limits.expanded)
        return self._state.draft(view, limits.size(view, plan), partial(self._draft, view, plan, nodes, limits))

    def _tree(self, builder: TreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        if builder.view.draws and not builder.view.warp.greedy:
            return build_static_tree(builder, self._drawn, allowed, limits)
        return build_dynamic_tree(builder, allowed, limits)


@final
class HeadTreeBuilder(TreeBuilder):
    """A tree built with an EAGLE head: each node attends to its ancestors and the committed tokens.

    A node reads its parent's state in place of the target's features, which do not exist yet. Nodes have the slots from
    the root's on, in the order in which they are added. Masks grow with the tree: that of a node is its parent's with
    the node itself. Node 0 is the root's entry.

    Args:
        states, slots: of ``FeatureCache.extend`` and ``slots_of``.
    """

    def __init__(
        self,
        net: EagleNet,
        cache: FeatureCache,
        view: View,
        states: Float[Tensor, "B 1 H"],
        slots: TreeSlots,
        ops: Ops,
    ) -> None:
        super().__init__(view, net.logits(states), net.target.vocab_size, net.vocabulary, ops)
        self._net = net
        self._cache = cache
        self._states = states
        self._bases = (view.lengths - 2).clamp(min=0)[:, None]
        self._kv_extent = slots.kv_extent
        self._index = torch.arange(slots.nodes, device=states.device)
        self._slots = self._bases + self._index
        self._family = (self._index == 0).expand(len(view.rows), 1, -1)  # ancestors of the frontier, and itself
        self._mask: Tensor | None = None  # of the frontier, where forwards read masks

    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F v"]:
        depth, start = len(self.starts) - 1, self.starts[-1]
        added = slice(start, start + tokens.shape[1])
        carried, tables = self._net.carry(self._states), not self._cache.reads_masks
        step = StepIn(
            tokens=tokens,
            positions=(self._bases + depth).expand_as(tokens),
            slots=self._slots[:, added],
            visible={"rows": self._visible(depth, added, places)} if tables else {},
            rows=self.view.rows,
            kv_extent=self._kv_extent,
        )
        mask = None if tables else self._grown(depth, added, places, carried.dtype)
        self._states = self._cache.forward(step, at_places(carried, places), mask)
        return self._net.logits(self._states)

    def _visible(self, depth: int, added: slice, places: Int[Tensor, "B F"]) -> Visible:
        """What the nodes of a new level attend to."""
        own = self._index[added, None].expand(len(places), -1, -1)
        self._family = at_places(self._family, places).scatter_(2, own, True)
        begin, window = None, self._cache.window
        if window is not None:
            begin = (self._bases + (depth - window + 1)).expand_as(places)
            if depth >= window:
                self._family[..., : self.starts[depth - window + 1]] = False
        return Visible(begin, self._bases, self._bases, self._family)

    def _grown(
        self, depth: int, added: slice, places: Int[Tensor, "B F"], dtype: torch.dtype
    ) -> Float[Tensor, "B 1 F S"]:
        """The same as a mask."""
        if self._mask is None:
            self._mask = Visible(None, self._bases, self._bases, self._family).mask(self._kv_extent, dtype)[:, 0]
        self._mask = at_places(self._mask, places).scatter_(2, self._slots[:, added, None], 0.0)
        window = self._cache.window
        if window is not None:
            first = depth - window + 1  # of the nodes' own depths that they attend to, or of the positions before
            begin = self._bases + (self.starts[first] if first > 0 else first)
            outside = torch.arange(self._kv_extent, device=places.device) < begin[:, None]
            self._mask.masked_fill_(outside, torch.finfo(dtype).min)
        return self._mask[:, None]
