"""A draft model that reads only the first and the latest tokens of a row (StreamingLLM, Xiao et al., arXiv:2309.17453),
for rows longer than the draft's context or than is worth reading.

StreamingLLM moves keys to new positions, which needs keys from before their rotation, and they keep information about
dropped tokens. Here the draft reads a shorter sequence instead: dropped tokens are not in it, positions run from 0 to
the window's end, and the window is read again when it moves. It moves by a quarter of its size, so each token is read
about four times. The draft's law is exactly that of the shorter sequence, for any kind of positions.
"""

from dataclasses import replace
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import Plan, Room, View
from foredraft.core.errors import OptionError
from foredraft.core.transfer import to_device
from foredraft.drafters.common.draft_runner import DraftRunner
from foredraft.model.base import TargetModel
from foredraft.model.recording.replay import EAGER, Replay


@final
class WindowedRunner(DraftRunner):
    """A ``DraftRunner`` that reads at most ``window`` tokens of a row: the first ``sinks`` and the latest ones.

    The number of dropped tokens depends on the row's length alone. Inside another drafter, rows grow by drafted tokens
    and are rewound; a window that moved with them would be read again each time. With ``ahead``, the window keeps room
    for this many more tokens than the row has at the first read after a rewind, and moves only beyond them.

    Args:
        model, vocab_size, replay: see ``DraftRunner``.
        window: tokens, including those being drafted.
        sinks: how many of them are the first tokens.
        room: the most nodes that are drafted.
        ahead: tokens by which a row may grow before it is rewound; at most a quarter of the window is kept free.

    Raises:
        OptionError: the window has no room for committed tokens, or is longer than the draft's context.
    """

    def __init__(
        self,
        model: TargetModel,
        vocab_size: int,
        window: int,
        sinks: int,
        room: int,
        ahead: int = 0,
        *,
        replay: Replay = EAGER,
    ) -> None:
        super().__init__(model, vocab_size, replay)
        self._stride = (window - sinks - room) // 4
        if sinks < 0 or self._stride < 1:
            raise OptionError(f"A window of {window} tokens is too short for {sinks} sinks and {room} drafted nodes.")
        if window > model.max_length:
            raise OptionError(f"A window of {window} tokens is longer than the draft's {model.max_length}.")
        self._limit = window - room
        self._sinks = sinks
        self._ahead = min(ahead, self._stride)
        self._begins: dict[int, int] = {}  # length of each row at the first read after a rewind
        self._dropped: dict[int, int] = {}  # dropped tokens of each row at its last read

    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], room: Room) -> None:
        """Nothing: of a long prompt the window reads little."""

    def fork(self, row: int, source: int, length: int) -> None:
        """Nothing, for the same reason."""

    def admit(self, row: int, prompt: Int[Tensor, "T"] | None = None) -> None:
        self._dropped[row] = 0
        super().admit(row)

    def rewind(self, row: int, length: int) -> None:
        self._begins.pop(row, None)
        dropped = self._dropped[row]
        super().rewind(row, length - dropped if length > self._sinks + dropped else min(length, self._sinks))

    def release(self, row: int) -> None:
        self._begins.pop(row, None)
        self._dropped.pop(row, None)
        super().release(row)

    def _within_context(self, view: View, plan: Plan) -> Plan:
        """The plan, unchanged: the window always has room."""
        return plan

    def dropped(self, extent: int) -> int:
        """How many tokens after the sinks are dropped from a row of this length."""
        return -(-max(extent - self._limit, 0) // self._stride) * self._stride

    def _as_read(self, view: View) -> View:
        for row, extent in zip(view.rows, view.extents, strict=True):
            dropped = self.dropped(self._begins.setdefault(row, extent) + self._ahead) if self._ahead else 0
            if extent - dropped > self._limit:
                dropped = self.dropped(extent)
            if dropped != self._dropped[row]:
                self._dropped[row] = dropped
                super().rewind(row, self._sinks)
        return self._short(view)

    def _short(self, view: View) -> View:
        """The rows without their dropped tokens."""
        counts = [self._dropped[row] for row in view.rows]
        if not any(counts):
            return view
        dropped = to_device(counts, view.lengths.device)
        extents = tuple(extent - count for extent, count in zip(view.extents, counts, strict=True))
        place = torch.arange(max(extents), device=dropped.device).expand(len(counts), -1)
        place = torch.where(place < self._sinks, place, place + dropped[:, None])
        history = view.history.gather(1, place.clamp(max=view.history.shape[1] - 1))
        return replace(view, history=history, lengths=view.lengths - dropped, extents=extents)
