"""Base class of self-speculative drafters: the target with fewer layers, or with a part of its KV cache."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, RowState, StepOut, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.trees.chain import ChainLimits, ChainOptions, build_chain
from foredraft.model.base import TargetModel, widened
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.partial.skipping import LayerSkipLM
from foredraft.model.recording.segment import Segment, SegmentRows


class SelfSpeculativeDrafter(Rewindable):
    """Draws a chain from a cheaper form of the target.

    Shares the target's cache, which already holds the full model's keys and values of committed tokens: nothing needs
    to be read first or stored per row. The draft's keys and values go to the slots from the root on, which
    verification overwrites.

    Args:
        model: whose addresses ``_forward`` takes.
        cache: the target's; it holds everything before each row's root.
        vocab_size: width of the laws; the target's may differ if it is the middle model of a cascade.
        states: what it keeps of rows, if anything.
    """

    def __init__(
        self, options: ChainOptions, model: TargetModel, cache: SlotCache, vocab_size: int, *states: RowState
    ) -> None:
        super().__init__(Needs(max_nodes=options.num_assistant_tokens, target_cache=True), *states)
        self._model = model
        self._vocab_size = vocab_size
        self.cache = cache

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self.needs.max_nodes)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        return self._chain(view, ChainLimits.of(plan, depth, view.lengths.device))

    @abstractmethod
    def _chain(self, view: View, limits: ChainLimits) -> Draft:
        """Chains within these limits, at least one token deep."""

    @abstractmethod
    def _forward(self, step: StepIn) -> StepOut:
        """A forward of the draft."""

    def _logits(
        self, tokens: Int[Tensor, "B"], bases: Int[Tensor, "B"], rows: Sequence[int], used_slots: int
    ) -> Float[Tensor, "B 1 V"]:
        """Logits after a token of each row, whose earlier ones have been read. Only padding ids are ever clipped."""
        chain = TokenTree.chain(tokens[:, None].clamp(max=self._model.vocab_size - 1))
        step = self._model.address(chain, bases, rows, used_slots)
        return widened(self._forward(step).logits, self._vocab_size)


class SkippingDrafter(SelfSpeculativeDrafter):
    """Draws a chain from the target with some layers skipped.

    A draft with all its forwards is one segment; where that is not recorded, each forward is one.

    Args:
        draft: the target with the layers that draft.
    """

    def __init__(self, options: ChainOptions, draft: LayerSkipLM, cache: SlotCache, vocab_size: int) -> None:
        super().__init__(options, draft.model, cache, vocab_size)
        self._draft = draft
        rows = SegmentRows(cache, lambda: draft.model.version)
        self._drawn = Segment("chain", self._draw, rows, model=draft.model)
        self._read = Segment("draft", self._first_logits, rows, model=draft.model, of_view=False)

    def _chain(self, view: View, limits: ChainLimits) -> Draft:
        used_slots = max(view.host_lengths) + limits.depth
        self.cache.reserve(view.rows, [length + limits.depth for length in view.host_lengths])
        self.cache.arrange(view.rows)
        kv_extent = self._model.kv_extent(used_slots, 1, self.cache.slots)
        with self._draft.running():
            return self._drawn(view, limits, kv_extent)

    def _draw(self, view: View, limits: ChainLimits, kv_extent: int) -> Draft:
        def read(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
            return self._read(view, tokens, view.lengths - 1 + index, kv_extent)

        return build_chain(view, limits, read(view.roots, 0), read)

    def _first_logits(
        self, tokens: Int[Tensor, "B"], bases: Int[Tensor, "B"], kv_extent: int
    ) -> Float[Tensor, "B 1 V"]:
        """``_logits`` of the rows in the first rows of the buffers."""
        return self._logits(tokens, bases, self.cache.first(len(tokens)), kv_extent)

    def _forward(self, step: StepIn) -> StepOut:
        return self._model.compute(step, self.cache)
