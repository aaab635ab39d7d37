"""From what a method's options say about lengths to the controller that decides them."""

from typing import Any

from foredraft.core.draft import Law
from foredraft.core.drafter import Needs
from foredraft.core.params import check_known
from foredraft.engine.control import Auto, Constant, Controller, CostAware, Heuristic
from foredraft.engine.control_tree import CostAwareTree
from foredraft.engine.costs import CostTable, measure_costs
from foredraft.model.causal import CausalLM

SCHEDULES = ("auto", "constant", "cost", "heuristic")


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


def scheduled(options: Any, needs: Needs, costs: Costs, lossless: bool) -> Controller:
    """The controller that ``options`` ask for.

    Args:
        options: of a method: ``num_assistant_tokens_schedule``, ``law``, and perhaps a confidence threshold.
        needs: of its drafter.
        lossless: the rule of verification keeps the law, so that a text cannot depend on what picked drafts it was
            offered.

    Raises:
        OptionError: an unknown schedule.
    """
    longest = needs.longest
    if not longest:
        return Constant(0)
    schedule = options.num_assistant_tokens_schedule
    check_known("num_assistant_tokens_schedule", {schedule: None}, SCHEDULES)
    confidence = getattr(options, "assistant_confidence_threshold", 0.0)
    constant = Constant(longest, confidence)
    if schedule == "constant":
        return constant
    if schedule == "heuristic":
        return Heuristic(longest, confidence)
    cost_aware: Controller
    if needs.scored:
        cost_aware = CostAwareTree(longest, needs.max_nodes, costs(64))
    else:
        cost_aware = CostAware(longest, costs(16), confidence)
    if schedule == "cost":
        return cost_aware
    return Auto(constant, cost_aware, options.law is Law.FIXED and lossless)
