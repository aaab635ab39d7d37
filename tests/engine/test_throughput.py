"""The throughput policy: above the best fixed size where drafts differ, and little lost where nothing pays."""

import functools
import json
import math
import random
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from policy_sim import World, always, fixed, plain, run, step_of, uneven, view

from foredraft.core.drafter import Needs, Plan
from foredraft.core.worth import Features
from foredraft.engine.policy import Throughput
from foredraft.engine.policy.estimates import AcceptanceModel, ForwardTimes, Seconds, rising_means

CHAIN, TREE = Needs(max_nodes=8), Needs(max_nodes=12, max_depth=6, scored=True)
STEPS = 1000
ALIKE = {
    "cheap draft": World(CHAIN, always(0.8), lambda levels: 0.05 * levels, lambda nodes: 1 + 0.03 * (nodes - 1)),
    "dear draft": World(CHAIN, always(0.8), lambda levels: 0.2 * levels, lambda nodes: 1 + 0.05 * (nodes - 1)),
    "made whole": World(
        replace(CHAIN, whole=True), always(0.7), lambda levels: 0.3 * levels, lambda nodes: 1 + 0.03 * (nodes - 1)
    ),
    "short": World(CHAIN, always(0.6), lambda levels: 0.1 * levels, lambda nodes: 1 + 0.05 * (nodes - 1)),
}
"""All drafts are alike, so that no policy can beat the best fixed size."""
UNEVEN = {
    "tree": World(TREE, uneven(0.3, 0.95), lambda levels: 0.1 * levels, lambda nodes: 1 + 0.1 * (nodes - 1)),
    "overconfident": replace(
        World(TREE, uneven(0.3, 0.9), lambda levels: 0.1 * levels, lambda nodes: 1 + 0.1 * (nodes - 1)), sharpness=2.0
    ),
    "rare matches": World(
        CHAIN, always(0.7), lambda levels: 1e-4 * levels, lambda nodes: 1 + 0.04 * (nodes - 1), matches=0.2
    ),
}
LOSES = {
    "never accepted": World(CHAIN, always(0.05), lambda levels: 0.3 * levels, lambda nodes: 1 + 0.1 * (nodes - 1)),
    "as dear as two": World(CHAIN, always(0.3), lambda levels: 1 + 0.3 * levels, lambda nodes: 1.0),
    "break even": World(CHAIN, always(0.5), lambda levels: 0.3 * levels, lambda nodes: 1 + 0.2 * (nodes - 1)),
}


def rate(world: World, seeds: int = 2) -> float:
    """The mean tokens a second of new policies."""
    worlds = [replace(world, seed=seed) for seed in range(seeds)]
    return mean(run(Throughput(each.needs), each, STEPS).rate for each in worlds)


def child(chance: float, depth: int, recent: float) -> Features:
    """Of a token with this probability under the draft."""
    return Features(1.0, math.log(chance / (1 - chance)), math.log(depth), recent - 0.5)


@functools.cache
def best_fixed(name: str) -> float:
    """Without noise."""
    world = (ALIKE | UNEVEN)[name]
    return max(fixed(world, size, STEPS) for size in (1, 2, 3, 5, 7, 11) if size <= world.needs.max_nodes)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_is_near_the_best_fixed_size(name: str, noise: float):
    assert rate(replace(ALIKE[name], noise=noise, spikes=noise / 4)) > 0.93 * best_fixed(name)


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_is_above_the_best_fixed_size_where_scores_tell_drafts_apart(name: str, noise: float):
    least = 1.0 if noise else 1.08
    assert rate(replace(UNEVEN[name], noise=noise, spikes=noise / 4)) > least * best_fixed(name)


@pytest.mark.parametrize("name", LOSES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_drafts_that_do_not_pay_lose_little(name: str, noise: float):
    """Where the trials are: at first, and ever after a small share of the time."""
    world = replace(LOSES[name], noise=noise, spikes=noise / 4)
    assert rate(world) > 0.97 * plain(world)
    ran = run(Throughput(world.needs), world, STEPS)
    assert any(ran.sizes[STEPS // 2 :]), "it should go on trying"


def test_rows_count():
    """Eight rows make nodes dear; the sizes of eight are not those of one."""
    world = World(TREE, uneven(0.4, 0.8), lambda levels: 0.05 * levels, lambda nodes: 0.9 + 0.1 * nodes)
    policy = Throughput(TREE)
    alone, together = run(policy, world, 400).sizes[-200:], run(policy, world, 400, rows=8).sizes[-200:]
    assert mean(alone) > 2 and mean(together) < 1
    assert mean(run(policy, world, 100).sizes) > 2, "what is known of one row is still known"


def test_a_batch_that_shrinks_keeps_what_larger_ones_have_shown():
    """Rows end one after another, and each batch size would try wide forwards anew."""
    world = World(TREE, uneven(0.3, 0.7), lambda levels: 0.02 * levels, lambda nodes: 1 + 0.1 * nodes)
    policy = Throughput(TREE)
    assert max(run(policy, world, 60, rows=64).sizes) == 1, "64 guesses a step tell enough"
    for rows in (32, 16, 8):
        ran = run(policy, world, 30, rows=rows)
        assert ran.rate > 0.96 * rows / world.forward(rows), rows
    assert run(policy, world, 60).rate > 1.4 * plain(world)


def test_drafts_of_which_nothing_is_verified_are_soon_not_made():
    """Steps of many rows are limited by their nodes. Plain steps were timed in a slow moment, so drafts seem to pay."""
    world = World(TREE, always(0.3), lambda levels: 0.1 * levels, lambda nodes: nodes / 16)
    policy = Throughput(TREE)
    run(policy, replace(world, forward=lambda nodes: nodes / 8), 6, rows=16)
    assert run(policy, world, 100, rows=16).rate > 0.97 * 16


def test_a_trial_of_new_outputs_is_rare_where_the_drafter_reads_their_prompts_first():
    """Short outputs of many rows: each trial takes four plain steps before it begins."""
    slow = World(TREE, always(0.3), lambda levels: 0.1 * levels, lambda nodes: nodes / 16, start=0.25, life=32)
    policy = Throughput(TREE)
    run(policy, slow, 32, rows=16)
    for row in range(16):
        policy.release(row)
    assert run(policy, slow, 200, rows=16).rate > 0.97 * 16


def test_another_temperature_is_another_matter():
    policy, good, bad = Throughput(CHAIN), ALIKE["cheap draft"], LOSES["never accepted"]
    run(policy, replace(bad, temperature=1.0), 400)
    assert mean(run(policy, good, 300).sizes[-100:]) > 3
    assert mean(run(policy, replace(bad, temperature=1.0), 100).sizes) < 1


def test_it_follows_a_change_of_topic():
    good = ALIKE["cheap draft"]
    bad = replace(good, chances=always(0.02))
    policy = Throughput(CHAIN)
    assert mean(run(policy, bad, 600).sizes[-200:]) < 1
    assert mean(run(policy, replace(good, chances=always(0.85)), 600).sizes[-200:]) > 3
    assert mean(run(policy, bad, 400).sizes[-200:]) < 1


def test_it_follows_a_machine_that_becomes_slow_at_drafting():
    policy, fast = Throughput(CHAIN), ALIKE["cheap draft"]
    assert mean(run(policy, fast, 300).sizes[-100:]) > 3
    slow = replace(fast, draft=lambda levels: 3.0 * levels)
    assert mean(run(policy, slow, 300).sizes[-100:]) < 1


def test_what_it_takes_to_begin_counts():
    """A draft model that reads a long prompt first, for requests that are soon over."""
    world = replace(ALIKE["dear draft"], life=10)
    assert mean(run(Throughput(CHAIN), world, STEPS).sizes[-500:]) > 1
    assert mean(run(Throughput(CHAIN), replace(world, start=60.0), STEPS).sizes[-500:]) < 0.5


def test_what_a_draft_takes_after_a_pause_is_not_the_price_of_drafts():
    """A head reads what was decoded without it: a trial is dear, and drafting in every step is not."""
    good = replace(ALIKE["dear draft"], resumption=2.0)
    policy = Throughput(CHAIN)
    assert mean(run(policy, replace(good, chances=always(0.05)), 400).sizes[-200:]) < 0.5
    assert mean(run(policy, good, 800).sizes[-200:]) > 1


def test_each_output_begins_with_what_is_usual():
    """Half of the outputs are drafted well and half badly, in turns: the last one says nothing about the next."""
    policy, good = Throughput(CHAIN), replace(ALIKE["dear draft"], resumption=1.0)
    worlds, ran = (good, replace(good, chances=always(0.1))), []
    for number in range(24):
        ran.append(run(policy, replace(worlds[number % 2], seed=number), 80))
        policy.release(0)
    well, badly = (mean([mean(each.sizes) for each in ran[first::2]]) for first in (8, 9))
    assert well > 2 and badly < 1


def test_a_good_drafter_drafts_after_a_few_plain_steps_and_at_once_where_it_is_known():
    policy, world = Throughput(CHAIN), ALIKE["cheap draft"]
    assert all(run(policy, world, 15).sizes[2:])
    run(policy, world, 200)
    again = Throughput(CHAIN)
    again.restore(json.loads(json.dumps(policy.state())))
    again.restore({"sizes": [0, 1], "seconds": {}, "accepted": {}})  # of version 0.1: ignored
    assert all(run(again, world, 15).sizes)


def test_rows_get_no_more_than_they_can_use():
    policy = Throughput(CHAIN)
    run(policy, ALIKE["cheap draft"], 100, rows=3)
    plan = policy.plan(view(0, 1, 2), [9, 2, 0])
    assert plan.lengths[0] > 2 and plan.lengths[1:] == (2, 0)
    assert policy.plan(view(0, 1, 2), [0, 0, 0]) == Plan((0, 0, 0))


def test_another_level_must_bring_what_its_time_would_elsewhere():
    policy = Throughput(TREE)
    run(policy, UNEVEN["tree"], 200)
    price = policy.plan(view(0), [100]).level_price
    assert 0 < price.level <= price.level + price.node <= Throughput.DEAREST


def test_drawn_drafts_are_never_cut_and_their_size_follows_earlier_ones():
    """What decides is known before the draft: the plan has a size, and no prices."""
    world = replace(ALIKE["dear draft"], temperature=1.0, draws=True)
    policy = Throughput(CHAIN)
    ran = run(policy, world, STEPS)
    plan = policy.plan(view(0, temperature=1.0, draws=True), [100])
    assert plan.worth is not None and not plan.worth.prices
    assert 2 <= plan.length <= 5, "3 is the best"
    assert ran.rate > 0.9 * best_fixed("dear draft")


def served(policy: Throughput, world: World, requests: int, most: int, young: float = 1.0) -> list[int]:
    """Lengths of drafts for requests of so many tokens, whose first steps take ``young`` times as long."""
    lengths = []
    for _ in range(requests):
        seen, output = view(0), [0] * 0
        while (left := most - len(output)) > 0:
            seen = replace(seen, outputs=(output,))
            plan = policy.plan(seen, [left - 1])
            done = step_of(world, plan, 1)
            output += done.rows[0].emitted
            slow = young if len(output) < 4 else 1.0
            done = replace(done, draft_seconds=slow * done.draft_seconds, verify_seconds=slow * done.verify_seconds)
            policy.observe(seen, plan, done)
            lengths.append(plan.length)
        policy.release(0)
    return lengths


def test_steps_right_after_a_prompt_are_not_timed():
    """They take five times as long here; what is known of later steps is as if they took as long as these."""
    times = []
    for young in (1.0, 5.0):
        policy = Throughput(CHAIN)
        assert mean(served(policy, ALIKE["cheap draft"], 30, 40, young)[-100:]) > 3
        ((_, pace),) = policy.state()["paces"].items()
        times.append([pace["forward"]["1"], pace["level"]])
        assert mean(served(policy, LOSES["never accepted"], 60, 20, young)[-100:]) < 1
    assert times[0] == pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("name", ["cheap draft", "never accepted"])
def test_requests_of_a_few_tokens_are_served(name: str, most: int):
    """Where hardly a step is timed."""
    lengths = served(Throughput(CHAIN), (ALIKE | LOSES)[name], 100, most)
    assert not any(lengths[:2])
    if name == "never accepted":
        assert mean(map(bool, lengths)) < 0.25
    elif most > 4:
        assert mean(map(bool, lengths)) > 0.3


def test_a_stall_of_a_minute_is_soon_forgotten():
    policy, world = Throughput(CHAIN), ALIKE["cheap draft"]
    run(policy, world, 200)
    plan = policy.plan(view(0), [100])
    policy.observe(view(0), plan, replace(step_of(world, plan, 1), draft_seconds=30.0, verify_seconds=60.0))
    assert mean(run(policy, world, 100).sizes) > 3


# What it estimates with.


def test_the_acceptance_model_finds_the_weights_that_made_the_data():
    chance, truth = random.Random(0), Features(-0.5, 0.7, -0.4, 1.0)
    model = AcceptanceModel()
    for _ in range(1500):
        features = [child(chance.uniform(0.02, 0.98), chance.randint(1, 6), chance.random()) for _ in range(6)]
        chances = [1 / (1 + math.exp(-float(np.dot(truth, each)))) for each in features]
        for each, probability in zip(features, chances, strict=True):
            model.learn(each, accepted=chance.random() < probability)
    assert model.weights == pytest.approx(truth, abs=0.25)


def test_the_acceptance_model_believes_the_draft_until_it_knows_better():
    model = AcceptanceModel()
    for right in [True, False] * (AcceptanceModel.BATCH // 2 - 1):
        model.learn(child(0.5, 1, 0.5), accepted=right)
        assert model.weights == (0.0, 1.0, 0.0, 0.0), "a batch is learned at once"
    for _ in range(2):
        model.learn(child(0.5, 1, 0.5), accepted=False)
    assert model.weights == pytest.approx((-0.2, 1.0, 0.0, 0.0), abs=0.3) and model.weights.one < 0


def test_batches_of_the_acceptance_model_grow_and_it_starts_from_what_is_stored():
    stored, chance = Features(-0.5, 0.7, -0.4, 1.0), random.Random(0)
    model, changes = AcceptanceModel(stored), []
    for number in range(1200):
        before = model.weights
        model.learn(child(chance.uniform(0.02, 0.98), 1, 0.5), accepted=chance.random() < 0.5)
        changes += [number] if model.weights != before else []
    sizes = [after - before for before, after in zip([-1, *changes], changes, strict=False)]
    assert sizes[0] == AcceptanceModel.BATCH and sizes == sorted(sizes) and sizes[-1] == AcceptanceModel.MOST
    assert AcceptanceModel(stored).weights == stored


def test_times_rise_with_the_size_and_are_interpolated():
    assert rising_means([(1.0, 1), (3.0, 1), (2.0, 1), (4.0, 1)]) == [1.0, 2.5, 2.5, 4.0]
    times = ForwardTimes()
    for size, seconds in ((1, 9.0), (1, 1.0), (8, 2.4), (6, 50.0), (8, 2.4), (1, 9.0)):
        times.add(size, seconds)  # plain steps count after another one
    found = times.table(12)
    assert found[1] == 1.0 and found[6] == found[8] == pytest.approx((50 + 2 * 2.4) / 3)
    for _ in range(20):
        times.add(6, 2.0)
    found = times.table(12)
    assert found[1] == 1.0 and found[6] == pytest.approx(2.0, rel=0.05) and found[8] == 2.4
    assert found[4] == pytest.approx((1.0 + 3 / 5 * (found[6] - 1.0)) * (1 - ForwardTimes.HOPE))
    assert found[12] == pytest.approx((2.4 + 4 * 1.4 / 7) * (1 - ForwardTimes.HOPE))


def test_seconds_fall_fast_and_rise_slowly():
    estimate = Seconds()
    for _ in range(30):
        for seconds in (1.0, 1.1, 1.5):
            estimate.add(seconds)
    assert 1.0 < estimate.value < 1.2
    estimate.add(60.0)
    assert estimate.value < 1.3, "a stall"
    for _ in range(60):
        estimate.add(3.0)
    assert estimate.value == pytest.approx(3.0, rel=0.05), "the machine became slow"
    for _ in range(10):
        estimate.add(1.0)
    assert estimate.value < 1.1
