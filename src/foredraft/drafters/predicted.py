"""Predicted outputs: a text that a request's output may repeat is drafted from by look-up, beside any drafter.

A request with a prediction keeps its place in that text. While the output follows it, the next tokens of the text are
the row's draft, a copy, in place of the drafter's. They are picked, and target sampling verifies them under every
drafter, so they are lossless. Where the output leaves the text, the drafter drafts until the place is found again.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

from foredraft.core.drafter import ByRow, Drafter, View
from foredraft.drafters.common.copying import CopyingDrafter, widest_copy

LENGTHS = (3, 7, 15, 31, 63)
"""Lengths of copies. With the root, they are node counts of forwards (``fitting.SIZES``)."""
LONGEST = LENGTHS[-1]
_FIRST, _UNSURE = 15, 7  # length of the first copy, and of the first one after a short match
_COMPARED = 16  # most tokens compared to find the place again
_SURE = 3  # tokens of a match that counts everywhere
_NEAR = 24  # a shorter one counts up to this many tokens behind the place left, and after it was left
_TRIED = 512  # most places of a token that are compared, before the place left and after it
_EDIT = 12  # most tokens of a replacement that is expected again


class _Edit(NamedTuple):
    """Tokens of the prediction, and those that the output has in their place."""

    old: tuple[int, ...]
    new: tuple[int, ...]


class _Place(NamedTuple):
    """What is expected: the last ``left`` tokens of ``edit.new``, then the prediction from ``start`` on."""

    start: int
    left: int = 0
    edit: _Edit = _Edit((), ())


class PredictionCursor:
    """The place of one request's output in its prediction, on the host.

    A copy is at least twice as long as what was accepted of the last one. After a mismatch, the output's last tokens
    are looked up in the prediction: the place is after the longest match, of equal ones the nearest behind the place
    left. What the output wrote in place of a few tokens is expected wherever they follow, until it is rejected: a name
    that was changed once is changed everywhere.

    Args:
        tokens: the prediction.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._indices: defaultdict[int, list[int]] = defaultdict(list)  # of each token that others follow
        for index, token in enumerate(self._tokens[:-1]):
            self._indices[token].append(index)
        self._recent: deque[int] = deque(maxlen=_COMPARED)  # emitted tokens, the latest first
        self._place: _Place | None = _Place(0)  # None if unknown
        self._length = _FIRST
        self._read = 0  # tokens of the output
        self._drafts = False  # the last draft was not empty
        self._edits: dict[int, _Edit] = {}  # by their first old token
        self._left = 0  # index in the prediction where the output left it
        self._since: list[int] = []  # tokens emitted since
        self._guess: _Edit | None = None  # the replacement before a place that no token has confirmed yet

    def draft(self, most: int) -> list[int]:
        """The tokens to copy in the next step, ``most`` or fewer; none if the place is unknown."""
        tokens: list[int] = []
        ahead = self._next(self._place)
        while ahead is not None and len(tokens) < min(self._length, most):
            tokens.append(ahead[0])
            ahead = self._next(ahead[1])
        self._drafts = len(tokens) > 0
        return tokens

    def read(self, output: Sequence[int]) -> None:
        """Read what a step has added to the output: the accepted tokens of the last draft, and another one."""
        emitted, self._read = output[self._read :], len(output)
        if not emitted:
            return
        if self._drafts:
            self._length = next((length for length in LENGTHS if length >= 2 * (len(emitted) - 1)), LONGEST)
        for token in emitted:
            self._recent.appendleft(token)
            ahead = self._next(self._place)
            if ahead is not None and ahead[0] == token:
                self._place = ahead[1]
                self._confirm()
                continue
            if self._place is not None:
                self._leave(self._place)
            self._since.append(token)
        if self._place is None:
            self._find()

    def _next(self, place: _Place | None) -> tuple[int, _Place] | None:
        """The token expected at a place and the place after it; None at the end of the prediction."""
        if place is None:
            return None
        start, left = place.start, place.left
        if left:
            return place.edit.new[-left], _Place(start, left - 1, place.edit)
        if start >= len(self._tokens):
            return None
        edit = self._edit(start)
        if edit is None:
            return self._tokens[start], _Place(start + 1)
        return edit.new[0], _Place(start + len(edit.old), len(edit.new) - 1, edit)

    def _edit(self, index: int) -> _Edit | None:
        """The replacement expected for the tokens from here on."""
        edit = self._edits.get(self._tokens[index]) if index < len(self._tokens) else None
        return edit if edit is not None and self._tokens[index : index + len(edit.old)] == edit.old else None

    def _leave(self, place: _Place) -> None:
        """The output does not go on as expected at this place."""
        self._place = None
        if self._guess is not None:  # the place was wrong: the search goes on from the place left before
            self._guess = None
            return
        start, left, edit = place
        failed = edit if left else self._edit(start)
        if failed is not None:
            self._edits.pop(failed.old[0], None)
        self._left, self._since = start - (len(edit.old) if left else 0), list(edit.new[:-left] if left else ())

    def _find(self) -> None:
        """Look the last tokens up in the prediction."""
        recent = tuple(self._recent)
        best, found = (0, False, 0), 0
        places = self._indices.get(recent[0], []) if recent else []
        near = bisect_left(places, self._left)
        for index in places[max(near - _TRIED, 0) : near + _TRIED]:
            size = 1
            while size < len(recent) and size <= index and self._tokens[index - size] == recent[size]:
                size += 1
            behind = index - self._left
            if size >= _SURE or (0 <= behind < _NEAR and len(self._since) <= _NEAR):
                best, found = max((best, found), ((size, behind >= 0, -abs(behind)), index + 1))
        if not found:
            return
        matched = min(best[0], len(self._since))
        self._guess = _Edit(self._tokens[self._left : found - matched], tuple(self._since[:-matched]))
        self._place = _Place(found)
        if best[0] < _SURE:
            self._length = min(self._length, _UNSURE)

    def _confirm(self) -> None:
        """A token has confirmed the place; a short replacement before it is expected again."""
        if self._guess is not None:
            old, new = self._guess
            if 0 < len(old) <= _EDIT and 0 < len(new) <= _EDIT:
                self._edits[old[0]] = self._guess
            self._guess = None


@final
class PredictedOutputs(CopyingDrafter):
    """Copies from the predictions of requests, beside the drafts of the inner drafter.

    While a row has a prediction nothing is drafted ahead, since a copy needs the last step's tokens on the host.
    """

    def __init__(self, inner: Drafter) -> None:
        self._cursors = ByRow[PredictionCursor]()
        super().__init__(inner, self._cursors)

    def copies(self, view: View, limits: Sequence[int]) -> tuple[int, ...]:
        if not self._cursors and not any(params.prediction for params in view.params):
            return self._inner.copies(view, limits)
        return super().copies(view, limits)

    def _chains(self, view: View, limits: Sequence[int]) -> list[Sequence[int]]:
        most = widest_copy(view) - 1
        chains: list[Sequence[int]] = []
        for row, params, output, limit in zip(view.rows, view.params, view.outputs, limits, strict=True):
            if not params.prediction:
                chains.append(())
                continue
            assert isinstance(params.prediction, tuple)
            if row not in self._cursors:
                self._cursors[row] = PredictionCursor(params.prediction)
                self.needs = replace(self._inner.needs, ahead=False)
            self._cursors[row].read(output)
            chains.append(self._cursors[row].draft(min(limit, most)))
        return chains

    def release(self, row: int) -> None:
        super().release(row)
        if not self._cursors:
            self.needs = self._inner.needs
