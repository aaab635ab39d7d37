"""A draft model with any tokenizer: universal assisted generation (Timor, Mamou et al., arXiv:2502.05202).

Three methods. SLEM (string-level exact match): the draft continues the text in its own tokens, and its output is
re-tokenized with the target's tokenizer; these tokens are picked. SLRS (string-level rejection sampling): many
continuations are re-tokenized, and their probabilities add up to a law over the target's tokens. TLI (token-level
intersection): the draft's law is restricted to the tokens that both vocabularies have, and tokens are drawn from it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from foredraft.core.best import best_of
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import DrafterError
from foredraft.core.options import check_bounds, option
from foredraft.core.rng import RandomStream, draw
from foredraft.core.sampling.params import SamplingParams, check_known
from foredraft.core.sampling.warp import Warp
from foredraft.core.transfer import to_device
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.draft_runner import DraftRunner, Forwards
from foredraft.drafters.trees.builder import TreeBuilder
from foredraft.drafters.trees.chain import ChainLimits, ChainOptions, build_chain
from foredraft.drafters.trees.dynamic import build_dynamic_tree
from foredraft.drafters.trees.shapes import TreeLimits
from foredraft.drafters.universal.retokenizer import Retokenizer
from foredraft.drafters.universal.string_law import PickedNode, Sequences, TokenTrie, picked
from foredraft.model.base import TargetModel
from foredraft.model.text.vocab_mapping import VocabMapping

CONVERSIONS = ("auto", "slem", "slrs", "tli")
ENOUGH = 0.5
"""TLI is used for sampled rows if the shared tokens have at least this share of the draft's probability."""

_SCORED = 4
"""By SLRS, the tree of the draft's sequences has so many nodes for each sequence that is followed."""
_SAMPLE = b"""The first of 42 houses was built in 1987, and its owner said: "It isn't ours." Then they moved on.

def area(width, height):
    # in square metres
    return {"value": width * height, "unit": "m2"}
"""


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Conversion of drafts, in addition to ``ChainOptions``; names as in transformers where it has them."""

    num_assistant_tokens: int = option(8, "longest draft, in tokens of the target and of the draft model.")
    method: str = option(
        "auto",
        "slem: convert the likeliest text; slrs: convert the likeliest texts and add up their probabilities; tli: "
        "draft only tokens that both vocabularies have; auto: tli for sampled rows if the shared tokens have at least "
        "half of the draft's probability, else slem.",
    )
    sequences: int = option(8, "of the draft model, which slrs follows at a time.")
    target_lookbehind: int = option(10, "last tokens of the target that are converted again with new ones.")
    assistant_lookbehind: int = option(10, "last tokens before a draft that are converted again with it.")

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.FIXED if self.method == "slem" else Law.CHAIN

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # super() does not work in a dataclass with slots
        check_known("method", {self.method: None}, CONVERSIONS)
        check_bounds(self, least={"sequences": 1, "target_lookbehind": 1, "assistant_lookbehind": 1})


@final
class Universal(Rewindable):
    """Drafts with a model that reads each row in its own tokens.

    Args:
        model: the draft model.
        mapping: between the target's tokenizer and the draft's.
    """

    def __init__(self, options: Options, model: TargetModel, mapping: VocabMapping) -> None:
        self._options = options
        self._mapping = mapping
        self._shared, self._silent = mapping.shared.to(model.device), mapping.silent.to(model.device)
        self._always_tli = options.method == "tli"
        self._sampled_tli = self._always_tli or (options.method == "auto" and coverage(model, mapping) >= ENOUGH)
        self._runner = DraftRunner(model, model.vocab_size)
        self._chain = self._runner.drafting("chain", self._tli)
        self._text = self._runner.drafting("text", self._spoken)
        self._texts = self._runner.drafting("texts", self._likely)
        self._retokenizer = Retokenizer(mapping, options.target_lookbehind, self._runner)
        self._likeliest = Warp.of(
            [SamplingParams()], vocab_size=model.vocab_size, eos_token_ids=[()], prompt_lengths=[0], device=model.device
        )  # for any number of rows
        law = Law.CHAIN if self._sampled_tli or options.method == "slrs" else Law.FIXED
        super().__init__(Needs(max_nodes=options.num_assistant_tokens, law=law), self._retokenizer)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        own, unchanged = self._retokenizer.view(view)
        for row, length in zip(own.rows, unchanged, strict=True):
            self._runner.rewind(row, length)
        plan = self._runner.within_context(own, plan)
        depth = min(plan.length, self._options.num_assistant_tokens)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        if self._always_tli or (self._sampled_tli and not view.warp.greedy):
            limits = ChainLimits.of(plan, depth, view.lengths.device)
            return self._runner.draft(self._chain, view, self.needs.max_nodes, limits, read=own)
        if self._options.method == "slrs":
            return self._slrs(view, own, plan, depth)
        return self._slem(view, own, plan, depth)

    def _tli(self, view: View, forwards: Forwards, limits: ChainLimits) -> Draft:
        """TLI: a chain in the target's tokens, drawn from the draft's law on the shared tokens."""

        def shared(logits: Float[Tensor, "B 1 v"]) -> Float[Tensor, "B 1 V"]:
            gathered = logits.index_select(-1, self._shared.clamp(min=0))
            return gathered.masked_fill(self._shared < 0, torch.finfo(logits.dtype).min)

        def read_next(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
            return shared(forwards.next(self._shared[tokens].clamp(min=0), index))

        return build_chain(view, limits, shared(forwards.root()), read_next)

    def _spoken(self, view: View, forwards: Forwards, limits: ChainLimits) -> Draft:
        """A chain in the draft's tokens, without those that have no text."""

        def spoken(logits: Float[Tensor, "B 1 v"]) -> Float[Tensor, "B 1 v"]:
            return logits.masked_fill(self._silent, torch.finfo(logits.dtype).min)

        def read_next(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 v"]:
            return spoken(forwards.next(tokens, index))

        return build_chain(view, limits, spoken(forwards.root()), read_next)

    def _slem(self, view: View, own: View, plan: Plan, depth: int) -> Draft:
        """SLEM: the draft's likeliest tokens, re-tokenized with the target's tokenizer."""
        own_plan = _in_own_tokens(plan, view, own)
        own, depth = replace(own, warp=self._likeliest), min(depth, own_plan.length)
        limits = ChainLimits.of(own_plan, depth, own.lengths.device)
        tree = self._runner.draft(self._text, own, self.needs.max_nodes, limits).tree
        drafts = [
            self._mapping.to_target(before, tokens[:count])[:length]
            for ((count, *tokens), before), length in zip(
                self._read(view, tree.valid[:, 1:].sum(1, keepdim=True), tree.tokens[:, 1:]), plan.lengths, strict=True
            )
        ]
        return Draft(_chains(view, drafts), Law.FIXED)

    def _read(self, view: View, *tables: Shaped[Tensor, "B _"]) -> list[tuple[list[Any], list[int]]]:
        """Each row of the tables on the host, and the row's last tokens, which are re-tokenized with a draft."""
        most = self._options.assistant_lookbehind
        begin = max(min(view.host_lengths) - most, 0)
        width = sum(table.shape[1] for table in tables)
        read = torch.cat([*tables, view.history[:, begin : max(view.host_lengths)]], 1).tolist()
        sizes = zip(read, view.host_lengths, strict=True)
        return [(row[:width], list(map(int, row[width:][: length - begin][-most:]))) for row, length in sizes]

    def _slrs(self, view: View, own: View, plan: Plan, depth: int) -> Draft:
        """SLRS: a law over the target's tokens from the draft's likeliest sequences, re-tokenized.

        Its tokens are picked, the best first; drawn from it, where drafts are drawn.
        """
        own_plan = _in_own_tokens(plan, view, own)
        own, depth = replace(own, warp=self._likeliest), min(depth, own_plan.length)
        most = self._options.sequences
        limits = TreeLimits(_SCORED * most, depth, most, plan.level_price, reads=not view.static)
        allowed = own_plan.on(own.lengths.device)
        heat = view.warp.truncation.temperature  # 1 in greedy rows
        tree = self._runner.draft(self._texts, own, limits.expanded, allowed, limits, heat)
        assert tree.scores is not None
        nodes = tree.tree.tokens.shape[1]
        read = self._read(view, tree.tree.tokens.double(), tree.tree.parents, tree.scores.exp())
        tries = [
            Sequences(list(map(int, row[:nodes])), list(map(int, row[nodes : 2 * nodes])), row[2 * nodes :]).texts(
                functools.partial(self._mapping.to_target, before), length
            )
            for (row, before), length in zip(read, plan.lengths, strict=True)
        ]
        if view.draws and not view.warp.greedy:
            return self._drawn(view, plan, tries)
        return Draft(_trees(view, [self._picked(view, plan, b, trie) for b, trie in enumerate(tries)]), Law.FIXED)

    def _likely(
        self,
        view: View,
        forwards: Forwards,
        allowed: Int[Tensor, "B"],
        limits: TreeLimits,
        heat: Float[Tensor, "B 1 1"] | None,
    ) -> Draft:
        """A tree of the draft's likeliest sequences."""
        return build_dynamic_tree(_TextTree(forwards, view, self._silent, heat), allowed, limits)

    def _picked(self, view: View, plan: Plan, b: int, trie: TokenTrie) -> list[PickedNode]:
        """The best nodes for row b, as many as its chain would have."""
        times = functools.partial(self._times, view, b) if view.warp.host_temperatures[b] else None
        return picked(trie, plan.lengths[b], times, confidence=plan.confidence, chain=plan.chain)

    def _times(self, view: View, b: int, ahead: int) -> Float[Tensor, "V"]:
        """When each token arrives at the position so many tokens ahead in row b, on the host."""
        return view.noise.times(ahead, len(self._shared))[b].cpu()

    def _drawn(self, view: View, plan: Plan, tries: list[TokenTrie]) -> Draft:
        """Chains that are drawn from the law of each row; those of greedy rows are picked."""
        width, drafts = len(self._shared), [list[int]() for _ in tries]
        laws = torch.zeros(len(tries), 1 + plan.length, width)
        for b, trie in enumerate(tries):
            greedy = view.warp.host_temperatures[b] == 0
            while trie.children and len(drafts[b]) < plan.lengths[b]:
                law, index = trie.law(width), 1 + len(drafts[b])
                bits = view.noise.bits(RandomStream.DRAFT, torch.full_like(view.lengths, index))[b]
                token = int(law.argmax() if greedy else draw(law, bits.cpu()))
                laws[b, index] = torch.nn.functional.one_hot(torch.tensor(token), width) if greedy else law
                drafts[b].append(token)
                if law[token] < plan.confidence:
                    break
                trie = trie.children[token]
        tree = _chains(view, drafts)
        return Draft(tree, Law.CHAIN, laws[:, : tree.tokens.shape[1]].to(view.history.device))


@final
class _TextTree(TreeBuilder):
    """A tree of a draft model's likeliest tokens that have a text, by its law at each row's temperature."""

    def __init__(
        self, forwards: Forwards, view: View, silent: Bool[Tensor, "v"], heat: Float[Tensor, "B 1 1"] | None
    ) -> None:
        logits = forwards.root()
        super().__init__(view, logits, logits.shape[-1])
        self._forwards, self._silent, self._heat = forwards, silent, heat

    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        scores = self.logits.float() if self._heat is None else self.logits.float() / self._heat.float()
        spoken = scores.masked_fill(self._silent, torch.finfo(torch.float32).min)
        best = best_of(spoken, min(count, spoken.shape[-1]))
        return best.indices, spoken.log_softmax(-1).gather(-1, best.indices)

    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F v"]:
        return self._forwards.level(self.read, self.starts[-1])


def _in_own_tokens(plan: Plan, view: View, own: View) -> Plan:
    """The plan in the draft's tokens: scaled by each row's numbers of tokens under the two tokenizers, plus one."""
    sizes = zip(plan.lengths, own.host_lengths, view.host_lengths, strict=True)
    return replace(plan, lengths=tuple(min(length, 1 - (-length * draft // target)) for length, draft, target in sizes))


def _chains(view: View, drafts: Sequence[Sequence[int]]) -> TokenTree:
    """A chain of these tokens in each row."""
    width, device = max(map(len, drafts)), view.history.device
    table = to_device([[*draft, *[0] * (width - len(draft))] for draft in drafts], device)
    lengths = to_device([len(draft) + 1 for draft in drafts], device)
    return TokenTree.chain(torch.cat([view.roots[:, None], table], 1), lengths)


def _trees(view: View, drafts: Sequence[Sequence[PickedNode]]) -> TokenTree:
    """A tree of these nodes in each row."""
    width, device = max(map(len, drafts)), view.history.device
    rows = [[*draft, *[PickedNode(0, PAD)] * (width - len(draft))] for draft in drafts]
    tokens = to_device([[node.token for node in row] for row in rows], device)
    parents = to_device([[ROOT, *(node.parent for node in row)] for row in rows], device)
    return TokenTree(torch.cat([view.roots[:, None], tokens], 1), parents, depth=width)


def coverage(model: TargetModel, mapping: VocabMapping) -> float:
    """The share of the draft's probability on shared tokens, averaged over a sample of English and code."""
    tokens = [*mapping.draft.opening, *mapping.draft.encode(_SAMPLE, first=True)][: model.max_length]
    if not tokens:
        return 0.0
    sample = torch.tensor([tokens], device=model.device).clamp(max=model.vocab_size - 1)
    law = model.stock_logits(sample)[0].float().softmax(-1)
    shared = mapping.shared[mapping.shared >= 0].to(law.device)
    return float(law[:, shared].sum(-1).mean())


def build(options: Options, context: BuildContext) -> Universal:
    """universal:PATH"""
    model, tokenizer = context.model_of_any_tokenizer(context.path)
    own = context.tokenizer
    if own is None:
        raise DrafterError(
            "universal reads the text, and the target has no tokenizer here: give load one with tokenizer=..., or use "
            "a drafter that needs none, such as prompt_lookup."
        )
    if tokenizer is None:
        raise DrafterError(f"universal reads the text, and the draft {context.path!r} has no tokenizer in its folder.")
    mapping = VocabMapping(own, tokenizer, context.vocab_size, model.vocab_size)
    return Universal(options, model, mapping)
