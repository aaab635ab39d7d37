"""Policies without a clock, the options that ask for a policy, and what the engine tells it."""

import random

import pytest
import torch
from policy_sim import view

import runs
import tiny
from foredraft.bench.check import draft_always
from foredraft.compose.load import load
from foredraft.core.draft import Law
from foredraft.core.drafter import Needs, Plan
from foredraft.core.errors import OptionError
from foredraft.core.options import DrafterOptions
from foredraft.core.worth import DraftNodes
from foredraft.engine.cost_model import CostTable, measure_costs
from foredraft.engine.policy import Calibrated, Constant, Heuristic, OffFrom, Policy, Throughput, policy_for
from foredraft.engine.policy.fixed import best_threshold
from foredraft.engine.step import RowStep, StepResult
from foredraft.engine.tail import StepEnd


def done(*rows: tuple[int, int], scores: tuple[float, ...] = ()) -> StepResult:
    """Rows of (drafted depth, accepted)."""
    nodes = DraftNodes(range(-1, len(scores)), (0.0, *scores))
    steps = [RowStep([0] * (accepted + 1), depth, depth, accepted, True, nodes=nodes) for depth, accepted in rows]
    return StepResult(steps, StepEnd.known(steps, 1), None, 0.0, 0.0)


def test_constant_keeps_to_limits():
    plan = Constant(5, confidence=0.3).plan(view(0, 1, 2), [9, 2, 0])
    assert plan == Plan((5, 2, 0), 0.3) and plan.length == 5
    assert Constant(5, nodes=7).plan(view(0), [9]) == Plan((5,), nodes=7)


def test_heuristic_is_transformers_schedule_row_by_row():
    policy = Heuristic(5)
    rows = view(3, 7)
    policy.observe(rows, policy.plan(rows, [99, 99]), done((5, 5), (5, 4)))
    assert policy.plan(rows, [99, 99]).lengths == (7, 4)
    policy.observe(rows, policy.plan(rows, [99, 99]), done((7, 0), (2, 2)))  # the second ended early, all taken
    assert policy.plan(rows, [99, 99]).lengths == (6, 6)
    policy.observe(rows, Plan((6, 0)), done((6, 6), (0, 0)))  # nothing was drafted for the second
    assert policy.plan(rows, [99, 99]).lengths == (8, 6)
    for _ in range(20):
        policy.observe(rows, policy.plan(rows, [99, 99]), done((5, 0), (5, 0)))
    assert policy.plan(rows, [99, 99]).lengths == (1, 1)
    policy.release(7)
    assert policy.plan(rows, [99, 99]).lengths == (1, 5)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_threshold_is_the_one_with_the_least_cost(seed: int):
    chance = random.Random(seed)
    seen = [(round(chance.random(), 1), chance.random() < 0.6) for _ in range(40)]
    accepted = sum(right for _, right in seen)

    def cost(threshold: float) -> float:
        wrong = sum(not right for p, right in seen if p >= threshold) / (len(seen) - accepted)
        return wrong + 3.0 * sum(right for p, right in seen if p < threshold) / accepted

    found = best_threshold(seen, 3.0)
    assert found in {p for p, _ in seen}
    assert cost(found) == pytest.approx(min(cost(p) for p, _ in seen))
    assert best_threshold([(0.5, True)] * 3, 3.0) == 0.0


def test_calibrated_moves_the_threshold_to_where_results_part():
    policy = Calibrated(4, 0.9)
    assert policy.plan(view(0), [99]) == Plan((4,), 0.9)
    for _ in range(10):  # tokens of 0.6 are accepted, the one of 0.2 after them is not, and what follows is unknown
        scores = tuple(torch.tensor([0.6, 0.6, 0.2, 0.99]).log().cumsum(0).tolist())
        policy.observe(view(0), policy.plan(view(0), [99]), done((4, 2), scores=scores))
    plan = policy.plan(view(0), [2])
    assert plan.lengths == (2,) and plan.confidence == pytest.approx(0.6, abs=1e-6)


def option(schedule: str, law: Law = Law.CHAIN, confidence: float = 0.0) -> DrafterOptions:
    class Options(DrafterOptions):
        pass

    Options.schedule, Options.law, Options.confidence = schedule, law, confidence  # type: ignore[assignment]
    return Options()


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("auto", Throughput), ("constant", Constant), ("heuristic", Heuristic), ("calibrated", Calibrated)],
)
def test_schedules_have_their_policies(schedule: str, kind: type[Policy]):
    assert isinstance(policy_for(option(schedule, confidence=0.4), Needs(max_nodes=4)), kind)
    assert isinstance(policy_for(option(schedule, confidence=0.4), Needs(max_nodes=4), off_from=2), OffFrom)
    assert isinstance(policy_for(option(schedule), Needs()), Constant), "there is nothing to decide"


@pytest.mark.parametrize("schedule", ["never", "cost", "goodput"])
def test_unknown_schedules_are_a_sentence(schedule: str):
    with pytest.raises(
        OptionError, match=rf"Unknown num_assistant_tokens_schedule '{schedule}'.*auto, calibrated, constant"
    ):
        policy_for(option(schedule), Needs(max_nodes=4))


def test_calibrated_is_for_chains_with_a_threshold():
    for options in (option("calibrated", Law.FIXED, 0.4), option("calibrated")):
        with pytest.raises(OptionError, match="chains with a threshold"):
            policy_for(options, Needs(max_nodes=4))


def test_the_engine_tells_the_whole_time_of_each_step():
    policy = tiny.ScriptedPolicy(lambda view, limits: Plan((1,) * len(limits)))
    drafter, _ = tiny.draft_model(runs.model(), runs.model())
    result = tiny.generator(runs.model(), drafter, policy).generate(tiny.prompts((5,))[0], max_new_tokens=6)
    seen = [done for _, done in policy.observed]
    assert all(min(done.draft_seconds, done.verify_seconds, done.host_seconds) > 0 for done in seen)
    steps = sum(done.draft_seconds + done.verify_seconds + done.host_seconds for done in seen)
    assert steps <= result.stats.seconds - result.stats.prefill_seconds


def test_what_a_generator_has_learned_stays():
    generator = load("sample", "eagle3", device="cpu")
    for _ in range(2):
        generator.generate("one two three one two", max_new_tokens=24, eos_token_id=())
    policy = generator.engine.policy
    assert isinstance(policy, Throughput)
    state = policy.state()
    assert state["paces"]["1/0"]["forward"]["1"] > 0 and state["weights"]["0"] != [0.0, 1.0, 0.0, 0.0]
    generator.close()


def test_a_check_drafts_always_and_leaves_what_was_asked_for():
    generator = load("sample", "draft_model,num_assistant_tokens=3", device="cpu")
    draft_always(generator)
    assert generator.engine.policy.plan(view(0), [9]) == Plan((3,))
    generator.engine.policy = asked = Heuristic(2)
    draft_always(generator)
    assert generator.engine.policy is asked
    generator.close()


def test_cost_table_reads_between_and_beyond():
    table = CostTable((1, 2, 4), (1.0, 1.0, 3.0))
    assert [table(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert CostTable((2,), (1.0,))(4) == 2.0


def test_costs_are_measured_and_rise():
    table = measure_costs(runs.model(), cached=16)
    assert table.rows == (1, 2, 4, 6, 8, 12, 16)
    assert table.seconds == tuple(sorted(table.seconds)) and table.seconds[0] > 0
    quick = measure_costs(runs.model(), cached=16, budget=0.0)  # too slow for a second round: one will do
    assert quick.rows == table.rows
