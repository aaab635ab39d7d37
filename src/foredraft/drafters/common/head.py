"""Base class of drafters with trained heads, which store the target's hidden states per row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, Needs, Room, StepOut, View
from foredraft.core.options import SizedOptions
from foredraft.drafters.common.feature_cache import DraftState

T = TypeVar("T")


@runtime_checkable
class HeadState(Protocol):
    """State of each row between steps."""

    def fuse(self, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> Mapping[int, Float[Tensor, "1 F G"]]:
        """See ``Drafter.fuse``."""
        ...

    def read_ahead(
        self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F G"]], room: Room
    ) -> None:
        """See ``Drafter.read_ahead``."""

    def fork(self, row: int, source: int, length: int) -> None:
        """See ``Drafter.fork``."""

    def admit(self, row: int, hidden: Mapping[int, Float[Tensor, "1 F G"]]) -> None:
        """Add a row with what ``fuse`` returned for its prompt."""

    def commit(self, view: View, verdict: Verdict, out: StepOut) -> None:
        """Store the target's states of the accepted path."""

    def release(self, row: int) -> None:
        """Remove a row."""

    def extend(self, view: View, room: int) -> DraftState:
        """The state that the head drafts from, with room for ``room`` nodes after it."""
        ...

    @property
    def records(self) -> bool:
        """Whether parts of drafts are recorded, so that their shapes should be few."""
        ...

    def run(self, segment: str, function: Callable[..., T], view: View, *arguments: Any) -> T:
        """``function(view, *arguments)`` for the rows of the last ``extend``, recorded if steps are; see
        ``replay_rows.run_rows``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions(SizedOptions):
    """Corrections of the head's config.

    rope_theta: base of the head's rotary positions, if its config is wrong.
    taps: hidden layers of the target that the head reads, such as 2x16x29, if missing or wrong in its files.
    """

    rope_theta: float | None = field(default=None, metadata={"unset": "from its config"})
    taps: tuple[int, ...] | None = field(default=None, metadata={"unset": "from its files"})


M = TypeVar("M", bound=HeadState)


class HeadDrafter(Drafter, Generic[M]):
    """A drafter whose head reads the target's hidden states. Subclasses implement ``propose``."""

    def __init__(self, state: M, needs: Needs) -> None:
        self._state = state
        self.needs = needs

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> Mapping[int, Float[Tensor, "1 F G"]]:
        return self._state.fuse(hidden)

    @torch.inference_mode()
    def read_ahead(
        self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F G"]], room: Room
    ) -> None:
        self._state.read_ahead(row, prompt, hidden, room)

    @torch.inference_mode()
    def fork(self, row: int, source: int, length: int) -> None:
        self._state.fork(row, source, length)

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._state.admit(row, hidden)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._state.commit(view, verdict, out)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        self._state.release(row)
