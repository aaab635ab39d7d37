"""Base class of drafters that draft with several others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, KVSize, StepOut, View

Hidden = Mapping[int, Float[Tensor, "1 F G"]]


class CompositeDrafter(Drafter):
    """Keeps several drafters up to date; each gets the states that it reads. Subclasses implement ``propose``."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], hidden: Hidden, kv_size: KVSize) -> None:
        for drafter in self._drafters:
            drafter.read_ahead(row, prompt, drafter.fuse(drafter.needs.states(hidden)), kv_size)

    def fork(self, row: int, source: int, length: int) -> None:
        for drafter in self._drafters:
            drafter.fork(row, source, length)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Hidden) -> None:
        for drafter in self._drafters:
            drafter.admit(row, prompt, drafter.fuse(drafter.needs.states(hidden)))

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        for drafter in self._drafters:
            drafter.commit(view, draft, verdict, replace(out, hidden=drafter.needs.states(out.hidden)))

    def release(self, row: int) -> None:
        for drafter in self._drafters:
            drafter.release(row)
