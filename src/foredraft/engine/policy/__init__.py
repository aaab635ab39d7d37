"""Policies: how much is drafted in each step. ``policy_for`` makes the one that a method's options ask for."""

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
    options: DrafterOptions, needs: Needs, *, lossless: bool = True, off_from: int = 0, prior: float = NEUTRAL
) -> Policy:
    """The policy that ``options`` ask for.

    Args:
        options: of a method.
        needs: of its drafter.
        lossless: the rule of verification keeps the law, so that no output depends on which picked drafts it was
            offered.
        off_from: with so many rows, or more, nothing is drafted; 0 is never. Constant and heuristic lengths of drawn
            drafts stay as they are, since these make an output reproducible.
        prior: see ``Throughput``.

    Raises:
        OptionError: an unknown schedule, or one that is not for such drafts.
    """
    longest = needs.longest
    if not longest:
        return Constant(0)
    schedule = options.schedule
    check_known("num_assistant_tokens_schedule", {schedule: None}, SCHEDULES)
    confidence = options.confidence
    if schedule == "calibrated" and (options.law is not Law.CHAIN or not confidence):
        raise OptionError(
            "num_assistant_tokens_schedule=calibrated chooses an assistant_confidence_threshold, so it is for drafters "
            "of chains that have one which is not 0; take auto."
        )
    made: dict[str, Policy] = {
        "constant": Constant(longest, confidence),
        "heuristic": Heuristic(longest, confidence, longest),
        "calibrated": Calibrated(longest, confidence),
        "auto": Throughput(needs, confidence, prior),
    }
    picked = (needs.law or options.law) is Law.FIXED and lossless
    return OffFrom(made[schedule], off_from, picked or schedule == "auto") if off_from else made[schedule]
