"""The interface of policies, which decide how much is drafted in each step from past steps alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.core.drafter import Plan, View
from foredraft.engine.step import StepResult


class Policy(ABC):
    """Decides the plan of each step. Subclasses are final."""

    ahead: bool = False
    """Whether ``plan`` may be called for the next step before ``observe`` for this one."""

    @abstractmethod
    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        """The plan for the rows of ``view``; ``limits`` are the most draft tokens that each row can use."""

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:  # noqa: B027 - some learn nothing
        """Learn from the result of a planned step; called once for each step."""

    def release(self, row: int) -> None:  # noqa: B027 - some know no rows
        """Forget a row whose request has ended."""

    def state(self) -> dict[str, Any]:
        """What was learned, as values that JSON can hold; empty if nothing is."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most learn nothing
        """Start from the ``state`` of another policy. A state that does not fit, as with other sizes, is ignored.

        Raises:
            KeyError, TypeError, ValueError: it is not a state.
        """
