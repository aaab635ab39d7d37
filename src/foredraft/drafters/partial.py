"""The target drafts with a part of its KV cache (MagicDec, Chen et al., arXiv:2408.11049).

At long contexts, reading keys and values dominates the cost of a forward. With a few hundred of them the target is a
cheap and accurate draft of itself. The tokens are selected as in TriForce (chunks retrieved by the query,
arXiv:2404.11912), StreamingLLM (sinks and a window, arXiv:2309.17453) or H2O (heavy hitters, arXiv:2306.14048). Rows
within the budget draft with the whole cache.
"""

from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft
from foredraft.core.drafter import StepOut, View
from foredraft.core.options import check_bounds, option
from foredraft.core.sampling.params import check_known
from foredraft.drafters.common.self_speculative import SelfSpeculativeDrafter
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.partial_cache import PartialCacheSync
from foredraft.drafters.trees.chain import ChainLimits, ChainOptions, build_chain
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.partial.kv_selection import SCORES, HeavyHitters, Retrieval, Selection, Window
from foredraft.model.partial.model import PartialLM

CACHES = ("retrieval", "window", "h2o")


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Selection of the kept tokens, in addition to ``ChainOptions``."""

    cache: str = option(
        "retrieval",
        "the tokens kept of a long context: retrieval (chunks), window (first and latest) or h2o (heavy hitters).",
    )
    budget: int = option(512, "tokens kept per layer.")
    chunk: int = option(8, "tokens per chunk; for retrieval.")
    score: str = option(
        "mean", "of a chunk: mean (of its keys, as in TriForce) or best (of any key and any head); for retrieval."
    )
    sinks: int = option(4, "first tokens in the budget; for window.")
    recent: int = option(0, "latest tokens in the budget; for h2o. 0: half.")
    room: int = option(64, "new tokens before the kept tokens are selected again.")
    refresh: float = option(
        0.8, "also select again when acceptance of the last four drafts falls below this share of the usual; 0: never."
    )
    whole_layers: int = option(0, "first layers that attend to all tokens.")

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # super() does not work in a dataclass with slots
        check_known("cache", {self.cache: None}, CACHES)
        check_known("score", {self.score: None}, SCORES)
        check_bounds(self, least={"room": 1, "refresh": 0, "whole_layers": 0}, below={"refresh": 1})
        self.selection()

    def selection(self) -> Selection:
        """The selection of kept tokens.

        Raises:
            OptionError: the budget is too small for it.
        """
        if self.cache == "window":
            return Window(self.budget, self.sinks)
        if self.cache == "h2o":
            return HeavyHitters(self.budget, self.recent or self.budget // 2)
        return Retrieval(self.budget, self.chunk, self.score)


@final
class Partial(SelfSpeculativeDrafter):
    """Draws chains from the target with a part of its cache.

    Args:
        target: the model.
        full: its full cache.
        vocab_size: width of the laws.
    """

    def __init__(self, options: Options, target: CausalLM, full: SlotCache, vocab_size: int) -> None:
        ahead, selection = options.num_assistant_tokens, options.selection()
        room = options.room + selection.slack + 1 + ahead
        model = PartialLM(target, full, selection, room, options.whole_layers)
        self._cache_sync = PartialCacheSync(model, ahead, options.refresh)
        super().__init__(options, model, full, vocab_size, self._cache_sync)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial cache, in addition to the target's."""
        return self._cache_sync.model.nbytes

    def _chain(self, view: View, limits: ChainLimits) -> Draft:
        self._cache_sync.sync(view)

        def read(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
            return self._logits(tokens, view.lengths - 1 + index, view.rows, max(view.host_lengths) + index)

        limits = replace(limits, siblings=False)  # with most guesses right, depth is worth more
        return build_chain(view, limits, read(view.roots, 0), read)

    def _forward(self, step: StepIn) -> StepOut:
        model = self._cache_sync.model
        return model.forward(step, model.cache)


def build(options: Options, context: BuildContext) -> Partial:
    """partial"""
    return Partial(options, context.stock_target, context.cache, context.vocab_size)
