"""What the drafters on trained heads have in common: a memory of what the target computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, Needs, StepOut, View
from foredraft.core.options import SizedOptions
from foredraft.drafters.common.feature_cache import DraftState


@runtime_checkable
class HeadState(Protocol):
    """What is kept of each row between its steps."""

    def admit(self, row: int, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        """A text begins with these states of the target."""

    def commit(self, view: View, verdict: Verdict, out: StepOut) -> None:
        """Take what the target computed for the accepted path."""

    def release(self, row: int) -> None:
        """The text has ended."""

    def extend(self, view: View, room: int) -> DraftState:
        """What the head goes on from, with room for so many nodes behind it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions(SizedOptions):
    """How the head is read.

    rope_theta: base of the head's rotary positions, if its config is wrong.
    taps: hidden layers of the target that the head reads, such as 2x16x29, if its files are wrong or do not say.
    """

    rope_theta: float | None = field(default=None, metadata={"unset": "from its config"})
    taps: tuple[int, ...] | None = field(default=None, metadata={"unset": "from its files"})


M = TypeVar("M", bound=HeadState)


class HeadDrafter(Drafter, Generic[M]):
    """A drafter whose head goes on from what the target computed. Subclasses say how they ``propose``."""

    def __init__(self, memory: M, needs: Needs) -> None:
        self._memory = memory
        self.needs = needs

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._memory.admit(row, hidden)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._memory.commit(view, verdict, out)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        self._memory.release(row)
