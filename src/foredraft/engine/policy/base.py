"""What a policy is: it decides how much is drafted in each step, from the past alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.core.drafter import Plan, View
from foredraft.engine.step import StepDone


class Policy(ABC):
    """Decides the plan of each step. It never sees what is being drawn (non-anticipation). Subclasses are final."""

    @property
    def learns(self) -> bool:
        """Whether the plan of a sampled row may depend on other rows, on earlier requests, or on the clock."""
        return True

    @abstractmethod
    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        """The plan for the rows of ``view``; ``limits`` are the most tokens that each of them can still use."""

    @abstractmethod
    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        """The result of a step that was planned; called once for each."""

    @abstractmethod
    def release(self, row: int) -> None:
        """A request has ended and its row is free."""

    def state(self) -> dict[str, Any]:
        """What was learned, as values that JSON can hold; empty if nothing is."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most learn nothing
        """Start from the ``state`` of another policy. A state that does not fit, as with other sizes, is ignored.

        Raises:
            KeyError, TypeError, ValueError: it is not a state.
        """
