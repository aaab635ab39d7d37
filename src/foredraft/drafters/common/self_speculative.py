"""Base class of self-speculative drafters: the target with fewer layers."""

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.chain import ChainLimits, ChainOptions, draw_chain
from foredraft.model.base import widened
from foredraft.model.cache import SlotCache
from foredraft.model.skipping import LayerSkipLM


class SelfSpeculativeDrafter(Rewindable):
    """Draws a chain from the target with some layers skipped.

    Shares the target's cache, which already holds the full model's keys and values of committed tokens: nothing needs
    to be read first or stored per row. The draft's keys and values go to the slots from the root on, which
    verification overwrites.

    Args:
        cache: the target's; it holds everything before each row's root.
        vocab_size: width of the laws; the target's may differ if it is the middle model of a cascade.
    """

    def __init__(self, options: ChainOptions, partial: LayerSkipLM, cache: SlotCache, vocab_size: int) -> None:
        self.needs = Needs(max_nodes=options.num_assistant_tokens, target_cache=True)
        self._partial = partial
        self._vocab_size = vocab_size
        self.cache = cache

    def rewind(self, row: int, length: int) -> None: ...

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self.needs.max_nodes)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        self.cache.reserve(max(view.rows) + 1, max(view.extents) + depth)
        read = partial(self._next_logits, view)
        limits = ChainLimits.of(plan, depth, view.lengths.device)
        return draw_chain(view, limits, read(view.roots, 0), read)

    def _next_logits(self, view: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
        """Logits after token ``index`` of each row's chain; the root is 0."""
        model = self._partial.model
        chain = TokenTree.chain(tokens[:, None].clamp(max=model.vocab_size - 1))
        step = model.address(chain, view.lengths - 1 + index, view.rows, max(view.extents) + index)
        return widened(self._partial.forward(step, self.cache).logits, self._vocab_size)
