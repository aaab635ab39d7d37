"""The controller of scored trees: what a node and a level must promise, and that it stops where nothing pays."""

import pytest
import torch

from foredraft.core.drafter import Plan, View
from foredraft.core.noise import Noise
from foredraft.core.params import SamplingParams
from foredraft.core.warp import Warp
from foredraft.engine.control import CostAwareTree
from foredraft.engine.costs import CostTable
from foredraft.engine.step import RowStep, StepDone

GENTLE = CostTable((1, 64), (1.0, 7.3))
"""One second for a row, and a tenth for each one more."""


def view(*rows: int) -> View:
    lengths = torch.full((len(rows),), 4)
    warp = Warp.of(
        [SamplingParams()] * len(rows),
        vocab_size=8,
        eos_token_ids=[()] * len(rows),
        prompt_lengths=[4] * len(rows),
        device="cpu",
    )
    history = torch.zeros(len(rows), 4, dtype=torch.long)
    return View(rows, history, lengths, (4,) * len(rows), warp, Noise(lengths, lengths))


def run(controller: CostAwareTree, steps: int, accepted: int, *, level: float, nodes: int = 10, rows: int = 1) -> Plan:
    """The last plan of some steps in which so many tokens of each draft were accepted; ``level`` seconds a level."""
    seen, plan = view(*range(rows)), Plan(())
    for _ in range(steps):
        plan = controller.plan(seen, [100] * rows)
        if plan.length:
            results = [RowStep([0] * (accepted + 1), nodes, plan.length, accepted, True)] * rows
            verify = GENTLE(rows * (1 + nodes))
        else:
            results, verify = [RowStep([0], 0, 0, 0, True)] * rows, GENTLE(rows)
        empty = torch.zeros(rows, 1, dtype=torch.long)
        done = StepDone(results, empty, empty[:, 0], None, level * plan.length, verify)
        controller.observe(seen, plan, done)
    return plan


def test_a_node_and_a_level_must_bring_what_their_time_would():
    plan = run(CostAwareTree(5, GENTLE), 60, accepted=3, level=0.05)
    rate = 4 / (GENTLE(11) + 5 * 0.05)  # tokens a second
    assert plan.length == 5
    assert plan.node_worth == pytest.approx(0.1 * rate, rel=0.02)
    assert plan.level_worth == pytest.approx(0.05 * rate, rel=0.02)


def test_in_a_batch_a_row_of_the_forward_is_worth_as_much_as_all_texts_together_bring():
    alone = run(CostAwareTree(5, GENTLE), 60, accepted=3, level=0.05)
    together = run(CostAwareTree(5, GENTLE), 60, accepted=5, level=0.05, rows=4)
    rate = 24 / (GENTLE(44) + 5 * 0.05)
    assert together.node_worth == pytest.approx(0.1 * rate, rel=0.02)
    assert together.node_worth > alone.node_worth


def test_it_rests_where_drafting_does_not_pay_and_tries_again():
    controller = CostAwareTree(5, GENTLE)
    lengths = [run(controller, 1, accepted=0, level=0.2).length for _ in range(200)]
    assert all(lengths[: CostAwareTree.SURE])
    assert 0 < sum(length > 0 for length in lengths[40:]) < 40, "it should rest, and try now and then"


def test_it_goes_on_when_a_trial_shows_that_it_pays_again():
    controller = CostAwareTree(5, GENTLE)
    run(controller, 60, accepted=0, level=0.2)
    lengths = [run(controller, 1, accepted=5, level=0.01).length for _ in range(200)]
    assert all(lengths[-50:])


def test_another_text_is_tried_at_once():
    controller = CostAwareTree(5, GENTLE)
    run(controller, 60, accepted=0, level=0.2)
    controller.release(0)
    assert run(controller, 1, accepted=5, level=0.01).length == 5


def test_no_row_drafts_more_than_it_can_use():
    plan = CostAwareTree(5, GENTLE).plan(view(0, 1, 2), [9, 2, 0])
    assert plan.lengths == (5, 2, 0)
