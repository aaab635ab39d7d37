"""Base class of drafters around another one."""

from collections.abc import Sequence

from foredraft.core.draft import Draft
from foredraft.core.drafter import Drafter, Plan, RowState, View


class DrafterWrapper(Drafter):
    """Drafts what the inner drafter does.

    Args:
        states: what it keeps of rows itself.
    """

    def __init__(self, inner: Drafter, *states: RowState) -> None:
        super().__init__(inner.needs, inner, *states)
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def copies(self, view: View, limits: Sequence[int]) -> tuple[int, ...]:
        return self._inner.copies(view, limits)

    def propose(self, view: View, plan: Plan) -> Draft:
        return self._inner.propose(view, plan)
