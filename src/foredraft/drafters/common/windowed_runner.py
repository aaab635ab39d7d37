"""A draft model that reads the first tokens of a text and the latest ones only: StreamingLLM's policy (Xiao et al.,
arXiv:2309.17453) for a text longer than the draft's context, or than is worth its while.

StreamingLLM moves keys to new positions; that takes keys from before their rotation, and what they know of tokens that
have gone stays in them. Here the draft reads a shorter text instead: the left out tokens are not in it, positions count
from 0 to the window's end, and the tokens of the window are read again when it moves. It moves by a quarter of itself
at a time, so a token is read about four times in all. The draft says just what it would say about that text, whatever
kind of positions it has.
"""

from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.draft_runner import DraftRunner


@final
class WindowedRunner:
    """A ``DraftRunner`` of texts of at most ``window`` tokens: the first ``sinks``, and the latest ones.

    How much is left out depends on a text's length alone, so neither chance nor neighbours have a part in it. Inside
    another drafter texts get longer by what is drafted and are taken back again; a window that moved with them would
    move there and back, and be read anew each time. With ``ahead`` it stands, from one taking back to the next, where
    it has room for so many more tokens than the text has when it is first read; beyond these it moves.

    Args:
        reader: for the draft.
        window: tokens, with those that are being drafted.
        sinks: how many of them are the text's first.
        room: the most nodes that are drafted.
        ahead: what a text may grow by before it is taken back; more than a quarter of the window is never kept free.

    Raises:
        OptionError: a window that leaves no room for a text, or that is longer than the draft's context.
    """

    def __init__(self, reader: DraftRunner, window: int, sinks: int, room: int, ahead: int = 0) -> None:
        self._stride = (window - sinks - room) // 4
        if sinks < 0 or self._stride < 1:
            raise OptionError(f"A window of {window} tokens is too short for {sinks} sinks and {room} drafted nodes.")
        if window > reader.model.max_length:
            raise OptionError(f"A window of {window} tokens is longer than the draft's {reader.model.max_length}.")
        self._reader = reader
        self._limit = window - room
        self._sinks = sinks
        self._ahead = min(ahead, self._stride)
        self._begins: dict[int, int] = {}  # length of each row when it was first read since it was taken back
        self._left: dict[int, int] = {}  # tokens of each row that were left out when it was last read

    @property
    def cache_bytes(self) -> int:
        """Of the draft's keys and values."""
        return self._reader.cache.nbytes

    def admit(self, row: int) -> None:
        """A text begins."""
        self._left[row] = 0
        self._reader.admit(row)

    def rewind(self, row: int, length: int) -> None:
        """Only the first so many tokens of a text stand."""
        self._begins.pop(row, None)
        left = self._left[row]
        self._reader.rewind(row, length - left if length > self._sinks + left else min(length, self._sinks))

    def release(self, row: int) -> None:
        """Forget a text."""
        self._begins.pop(row, None)
        self._left.pop(row, None)
        self._reader.release(row)

    def within_context(self, view: View, plan: Plan) -> Plan:
        """The plan itself: the window always has room."""
        return plan

    def read(self, view: View, room: int) -> Float[Tensor, "B 1 V"]:
        """See ``DraftRunner.read``."""
        for row, extent in zip(view.rows, view.extents, strict=True):
            left = self.left_out(self._begins.setdefault(row, extent) + self._ahead) if self._ahead else 0
            if extent - left > self._limit:
                left = self.left_out(extent)
            if left != self._left[row]:
                self._left[row] = left
                self._reader.rewind(row, self._sinks)
        return self._reader.read(self._short(view, with_history=True), room)

    def read_on(self, view: View, tokens: Int[Tensor, "B"], index: int) -> Float[Tensor, "B 1 V"]:
        """See ``DraftRunner.read_on``."""
        return self._reader.read_on(self._short(view), tokens, index)

    def read_level(self, view: View, tree: TokenTree, start: int) -> Float[Tensor, "B F V"]:
        """See ``DraftRunner.read_level``."""
        return self._reader.read_level(self._short(view), tree, start)

    def left_out(self, extent: int) -> int:
        """How many tokens of a text of this length are not read: those behind the sinks."""
        return -(-max(extent - self._limit, 0) // self._stride) * self._stride

    def _short(self, view: View, *, with_history: bool = False) -> View:
        """The rows with the texts that the draft reads."""
        lefts = [self._left[row] for row in view.rows]
        if not any(lefts):
            return view
        left = torch.tensor(lefts, device=view.lengths.device)
        extents = tuple(extent - out for extent, out in zip(view.extents, lefts, strict=True))
        history = view.history
        if with_history:
            place = torch.arange(max(extents), device=left.device).expand(len(lefts), -1)
            place = torch.where(place < self._sinks, place, place + left[:, None])
            history = history.gather(1, place.clamp(max=history.shape[1] - 1))
        return replace(view, history=history, lengths=view.lengths - left, extents=extents)
