"""The target drafts for itself over a part of its cache (MagicDec, Chen et al., arXiv:2408.11049).

At long contexts reading keys and values is what a forward costs. Over a few hundred of them the target is a cheap draft
of itself, and a good one: its law is nearly the target's own. The part is chosen as in TriForce (chunks that the query
asks for, arXiv:2404.11912), StreamingLLM (sinks and a window, arXiv:2309.17453) or H2O (heavy hitters,
arXiv:2306.14048). Rows of texts that fit are drafted for with the whole cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Needs, Plan, Rewindable, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import check_known
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.chain import ChainOptions, draw_chain
from foredraft.drafters.common.partial_cache_sync import PartialCacheSync
from foredraft.model.base import widened
from foredraft.model.cache import SlotCache
from foredraft.model.hf import CausalLM
from foredraft.model.partial.kv_selection import HeavyHitters, Retrieval, Selection, Window
from foredraft.model.partial.model import PartialLM

CACHES = ("retrieval", "window", "h2o")


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Those of every chain (``ChainOptions``), and

    cache: the tokens kept of a long context: retrieval (chunks), window (first and latest) or h2o (heavy hitters).
    budget: tokens kept per layer.
    chunk: retrieval: tokens of a chunk.
    sinks: window: how many of the budget are the first tokens.
    recent: h2o: how many of the budget are the latest tokens; 0: half.
    room: new tokens before the kept tokens are selected again.
    refresh: also select again when acceptance of the last four drafts falls below this share of the usual; 0: never.
    """

    cache: str = "retrieval"
    budget: int = 512
    chunk: int = 8
    sinks: int = 4
    recent: int = 0
    room: int = 64
    refresh: float = 0.8

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # a dataclass with slots is made anew, which super() does not see
        check_known("cache", {self.cache: None}, CACHES)
        if self.room < 1 or not 0 <= self.refresh < 1:
            raise OptionError("room must be 1 or more, and refresh at least 0 and below 1.")
        self.selection()

    def selection(self) -> Selection:
        """What chooses the tokens.

        Raises:
            OptionError: a budget that it cannot keep to.
        """
        if self.cache == "window":
            return Window(self.budget, self.sinks)
        if self.cache == "h2o":
            return HeavyHitters(self.budget, self.recent or self.budget // 2)
        return Retrieval(self.budget, self.chunk)


@final
class Partial(Rewindable):
    """Draws chains from the target over a part of its cache.

    Args:
        target: whose weights these are.
        full: its cache in the loop.
        vocab_size: how wide laws are.
    """

    def __init__(self, options: Options, target: CausalLM, full: SlotCache, vocab_size: int) -> None:
        self._options = options
        self.full = full
        self._vocab_size = vocab_size
        self.needs = Needs(max_nodes=options.num_assistant_tokens, target_cache=True)
        ahead = options.num_assistant_tokens
        selection = options.selection()
        model = PartialLM(target, full, selection, options.room + selection.slack + 1 + ahead)
        self._follower = PartialCacheSync(model, ahead, options.refresh)

    @property
    def partial_bytes(self) -> int:
        """What the partial cache takes, beside the target's own."""
        return self._follower.model.nbytes

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._follower.admit(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self._options.num_assistant_tokens)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        self._follower.sync(view)
        return draw_chain(view, plan, depth, self._read(view, view.roots, 0), self._read)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._follower.judged(view, draft, verdict)

    def rewind(self, row: int, length: int) -> None:
        self._follower.rewind(row, length)

    def release(self, row: int) -> None:
        self._follower.release(row)

    def _read(self, view: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
        """Logits after token ``index`` of a chain, the root being 0; those before it have been read."""
        model = self._follower.model
        chain = TokenTree.chain(tokens[:, None].clamp(max=model.vocab_size - 1))
        step = model.address(chain, view.lengths - 1 + index, view.rows, max(view.extents) + index)
        return widened(model.forward(step, model.cache).logits, self._vocab_size)


def build(options: Options, context: BuildContext) -> Partial:
    """partial"""
    return Partial(options, context.target, context.cache, context.vocab_size)
