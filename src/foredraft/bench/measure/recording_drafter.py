"""A wrapper that records another drafter's drafts and their verdicts."""

from abc import abstractmethod

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import StepOut, View
from foredraft.drafters.common.wrapper import DrafterWrapper


class RecordingDrafter(DrafterWrapper):
    """Subclasses record each step."""

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        super().commit(view, draft, verdict, out)
        self._record(view, draft, verdict, out)

    @abstractmethod
    def _record(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        """Record a step; called after the inner drafter's ``commit``."""
