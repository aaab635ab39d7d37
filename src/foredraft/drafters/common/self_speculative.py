"""Base class of self-speculative drafters: the target with fewer layers, or with a part of its KV cache."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.chain import ChainLimits, ChainOptions, draw_chain
from foredraft.model.base import TargetModel, widened
from foredraft.model.cache import SlotCache
from foredraft.model.replay import EAGER, Replay, Sizes
from foredraft.model.replay_rows import replay_for, run_rows
from foredraft.model.skipping import LayerSkipLM


class SelfSpeculativeDrafter(Rewindable):
    """Draws a chain from a cheaper form of the target.

    Shares the target's cache, which already holds the full model's keys and values of committed tokens: nothing needs
    to be read first or stored per row. The draft's keys and values go to the slots from the root on, which
    verification overwrites.

    Args:
        cache: the target's; it holds everything before each row's root.
        vocab_size: width of the laws; the target's may differ if it is the middle model of a cascade.
    """

    def __init__(self, options: ChainOptions, cache: SlotCache, vocab_size: int) -> None:
        self.needs = Needs(max_nodes=options.num_assistant_tokens, target_cache=True)
        self._vocab_size = vocab_size
        self.cache = cache

    def rewind(self, row: int, length: int) -> None: ...

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self.needs.max_nodes)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        return self._chain(view, ChainLimits.of(plan, depth, view.lengths.device))

    @abstractmethod
    def _chain(self, view: View, limits: ChainLimits) -> Draft:
        """Chains within these limits, at least one token deep."""


class SkippingDrafter(SelfSpeculativeDrafter):
    """Draws a chain from the target with some layers skipped.

    A draft with all its forwards is one segment, ``chain``; where that is not recorded, each forward is one, ``draft``.

    Args:
        draft: the target with the layers that draft.
        replay: how drafts run; a ``child`` of it runs them, so their tensors are valid until the next draft.
    """

    def __init__(
        self, options: ChainOptions, draft: LayerSkipLM, cache: SlotCache, vocab_size: int, replay: Replay = EAGER
    ) -> None:
        super().__init__(options, cache, vocab_size)
        self._draft = draft
        self._replay = replay.child()

    def _chain(self, view: View, limits: ChainLimits) -> Draft:
        target, count, reach = self._draft.model, len(view.rows), max(view.extents) + limits.depth
        self.cache.reserve(max(view.rows) + 1, reach)
        self.cache.arrange(view.rows)
        extent = target.extent(reach, 1, self.cache.slots)
        replay, sizes = replay_for(self._replay, self.cache, target.version, count, free_rows=())

        def recorded(view: View, limits: ChainLimits, extent: int) -> Draft:
            return self._drawn(view, limits, extent, EAGER, sizes, recorded=True)

        def eager() -> Draft:
            return self._drawn(view, limits, extent, replay, sizes)

        with self._draft.running():
            given, reason = (view, limits, extent), target.why_eager
            return run_rows(replay, view.rows, "chain", recorded, *given, otherwise=eager, why_eager=reason)

    def _drawn(
        self, view: View, limits: ChainLimits, extent: int, replay: Replay, sizes: Sizes, *, recorded: bool = False
    ) -> Draft:
        def read(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
            given, reason = (tokens, view.lengths - 1 + index, extent), self._draft.model.why_eager
            return replay("draft", sizes, self._logits, *given, why_eager=reason)

        return draw_chain(view, limits, read(view.roots, 0), read, recorded=recorded)

    def _logits(self, tokens: Int[Tensor, "B"], bases: Int[Tensor, "B"], extent: int) -> Float[Tensor, "B 1 V"]:
        """Logits after a token of each row; the rows are in the first lines of the cache."""
        target = self._draft.model
        step = target.address(single_nodes(tokens, target), bases, self.cache.first(len(tokens)), extent)
        return widened(target.compute(step, self.cache).logits, self._vocab_size)


def single_nodes(tokens: Int[Tensor, "B"], model: TargetModel) -> TokenTree:
    """Trees of one node, whose ids are clipped to the model's vocabulary; only padding ids are ever beyond it."""
    return TokenTree.chain(tokens[:, None].clamp(max=model.vocab_size - 1))
