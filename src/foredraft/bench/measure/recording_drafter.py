"""A drafter around another that looks at what became of its drafts, and changes nothing."""

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, Plan, StepOut, View


class Onlooker(Drafter):
    """Passes everything on. Subclasses say what they see."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.needs = inner.needs

    def admit(self, row: int, prompt: Tensor, hidden: Mapping[int, Tensor]) -> None:
        self._inner.admit(row, prompt, hidden)

    def propose(self, view: View, plan: Plan) -> Draft:
        return self._inner.propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._inner.commit(view, draft, verdict, out)
        self._see(draft, verdict)

    def release(self, row: int) -> None:
        self._inner.release(row)

    @abstractmethod
    def _see(self, draft: Draft, verdict: Verdict) -> None:
        """What was drafted in a step, and what was accepted of it; the inner drafter has been told."""
