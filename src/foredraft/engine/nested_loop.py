"""A loop inside a drafter: a model between target and drafter decodes speculatively, and what it says is the draft.

Cascades (CS Drafting, arXiv:2312.11462) and TriForce (arXiv:2404.11912) draft so. The loop says exactly what the middle
model would have said alone, since verification inside is as exact as outside; so the law q that a token was really
drawn from is the middle's own processed law there. That takes three things: a rejection inside draws from the
residual; whether a token is handed on never depends on whether it was accepted, since how many there will be is settled
before the first of them is drawn; and the loop has random numbers of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Plan, Rewindable, View
from foredraft.core.errors import DrafterError, LawError
from foredraft.core.tree import TokenTree
from foredraft.core.verify import RULES
from foredraft.engine.step import StepDone, Stepper
from foredraft.model.base import TargetModel, VocabPadded
from foredraft.model.cache import SlotCache
from foredraft.model.prefill import prefill

_CATCH_UP = 16
"""Rows that are further behind than this are brought up apart from the others, which need not read along."""


class NestedLoopParts(NamedTuple):
    """What an inner loop is made of.

    middle: the model that verifies inside.
    drafter: drafts for it.
    cache: the middle's, row for row beside the target's; nobody else may write to it.
    length: the most tokens that an inner step drafts.
    confidence: a path inside ends after its first token that is less sure; see ``Plan``.
    follow: has the cache hold each text but its root, where the middle need not read for that. None: it reads along.
    """

    middle: TargetModel
    drafter: Drafter
    cache: SlotCache
    length: int
    confidence: float = 0.0
    sync: Callable[[View], None] | None = None


class NestedLoop:
    """Extends texts as the middle model would, by steps of ``drafter``, and takes everything back afterwards.

    The middle reads along what was committed, when it is next asked for a draft: what it said itself, and the target
    accepted, still stands in its cache.

    Args:
        parts: the middle, its drafter, its cache.
        vocab_size: of the target, V below. The middle's may be narrower or wider, as padded vocabularies are.
        rule: of verification inside; None takes the best one for each draft's law.
        level: tells apart the inner loops of one drafter; see ``Noise.nested``.

    Raises:
        DrafterError: ``drafter`` cannot take a text back, or wants hidden states.
        LawError: a rule that is lossy, so that q would not be the law of what is drafted.
    """

    def __init__(self, parts: NestedLoopParts, vocab_size: int, *, rule: str | None = None, level: int = 0) -> None:
        drafter = parts.drafter
        name = drafter.__class__.__name__
        if not isinstance(drafter, Rewindable):
            raise DrafterError(
                f"{name} cannot stand inside another drafter: what it remembers of a text that is only drafted "
                "cannot be taken back."
            )
        if drafter.needs.hidden_layers:
            raise DrafterError(f"{name} cannot stand inside another drafter: it reads the target's hidden states.")
        if rule is not None and not RULES[rule].lossless:
            raise LawError(f"Verification rule {rule!r} is lossy, so no law of what an inner loop drafts is known.")
        self._parts = parts
        self._middle = VocabPadded(parts.middle, vocab_size)
        self._drafter = drafter
        self._cache = parts.cache
        self._stepper = Stepper(self._middle, parts.cache, drafter, rule)
        self._level = level
        self._held: dict[int, list[int]] = {}  # tokens of each row whose keys and values stand in the cache
        self._known: dict[int, int] = {}  # how many of them are surely those of the row's text

    def admit(self, row: int, prompt: Int[Tensor, "T"]) -> None:
        """A text begins; it is read when it is first drafted for."""
        self._held[row], self._known[row] = [], 0
        self._drafter.admit(row, prompt, {})

    def rewind(self, row: int, length: int) -> None:
        """Only the first so many tokens of a text stand."""
        self._known[row] = min(self._known[row], length)
        self._drafter.rewind(row, length)

    def release(self, row: int) -> None:
        """Forget a text; the last one takes the cache with it."""
        self._held.pop(row, None)
        self._known.pop(row, None)
        self._drafter.release(row)
        if not self._held:
            self._cache.clear()

    @torch.inference_mode()
    def extend(self, view: View, lengths: Sequence[int]) -> Draft:
        """A chain of exactly ``lengths[b]`` tokens for each row, or of as many as the middle's context has room for.

        Rows that have theirs go on beside the others; what they say beyond is dropped.

        Returns:
            a ``CHAIN`` with the middle's processed law at each token, or a ``FIXED`` one where all rows are greedy.
        """
        room = [self._middle.max_length - extent for extent in view.extents]
        lengths = [max(0, min(length, most)) for length, most in zip(lengths, room, strict=True)]
        if not any(lengths):
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        roots = self._read_along(view) if self._parts.sync is None else self._parts.sync(view)
        said: list[list[int]] = [[] for _ in lengths]
        laws = _Laws(lengths)
        ahead = replace(view, noise=view.noise.nested(self._level))
        while any(len(text) < length for text, length in zip(said, lengths, strict=True)):
            # the last token of a step is the middle's own, so one less is drafted than there is left to say
            left = (max(length - len(text) - 1, 0) for text, length in zip(said, lengths, strict=True))
            plan = Plan(tuple(min(self._parts.length, most) for most in left), self._parts.confidence)
            done = self._stepper(ahead, plan, laws=True)
            laws.add(done, [len(text) for text in said])
            for text, result in zip(said, done.rows, strict=True):
                text += result.emitted
            ahead = ahead.followed_by(done.emitted, [len(result.emitted) for result in done.rows])
        for b, row in enumerate(view.rows):
            if roots is not None and self._known[row] == view.extents[b] - 1:  # else the text has outgrown the middle
                self._held[row] += [roots[b], *said[b][:-1]]
            self._drafter.rewind(row, view.extents[b])
        drafted = [text[:length] + [0] * (max(lengths) - length) for text, length in zip(said, lengths, strict=True)]
        device = view.lengths.device
        tokens = torch.cat([view.roots[:, None], torch.tensor(drafted, device=device)], 1)
        tree = TokenTree.chain(tokens, 1 + torch.tensor(lengths, device=device))
        return Draft(tree, Law.FIXED if laws.q is None else Law.CHAIN, laws.q)

    def _read_along(self, view: View) -> list[int]:
        """Have the cache hold each text but its root, and nothing else; return the roots.

        What was drafted before and what was committed since are compared on the host: one small read.
        """
        ends = [min(extent, self._middle.max_length) - 1 for extent in view.extents]
        knowns = [min(self._known[row], end) for row, end in zip(view.rows, ends, strict=True)]
        begin = min(knowns)
        texts = view.history[:, begin : max(view.extents)].tolist()
        starts = []
        for row, text, known, end in zip(view.rows, texts, knowns, ends, strict=True):
            held, new = self._held[row], text[known - begin : end - begin]
            same = _in_common(held[known:], new)
            starts.append(known + same)
            del held[known + same :]
            held += new[same:]
            self._known[row] = end
        self._cache.reserve(max(view.rows) + 1, max(view.extents))
        fresh = [row for row, start in zip(view.rows, starts, strict=True) if start == 0]
        if fresh:  # whoever had the row before may have left NaN behind
            self._cache.zero(fresh)
        behind = [b for b, start in enumerate(starts) if start < ends[b]]
        for far in (True, False):
            group = [b for b in behind if (ends[b] - starts[b] > _CATCH_UP) == far]
            if group:
                self._read([view.rows[b] for b in group], [starts[b] for b in group], view.lengths.device)
        return [text[extent - 1 - begin] for text, extent in zip(texts, view.extents, strict=True)]

    def _read(self, rows: Sequence[int], starts: Sequence[int], device: torch.device) -> None:
        """Read what the cache should hold of these rows from ``starts`` on."""
        new = [self._held[row][start:] for row, start in zip(rows, starts, strict=True)]
        width = max(map(len, new))
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in new], device=device)
        prefill(self._middle, self._cache, rows, tokens, starts)


class _Laws:
    """The laws of what is drafted, gathered step by step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.q: Float[Tensor, "B N V"] | None = None  # the root's are never read

    def add(self, done: StepDone, places: Sequence[int]) -> None:
        """Take in a step's laws; row b's first is that of token ``places[b]``."""
        if done.laws is None:
            return
        if self.q is None:
            self.q = done.laws.new_zeros(len(self._lengths), 1 + max(self._lengths), done.laws.shape[-1])
        where = [
            (b, i, 1 + places[b] + i)
            for b, result in enumerate(done.rows)
            for i in range(min(len(result.emitted), self._lengths[b] - places[b]))
        ]
        if where:
            row, source, target = torch.tensor(where, device=self.q.device).unbind(1)
            self.q[row, target] = done.laws[row, source]


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
