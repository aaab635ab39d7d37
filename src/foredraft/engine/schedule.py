"""From what a method's options say about lengths to the controller that decides them."""

from collections.abc import Callable, Sequence
from typing import Any

from foredraft.core.draft import Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.params import check_known
from foredraft.engine.allowance import Allowance
from foredraft.engine.control import Apart, Constant, Controller, CostAware, Heuristic
from foredraft.engine.control_dynamic import Calibrated, Goodput
from foredraft.engine.control_tree import CostAwareTree
from foredraft.engine.costs import CostTable, measure_costs
from foredraft.engine.step import StepDone
from foredraft.model.causal import CausalLM

SCHEDULES = ("auto", "constant", "cost", "heuristic", "calibrated", "goodput")


class Costs:
    """What forwards of a target cost, measured when somebody first wants to know."""

    def __init__(self, target: CausalLM) -> None:
        self._target = target
        self._tables: dict[int, CostTable] = {}

    def __call__(self, longest: int) -> CostTable:
        """The table for up to so many rows."""
        if longest not in self._tables:
            self._tables[longest] = measure_costs(self._target, longest=longest)
        return self._tables[longest]


class Below(Controller):
    """Another controller's plans while fewer than ``rows`` rows are in flight, and none from there on. Where a text may
    depend on what was drafted for it, hence on who shares its batch, the plans are never changed; see ``scheduled``."""

    def __init__(self, inner: Controller, rows: int, picked: bool) -> None:
        self._inner = inner
        self._rows = rows
        self._picked = picked

    @property
    def learns(self) -> bool:
        return self._inner.learns

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        if len(view.rows) >= self._rows and (self._picked or view.warp.greedy):
            return Plan((0,) * len(view.rows))
        return self._inner.plan(view, limits)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        self._inner.observe(view, plan, done)

    def release(self, row: int) -> None:
        self._inner.release(row)


def scheduled(
    options: Any, needs: Needs, costs: Callable[[int], CostTable], lossless: bool, off_from: int = 0
) -> Controller:
    """The controller that ``options`` ask for.

    Args:
        options: of a method: ``num_assistant_tokens_schedule``, ``law``, and perhaps a confidence threshold.
        needs: of its drafter.
        costs: the table of what forwards cost, for up to so many rows; see ``Costs``.
        lossless: the rule of verification keeps the law, so that a text cannot depend on what picked drafts it was
            offered.
        off_from: with so many rows, or more, nothing is drafted, where a text cannot depend on it; 0 is never.

    Raises:
        OptionError: an unknown schedule, or one that is not for such drafts.
    """
    longest = needs.longest
    if not longest:
        return Constant(0)
    schedule = options.num_assistant_tokens_schedule
    check_known("num_assistant_tokens_schedule", {schedule: None}, SCHEDULES)
    confidence = getattr(options, "assistant_confidence_threshold", 0.0)
    picked = (needs.law or options.law) is Law.FIXED and lossless
    constant = Constant(longest, confidence)
    if schedule == "constant":
        chosen: Controller = constant
    elif schedule == "heuristic":
        chosen = Heuristic(longest, confidence, longest)
    else:
        sampled = constant if schedule == "auto" and not picked else _by_the_clock(schedule, options, needs, costs)
        chosen = Apart(_by_the_clock(schedule, options, needs, costs), sampled)
    return Below(chosen, off_from, picked) if off_from else chosen


def _by_the_clock(schedule: str, options: Any, needs: Needs, costs: Callable[[int], CostTable]) -> Controller:
    """A controller that weighs what forwards cost, and may not lose much."""
    longest, confidence = needs.longest, getattr(options, "assistant_confidence_threshold", 0.0)
    table = costs(64)
    if schedule == "calibrated":
        if options.law is not Law.CHAIN or not confidence:
            raise OptionError(
                "num_assistant_tokens_schedule=calibrated chooses an assistant_confidence_threshold, so it is for "
                "drafters of chains that have one which is not 0; take cost or auto."
            )
        return Allowance(Calibrated(longest, table), table)
    if needs.scored:
        return Allowance(CostAwareTree(longest, needs.max_nodes, table), table)
    kind = Goodput if schedule == "goodput" else CostAware
    return Allowance(kind(longest, table, confidence), table)
