"""Texts told again in a draft's own tokens, beside the target's, whatever tokenizers the two have."""

from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.model.vocab_mapping import VocabMapping

_TRIES = 8
"""Places at which a text may be parted that are looked at."""
_ENDLESS = 8
"""A window of so many times the look-behind is parted wherever it can be."""


@dataclass(slots=True)
class _Text:
    """``told``: all of it in the draft's tokens. ``marks``: places, in both, up to which it will not change."""

    told: Int[Tensor, "T"]
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    limit: int = 0  # a window of so many tokens is cut


class Retokenizer:
    """Keeps each text in the draft's tokens.

    New tokens may change how what stands before them is written. So a window is written anew each time, from the last
    mark on, and a mark is set ``lookbehind`` tokens or more before the end, where the text behind it is written the
    same alone and together with what stands before.

    Args:
        bridge: between the two tokenizers.
        lookbehind: so many of the target's last tokens are always written anew.
    """

    def __init__(self, bridge: VocabMapping, lookbehind: int) -> None:
        self._bridge = bridge
        self._lookbehind = lookbehind
        self._texts: dict[int, _Text] = {}

    def admit(self, row: int, device: torch.device) -> None:
        """A text begins."""
        self._texts[row] = _Text(torch.zeros(0, dtype=torch.long, device=device), limit=2 * self._lookbehind)

    def rewind(self, row: int, length: int) -> None:
        """Only the first so many of the target's tokens stand."""
        marks = self._texts[row].marks
        while marks[-1][0] > length:
            marks.pop()

    def release(self, row: int) -> None:
        """Forget a text."""
        self._texts.pop(row, None)

    def view(self, view: View) -> tuple[View, list[int]]:
        """The same texts in the draft's tokens, and how many of each text's tokens are those of the last time."""
        stand = [self._tell(row, view.history[b], view.extents[b]) for b, row in enumerate(view.rows)]
        texts = [self._texts[row].told for row in view.rows]
        extents = tuple(len(text) for text in texts)
        history = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        lengths = torch.tensor(extents, device=view.lengths.device)
        return replace(view, history=history, lengths=lengths, extents=extents), stand

    def _tell(self, row: int, history: Int[Tensor, "L"], extent: int) -> int:
        """Bring one text up to date; returns how many tokens are as they were."""
        text = self._texts[row]
        begin, known = text.marks[-1]
        window = history[begin:extent].tolist()
        tail = self._bridge.to_draft(window, first=begin == 0)
        if not tail and not known:
            tail = [0]  # there must be something to read, be it nonsense
        before = text.told[known:].tolist()
        same = _shared(before, tail)
        fresh = torch.tensor(tail[same:], dtype=torch.long, device=history.device)
        text.told = torch.cat([text.told[: known + same], fresh])
        if len(window) >= text.limit:
            self._mark(text, window, tail)
        return known + same

    def _mark(self, text: _Text, window: list[int], tail: list[int]) -> None:
        """Set a mark as late as may be, where a word ends; in vain, the next try is a while later.

        A run without an end, such as a line of dashes, is parted anywhere in the end: what is told of it may then
        differ from what would be told at once, which costs a draft at most.
        """
        anywhere = range(len(window) - self._lookbehind, 0, -1)
        ends = (place for place in anywhere if self._bridge.is_boundary(window, place))
        endless = len(window) >= _ENDLESS * self._lookbehind
        for place in (*islice(ends, _TRIES), *islice(anywhere if endless else (), _TRIES)):
            rest = self._bridge.to_draft(window[place:], first=False)
            known_word = rest and self._bridge.draft.pieces[rest[0]]  # half of an unknown word is unknown too
            if known_word and tail[-len(rest) :] == rest:
                begin, known = text.marks[-1]
                text.marks.append((begin + place, known + len(tail) - len(rest)))
                text.limit = 2 * self._lookbehind
                return
        text.limit = 2 * len(window)


def _shared(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common from their beginning on."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (mine, other) in pairs if mine != other), min(len(a), len(b)))
