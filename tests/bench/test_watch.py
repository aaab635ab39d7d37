"""What is measured beside the clock: places of a tree by hand, costs of forwards, each of them once."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bench_cases import Fake, Write, asks

import tiny
from foredraft.bench.measure import watch as watching
from foredraft.bench.measure.arms import BenchArm, LoopArm
from foredraft.bench.measure.records import RunFile, read_runs
from foredraft.bench.measure.run import Settings
from foredraft.bench.measure.watch import ExtraMeasurements, watch
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, TokenTree
from foredraft.engine.cost_model import measure_bandwidth, measure_costs
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer

STEPS, PROMPT = 4, "some words"
GREEDY = SamplingParams(max_new_tokens=3 * STEPS, eos_token_id=())
PARENTS = [-1, 0, 0, 2, PAD, 1, 2, 3, 6]
RIGHT = {2: 1, 6: 2}  # these two hold the first and the second token that are right
CHANCES = {1: 0.305, 2: 0.605, 3: 0.205, 5: 0.505, 6: 0.995, 7: 0.105, 8: 0.405}  # of each node, given its parent


def generator(drafter: Any = None) -> Any:
    return tiny.generator(CausalLM(tiny.build()), drafter, tokenizer=Tokenizer(tiny.tokenizer()))


def static(truth: Sequence[int], scored: bool = True) -> tiny.ScriptedDrafter:
    """A tree of the shape ``PARENTS``: each step two drafted tokens are right, and the bonus."""

    def propose(view: View, plan: Plan) -> Draft:
        at = view.host_lengths[0]
        if not plan.lengths[0]:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        tokens = [(truth[min(at, len(truth) - 1)] + 1 + node) % tiny.VOCAB for node in range(len(PARENTS))]
        tokens[0] = int(view.roots[0])
        scores = [0.0] * len(PARENTS)
        for node, depth in RIGHT.items():
            tokens[node] = truth[at + depth - 1]
        for node, chance in CHANCES.items():
            scores[node] = scores[PARENTS[node]] + math.log(chance)
        tree = TokenTree(torch.tensor([tokens]), torch.tensor([PARENTS]), depth=3)
        return Draft(tree, Law.FIXED, scores=torch.tensor([scores]) if scored else None)

    return tiny.ScriptedDrafter(propose, max_nodes=8)


@pytest.fixture(scope="module")
def truth() -> list[int]:
    plain = generator()
    return plain.encode(PROMPT) + plain.generate(PROMPT, max_new_tokens=3 * STEPS + 4).tokens


@pytest.mark.parametrize("scored", [True, False])
def test_places_of_a_static_tree_are_those_by_hand(truth: list[int], scored: bool):
    found = watch(LoopArm("tree", generator(static(truth, scored)), 1), asks(PROMPT)[0], GREEDY)
    every, never = [STEPS, STEPS], [STEPS, 0]
    assert found.places == {"1": never, "2": every, "2-1": never, "2-2": every, "2-2-1": never}
    wanted = {"30": never, "60": every, "20": never, "99": every, "40": never}
    assert found.confidence == (wanted if scored else {})
    assert (found.arm, found.task, found.prompt, found.temperature) == ("tree", "t", "0", 0.0)


def besides(
    arms: Sequence[BenchArm], prompts: Sequence[str] = (), batches: Sequence[int] = (), **given: Any
) -> ExtraMeasurements:
    usual: dict[str, Any] = {"temperatures": [0.0], "cached": (4, 8, 4000), "seconds": 0.001}
    settings = Settings("tiny", max_new_tokens=3 * STEPS)
    return ExtraMeasurements(arms, settings, batches=batches, prompts=asks(*prompts), **{**usual, **given})


@pytest.fixture
def arms(truth: list[int], monkeypatch: pytest.MonkeyPatch) -> list[BenchArm]:
    monkeypatch.setattr(watching, "measure_bandwidth", lambda device: 2.5e9)
    return [Fake("fake"), LoopArm("none", generator(), 2), LoopArm("tree", generator(static(truth)), 2)]


def test_costs_are_timed_once_for_each_size_that_fits(arms: list[BenchArm], write: Write):
    what = besides(arms, batches=(1, 2))
    lines = list(what.lines(RunFile()))
    file = read_runs(write(*lines))
    assert [(cost.batch, cost.cached) for cost in file.costs] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    for cost in file.costs:
        assert cost.nodes[0] == 1 and cost.nodes[-1] == 64 and list(cost.nodes) == sorted(set(cost.nodes))
        assert list(cost.seconds) == sorted(cost.seconds) and cost.seconds[0] > 0
        assert cost.weight_bytes > 0 and cost.bandwidth == 2.5e9
    assert list(what.lines(file)) == []
    cut = read_runs(write(*lines[:3]))
    assert [(line["batch"], line["cached"]) for line in what.lines(cut)] == [(2, 8)]


def test_drafts_are_watched_once_for_each_arm_prompt_and_temperature(arms: list[BenchArm], write: Write):
    what = besides(arms, [PROMPT], temperatures=[0.0, 0.5])
    lines = list(what.lines(RunFile()))
    assert [(line["kind"], line["arm"], line["prompt"], line["temperature"]) for line in lines] == [
        ("watch", "tree", "0", 0.0),
        ("watch", "tree", "0", 0.5),
    ]
    file = read_runs(write(*lines))
    assert list(what.lines(file)) == []
    assert [line["temperature"] for line in what.lines(read_runs(write(*lines[:1])))] == [0.5]


def test_a_prompt_that_cannot_be_continued_is_left_out(truth: list[int]):
    arm = LoopArm("tree", generator(static(truth)), 1)
    lines = list(besides([arm], ["q" * 300, PROMPT]).lines(RunFile()))
    assert [line["prompt"] for line in lines] == ["1"]


def test_nothing_is_measured_unless_it_was_asked_for(arms: list[BenchArm]):
    assert list(besides(arms).lines(RunFile())) == []


def test_an_arm_that_was_watched_says_the_same_as_before(truth: list[int]):
    arm = LoopArm("tree", generator(static(truth)), 1)
    prompt = [arm.generator.encode(PROMPT)]
    before = arm.run(prompt, GREEDY)
    watch(arm, asks(PROMPT)[0], GREEDY)
    after = arm.run(prompt, GREEDY)
    assert before.tokens == after.tokens and before.stats.accepted == after.stats.accepted == 2 * STEPS


def test_a_table_of_costs_is_by_rows_of_all_texts():
    target = CausalLM(tiny.build())
    table = measure_costs(target, 4, 0.001, longest=8, batch=3)
    assert table.rows == (3, 6, 12, 24) or (table.rows[0], table.rows[-1]) == (3, 24)
    assert all(rows % 3 == 0 for rows in table.rows) and len(table.rows) == len(table.seconds)


def test_bandwidth_is_bytes_a_second(monkeypatch: pytest.MonkeyPatch):
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    assert measure_bandwidth(torch.device("cpu"), mebibytes=3) == 3 * 2**20 / 2
