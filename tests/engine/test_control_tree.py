"""The controller of scored trees: how many nodes, what a level must promise, and that it stops where nothing pays."""

import statistics

import pytest
import torch
from watched_rows import view

from foredraft.core.drafter import Plan
from foredraft.engine.control import Rest
from foredraft.engine.control_tree import CostAwareTree
from foredraft.engine.costs import CostTable
from foredraft.engine.step import RowStep, StepDone, round_up

GENTLE = CostTable((1, 64), (1.0, 7.3))
"""One second for a row, and a tenth for each one more."""


def run(
    controller: CostAwareTree, steps: int, ranks: tuple[int, ...], *, level: float, rows: int = 1, slow: float = 0.0
) -> list[Plan]:
    """The plans of some steps. The path through nodes of these ranks is the target's, as far as it is drafted; a level
    takes ``level`` seconds, and a step ``slow`` seconds more than its forward."""
    seen, plans = view(*range(rows)), []
    for _ in range(steps):
        plan = controller.plan(seen, [100] * rows)
        plans.append(plan)
        accepted = tuple(rank for rank in ranks if rank <= plan.nodes) if plan.length else ()
        nodes = plan.nodes if plan.length else 0
        levels = min(plan.length, nodes)
        result = RowStep([0] * (len(accepted) + 1), nodes, levels, len(accepted), True, accepted, refused=levels > 0)
        empty = torch.zeros(rows, 1, dtype=torch.long)
        verify = GENTLE(rows * round_up(1 + nodes)) + slow
        done = StepDone([result] * rows, empty, empty[:, 0], None, level * levels, verify, levels)
        controller.observe(seen, plan, done)
    return plans


def tree() -> CostAwareTree:
    return CostAwareTree(5, 31, GENTLE)


def usual(plans: list[Plan]) -> int:
    return statistics.mode(plan.nodes for plan in plans[-CostAwareTree.EXPLORE + 1 :])


@pytest.mark.parametrize(
    ("ranks", "nodes"), [((1, 2, 3), 3), ((1, 2, 6), 7), ((1, 3, 5, 30, 31), 5), (tuple(range(24, 32)), 31)]
)
def test_as_many_nodes_as_bring_the_most_a_second(ranks: tuple[int, ...], nodes: int):
    plans = run(tree(), 150, ranks, level=0.02)
    rates = {
        n: (1 + sum(r <= n for r in ranks)) / (GENTLE(1 + n) + 0.02 * min(n, 5)) for n in (1, 3, 5, 7, 11, 15, 23, 31)
    }
    assert usual(plans) == nodes == max(rates, key=lambda n: (rates[n], -n))
    assert all(plan.length == 5 for plan in plans[CostAwareTree.PLAIN : CostAwareTree.AGAIN])


def test_now_and_then_it_drafts_all_that_it_can():
    """The text has changed, and only a large tree shows it."""
    controller = tree()
    assert usual(run(controller, 150, (1, 2, 3), level=0.02)) == 3
    assert usual(run(controller, 600, (1, 2, *range(24, 32)), level=0.02)) == 31


def test_a_level_must_bring_what_its_time_would():
    plan = next(plan for plan in reversed(run(tree(), 150, (1, 2, 3), level=0.02)) if plan.level_worth)
    rate = 4 / (GENTLE(4) + 3 * 0.02)
    goes_on = 3 / 4  # three of four nodes that had a child had an accepted one
    assert plan.level_worth == pytest.approx(0.02 * rate / goes_on, rel=0.03)


def test_in_a_batch_nodes_cost_more_for_what_they_bring():
    assert usual(run(tree(), 150, (1, 2, 3, 6, 7), level=0.02)) == 7
    assert usual(run(tree(), 150, (1, 2, 3, 6, 7), level=0.02, rows=8)) == 3


def test_what_a_step_takes_over_its_forward_counts():
    """Larger trees share it among more tokens."""
    assert usual(run(tree(), 150, (1, 14), level=0.02)) == 1
    assert usual(run(tree(), 150, (1, 14), level=0.02, slow=3.0)) == 15


def test_it_rests_where_drafting_does_not_pay_and_tries_again():
    lengths = [plan.length for plan in run(tree(), 200, (), level=0.2)]
    assert all(lengths[CostAwareTree.PLAIN : CostAwareTree.PLAIN + CostAwareTree.SURE])
    assert 0 < sum(length > 0 for length in lengths[40:]) < 40, "it should rest, and try now and then"


def test_it_goes_on_when_a_trial_shows_that_it_pays_again():
    controller = tree()
    run(controller, 60, (), level=0.2)
    assert all(plan.length for plan in run(controller, 200, (1, 2, 3, 4, 5), level=0.01)[-50:])


def test_another_text_is_tried_soon_but_not_while_it_may_be_a_short_one():
    controller = tree()
    while controller.plan(view(0), [100]).length or not controller._resting:
        run(controller, 1, (), level=0.2)
    run(controller, Rest.FIRST + Rest.TRIAL + 2, (), level=0.2)  # its next rest is a longer one
    controller.release(0)
    lengths = [plan.length for plan in run(controller, Rest.FIRST + 1, (1, 2, 3, 4, 5), level=0.01)]
    assert not any(lengths[:3]) and any(lengths)


def test_a_text_that_ends_among_others_is_forgotten_quietly():
    """Else a busy server would begin anew at every end."""
    controller = tree()
    run(controller, 60, (), level=0.2, rows=4)
    controller.release(2)
    assert run(controller, 3, (), level=0.2, rows=4)[0].length == 0


def test_a_plain_step_is_timed_now_and_then():
    """It was slow at first, so that drafting seemed to pay."""
    controller = tree()
    run(controller, CostAwareTree.PLAIN, (1,), level=1.5, slow=20.0)
    plans = run(controller, 12 * CostAwareTree.AGAIN, (1,), level=1.5)
    assert plans[50].length and not all(plan.length for plan in plans[-50:])


def test_rows_that_do_not_draft_bring_one_token_each():
    controller = tree()
    run(controller, 60, (1, 2, 3), level=0.02, rows=8)
    everyone, alone = controller._best(8, 8), controller._best(8, 1)
    assert alone[1] < everyone[1] and alone[0] <= everyone[0]
    assert controller.plan(view(*range(8)), [0] * 8).length == 0


def test_no_row_drafts_more_than_it_can_use():
    controller = tree()
    run(controller, 10, (1, 2, 3), level=0.01, rows=3)
    assert controller.plan(view(0, 1, 2), [9, 2, 0]).lengths == (5, 2, 0)
