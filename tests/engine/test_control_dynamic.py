"""Thresholds and lengths that are learned: what they choose is what a replay of the past says is best."""

import math
import random

import pytest
import torch
from watched_rows import view

import tiny
from foredraft.compose import load
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import OptionError
from foredraft.engine.control import Rest
from foredraft.engine.control_dynamic import Calibrated, Goodput, Trace, best_batch_length, replay
from foredraft.engine.costs import CostTable
from foredraft.engine.step import RowStep, StepDone
from foredraft.model.causal import CausalLM

FLAT = CostTable((1, 16), (1.0, 1.0))
STEEP = CostTable((1, 16), (1.0, 16.0))
GENTLE = CostTable((1, 17), (1.0, 2.0))


def traces(count: int, chance: random.Random, honest: float = 1.0) -> list[Trace]:
    """Chains whose tokens are accepted as often as the draft says, raised to ``honest``."""
    found = []
    for _ in range(count):
        confidences = tuple(chance.random() for _ in range(6))
        right = [chance.random() < confidence**honest for confidence in confidences]
        found.append(Trace(confidences, (*right, False).index(False)))
    return found


def brute_force(found: list[Trace], threshold: float, costs: CostTable, draft: float) -> float:
    """Tokens a second, chain by chain and token by token."""
    tokens = seconds = 0.0
    for trace in found:
        drafted = 0
        for confidence in trace.confidences:
            drafted += 1
            seconds += draft
            if confidence < threshold:
                break
        seconds += costs(1 + drafted)
        tokens += 1 + min(drafted, trace.accepted)
    return tokens / seconds


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("costs", [FLAT, STEEP, GENTLE], ids=["flat", "steep", "gentle"])
def test_a_replay_finds_what_brute_force_finds(seed: int, costs: CostTable):
    found = traces(40, random.Random(seed))
    best = replay(found, Calibrated.GRID, costs, 0.1)
    rates = {threshold: brute_force(found, threshold, costs, 0.1) for threshold in Calibrated.GRID}
    assert best.rate == pytest.approx(max(rates.values())) and rates[best.threshold] == pytest.approx(best.rate)


def steps(controller: Calibrated, count: int, honest: float, seed: int = 0) -> list[Plan]:
    """A controller at work on chains of a kind, which end where it says."""
    chance, plans, seen = random.Random(seed), [], view(0)
    for _ in range(count):
        plan = controller.plan(seen, [100])
        plans.append(plan)
        trace = traces(1, chance, honest)[0]
        drafted = min(trace.length(plan.confidence), plan.length)
        scores, total = [], 0.0
        for confidence in trace.confidences[:drafted]:
            total += math.log(confidence)
            scores.append(total)
        accepted = min(drafted, trace.accepted)
        row = RowStep([0] * (1 + accepted), drafted, drafted, accepted, True, scores=tuple(scores))
        empty = torch.zeros(1, 1, dtype=torch.long)
        controller.observe(seen, plan, StepDone([row], empty, empty[:, 0], None, 0.05 * drafted, 1.0))
    return plans


def test_calibrated_ends_chains_where_the_draft_says_too_much():
    """A draft that is right less often than it thinks is stopped earlier than one that is right more often."""

    def chosen(honest: float) -> float:
        late = [plan.confidence for plan in steps(Calibrated(6, GENTLE), 400, honest)[200:]]
        used = sorted(confidence for confidence in late if confidence > 1e-9)
        return used[len(used) // 2]

    assert chosen(0.3) < chosen(3.0)


def test_calibrated_looks_at_whole_chains_now_and_then():
    plans = steps(Calibrated(6, FLAT), 100, 1.0)
    whole = [plan for plan in plans[Calibrated.FEW :] if plan.confidence < 1e-9]
    assert len(whole) == pytest.approx(100 / Calibrated.EXPLORE, abs=2)


def test_calibrated_rests_where_no_threshold_pays():
    plans = steps(Calibrated(6, STEEP), 300, 20.0)
    assert sum(plan.length > 0 for plan in plans[-100:]) < 100 * Rest.TRIAL / Rest.FIRST
    assert any(plan.length > 0 for plan in plans[-100:]), "it tries again"


def test_goodput_is_the_best_of_all_lengths():
    chance = random.Random(3)
    for _ in range(50):
        rates = [chance.uniform(0.1, 0.95) for _ in range(4)]
        limits = [chance.choice((2, 5, 9)) for _ in rates]
        draft = chance.choice((0.0, 0.05, 0.3))

        def goodput(length: int, rates=rates, limits=limits, draft=draft) -> float:
            tokens = sum(
                sum(a**j for j in range(min(length, limit) + 1)) for a, limit in zip(rates, limits, strict=True)
            )
            return tokens / (GENTLE(4 * (1 + length)) + draft * length)

        best = best_batch_length(rates, limits, 8, GENTLE, draft)
        most = max(range(9), key=goodput)
        assert goodput(best) == pytest.approx(goodput(most)) or (best == 0 and goodput(most) < 1.03 * goodput(0))


def test_goodput_is_shorter_for_more_rows_and_off_where_nothing_pays():
    lengths = [
        best_batch_length([0.7] * rows, [99] * rows, 8, CostTable((1, 8, 64), (1.0, 1.2, 9.0)), 0.02)
        for rows in (1, 4, 16)
    ]
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_goodput_learns_each_row():
    controller, seen = Goodput(8, FLAT), view(0, 1)
    for _ in range(60):
        plan = controller.plan(seen, [100, 100])
        length = plan.length
        rows = [RowStep([0] * (1 + got), length, length, got, True) for got in (length, 0)]
        empty = torch.zeros(2, 1, dtype=torch.long)
        controller.observe(seen, plan, StepDone(rows, empty, empty[:, 0], None, 0.0, 1.0))
    good, bad = (controller.plan(view(row), [100]).length for row in (0, 1))
    assert good == 8 and bad <= 3
    controller.release(1)
    assert controller.plan(view(1), [100]).length > bad


@pytest.mark.parametrize("schedule", ["calibrated", "goodput"])
def test_by_option_the_text_is_the_same(schedule: str):
    g = load("sample", drafter=f"draft_model:sample-draft,num_assistant_tokens_schedule={schedule}")
    plain = load(g.engine.target, tokenizer=g.tokenizer, drafter=None)
    prompts = ["def add(a, b):", "Once upon a time"]
    expected = [result.tokens for result in plain.generate(prompts, max_new_tokens=40)]
    results = g.generate(prompts, max_new_tokens=40)
    assert [result.tokens for result in results] == expected and results[0].stats.accepted > 0
    g.close()


def test_a_chain_says_how_sure_it_is():
    """Scores of a step are the draft's own probabilities of the tokens that it drafted."""
    target, draft = CausalLM(tiny.build("llama")), CausalLM(tiny.build("llama", seed=5))
    drafter, _ = tiny.draft_model(draft, target, tokens=3)
    seen: list[tuple[list[int], tuple[float, ...], list[int]]] = []

    controller = Calibrated(3, FLAT)
    observe = controller.observe

    def watched(view: View, plan: Plan, done: StepDone) -> None:
        seen.append((view.history[0, : view.extents[0]].tolist(), done.rows[0].scores, done.rows[0].emitted))
        observe(view, plan, done)

    controller.observe = watched  # type: ignore[method-assign]
    tiny.generator(target, drafter, controller).generate(tiny.prompts((9,))[0], max_new_tokens=8)
    text, scores, _ = seen[0]
    path, total = list(text), 0.0
    for score in scores:
        law = draft.stock_logits(torch.tensor([path]))[0, -1].float().log_softmax(-1)
        total += float(law.max())
        assert score == pytest.approx(total, abs=1e-4)
        path.append(int(law.argmax()))
    assert len(scores) == 3


def test_what_cannot_be_is_said():
    for drafter in ("prompt_lookup", "draft_model:sample-draft,branching=2x2", "eagle3"):
        joined = f"{drafter},num_assistant_tokens_schedule=calibrated"
        with pytest.raises(OptionError, match="calibrated chooses an assistant_confidence_threshold"):
            load("sample", drafter=joined)
