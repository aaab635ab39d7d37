"""Controllers: what they plan, from what they have seen, and that they stop where nothing pays."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from watched_rows import view

import tiny
from foredraft.core.draft import Law
from foredraft.core.drafter import Needs, Plan
from foredraft.engine.control import Apart, Constant, Controller, CostAware, Heuristic, Rest
from foredraft.engine.costs import CostTable, measure_costs
from foredraft.engine.schedule import scheduled
from foredraft.engine.step import RowStep, StepDone
from foredraft.model.causal import CausalLM

FLAT = CostTable((1, 16), (1.0, 1.0))
STEEP = CostTable((1, 16), (1.0, 16.0))


def done(*rows: tuple[int, int], seconds: float = 0.0) -> StepDone:
    """Rows of (drafted depth, accepted)."""
    steps = [RowStep([0] * (accepted + 1), depth, depth, accepted, True) for depth, accepted in rows]
    empty = torch.zeros(len(rows), 1, dtype=torch.long)
    return StepDone(steps, empty, empty[:, 0], None, seconds, 0.0)


def run(
    controller: Controller, steps: int, share: float, seconds: float = 0.0, rows: int = 1, temperature: float = 0.0
) -> list[int]:
    """Lengths planned over some steps in which this share of each draft is accepted."""
    lengths = []
    seen = view(*range(rows), temperature=temperature)
    for _ in range(steps):
        plan = controller.plan(seen, [100] * rows)
        lengths.append(plan.length)
        accepted = round(plan.length * share)
        controller.observe(seen, plan, done(*[(plan.length, accepted)] * rows, seconds=seconds * plan.length))
    return lengths


def test_constant_keeps_to_limits():
    plan = Constant(5, confidence=0.3).plan(view(0, 1, 2), [9, 2, 0])
    assert plan == Plan((5, 2, 0), 0.3) and plan.length == 5


def test_heuristic_is_transformers_schedule_row_by_row():
    controller = Heuristic(5)
    rows = view(3, 7)
    controller.observe(rows, controller.plan(rows, [99, 99]), done((5, 5), (5, 4)))
    assert controller.plan(rows, [99, 99]).lengths == (7, 4)
    controller.observe(rows, controller.plan(rows, [99, 99]), done((7, 0), (2, 2)))  # the second ended early, all taken
    assert controller.plan(rows, [99, 99]).lengths == (6, 6)
    controller.observe(rows, Plan((6, 0)), done((6, 6), (0, 0)))  # nothing was drafted for the second
    assert controller.plan(rows, [99, 99]).lengths == (8, 6)
    for _ in range(20):
        controller.observe(rows, controller.plan(rows, [99, 99]), done((5, 0), (5, 0)))
    assert controller.plan(rows, [99, 99]).lengths == (1, 1)
    controller.release(7)
    assert controller.plan(rows, [99, 99]).lengths == (1, 5)


def test_cost_aware_drafts_all_it_can_where_rows_are_free_and_right():
    assert run(CostAware(8, FLAT), 30, share=1.0)[-1] == 8


def test_cost_aware_stops_where_nothing_is_accepted_and_tries_again_ever_less():
    lengths = run(CostAware(8, FLAT), 2000, share=0.0, seconds=0.3)
    started = next(i for i, length in enumerate(lengths) if length == 0)
    assert started < 40
    trials = [i for i, length in enumerate(lengths) if length and i > started]
    assert 3 < len(trials) < 150  # never for good, but seldom
    gaps = [b - a for a, b in itertools.pairwise(trials) if b - a > 1]
    assert gaps == sorted(gaps) and max(gaps) <= CostAware.LONGEST_REST + 2


def test_cost_aware_comes_back_when_the_text_changes_and_with_a_new_text():
    controller = CostAware(8, FLAT)
    run(controller, 300, share=0.0, seconds=0.3)
    assert run(controller, 400, share=1.0, seconds=0.01)[-1] > 0
    controller = CostAware(8, FLAT)
    assert run(controller, 20, share=0.0, seconds=0.3)[-1] == 0
    controller.release(0)
    assert any(run(controller, Rest.FIRST + 1, share=0.0))


@pytest.mark.parametrize(("costs", "seconds"), [(STEEP, 0.0), (FLAT, 5.0)], ids=["dear rows", "dear draft"])
def test_cost_aware_weighs_costs(costs: CostTable, seconds: float):
    assert run(CostAware(8, costs), 60, share=0.7, seconds=seconds)[-1] == 0


def test_cost_aware_takes_the_best_length_of_the_formula():
    """With a_d = a everywhere and a draft of cost c the best length is theory's."""
    from foredraft.core.theory import best_length

    controller = CostAware(12, FLAT)
    generator = torch.Generator().manual_seed(0)
    seen = view(0)
    for _ in range(3000):
        plan = Plan((12,))
        accepted = int((torch.rand(12, generator=generator) < 0.7).long().cumprod(0).sum())
        controller.observe(seen, plan, done((12, accepted), seconds=12 * 0.1))
    assert abs(controller.best_length(1) - best_length(0.7, 0.1).length) <= 1


def test_greedy_and_sampled_batches_have_controllers_of_their_own():
    controller = Apart(CostAware(8, FLAT), Constant(3))
    assert controller.plan(view(0), [99]).length == 8
    assert controller.plan(view(0, temperature=1.0), [99]).length == 3
    controller = Apart(CostAware(8, FLAT), CostAware(8, FLAT))
    run(controller, 60, share=0.0, seconds=0.3)
    assert controller.plan(view(1), [99]).length == 0, "greedy drafts have failed"
    assert controller.plan(view(1, temperature=1.0), [99]).length == 8, "of sampled ones nothing is known"


def test_the_end_of_a_row_is_told_to_who_has_seen_it():
    controller = Apart(Heuristic(3), Heuristic(5))
    for temperature, row in ((0.0, 1), (1.0, 2)):
        rows = view(row, temperature=temperature)
        controller.observe(rows, controller.plan(rows, [99]), done((3 + 2 * (row - 1), 0)))
    controller.release(1)
    assert controller.plan(view(1), [99]).length == 3
    assert controller.plan(view(2, temperature=1.0), [99]).length == 4


@pytest.mark.parametrize(
    ("law", "real", "temperature", "adapts"),
    [
        (Law.CHAIN, None, 0.0, True),
        (Law.CHAIN, None, 1.0, False),
        (Law.FIXED, None, 1.0, True),
        (Law.CHAIN, Law.FIXED, 1.0, True),
        (Law.FIXED, Law.CHAIN, 1.0, False),
    ],
)
def test_auto_looks_at_the_clock_only_where_texts_cannot_depend_on_it(
    law: Law, real: Law | None, temperature: float, adapts: bool
):
    options = SimpleNamespace(num_assistant_tokens_schedule="auto", law=law)
    controller = scheduled(options, Needs((), 4, 4, law=real), lambda longest: STEEP, lossless=True)
    lengths = run(controller, 400, share=0.0, seconds=5.0, temperature=temperature)
    assert (0 in lengths) == adapts


def test_cost_table_reads_between_and_beyond():
    table = CostTable((1, 2, 4), (1.0, 1.0, 3.0))
    assert [table(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert CostTable((2,), (1.0,))(4) == 2.0


def test_costs_are_measured_and_rise():
    target = CausalLM(tiny.build("llama"))
    table = measure_costs(target, cached=16)
    assert (
        table.rows == (1, 2, 4, 6, 8, 12, 16) and table.seconds == tuple(sorted(table.seconds)) and table.seconds[0] > 0
    )
    assert measure_costs(target, cached=16, budget=0.0).rows == table.rows  # too slow for a second round: one will do
