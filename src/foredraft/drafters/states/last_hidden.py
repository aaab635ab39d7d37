"""The target's last hidden state of each row, for heads that read nothing else."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import ByRow, Fused, Needs, RowState, StepOut, View
from foredraft.core.target_parts import FINAL
from foredraft.drafters.states.feature_cache import DraftState
from foredraft.model.recording.segment import SegmentRows


class LastHidden(RowState):
    """h_t for each row, where t is the token before the root: the final hidden state that produced the root."""

    needs = Needs((FINAL,), ahead=True)

    def __init__(self) -> None:
        self._last = ByRow[Tensor]()
        self.states = (self._last,)
        self.rows = SegmentRows()

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> dict[int, Float[Tensor, "1 F H"]]:
        """The last state of a part of a prompt; a copy, which does not keep the others alive."""
        return {FINAL: hidden[FINAL][:, -1:].clone()}

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        """A prompt of one token has no state yet."""
        states = hidden[FINAL]
        self._last[row] = states[0, -1] if states.shape[1] else states.new_full((states.shape[2],), torch.nan)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        """Store the states that produced the bonus tokens."""
        last = verdict.path.gather(1, verdict.accepted()[:, None])[..., None]
        states = out.hidden[FINAL]
        states = states.gather(1, last.expand(-1, 1, states.shape[2]))[:, 0]
        self._last.update(zip(view.rows, states.unbind(0), strict=True))

    def extend(self, view: View, tree_slots: int) -> DraftState:
        """The states of these rows; ``tree_slots`` is not needed."""
        states = torch.stack([self._last[row] for row in view.rows])[:, None]
        return DraftState(states.nan_to_num(), view.lengths > 1)
