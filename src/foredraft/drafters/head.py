"""What the drafters on trained heads have in common: a memory of what the target computed, and scores."""

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, Needs, StepOut, View
from foredraft.core.warp import Warp
from foredraft.drafters.memory import Extended

SHARPEST = 0.8
"""The temperature at which a draft's law says best how often the target's likeliest token will be the draft's.

At temperature 1 a token is accepted about as often as the draft's probability for it says; a greedy target accepts
likely ones more often and unlikely ones less (docs/log.md, "How large a tree should be").
"""


@runtime_checkable
class Remembers(Protocol):
    """What is kept of each row between its steps."""

    def admit(self, row: int, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        """A text begins with these states of the target."""

    def commit(self, view: View, verdict: Verdict, out: StepOut) -> None:
        """Take what the target computed for the accepted path."""

    def release(self, row: int) -> None:
        """The text has ended."""

    def extend(self, view: View, room: int) -> Extended:
        """What the head goes on from, with room for so many nodes behind it."""
        ...


M = TypeVar("M", bound=Remembers)


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

    def release(self, row: int) -> None:
        self._memory.release(row)


def ranked(
    logits: Float[Tensor, "B F v"], count: int, warp: Warp
) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
    """The so many likeliest tokens after each of F nodes, best first, in the draft's own ids, and the logarithm of how
    likely each is to be accepted; numbers whatever the head computed, and none so low that a path's sum overflows."""
    least = torch.finfo(torch.float32).min / 64
    logits = logits.float().nan_to_num(nan=least, posinf=0.0, neginf=least)
    best = (logits / warp.temperature(SHARPEST)).log_softmax(-1).topk(min(count, logits.shape[-1]), dim=-1)
    return best.indices, best.values.clamp(min=least)
