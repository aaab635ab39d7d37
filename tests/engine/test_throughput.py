"""The throughput policy: near the best fixed size, little lost where nothing pays, and quick where things change."""

import json
import random
from dataclasses import replace
from statistics import mean

import pytest
from policy_sim import EMPTY, World, chain, ending, fixed, matching, mean_step, run, tree, view

from foredraft.core.drafter import Needs, Plan
from foredraft.engine.policy import Throughput
from foredraft.engine.policy.estimates import Timings
from foredraft.engine.step import RowStep, StepDone

CHAIN, TREE = Needs(max_nodes=8), Needs(max_nodes=23, max_depth=6, scored=True)
STEPS = 2000
PAYS = {
    "cheap draft": World(CHAIN, chain(0.8), lambda size, rows: 1 + 0.08 * size),
    "dear draft": World(CHAIN, chain(0.8), lambda size, rows: 1 + 0.3 * size),
    "short": World(CHAIN, chain(0.6), lambda size, rows: 1 + 0.15 * size),
    "good tree": World(TREE, tree(0.7), lambda size, rows: 1 + (0.4 + 0.03 * size if size else 0)),
}
ENDS = {
    "confident": World(
        CHAIN, chain(0.82), lambda size, rows: 1 + (0.1 + 0.06 * size if size else 0), reach=ending(0.75)
    ),
    "doubtful": World(CHAIN, chain(0.65), lambda size, rows: 1 + (0.2 + 0.15 * size if size else 0), reach=ending(0.6)),
    "few matches": World(CHAIN, chain(0.6), lambda size, rows: 1 + 0.04 * size, reach=matching(0.2)),
}
"""Chains that end before their size."""
LOSES = {
    "as dear as two": World(CHAIN, chain(0.3), lambda size, rows: 1 + (1 + 0.3 * size if size else 0)),
    "never accepted": World(CHAIN, chain(0.05), lambda size, rows: 1 + 0.6 * size),
    "bad tree": World(TREE, tree(0.3), lambda size, rows: 1 + (0.8 + 0.05 * size if size else 0)),
    "break even": World(CHAIN, chain(0.5), lambda size, rows: 1 + 0.5 * size),
}


def expected(world: World, sizes: list[int]) -> float:
    """Tokens a second of steps of these sizes, without the luck of their draws and their clock."""
    means = {size: mean_step(world, size) for size in set(sizes)}
    tokens, seconds = (sum(each) for each in zip(*(means[size] for size in sizes), strict=True))
    return tokens / seconds


def share_of_best(world: World, seeds: int = 2) -> float:
    """The mean of some new policies' tokens a second, as a share of those of the best fixed size."""
    found = [sizes_of(world, seed) for seed in range(seeds)]
    top = max(fixed(world, size) for size in Throughput(world.needs).state()["sizes"])
    return sum(expected(world, each) for each in found) / len(found) / top


def sizes_of(world: World, seed: int) -> list[int]:
    """The sizes of a new policy's steps."""
    mine = replace(world, chance=random.Random(seed))
    return run(Throughput(mine.needs), mine, STEPS).sizes


@pytest.mark.parametrize("name", PAYS)
def test_it_is_near_the_best_fixed_size(name: str):
    assert share_of_best(PAYS[name]) > 0.97


@pytest.mark.parametrize("name", LOSES)
def test_drafts_that_do_not_pay_lose_little(name: str):
    """Where the trials are: at first, and ever after a small share of the time."""
    world = LOSES[name]
    sizes = sizes_of(world, 0)
    assert expected(world, sizes) / fixed(world, 0) > 0.97
    assert any(sizes[STEPS // 2 :]), "it should go on trying"


@pytest.mark.parametrize("name", [*PAYS, *LOSES])
def test_noisy_times_are_tolerated(name: str):
    assert share_of_best(replace((PAYS | LOSES)[name], noise=0.1, spikes=0.05)) > 0.96


@pytest.mark.parametrize("name", ENDS)
def test_chains_that_end_early_are_as_long_as_pays(name: str):
    assert share_of_best(replace(ENDS[name], noise=0.2)) > 0.97


def test_steps_are_timed_by_what_their_drafts_reached():
    timings = Timings((0, 1, 2, 3))
    for _ in range(50):
        timings.add(0, 0, 1.0)
        timings.add(3, 1, 1.1)
        timings.add(3, 3, 1.3)
    timings.estimate()
    assert timings.estimates == pytest.approx([1.0, 1.1, 1.15, 1.2], abs=0.01), "half of the longer ones end at 1"
    assert [timings.known(i) for i in range(4)] == [True, False, False, True]
    for _ in range(200):
        timings.add(2, None, 1.02)
    timings.estimate()
    assert timings.estimates[1:] == pytest.approx([1.02] * 3, abs=0.05), "now nearly all have no token"


def test_rows_count():
    """Eight rows make nodes dear; the sizes of eight are not those of one."""
    world = World(TREE, tree(0.6), lambda size, rows: 1 + 0.02 * rows + (0.2 + 0.03 * size * rows if size else 0))
    policy = Throughput(TREE)
    alone, together = run(policy, world, 800).sizes[-200:], run(policy, world, 800, rows=8).sizes[-200:]
    assert mean(alone) > 3 and mean(together) < 1
    assert mean(run(policy, world, 100).sizes) > 3, "what is known of one row is still known"


def test_another_temperature_is_another_matter():
    policy, good, bad = Throughput(CHAIN), PAYS["cheap draft"], LOSES["never accepted"]
    run(policy, replace(bad, temperature=1.0), 600)
    assert mean(run(policy, good, 300).sizes[-100:]) > 3
    assert mean(run(policy, replace(bad, temperature=1.0), 100).sizes) < 1


def test_it_follows_a_change_of_topic():
    cost = PAYS["cheap draft"].cost
    bad, good = World(CHAIN, chain(0.02), cost), World(CHAIN, chain(0.85), cost)
    policy = Throughput(CHAIN)
    assert mean(run(policy, bad, 600).sizes[-200:]) < 1
    assert mean(run(policy, good, 600).sizes[-200:]) > 4
    assert mean(run(policy, bad, 400).sizes[-200:]) < 1


def test_it_follows_a_machine_that_becomes_slow_at_drafting():
    policy, fast = Throughput(CHAIN), PAYS["cheap draft"]
    slow = replace(fast, cost=lambda size, rows: 1 + 1.2 * size)
    assert mean(run(policy, fast, 300).sizes[-100:]) > 3
    assert mean(run(policy, slow, 300).sizes[-100:]) < 1


def test_what_it_takes_to_begin_counts():
    """A draft model that reads a long prompt first, for requests that are soon over."""
    world = replace(PAYS["dear draft"], life=10)
    assert mean(run(Throughput(CHAIN), world, STEPS).sizes[-500:]) > 1
    assert mean(run(Throughput(CHAIN), replace(world, start=60.0), STEPS).sizes[-500:]) < 0.5


def test_a_good_drafter_drafts_after_a_few_plain_steps_and_at_once_where_it_is_known():
    policy, world = Throughput(CHAIN), PAYS["cheap draft"]
    assert all(run(policy, world, 20).sizes[8:])
    run(policy, world, 400)
    again = Throughput(CHAIN)
    again.restore(json.loads(json.dumps(policy.state())))
    assert all(run(again, world, 20).sizes)
    other = Throughput(TREE)
    other.restore(policy.state())
    assert other.state()["accepted"] == {}, "it has other sizes"


def test_a_file_that_says_little_is_accepted_makes_smaller_first_drafts():
    first = {}
    for prior in (0.0, 0.2, 0.9):
        world = replace(PAYS["dear draft"], chance=random.Random(0))
        first[prior] = next(size for size in run(Throughput(CHAIN, prior=prior), world, 20).sizes if size)
    assert first[0.0] <= first[0.2] < first[0.9]


def test_rows_get_no_more_than_they_can_use():
    policy = Throughput(CHAIN)
    run(policy, PAYS["cheap draft"], 300, rows=3)
    plan = policy.plan(view(0, 1, 2), [9, 2, 0])
    assert plan.lengths[0] > 2 and plan.lengths[1:] == (2, 0)
    assert policy.plan(view(0, 1, 2), [0, 0, 0]) == Plan((0, 0, 0))


def test_another_level_must_bring_what_its_time_would_elsewhere():
    policy = Throughput(TREE)
    run(policy, PAYS["good tree"], 400)
    plan = policy.plan(view(0), [100])
    assert plan.nodes and 0 < plan.level_worth <= 0.9


def test_a_step_of_a_minute_is_not_owed_for_ever():
    policy, world = Throughput(CHAIN), PAYS["cheap draft"]
    run(policy, world, 300)
    plan = policy.plan(view(0), [100])
    row = RowStep([0], plan.length, plan.length, 0, True)
    policy.observe(view(0), plan, StepDone([row], EMPTY, None, 30.0, 60.0, plan.length))
    assert mean(run(policy, world, 200).sizes) > 3
