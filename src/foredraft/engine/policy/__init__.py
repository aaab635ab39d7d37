"""Policies decide how much is drafted in each step; ``policy_for`` makes the one for a method's options."""

from foredraft.core.draft import Law
from foredraft.core.drafter import Needs
from foredraft.core.errors import OptionError
from foredraft.core.options import DrafterOptions
from foredraft.core.sampling.params import check_known
from foredraft.engine.policy.base import Policy
from foredraft.engine.policy.fixed import Calibrated, Constant, Heuristic, OffFrom
from foredraft.engine.policy.throughput import NEUTRAL, Throughput

__all__ = [
    "NEUTRAL",
    "SCHEDULES",
    "Calibrated",
    "Constant",
    "Heuristic",
    "OffFrom",
    "Policy",
    "Throughput",
    "policy_for",
]

SCHEDULES = ("auto", "constant", "heuristic", "calibrated")


def policy_for(
    options: DrafterOptions, needs: Needs, *, off_from: int = 0, prior: float = NEUTRAL, any_width: bool = False
) -> Policy:
    """Make the policy for a method's options.

    Args:
        options: of the method.
        needs: of its drafter.
        off_from: draft nothing with this many rows or more; 0 is never.
        prior, any_width: see ``Throughput``.

    Raises:
        OptionError: the schedule is unknown or does not fit these drafts.
    """
    longest = needs.longest
    if not longest:
        return Constant(0)
    schedule = options.schedule
    check_known("num_assistant_tokens_schedule", {schedule: None}, SCHEDULES)
    confidence = options.confidence
    if schedule == "calibrated" and (options.law is not Law.CHAIN or not confidence):
        raise OptionError(
            "num_assistant_tokens_schedule=calibrated tunes assistant_confidence_threshold, so it needs a drafter of "
            "chains with a threshold above 0; use auto."
        )
    policies: dict[str, Policy] = {
        "constant": Constant(longest, confidence),
        "heuristic": Heuristic(longest, confidence, longest),
        "calibrated": Calibrated(longest, confidence),
        "auto": Throughput(needs, prior, any_width=any_width),
    }
    return OffFrom(policies[schedule], off_from) if off_from else policies[schedule]
