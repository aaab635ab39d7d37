"""The target's last hidden state of each row, for heads that read nothing else."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Verdict
from foredraft.core.drafter import KVSize, Plan, StepOut, View
from foredraft.core.target_parts import FINAL
from foredraft.drafters.common.feature_cache import DraftState
from foredraft.model.recording.replay import EAGER, Replay
from foredraft.model.recording.replay_rows import run_rows

T = TypeVar("T")


class LastHidden:
    """h_t for each row, where t is the token before the root: the final hidden state that produced the root.

    Args:
        replay: how steps run; a ``child`` of it runs the heads.
    """

    def __init__(self, replay: Replay = EAGER) -> None:
        self._states: dict[int, Tensor] = {}
        self._replay = replay.child()

    def fuse(self, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> dict[int, Float[Tensor, "1 F H"]]:
        """The last state of a part of a prompt; a copy, which does not keep the others alive."""
        return {FINAL: hidden[FINAL][:, -1:].clone()}

    def read_ahead(
        self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F H"]], kv_size: KVSize
    ) -> None:
        """Nothing: the head reads one state."""

    def fork(self, row: int, source: int, length: int) -> None:
        """Nothing, for the same reason."""

    def admit(self, row: int, hidden: Mapping[int, Float[Tensor, "1 F H"]]) -> None:
        """Add a row; a prompt of one token has no state yet."""
        states = hidden[FINAL]
        self._states[row] = states[0, -1] if states.shape[1] else states.new_full((states.shape[2],), torch.nan)

    def commit(self, view: View, verdict: Verdict, out: StepOut) -> None:
        """Store the states that produced the bonus tokens."""
        last = verdict.path.gather(1, verdict.accepted()[:, None])[..., None]
        states = out.hidden[FINAL]
        states = states.gather(1, last.expand(-1, 1, states.shape[2]))[:, 0]
        self._states.update(zip(view.rows, states.unbind(0), strict=True))

    def release(self, row: int) -> None:
        self._states.pop(row, None)

    def extend(self, view: View, tree_slots: int) -> DraftState:
        """The states of these rows; ``tree_slots`` is not needed."""
        states = torch.stack([self._states[row] for row in view.rows])[:, None]
        return DraftState(states.nan_to_num(), view.lengths > 1)

    def planned(self, plan: Plan) -> Plan:
        """See ``FeatureCache.planned``."""
        return self._replay.planned(plan)

    def run(self, segment: str, function: Callable[..., T], view: View, *arguments: Any) -> T:
        """See ``FeatureCache.run``."""
        rows = range(1 << (len(view.rows) - 1).bit_length())
        return run_rows(self._replay, rows, segment, function, view, *arguments)
