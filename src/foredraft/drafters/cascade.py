"""A drafter that is itself a speculative loop: vertical cascades (CS Drafting, Chen et al., arXiv:2312.11462).

A middle model writes the draft by speculative decoding, with its own drafter, which may be a cascade again; so only the
smallest model drafts token by token (see ``states/nested_loop.py``). What the middle model says is a chain, which has
siblings in sampled rows (see ``trees/chain.py``).
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import DrafterError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.drafters.context import BuildContext, NestedDrafter
from foredraft.drafters.states.nested_loop import NestedLoop, NestedLoopParts
from foredraft.drafters.trees.chain import ChainLimits, build_chain
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Draft lengths of the two levels."""

    num_assistant_tokens: int = option(8, "tokens that the middle model drafts for the target.")
    inner_tokens: int | None = option(
        None,
        "most tokens drafted for the middle model per inner step; by default set by its drafter's options. The "
        "schedule of the inner drafter is ignored.",
        unset="by its drafter",
    )
    law = Law.CHAIN

    def __post_init__(self) -> None:
        check_bounds(self, least={"num_assistant_tokens": 1, "inner_tokens": 1})


@final
class Cascade(Rewindable):
    """Drafts with a middle model that decodes speculatively.

    Args:
        middle, cache: the middle model and its KV cache.
        part: its drafter.
        vocab_size: of the target. The middle model's may differ by padding.
    """

    def __init__(
        self, options: Options, middle: TargetModel, part: NestedDrafter, cache: SlotCache, vocab_size: int
    ) -> None:
        length = options.inner_tokens or part.drafter.needs.longest
        self._loop = NestedLoop(NestedLoopParts(middle, part.drafter, cache, length, part.confidence), vocab_size)
        super().__init__(Needs(max_nodes=options.num_assistant_tokens, whole=True), self._loop)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        guesses = not (view.warp.greedy or view.draws or plan.chain or plan.confidence)
        lengths = [min(length, self.needs.max_nodes) for length in plan.lengths]
        draft, logits = self._loop.extend(view, lengths, logits=guesses)
        if logits is None:
            return draft

        def read(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
            return logits[:, 1 + index : 2 + index]

        limits = ChainLimits(draft.tree.valid.sum(1) - 1, None, draft.tree.depth, siblings=True)
        return build_chain(view, limits, read(view.roots, 0), read)


def build(options: Options, context: BuildContext) -> Cascade:
    """cascade:MIDDLE+[INNER]"""
    if context.argument is None or len(context.paths) != 2:
        raise DrafterError(
            "cascade needs a middle model and a drafter for it: write cascade:MIDDLE+prompt_lookup, or "
            "cascade:MIDDLE+[draft_model:PATH,num_assistant_tokens=3]."
        )
    path, spec = context.paths
    middle = context.model(path)
    cache = middle.new_cache()
    part = context.nested(spec, target=middle, cache=cache)
    return Cascade(options, middle, part, cache, context.vocab_size)
