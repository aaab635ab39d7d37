"""Max-Gram (arXiv:2312.11462): copies the tokens after the longest earlier match of the last tokens.

The last level of cascade drafting: it needs no model and always drafts something. Prompt lookup matches a few last
tokens; here the match may be as long as the history. Deterministic: tokens are picked (``Law.FIXED``).
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Fused, Needs, Plan, Rewindable, StepOut, View
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.tree import TokenTree
from foredraft.drafters.context import BuildContext

_BASE = -7046029254386353131  # 0x9E3779B97F4A7C15: odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64) - (1 << 64) * (pow(_BASE, -1, 1 << 64) >> 63)
_NOTHING = -1


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Size of matches and copies, and drafts without a match."""

    num_assistant_tokens: int = option(10, "most tokens copied.")
    min_matching_ngram_size: int = option(1, "shortest run of last tokens that counts as a match.")
    bigrams: bool = option(
        False,
        "without a match, draft the token that last followed each token in any running request; otherwise repeat the "
        "last token once. Drafts then depend on other requests, so a relay with sampled drafts refuses it.",
    )

    def __post_init__(self) -> None:
        check_bounds(self, least={"num_assistant_tokens": 1, "min_matching_ngram_size": 1})


class Match(NamedTuple):
    """The longest earlier match of the last tokens: its size (0 for none), and where its latest occurrence ends."""

    size: Int[Tensor, "B"]
    end: Int[Tensor, "B"]


@final
class MaxGram(Rewindable):
    """Copies from the row's history. Its only state is the table of bigrams, one token per token of the vocabulary,
    freed with the last row."""

    def __init__(self, options: Options, vocab_size: int) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._followers = torch.zeros(0, dtype=torch.long)  # the last token seen after each token, else ``_NOTHING``
        self._rows: set[int] = set()
        super().__init__(
            Needs(max_nodes=options.num_assistant_tokens, learns=options.bigrams, shares_text=options.bigrams)
        )

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        self._rows.add(row)
        if self._options.bigrams:
            if not len(self._followers):
                self._followers = torch.full((self._vocab_size,), _NOTHING, device=prompt.device)
            self._followers[prompt[:-1]] = prompt[1:]

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self._options.num_assistant_tokens)
        longest = max(view.host_lengths)
        history = view.history[:, :longest]
        match = longest_match(history, view.lengths)
        found = match.size >= self._options.min_matching_ngram_size
        # past the end of the history the copy repeats itself, as if the history were periodic
        period = (view.lengths - match.end).clamp(min=1)[:, None]
        index = match.end[:, None] + torch.arange(depth, device=history.device) % period
        copied = history.gather(1, index.clamp(max=longest - 1))
        guessed = self._guess(view, depth)
        tokens = torch.where(found[:, None], copied, guessed)
        lengths = torch.where(found, depth, (guessed != _NOTHING).sum(1))
        lengths = lengths.minimum(plan.on(history.device))
        tree = TokenTree.chain(torch.cat([view.roots[:, None], tokens.clamp(min=0)], 1), lengths + 1)
        return Draft(tree, Law.FIXED)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        if not self._options.bigrams:
            return
        before = view.history.gather(1, (view.lengths[:, None] - 2).clamp(min=0))
        tokens = torch.cat([before, view.roots[:, None], verdict.emitted(draft.tree)], 1)
        first, second = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
        real = second >= 0
        self._followers[first[real]] = second[real]  # of several followers in one step any may be kept

    def release(self, row: int) -> None:
        self._rows.discard(row)
        if not self._rows:
            self._followers = self._followers.new_zeros(0)

    def _guess(self, view: View, depth: int) -> Int[Tensor, "B K"]:
        """The draft without a match: at least one token per row, then ``_NOTHING``."""
        guessed = torch.full((len(view.rows), depth), _NOTHING, device=view.roots.device)
        last = view.roots
        for place in range(depth if self._options.bigrams else 0):
            last = torch.where(last == _NOTHING, last, self._followers[last])
            guessed[:, place] = last
        guessed[:, 0] = torch.where(guessed[:, 0] == _NOTHING, view.roots, guessed[:, 0])
        return guessed


def longest_match(history: Int[Tensor, "B L"], lengths: Int[Tensor, "B"]) -> Match:
    """The longest run of last tokens that also ends earlier in the history, at its latest such position.

    Where a run matches, every shorter one does: the size is found by bisection, in log2(L) passes over the history.
    Runs are compared by a polynomial hash modulo 2^64 at all positions at once; a collision only costs a bad draft.
    """
    width = history.shape[1]
    end = torch.arange(width + 1, device=history.device)
    powers = torch.full_like(end, _BASE).cumprod(0)
    inverses = torch.full_like(end, _INVERSE).cumprod(0)
    sums = torch.nn.functional.pad(((history + 1) * powers[:-1]).cumsum(1), (1, 0))
    last = lengths[:, None]

    def ends(size: Int[Tensor, "B"]) -> Tensor:
        """True where the ``size`` tokens before a position equal the last ones [B, L + 1]."""
        begin = (end - size[:, None]).clamp(min=0)
        hashes = (sums - sums.gather(1, begin)) * inverses
        return (hashes == hashes.gather(1, last)) & (end >= size[:, None]) & (end < last)

    size = torch.zeros_like(lengths)
    for bit in reversed(range(width.bit_length())):
        longer = size + (1 << bit)
        size = torch.where(ends(longer).any(1) & (longer < lengths), longer, size)
    return Match(size, torch.where(ends(size), end, 0).amax(1))


def build(options: Options, context: BuildContext) -> MaxGram:
    """max_gram"""
    return MaxGram(options, context.vocab_size)
