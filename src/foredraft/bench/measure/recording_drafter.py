"""A wrapper that records another drafter's drafts and their verdicts."""

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, KVSize, Plan, StepOut, View


class RecordingDrafter(Drafter):
    """Delegates every call to the inner drafter; subclasses record each step."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.needs = inner.needs

    def fuse(self, hidden: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        return self._inner.fuse(hidden)

    def read_ahead(self, row: int, prompt: Tensor, hidden: Mapping[int, Tensor], kv_size: KVSize) -> None:
        self._inner.read_ahead(row, prompt, hidden, kv_size)

    def fork(self, row: int, source: int, length: int) -> None:
        self._inner.fork(row, source, length)

    def admit(self, row: int, prompt: Tensor, hidden: Mapping[int, Tensor]) -> None:
        self._inner.admit(row, prompt, hidden)

    def propose(self, view: View, plan: Plan) -> Draft:
        return self._inner.propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._inner.commit(view, draft, verdict, out)
        self._record(view, draft, verdict, out)

    def release(self, row: int) -> None:
        self._inner.release(row)

    @abstractmethod
    def _record(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        """Record a step; called after the inner drafter's ``commit``."""
