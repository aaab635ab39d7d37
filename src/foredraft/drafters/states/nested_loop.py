"""A speculative loop inside a drafter: a middle model decodes speculatively, and its output is the draft.

Used by cascades (CS Drafting, arXiv:2312.11462) and TriForce (arXiv:2404.11912). The middle model takes its tokens with
the noise that the target will use at these positions, and so does its drafter: each level guesses the next one's token.

With a ratio rule the loop has random numbers of its own. Verification inside is lossless, and the number of drafted
tokens is fixed before the first is drawn, so the law q of a drafted token is the middle model's processed law.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import ByRow, Drafter, Needs, Plan, Rewindable, RowState, View
from foredraft.core.errors import DrafterError
from foredraft.core.transfer import to_device
from foredraft.core.tree import TokenTree
from foredraft.drafters.states.read_rows import ReadRows
from foredraft.engine.prefix_cache import common_prefix
from foredraft.engine.step import StepInputs, Stepper, StepResult
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.prefill import CATCH_UP, prefill

_PROMPT = -1
"""In place of a prompt's tokens that were read before its first draft: they need not be compared."""


class NestedLoopParts(NamedTuple):
    """The parts of an inner loop.

    middle: the model that verifies inside.
    drafter: drafts for the middle model.
    cache: the middle model's KV cache, with the target's row numbers; nothing else may write to it.
    length: the most tokens that an inner step drafts.
    confidence: the confidence threshold of inner steps; see ``Plan``.
    sync: fills the cache with each row's tokens except the root without a forward. None: the middle model reads them.
    """

    middle: TargetModel
    drafter: Drafter
    cache: SlotCache
    length: int
    confidence: float = 0.0
    sync: Callable[[View], None] | None = None


class Extension(NamedTuple):
    """A chain, and the middle model's logits at each of its tokens (from 1 on), if they were asked for."""

    draft: Draft
    logits: Float[Tensor, "B N V"] | None = None


class NestedLoop(RowState):
    """Drafts with the middle model, decoding speculatively by steps of ``drafter``, and rewinds afterwards.

    The middle model reads a long prompt while the target does, and newly committed tokens at its next draft; its own
    tokens that the target accepted are still in its cache.

    Args:
        parts: the middle model, its drafter, its cache.
        vocab_size: of the target, V below. The middle model's may differ by padding.

    Raises:
        DrafterError: ``drafter`` cannot be rewound, or needs hidden states.
    """

    def __init__(self, parts: NestedLoopParts, vocab_size: int) -> None:
        drafter = parts.drafter
        name = drafter.__class__.__name__
        if not isinstance(drafter, Rewindable):
            raise DrafterError(
                f"{name} cannot be used inside another drafter: its state for tokens that are only drafted cannot be "
                "rewound."
            )
        if drafter.needs.hidden_layers:
            raise DrafterError(f"{name} cannot be used inside another drafter: it reads the target's hidden states.")
        self._parts = parts
        self._middle = parts.middle
        self._drafter = drafter
        self._cache = parts.cache
        reader = parts.middle if parts.sync is None else None
        self._rows = ReadRows(parts.cache, reader)  # an entry is a token that is known to be the row's
        self._stepper = Stepper(parts.middle, parts.cache, drafter, vocab_size=vocab_size)
        self._cached = ByRow[list[int]]()  # tokens of each row whose keys and values are in the cache
        self.states = (self._rows, drafter, self._cached)
        # how far a partial cache is filled depends on all rows
        self.needs = Needs(
            learns=drafter.needs.learns or drafter.needs.target_cache, shares_text=drafter.needs.shares_text
        )

    @property
    def commits(self) -> bool:
        """Never: the inner drafter sees the verdicts of inner steps."""
        return False

    @torch.inference_mode()
    def extend(self, view: View, lengths: Sequence[int], *, logits: bool = False) -> Extension:
        """A chain of exactly ``lengths[b]`` tokens for each row, or as many as the middle model's context allows: a
        ``FIXED`` draft or, if drafts are drawn, a ``CHAIN`` with the middle model's processed law at each token.

        Rows that have ended keep running with the others; their extra tokens are dropped.

        Args:
            logits: return them.
        """
        remaining = [self._middle.max_length - length for length in view.host_lengths]
        lengths = [max(0, min(length, most)) for length, most in zip(lengths, remaining, strict=True)]
        if not any(lengths):
            return Extension(Draft(TokenTree.root(view.roots), Law.FIXED))
        roots = self._catch_up(view) if self._parts.sync is None else self._parts.sync(view)
        outputs: list[list[int]] = [[] for _ in lengths]
        laws, scores = _ByToken(lengths), _ByToken(lengths)
        drawn = view.draws and not view.warp.greedy
        ahead = replace(view, noise=view.noise.nested(0), draws=False) if drawn else view
        while any(len(output) < length for output, length in zip(outputs, lengths, strict=True)):
            # the last token of a step is the bonus token, so draft one less than is left
            left = (max(length - len(output) - 1, 0) for output, length in zip(outputs, lengths, strict=True))
            plan = Plan(tuple(min(self._parts.length, most) for most in left), self._parts.confidence)
            step = self._stepper(StepInputs(ahead, plan, laws=drawn, logits=logits))
            starts = [len(output) for output in outputs]
            laws.add(step.end.laws, step, starts)
            scores.add(step.logits, step, starts)
            for output, result in zip(outputs, step.rows, strict=True):
                output += result.emitted
            ahead = ahead.followed_by(step.end.emitted, [len(result.emitted) for result in step.rows])
        for b, row in enumerate(view.rows):
            if roots is not None and self._rows.count[row] == view.host_lengths[b] - 1:  # else past its context
                self._cached[row] += [roots[b], *outputs[b][:-1]]
            self._drafter.rewind(row, view.host_lengths[b])
        drafted = [row[:length] + [0] * (max(lengths) - length) for row, length in zip(outputs, lengths, strict=True)]
        device = view.lengths.device
        tokens = torch.cat([view.roots[:, None], to_device(drafted, device)], 1)
        tree = TokenTree.chain(tokens, 1 + to_device(lengths, device))
        return Extension(Draft(tree, Law.FIXED if laws.table is None else Law.CHAIN, laws.table), scores.table)

    def _catch_up(self, view: View) -> list[int]:
        """Make the cache hold exactly each row's tokens except the root; return the roots.

        The earlier draft and the tokens committed since are compared on the host, with one small read.
        """
        ends = [min(length, self._middle.max_length) - 1 for length in view.host_lengths]
        knowns = [min(self._rows.count[row], end) for row, end in zip(view.rows, ends, strict=True)]
        begin = min(knowns)
        histories = view.history[:, begin : max(view.host_lengths)].tolist()
        starts = []
        for row, history, known, end in zip(view.rows, histories, knowns, ends, strict=True):
            cached, new = self._cached.setdefault(row, []), history[known - begin : end - begin]
            cached += [_PROMPT] * (known - len(cached))
            same = common_prefix(cached[known:], new)
            starts.append(known + same)
            del cached[known + same :]
            cached += new[same:]
            self._rows.count[row] = known + same
        self._rows.prepare(view, max(view.host_lengths))
        behind = [b for b, start in enumerate(starts) if start < ends[b]]
        for far in (True, False):
            group = [b for b in behind if (ends[b] - starts[b] > CATCH_UP) == far]
            if group:
                self._read([view.rows[b] for b in group], [starts[b] for b in group], view.lengths.device)
        self._rows.count.update(zip(view.rows, ends, strict=True))
        return [history[length - 1 - begin] for history, length in zip(histories, view.host_lengths, strict=True)]

    def _read(self, rows: Sequence[int], starts: Sequence[int], device: torch.device) -> None:
        """Prefill the tokens of these rows from ``starts`` on."""
        new = [self._cached[row][start:] for row, start in zip(rows, starts, strict=True)]
        width = max(map(len, new))
        tokens = to_device([row + [0] * (width - len(row)) for row in new], device)
        prefill(self._middle, self._cache, rows, tokens.clamp(max=self._middle.vocab_size - 1), starts)


class _ByToken:
    """Values of the drafted tokens over the vocabulary, collected step by step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.table: Float[Tensor, "B N V"] | None = None  # the root's are never read

    def add(self, values: Float[Tensor, "B D V"] | None, step: StepResult, starts: Sequence[int]) -> None:
        """Add a step's values, if it has any; row b's first belong to token ``starts[b]``."""
        if values is None:
            return
        if self.table is None:
            self.table = values.new_zeros(len(self._lengths), 1 + max(self._lengths), values.shape[-1])
        where = [
            (b, i, 1 + starts[b] + i)
            for b, result in enumerate(step.rows)
            for i in range(min(len(result.emitted), self._lengths[b] - starts[b]))
        ]
        if where:
            row, source, target = to_device(where, self.table.device).unbind(1)
            self.table[row, target] = values[row, source]
