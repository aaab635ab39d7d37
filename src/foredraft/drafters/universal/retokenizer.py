"""A row in the tokens of a draft model with another tokenizer."""

from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import Fused, KVSize, RowState, View
from foredraft.core.transfer import to_device
from foredraft.engine.prefix_cache import common_prefix
from foredraft.model.text.vocab_mapping import VocabMapping

_TRIES = 8
"""Split positions tried each time."""
_FORCE = 8
"""A window longer than this many look-behinds is split at any position."""


@dataclass(slots=True)
class _Row:
    """``tokens``: the row in the draft's tokens; ``ids``: the same on the host. ``splits``: positions (target, draft)
    before which it is final."""

    tokens: Int[Tensor, "T"]
    ids: list[int] = field(default_factory=list)
    splits: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    limit: int = 0  # a longer window gets a new split


class Retokenizer(RowState):
    """Keeps each row in the draft's tokens, for states that are kept in these.

    New tokens may change the tokenization of those before. So the window after the last split is re-tokenized each
    time. A split lies at least ``lookbehind`` tokens before the end, at a position where the rest tokenizes the same
    alone and together with the tokens before.

    Args:
        mapping: between the two tokenizers.
        lookbehind: the target's last tokens that are always converted again.
        states: what is kept in the draft's tokens. After a ``view``, its caller rewinds them to what is unchanged.
    """

    def __init__(self, mapping: VocabMapping, lookbehind: int, *states: RowState) -> None:
        self.states = states
        self._mapping = mapping
        self._lookbehind = lookbehind
        self._rows: dict[int, _Row] = {}
        self._left: dict[int, _Row] = {}  # of released rows

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        """Start a row, unless it is there."""
        self._left.pop(row, None)
        tokens = torch.zeros(0, dtype=torch.long, device=prompt.device)
        self._rows.setdefault(row, _Row(tokens, limit=2 * self._lookbehind))
        super().admit(row, prompt, hidden)

    @torch.inference_mode()
    def fork(self, row: int, source: int, length: int) -> None:
        """The states begin with as many of the draft's tokens, until the next call says how many are unchanged."""
        found = self._rows.get(source) or self._left.get(source)
        self._left.pop(row, None)
        count = 0
        if found is not None:
            count = next((own for place, own in found.splits if place >= length), len(found.ids))
            splits = [split for split in found.splits if split[0] <= max(length - self._lookbehind, 0)]
            self._rows[row] = _Row(found.tokens[:count], found.ids[:count], splits, 2 * self._lookbehind)
        super().fork(row, source, count)

    @torch.inference_mode()
    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused, kv_size: KVSize) -> None:
        """The states read the draft's tokens that later ones do not change."""
        self.admit(row, prompt, hidden)
        begin, _ = self._rows[row].splits[-1]
        super().rewind(row, self._update(row, prompt[begin:].tolist(), prompt.device))
        super().read_ahead(row, self._rows[row].tokens[: self._rows[row].splits[-1][1]], hidden, kv_size)

    def rewind(self, row: int, length: int) -> None:
        """The states follow at the next call."""
        splits = self._rows[row].splits
        while splits[-1][0] > length:
            splits.pop()

    def release(self, row: int) -> None:
        """Its tokens stay for ``fork``."""
        if row in self._rows:
            self._left[row] = self._rows.pop(row)
        super().release(row)

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
