"""Drafts that are launched before the last step was read back, so that the device drafts while the host ends a step.

Such a draft does not know how many tokens the last step has appended: ``View.host_lengths`` are upper bounds. Its plan
is made without the last step's results. It is dropped if the batch changes before it is verified.
"""

from foredraft.core.drafter import Plan, View
from foredraft.engine.policy import Policy
from foredraft.engine.request import Sequence
from foredraft.engine.state import Batch
from foredraft.engine.step import Drafted, Launched, Stepper
from foredraft.model.prefill import CATCH_UP

_CUT = 8
"""Drafts are made ahead unless more than one row in this many may be near its end, where its draft would be shorter
than necessary."""


class Ahead:
    """Keeps the draft that was made for the next step.

    Args:
        on: whether drafts are made ahead. On a CPU they would gain nothing, since work is done when it is launched; the
            processes of a tensor-parallel target agree on each plan before its step.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self._kept: tuple[tuple[Sequence, ...], Drafted] | None = None

    def take(self, sequences: tuple[Sequence, ...]) -> Drafted | None:
        """The draft for a step of these sequences, if there is one."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] == sequences else None

    def drop(self) -> None:
        """Forget the draft."""
        self._kept = None

    def draft(self, stepper: Stepper, batch: Batch, policy: Policy, launched: Launched) -> None:
        """Launch the draft of the next step of the batch behind this one, whose tokens the host does not know yet.

        Nothing is drafted if the drafter or the policy needs the last step's results, a row has a grammar, or a request
        records its steps, which are read back later.
        """
        if self.on and stepper.drafter.needs.ahead and policy.ahead:
            planned = self._planned(stepper, batch, policy, launched)
            self._kept = planned and (batch.sequences, stepper.propose(*planned))

    def _planned(self, stepper: Stepper, batch: Batch, policy: Policy, launched: Launched) -> tuple[View, Plan] | None:
        """The next step's view and plan, if it is drafted ahead."""
        sequences, width = batch.sequences, launched.width
        if any(each.params.record_steps or each.matcher is not None for each in sequences):
            return None
        context, longest = stepper.target.max_length, stepper.drafter.needs.longest
        limits = [each.draft_limit(context, width) for each in sequences]
        full = [min(each.draft_limit(context), longest) for each in sequences]
        cut = sum(limit < most for limit, most in zip(limits, full, strict=True))
        if _CUT * cut > len(limits) or 2 * width > CATCH_UP:
            return None
        view = batch.view(launched.inputs.view.kv_size, width)
        return view, policy.plan(view, limits)
