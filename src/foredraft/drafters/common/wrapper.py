"""Base class of drafters that wrap another one."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, KVSize, Plan, StepOut, View

Hidden = Mapping[int, Tensor]


class DrafterWrapper(Drafter):
    """Passes every call on to the inner drafter."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.needs = inner.needs

    @property
    def name(self) -> str:
        return self._inner.name

    def fuse(self, hidden: Hidden) -> Hidden:
        return self._inner.fuse(hidden)

    def read_ahead(self, row: int, prompt: Tensor, hidden: Hidden, kv_size: KVSize) -> None:
        self._inner.read_ahead(row, prompt, hidden, kv_size)

    def fork(self, row: int, source: int, length: int) -> None:
        self._inner.fork(row, source, length)

    def admit(self, row: int, prompt: Tensor, hidden: Hidden) -> None:
        self._inner.admit(row, prompt, hidden)

    def copies(self, view: View, limits: Sequence[int]) -> tuple[int, ...]:
        return self._inner.copies(view, limits)

    def propose(self, view: View, plan: Plan) -> Draft:
        return self._inner.propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._inner.commit(view, draft, verdict, out)

    def release(self, row: int) -> None:
        self._inner.release(row)
