"""Base class of drafters with trained heads, which store the target's hidden states per row."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, KVSize, Needs, Plan, StepOut, View
from foredraft.drafters.common.dynamic_tree import TreeLimits
from foredraft.drafters.common.feature_cache import FeatureCache
from foredraft.drafters.common.last_hidden import LastHidden

S = TypeVar("S", bound=FeatureCache | LastHidden)


class HeadDrafter(Drafter, Generic[S]):
    """A drafter whose head reads the target's hidden states. Subclasses implement ``propose``.

    Args:
        state: of each row between steps, from which the head drafts.
    """

    def __init__(self, state: S, needs: Needs) -> None:
        self._state = state
        self.needs = needs

    def _within(self, limits: TreeLimits, plan: Plan) -> TreeLimits:
        """These limits and the plan's. A recorded draft has all levels, which are cheap, so that its shapes are few."""
        plan = self._state.planned(plan)
        own = limits.within(plan)
        return own._replace(depth=min(limits.depth, own.nodes)) if plan.recorded else own

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> Mapping[int, Float[Tensor, "1 F G"]]:
        return self._state.fuse(hidden)

    @torch.inference_mode()
    def read_ahead(
        self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F G"]], kv_size: KVSize
    ) -> None:
        self._state.read_ahead(row, prompt, hidden, kv_size)

    @torch.inference_mode()
    def fork(self, row: int, source: int, length: int) -> None:
        self._state.fork(row, source, length)

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 F G"]]) -> None:
        self._state.admit(row, hidden)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._state.commit(view, verdict, out)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        self._state.release(row)
