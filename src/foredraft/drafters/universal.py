"""A draft model with any tokenizer: universal assisted generation (Timor, Mamou et al., arXiv:2502.05202).

Two methods. SLEM (string-level exact match): the draft continues the text in its own tokens, and its output is
re-tokenized with the target's tokenizer; these tokens are picked. TLI (token-level intersection): the draft's law is
restricted to the tokens that both vocabularies have, and tokens are drawn from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import KVSize, Needs, Plan, Rewindable, View
from foredraft.core.errors import DrafterError
from foredraft.core.options import check_bounds
from foredraft.core.sampling.params import SamplingParams, check_known
from foredraft.core.sampling.warp import Warp
from foredraft.core.transfer import to_device
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.chain import ChainLimits, ChainOptions, build_chain
from foredraft.drafters.common.draft_runner import DraftRunner, Forwards
from foredraft.engine.prefix_cache import common_prefix
from foredraft.model.base import TargetModel
from foredraft.model.recording.replay import EAGER, Replay
from foredraft.model.text.vocab_mapping import VocabMapping

CONVERSIONS = ("auto", "slem", "tli")
ENOUGH = 0.5
"""TLI is used for sampled rows if the shared tokens have at least this share of the draft's probability."""

_TRIES = 8
"""Split positions tried each time."""
_FORCE = 8
"""A window longer than this many look-behinds is split at any position."""
_SAMPLE = b"""The first of 42 houses was built in 1987, and its owner said: "It isn't ours." Then they moved on.

def area(width, height):
    # in square metres
    return {"value": width * height, "unit": "m2"}
"""


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Conversion of drafts, in addition to ``ChainOptions``; names as in transformers where it has them.

    num_assistant_tokens: longest draft, in tokens of the target and of the draft model.
    method: slem: convert by text; tli: draft only tokens that both vocabularies have; auto: tli for sampled rows if
        the shared tokens have at least half of the draft's probability, else slem.
    target_lookbehind: last tokens of the target that are converted again with new ones.
    assistant_lookbehind: last tokens before a draft that are converted again with it.
    """

    method: str = "auto"
    target_lookbehind: int = 10
    assistant_lookbehind: int = 10

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.FIXED if self.method == "slem" else Law.CHAIN

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # super() does not work in a dataclass with slots
        check_known("method", {self.method: None}, CONVERSIONS)
        check_bounds(self, least={"target_lookbehind": 1, "assistant_lookbehind": 1})


@final
class Universal(Rewindable):
    """Drafts with a model that reads each row in its own tokens.

    Args:
        model: the draft model.
        mapping: between the target's tokenizer and the draft's.
        replay: how its drafts run; see ``DraftRunner``.
    """

    def __init__(self, options: Options, model: TargetModel, mapping: VocabMapping, replay: Replay = EAGER) -> None:
        self._options = options
        self._mapping = mapping
        self._shared, self._silent = mapping.shared.to(model.device), mapping.silent.to(model.device)
        self._always_tli = options.method == "tli"
        self._sampled_tli = options.method != "slem" and (self._always_tli or coverage(model, mapping) >= ENOUGH)
        self._runner = DraftRunner(model, model.vocab_size, replay)
        self._retokenizer = Retokenizer(mapping, options.target_lookbehind)
        self._likeliest = Warp.of(
            [SamplingParams()], vocab_size=model.vocab_size, eos_token_ids=[()], prompt_lengths=[0], device=model.device
        )  # for any number of rows
        law = Law.CHAIN if self._sampled_tli else Law.FIXED
        self.needs = Needs(max_nodes=options.num_assistant_tokens, law=law)

    @torch.inference_mode()
    def read_ahead(
        self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F G"]], kv_size: KVSize
    ) -> None:
        self.admit(row, prompt, hidden)
        own, unchanged = self._retokenizer.read(row, prompt)
        self._runner.rewind(row, unchanged)
        self._runner.read_ahead(row, own, kv_size)

    @torch.inference_mode()
    def fork(self, row: int, source: int, length: int) -> None:
        self._runner.fork(row, source, self._retokenizer.fork(row, source, length))

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._runner.admit(row)
        self._retokenizer.admit(row, prompt.device)

    def rewind(self, row: int, length: int) -> None:
        self._retokenizer.rewind(row, length)

    def release(self, row: int) -> None:
        self._runner.release(row)
        self._retokenizer.release(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        own, unchanged = self._retokenizer.view(view)
        for row, length in zip(own.rows, unchanged, strict=True):
            self._runner.rewind(row, length)
        plan = self._runner.planned(own, plan)
        depth = min(plan.length, self._options.num_assistant_tokens)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        if self._always_tli or (self._sampled_tli and not view.warp.greedy):
            limits = ChainLimits.of(plan, depth, view.lengths.device)
            return self._runner.draft("chain", view, self.needs.max_nodes, self._tli, limits, read=own)
        return self._slem(view, own, plan, depth)

    def _tli(self, view: View, forwards: Forwards, limits: ChainLimits) -> Draft:
        """TLI: a chain in the target's tokens, drawn from the draft's law on the shared tokens."""

        def shared(logits: Float[Tensor, "B 1 v"]) -> Float[Tensor, "B 1 V"]:
            gathered = logits.index_select(-1, self._shared.clamp(min=0))
            return gathered.masked_fill(self._shared < 0, torch.finfo(logits.dtype).min)

        def read_next(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
            return shared(forwards.next(self._shared[tokens].clamp(min=0), index))

        return build_chain(view, limits, shared(forwards.root()), read_next, recorded=forwards.recorded)

    def _spoken(self, view: View, forwards: Forwards, limits: ChainLimits) -> Draft:
        """A chain in the draft's tokens, without those that have no text."""

        def spoken(logits: Float[Tensor, "B 1 v"]) -> Float[Tensor, "B 1 v"]:
            return logits.masked_fill(self._silent, torch.finfo(logits.dtype).min)

        def read_next(tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 v"]:
            return spoken(forwards.next(tokens, index))

        return build_chain(view, limits, spoken(forwards.root()), read_next, recorded=forwards.recorded)

    def _slem(self, view: View, own: View, plan: Plan, depth: int) -> Draft:
        """SLEM: the draft's likeliest tokens, re-tokenized with the target's tokenizer."""
        sizes = zip(plan.lengths, own.host_lengths, view.host_lengths, strict=True)
        # scale the lengths by the rows' numbers of tokens under the two tokenizers, plus one as a margin
        scaled = (min(length, 1 - (-length * draft // target)) for length, draft, target in sizes)
        own_plan = replace(plan, lengths=tuple(scaled))
        own, depth = replace(own, warp=self._likeliest), min(depth, own_plan.length)
        limits = ChainLimits.of(own_plan, depth, own.lengths.device)
        tree = self._runner.draft("text", own, self.needs.max_nodes, self._spoken, limits).tree
        begin = max(min(view.host_lengths) - self._options.assistant_lookbehind, 0)
        histories = view.history[:, begin : max(view.host_lengths)]
        read = torch.cat([tree.valid[:, 1:].sum(1, keepdim=True), tree.tokens[:, 1:], histories], 1).tolist()
        drafts, depth = [], tree.tokens.shape[1] - 1
        for b, (count, *tokens) in enumerate(read):
            before = tokens[depth : depth + view.host_lengths[b] - begin][-self._options.assistant_lookbehind :]
            drafts.append(self._mapping.to_target(before, tokens[:count])[: plan.lengths[b]])
        width, device = max(map(len, drafts)), view.history.device
        table = to_device([draft + [0] * (width - len(draft)) for draft in drafts], device)
        lengths = to_device([len(draft) + 1 for draft in drafts], device)
        return Draft(TokenTree.chain(torch.cat([view.roots[:, None], table], 1), lengths), Law.FIXED)


def coverage(model: TargetModel, mapping: VocabMapping) -> float:
    """The share of the draft's probability on shared tokens, averaged over a sample of English and code."""
    tokens = [*mapping.draft.opening, *mapping.draft.encode(_SAMPLE, first=True)]
    if not tokens:
        return 0.0
    sample = torch.tensor([tokens], device=model.device).clamp(max=model.vocab_size - 1)
    law = model.stock_logits(sample)[0].float().softmax(-1)
    shared = mapping.shared[mapping.shared >= 0].to(law.device)
    return float(law[:, shared].sum(-1).mean())


@dataclass(slots=True)
class _Row:
    """``tokens``: the row in the draft's tokens; ``ids``: the same on the host. ``splits``: positions (target, draft)
    before which it is final."""

    tokens: Int[Tensor, "T"]
    ids: list[int] = field(default_factory=list)
    splits: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    limit: int = 0  # a longer window gets a new split


class Retokenizer:
    """Keeps each row in the draft's tokens.

    New tokens may change the tokenization of those before. So the window after the last split is re-tokenized each
    time. A split lies at least ``lookbehind`` tokens before the end, at a position where the rest tokenizes the same
    alone and together with the tokens before.

    Args:
        mapping: between the two tokenizers.
        lookbehind: the target's last tokens that are always converted again.
    """

    def __init__(self, mapping: VocabMapping, lookbehind: int) -> None:
        self._mapping = mapping
        self._lookbehind = lookbehind
        self._rows: dict[int, _Row] = {}
        self._left: dict[int, _Row] = {}  # of released rows

    def admit(self, row: int, device: torch.device) -> None:
        """Add a row, unless it is there."""
        self._left.pop(row, None)
        self._rows.setdefault(row, _Row(torch.zeros(0, dtype=torch.long, device=device), limit=2 * self._lookbehind))

    def fork(self, row: int, source: int, length: int) -> int:
        """Add a row that begins with the first ``length`` of the target's tokens of another, or of its last request.

        Returns:
            how many of the draft's tokens it begins with, until the next call says how many of them are unchanged.
        """
        found = self._rows.get(source) or self._left.get(source)
        self._left.pop(row, None)
        if found is None:
            return 0
        count = next((own for place, own in found.splits if place >= length), len(found.ids))
        splits = [split for split in found.splits if split[0] <= max(length - self._lookbehind, 0)]
        self._rows[row] = _Row(found.tokens[:count], found.ids[:count], splits, 2 * self._lookbehind)
        return count

    def read(self, row: int, prompt: Int[Tensor, "T"]) -> tuple[Int[Tensor, "N"], int]:
        """Convert some of a prompt.

        Returns:
            the draft's tokens that later ones do not change, and how many of all are unchanged since the last call.
        """
        begin, _ = self._rows[row].splits[-1]
        unchanged = self._update(row, prompt[begin:].tolist(), prompt.device)
        return self._rows[row].tokens[: self._rows[row].splits[-1][1]], unchanged

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first ``length`` of the target's tokens."""
        splits = self._rows[row].splits
        while splits[-1][0] > length:
            splits.pop()

    def release(self, row: int) -> None:
        """Remove a row; its tokens stay for ``fork``."""
        if row in self._rows:
            self._left[row] = self._rows.pop(row)

    def view(self, view: View) -> tuple[View, list[int]]:
        """The rows in the draft's tokens, and how many tokens of each row are unchanged since the last call."""
        begins = [self._rows[row].splits[-1][0] for row in view.rows]
        first, device = min(begins), view.history.device
        histories = view.history[:, first : max(view.host_lengths)].tolist()
        windows = zip(histories, begins, view.host_lengths, strict=True)
        unchanged = [
            self._update(row, history[begin - first : length - first], device)
            for row, (history, begin, length) in zip(view.rows, windows, strict=True)
        ]
        rows = [self._rows[row].tokens for row in view.rows]
        host_lengths = tuple(len(tokens) for tokens in rows)
        history = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = to_device(host_lengths, device)
        return replace(view, history=history, lengths=lengths, host_lengths=host_lengths), unchanged

    def _update(self, number: int, window: list[int], device: torch.device) -> int:
        """Update one row by the target's tokens after its last split; return the number of unchanged tokens."""
        row = self._rows[number]
        begin, known = row.splits[-1]
        tail = self._mapping.to_draft(window, first=begin == 0)
        if not tail and not known:
            tail = [0]  # the draft model needs at least one token
        same = common_prefix(row.ids[known:], tail)
        row.tokens = torch.cat([row.tokens[: known + same], to_device(tail[same:], device)])
        row.ids[known:] = tail
        if len(window) >= row.limit:
            self._split(row, window, tail)
        return known + same

    def _split(self, row: _Row, window: list[int], tail: list[int]) -> None:
        """Add a split as late as possible, at the end of a word; if none is found, wait before the next try.

        A very long run, such as a line of dashes, is split anywhere: its tokens may then differ from those of the
        whole text, which costs a draft at most.
        """
        anywhere = range(len(window) - self._lookbehind, 0, -1)
        ends = (place for place in anywhere if self._mapping.is_boundary(window, place))
        force = len(window) >= _FORCE * self._lookbehind
        for place in (*islice(ends, _TRIES), *islice(anywhere if force else (), _TRIES)):
            rest = self._mapping.to_draft(window[place:], first=False)
            known_word = rest and self._mapping.draft.pieces[rest[0]]  # do not split inside an unknown word
            if known_word and tail[-len(rest) :] == rest:
                begin, known = row.splits[-1]
                row.splits.append((begin + place, known + len(tail) - len(rest)))
                row.limit = 2 * self._lookbehind
                return
        row.limit = 2 * len(window)


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
    return Universal(options, model, mapping, context.replay)
