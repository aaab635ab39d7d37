"""TriForce (Sun et al., COLM 2024, arXiv:2404.11912): three levels, for long contexts.

A small model with a windowed context drafts for the middle level, the target's weights with a retrieved part of their
cache; its output is the draft that the target verifies with the full cache (see ``states/nested_loop.py``). (The public
code draws from the middle level's law instead of the residual and returns that law as q, so its outputs are biased.)
"""

from dataclasses import dataclass
from typing import final

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import DrafterError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.drafters.context import BuildContext, NestedDrafter
from foredraft.drafters.states.nested_loop import NestedLoop, NestedLoopParts
from foredraft.drafters.states.partial_cache import PartialCacheSync
from foredraft.engine.fitting import round_up
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.model.partial.kv_selection import Retrieval
from foredraft.model.partial.model import PartialLM


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Draft lengths and contexts of the two inner levels."""

    gamma: int = option(8, "tokens that the middle level drafts for the target (gamma_2 in the paper).")
    inner_gamma: int = option(3, "most tokens drafted for the middle level per inner step (gamma_1).")
    budget: int = option(512, "tokens of a long context that the middle level reads.")
    chunk: int = option(8, "tokens per chunk of the selection.")
    score: str = option("mean", "of a chunk: mean (of its keys, as in the paper) or best (of any key and any head).")
    room: int = option(64, "new tokens before chunks are selected again.")
    refresh: float = option(
        0.8, "also select again when acceptance of the last four drafts falls below this share of the usual; 0: never."
    )
    whole_layers: int = option(0, "first layers in which the middle level attends to all tokens.")
    window: int = option(256, "tokens that the small model reads.")
    sinks: int = option(16, "number of first tokens in the window.")
    law = Law.CHAIN

    def __post_init__(self) -> None:
        least = {"gamma": 1, "inner_gamma": 1, "room": 1, "refresh": 0, "whole_layers": 0}
        check_bounds(self, least=least, below={"refresh": 1})
        self.selection()

    def selection(self) -> Retrieval:
        """The selection of the middle level's tokens.

        Raises:
            OptionError: the budget is less than two chunks.
        """
        return Retrieval(self.budget, self.chunk, self.score)


@final
class TriForce(Rewindable):
    """Drafts with the target over retrieved chunks of its cache, decoding speculatively with ``part``.

    Args:
        target: the model, also of the middle level.
        full: its full cache.
        part: drafts for the middle level.
        vocab_size: width of the laws.

    Raises:
        DrafterError: ``part`` drafts in the target's cache too.
    """

    def __init__(
        self, options: Options, target: CausalLM, full: SlotCache, part: NestedDrafter, vocab_size: int
    ) -> None:
        if part.drafter.needs.target_cache:
            raise DrafterError(
                f"{part.drafter.__class__.__name__} drafts in the target's cache, which does not hold the tokens of "
                "the middle level of triforce: use a drafter with its own cache, such as draft_model:PATH."
            )
        self.full = full
        selection = options.selection()
        # a row that is done keeps growing by a token per step until the slowest row is done
        ahead = 2 * options.gamma + round_up(1 + part.drafter.needs.max_nodes)
        middle = PartialLM(target, full, selection, options.room + selection.slack + 1 + ahead, options.whole_layers)
        self._cache_sync = PartialCacheSync(middle, ahead, options.refresh)
        parts = NestedLoopParts(
            middle, part.drafter, middle.cache, options.inner_gamma, part.confidence, sync=self._cache_sync.sync
        )
        self._loop = NestedLoop(parts, vocab_size)
        needs = Needs(max_nodes=options.gamma, target_cache=True, whole=True)
        super().__init__(needs, self._cache_sync, self._loop)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial cache, in addition to the target's."""
        return self._cache_sync.model.nbytes

    def propose(self, view: View, plan: Plan) -> Draft:
        return self._loop.extend(view, [min(length, self.needs.max_nodes) for length in plan.lengths]).draft


def build(options: Options, context: BuildContext) -> TriForce:
    """triforce:PATH, or triforce:[SPEC] for another drafter of the middle level"""
    path = context.path
    if len(context.paths) != 1:
        raise DrafterError("triforce takes one drafter for its middle level: write triforce:PATH or triforce:[SPEC].")
    if path.startswith("["):
        spec = context.paths[0]
    else:
        spec = f"draft_model:{path},num_assistant_tokens={options.inner_gamma},window={options.window},"
        ahead = 2 * options.gamma + options.inner_gamma  # rows that are done keep running with the others
        spec += f"sinks={options.sinks},ahead={ahead}"
    return TriForce(options, context.stock_target, context.cache, context.nested(spec), context.vocab_size)
