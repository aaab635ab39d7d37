"""Base class of self-speculative drafters: the target with fewer layers, or with a part of its KV cache."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, StepOut, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.chain import ChainLimits, ChainOptions, draw_chain
from foredraft.model.base import TargetModel, widened
from foredraft.model.cache import SlotCache
from foredraft.model.masks import StepIn


class SelfSpeculativeDrafter(Rewindable):
    """Draws a chain from the target with some layers skipped.

    Shares the target's cache, which already holds the full model's keys and values of committed tokens: nothing needs
    to be read first or stored per row. The draft's keys and values go to the slots from the root on, which
    verification overwrites.

    Args:
        model: whose addresses ``forward`` takes.
        forward: of the draft.
        cache: the target's; it holds everything before each row's root.
        vocab_size: width of the laws; the target's may differ if it is the middle model of a cascade.
    """

    def __init__(
        self,
        options: ChainOptions,
        model: TargetModel,
        forward: Callable[[StepIn], StepOut],
        cache: SlotCache,
        vocab_size: int,
    ) -> None:
        self.needs = Needs(max_nodes=options.num_assistant_tokens, target_cache=True)
        self._model = model
        self._forward = forward
        self._vocab_size = vocab_size
        self.cache = cache

    def rewind(self, row: int, length: int) -> None: ...

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self.needs.max_nodes)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        self._prepare(view, depth)
        read = partial(self._next_logits, view)
        limits = ChainLimits.of(plan, depth, view.lengths.device)
        return draw_chain(view, limits, read(view.roots, 0), read)

    def _prepare(self, view: View, depth: int) -> None:
        """Make room for a draft of this depth."""
        self.cache.reserve(max(view.rows) + 1, max(view.extents) + depth)

    def _next_logits(self, view: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
        """Logits after token ``index`` (the root is 0) of each row's chain, whose earlier tokens have been read."""
        model = self._model
        chain = TokenTree.chain(tokens[:, None].clamp(max=model.vocab_size - 1))
        step = model.address(chain, view.lengths - 1 + index, view.rows, max(view.extents) + index)
        return widened(self._forward(step).logits, self._vocab_size)
