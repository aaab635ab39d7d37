"""Hybrid: where it finds its copies, when it copies, how long copies are, and the law of all rows."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

import laws
import runs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters import hybrid
from foredraft.drafters.common import copying
from foredraft.drafters.common.copying import LONGEST_MATCH
from foredraft.drafters.hybrid import Hybrid, Match, Options, RowText
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Policy, Throughput
from runs import model

NEW = 24


def longest(tokens: Sequence[int]) -> Match | None:
    """``RowText.match``, by comparing all places."""
    best = None
    for end in range(len(tokens) - 1, 1, -1):
        length = 0
        while length < min(LONGEST_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= 2 and (best is None or length > best.length):
            best = Match(length, end)
    return best


@pytest.mark.parametrize("kinds", [2, 5])
def test_the_longest_match_is_found_and_of_equal_ones_the_latest(kinds: int):
    draws = random.Random(kinds)
    tokens = [draws.randrange(kinds) for _ in range(60)]
    text, output = RowText(tokens[:20], 0), []
    for token in tokens[20:]:
        known = [*tokens[:20], *output]
        assert text.match() == longest(known)
        if (match := text.match()) is not None:
            after = known[match.end :]
            assert text.after(match, 9) == [after[i % len(after)] for i in range(9)]
        output.append(token)
        text.read(output)
    assert RowText([3], 0).match() is None


def test_copies_have_the_length_with_the_most_tokens_per_time():
    widths = set()
    for number in range(200):
        draws = random.Random(number)
        copies = [[draws.random() for _ in range(draws.randrange(6))] for _ in range(3)]
        price = draws.random() / 4

        def rate(width: int, copies: list[list[float]] = copies, price: float = price) -> float:
            paths = [torch.tensor(each[:width]).cumprod(0).sum().item() for each in copies]
            return (1 + sum(paths) / 3) / (1 + price * (width + hybrid._SETUP)) if width else 1.0

        width, found = hybrid._best(copies, price)
        assert found == pytest.approx(max(map(rate, range(6))), abs=1e-6) and found == pytest.approx(
            rate(width), abs=1e-6
        )
        widths.add(width)
    assert len(widths) > 3


def test_a_rows_copies_correct_the_odds():
    text, output = RowText([1, 2, 3, 1, 2], 0), []
    match = text.match()
    assert match == Match(2, 2)
    first = text.chances_after(match, 3, False)
    assert first == sorted(first), "longer matches are likelier to be right"
    assert text.chances_after(match, 3, True)[0] < first[0]
    for accepted in (0, 0, 2, 2):
        text.chances = first
        output += [3] * (accepted + 1)
        before = text._shift
        text.read(output)
        assert (text._shift > before) == (accepted > 0)


def scripted(accepted: Sequence[Sequence[int]], policy: Policy | None = None) -> tuple[Generator, list[Plan]]:
    """A hybrid around a drafter that knows the outputs, with the plans that it got."""
    plans: list[Plan] = []

    def propose(view: View, plan: Plan) -> Draft:
        plans.append(plan)
        return tiny.Liar(accepted, honesty=1.0)(view, plan)

    drafter = Hybrid(Options(), tiny.ScriptedDrafter(propose))
    return tiny.generator(model(), drafter, policy), plans


@cache
def repeating() -> tuple[list[int], list[int]]:
    """A prompt at whose end the target repeats itself, and what it says then."""
    prompt = [41] * 6
    output = runs.plain(prompt, max_new_tokens=60 + NEW)
    prompt, output = [*prompt, *output[:60]], output[60:]
    assert len(set(output)) < 4
    return prompt, output


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_plain_decodings(temperature: float):
    prompts = [*tiny.prompts((5, 9)), repeating()[0]]
    options = {"max_new_tokens": NEW, "temperature": temperature, "seed": 3}
    plain = tiny.generator(model()).generate(prompts, **options)
    g, _ = scripted(prompts)
    assert [each.tokens for each in g.generate(prompts, **options)] == [each.tokens for each in plain]


def test_a_row_that_copies_is_not_drafted_for_and_counts_as_drafted():
    prompt, once = repeating()
    g, plans = scripted([[*prompt, *once]])
    found = g.generate(prompt, max_new_tokens=NEW)
    assert found.tokens == once
    assert found.stats.target_forwards < NEW and found.stats.accepted > 0
    assert found.stats.accepted_prediction_tokens == 0, "these come from a prediction alone"
    steps = found.stats.target_forwards - len(plans)
    assert steps > 0, "some steps copied, and for these the inner drafter was not asked"


class Paused(Policy):
    """Drafts nothing."""

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan((0,) * len(limits))


def test_copies_go_on_while_nothing_is_drafted():
    prompt, once = repeating()
    g, plans = scripted([[*prompt, *once]], Paused())
    found = g.generate(prompt, max_new_tokens=NEW)
    assert found.tokens == once and found.stats.accepted > 0 and not plans


def test_requests_with_a_prediction_copy_from_that_alone():
    prompt, once = repeating()
    g, _ = scripted([[*prompt, *once]], Paused())
    found = g.generate(prompt, max_new_tokens=NEW, prediction=[1, 2, 3])
    assert found.tokens == once and found.stats.accepted == found.stats.accepted_prediction_tokens
    both = g.generate([prompt, prompt], max_new_tokens=NEW, prediction=once)
    assert all(each.tokens == once and each.stats.accepted_prediction_tokens > 0 for each in both)


def test_a_prediction_of_one_row_leaves_the_copies_of_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hybrid, "_FIXED", 10**6)
    prompt, once = repeating()
    g, _ = scripted([[*prompt, *once]], Paused())
    sequences = g.submit([prompt], SamplingParams(max_new_tokens=NEW, prediction=once))
    sequences += g.submit([prompt], SamplingParams(max_new_tokens=NEW))
    g.engine.run(sequences)
    predicted, other = (sequence.stats for sequence in sequences)
    assert [sequence.tokens for sequence in sequences] == [once, once]
    assert predicted.accepted_prediction_tokens > 0
    assert other.accepted > 0 and other.accepted_prediction_tokens == 0


def test_rows_that_copy_say_nothing_about_the_inner_drafter():
    """The policy times and counts the inner drafter's steps alone."""
    prompt, once = repeating()
    inner = tiny.ScriptedDrafter(lambda view, plan: Draft(TokenTree.root(view.roots), Law.FIXED))
    drafter, policy = Hybrid(Options(), inner), Throughput(inner.needs)
    g = tiny.generator(model(), drafter, policy)
    found = g.generate(prompt, max_new_tokens=NEW)
    assert found.tokens == once and found.stats.accepted > 0
    widths = {size for pace in policy.state()["paces"].values() for size in pace["forward"]}
    assert widths <= {"0", "1"}, "no copy's width"


def test_many_rows_copy_little():
    """A copy widens the forward of all rows."""
    prompt = [token for part in repeating() for token in part]
    drafter = Hybrid(Options(), tiny.ScriptedDrafter(tiny.Liar([])))
    lengths = []
    for rows in (1, 4, 16):
        texts = [prompt, *tiny.prompts((len(prompt),) * (rows - 1))]
        tiny.admit(drafter, texts)
        params = (SamplingParams(),) * rows
        view = replace(tiny.view(texts), params=params, outputs=((),) * rows)
        view = replace(view, kv_size=view.kv_size._replace(rows=rows, slots=4 * len(prompt)))
        lengths.append(drafter.copies(view, [20] * rows)[0])
        for row in range(rows):
            drafter.release(row)
    assert lengths[0] > lengths[1] >= lengths[2] == 0


@pytest.mark.parametrize("name", ["hybrid", "hybrid tree"])
def test_rows_keep_their_law_beside_drawn_drafts(name: str, monkeypatch: pytest.MonkeyPatch):
    """Copies of a text that the target seldom follows, beside drafts that it seldom follows."""
    monkeypatch.setattr(copying, "NODES", 10**6)
    monkeypatch.setattr(hybrid, "_FIXED", 10**9)
    copied = []
    copies = Hybrid.copies

    def noted(self: Hybrid, view: View, limits: Sequence[int]) -> tuple[int, ...]:
        copied.append(found := copies(self, view, limits))
        return found

    monkeypatch.setattr(Hybrid, "copies", noted)
    g = laws.generator(name, "block" if name == "hybrid" else "traversal")
    texts = []
    for seed in range(2):
        results = g.generate([laws.PROMPT], laws.params("temperature", seed), num_return_sequences=2000)
        texts += [result.tokens for result in results]
    assert sum(length > 0 for lengths in copied for length in lengths) > 4000
    assert laws.p_value(laws.tally(texts), laws.law("temperature")) > 1e-3
