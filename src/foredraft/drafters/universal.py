"""A draft model with any tokenizer: universal assisted generation (Timor, Mamou et al., arXiv:2502.05202).

Two ways. By text (SLEM, string-level exact match): the draft goes on with the text in its own tokens, and what it says
is written again in the target's; these tokens are picked, whatever re-tokenisation does to them. By tokens (TLI,
token-level intersection): the draft's law is restricted to the tokens that both vocabularies have, and tokens are drawn
from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.sampling.params import SamplingParams, check_known
from foredraft.core.sampling.warp import Warp
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.chain import draw_chain
from foredraft.drafters.common.draft_runner import DraftRunner
from foredraft.drafters.common.retokenizer import Retokenizer
from foredraft.model.hf import CausalLM
from foredraft.model.vocab_mapping import VocabMapping

WAYS = ("auto", "slem", "tli")
ENOUGH = 0.5
"""With this share of the draft's mass on shared tokens, or more, sampled texts accept more by tokens than by text."""

_PASSAGE = b"""The first of 42 houses was built in 1987, and its owner said: "It isn't ours." Then they moved on.

def area(width, height):
    # in square metres
    return {"value": width * height, "unit": "m2"}
"""


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Names as in transformers where it has them.

    num_assistant_tokens: longest draft, in tokens of the target and of the draft model.
    assistant_confidence_threshold: a draft ends after its first token below this probability; that token is kept. 0:
        never.
    method: slem: convert by text; tli: draft only tokens that both vocabularies have; auto: tli for sampled rows if
        the shared tokens have at least half of the draft's probability, else slem.
    target_lookbehind: tokens of the target that are converted again together with new ones.
    assistant_lookbehind: tokens of the draft model that are converted again together with a draft.
    """

    num_assistant_tokens: int = 8
    assistant_confidence_threshold: float = 0.4
    method: str = "auto"
    target_lookbehind: int = 10
    assistant_lookbehind: int = 10

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.FIXED if self.method == "slem" else Law.CHAIN

    @property
    def confidence(self) -> float:
        return self.assistant_confidence_threshold

    def __post_init__(self) -> None:
        check_known("method", {self.method: None}, WAYS)
        if self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")
        if self.target_lookbehind < 1 or self.assistant_lookbehind < 1:
            raise OptionError("target_lookbehind and assistant_lookbehind must be 1 or more.")


@final
class Universal(Rewindable):
    """Drafts with a model that reads each text in its own tokens.

    Args:
        model: the draft.
        bridge: between the target's tokenizer and its own.
    """

    def __init__(self, options: Options, model: CausalLM, bridge: VocabMapping) -> None:
        self._options = options
        self._bridge = bridge
        self._shared, self._silent = bridge.shared.to(model.device), bridge.silent.to(model.device)
        self._always_by_tokens = options.method == "tli"
        self._sampled_by_tokens = options.method != "slem" and (
            self._always_by_tokens or coverage(model, bridge) >= ENOUGH
        )
        self._reader = DraftRunner(model, model.vocab_size)
        self._texts = Retokenizer(bridge, options.target_lookbehind)
        self._likeliest = Warp.of(
            [SamplingParams()], vocab_size=model.vocab_size, eos_token_ids=[()], prompt_lengths=[0], device=model.device
        )  # for any number of rows
        law = Law.CHAIN if self._sampled_by_tokens else Law.FIXED
        self.needs = Needs(max_nodes=options.num_assistant_tokens, law=law)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._reader.admit(row)
        self._texts.admit(row, prompt.device)

    def rewind(self, row: int, length: int) -> None:
        self._texts.rewind(row, length)

    def release(self, row: int) -> None:
        self._reader.release(row)
        self._texts.release(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        own, stand = self._texts.view(view)
        for row, length in zip(own.rows, stand, strict=True):
            self._reader.rewind(row, length)
        plan = self._reader.within_context(own, plan)
        depth = min(plan.length, self._options.num_assistant_tokens)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        logits = self._reader.read(own, self.needs.max_nodes)
        if self._always_by_tokens or (self._sampled_by_tokens and not view.warp.greedy):
            return self._by_tokens(view, own, plan, depth, logits)
        return self._by_text(view, own, plan, depth, logits)

    def _by_tokens(self, view: View, own: View, plan: Plan, depth: int, logits: Float[Tensor, "B 1 v"]) -> Draft:
        """TLI: a chain in the target's tokens, from the draft's law on the shared ones."""

        def shared(logits: Float[Tensor, "B 1 v"]) -> Float[Tensor, "B 1 V"]:
            gathered = logits.index_select(-1, self._shared.clamp(min=0))
            return gathered.masked_fill(self._shared < 0, torch.finfo(logits.dtype).min)

        def read_on(_: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
            return shared(self._reader.read_on(own, self._shared[tokens].clamp(min=0), index))

        return draw_chain(view, plan, depth, shared(logits), read_on)

    def _by_text(self, view: View, own: View, plan: Plan, depth: int, logits: Float[Tensor, "B 1 v"]) -> Draft:
        """SLEM: the draft's likeliest tokens, written again in the target's."""
        silent, least = self._silent, torch.finfo(logits.dtype).min

        def read_on(_: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 v"]:
            return self._reader.read_on(own, tokens, index).masked_fill(silent, least)

        sizes = zip(plan.lengths, own.extents, view.extents, strict=True)
        filled = (min(length, 1 - (-length * mine // theirs)) for length, mine, theirs in sizes)  # one more, to be safe
        asked = replace(plan, lengths=tuple(filled))
        own, depth = replace(own, warp=self._likeliest), min(depth, asked.length)
        tree = draw_chain(own, asked, depth, logits.masked_fill(silent, least), read_on).tree
        paths = zip(tree.tokens[:, 1:].tolist(), tree.valid[:, 1:].sum(1).tolist(), strict=True)
        drafts = []
        for b, (tokens, count) in enumerate(paths):
            begin = max(view.extents[b] - self._options.assistant_lookbehind, 0)
            before = view.history[b, begin : view.extents[b]].tolist()
            drafts.append(self._bridge.to_target(before, tokens[:count])[: plan.lengths[b]])
        width = max(map(len, drafts))
        table = torch.tensor([draft + [0] * (width - len(draft)) for draft in drafts], device=view.history.device)
        lengths = torch.tensor([len(draft) + 1 for draft in drafts], device=view.history.device)
        return Draft(TokenTree.chain(torch.cat([view.roots[:, None], table.long()], 1), lengths), Law.FIXED)


def coverage(model: CausalLM, bridge: VocabMapping) -> float:
    """The share of the draft's mass that lies on shared tokens, on average over a passage of English and of code."""
    tokens = [*bridge.draft.opening, *bridge.draft.encode(_PASSAGE, first=True)]
    if not tokens:
        return 0.0
    passage = torch.tensor([tokens], device=model.device).clamp(max=model.vocab_size - 1)
    law = model.stock_logits(passage)[0].float().softmax(-1)
    mine = bridge.shared[bridge.shared >= 0].to(law.device)
    return float(law[:, mine].sum(-1).mean())


def build(options: Options, context: BuildContext) -> Universal:
    """universal:PATH"""
    model, tokenizer = context.model_of_any_tokenizer(context.path)
    own = context.tokenizer
    if own is None:
        raise DrafterError(
            "universal reads the text, and the target has no tokenizer here: give load one with tokenizer=..., or take "
            "a drafter that needs none, such as prompt_lookup."
        )
    if tokenizer is None:
        raise DrafterError(f"universal reads the text, and the draft {context.path!r} has no tokenizer in its folder.")
    bridge = VocabMapping(own, tokenizer, context.vocab_size, model.vocab_size)
    return Universal(options, model, bridge)
