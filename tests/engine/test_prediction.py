"""Predicted outputs: the place in the prediction, the same tokens with and without, the law of both kinds of rows."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import laws
import runs
import tiny
from foredraft.core.draft import Draft, Law, Target
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import OptionError, PromptError
from foredraft.core.rng import HashedRng, Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import rule_of, verify
from foredraft.core.worth import Features, Worth
from foredraft.drafters.common import copying
from foredraft.drafters.common.copying import with_copies
from foredraft.drafters.predicted import LONGEST, PredictedOutputs, PredictionCursor
from foredraft.drafters.prompt_lookup import Options as LookupOptions, PromptLookup
from foredraft.engine.fitting import fitted
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Throughput
from foredraft.model.kv.cache import bucket
from oracle import SPECS, function_of
from runs import model

NAME, OTHER = (900, 901), (910, 911, 912)


def steps(prediction: Sequence[int], output: Sequence[int], most: int = LONGEST) -> tuple[int, int]:
    """Steps until the output is written, and tokens that were copied in vain."""
    place, written, count, wasted = PredictionCursor(prediction), 0, 0, 0
    while written < len(output):
        draft = place.draft(min(most, len(output) - written - 1))
        accepted = 0
        while accepted < len(draft) and draft[accepted] == output[written + accepted]:
            accepted += 1
        place.read(output[: written + accepted + 1])
        written, count, wasted = written + accepted + 1, count + 1, wasted + len(draft) - accepted
    return count, wasted


def source(words: int, seed: int = 0, kinds: int = 400) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(kinds) for _ in range(words)]


def with_names(name: tuple[int, ...], every: int = 25) -> list[int]:
    """A text in which a name stands again and again."""
    text = source(500)
    return [token for i in range(0, len(text), every) for token in (*text[i : i + every], *name)]


def test_what_is_predicted_takes_few_steps():
    text = source(600)
    assert steps(text, text) == (11, 0)  # 16, 32 and 64 tokens a step
    assert steps([], text)[0] == 600


@pytest.mark.parametrize(
    ("change", "most_steps"),
    [
        (lambda text: [*text[:300], *text[320:]], 18),  # something is left out
        (lambda text: [*text[:300], *source(5, seed=1), *text[300:]], 24),  # something is put in
        (lambda text: [*text[:300], 999, *text[301:]], 18),  # a token is another
        (lambda text: [*text[300:], *text[:300]], 20),  # two halves change places
        (lambda text: [*text[100:200], *text], 22),  # something stands there twice
    ],
)
def test_the_place_is_found_again(change: Any, most_steps: int):
    text = source(600)
    count, wasted = steps(text, change(text))
    assert count <= most_steps and wasted <= 80


def test_a_name_that_was_changed_is_changed_everywhere():
    text, wanted = with_names(NAME), with_names(OTHER)
    count, wasted = steps(text, wanted)
    assert count <= 18 and wasted < 40  # 10 with the names unchanged, and 20 names


def test_a_change_that_is_not_made_again_is_given_up():
    text = with_names(NAME)
    wanted = with_names(NAME)
    wanted[25:27] = OTHER
    assert steps(text, wanted)[0] <= 22


def test_an_unrelated_prediction_is_hardly_drafted_from():
    count, wasted = steps(source(500, seed=2, kinds=60), source(500, seed=1, kinds=60))
    assert count > 480 and wasted < 120


def test_limits_are_kept():
    text = source(100)
    place = PredictionCursor(text)
    assert [len(place.draft(most)) for most in (0, 1, 9, 99)] == [0, 1, 9, 15]
    place.read(text)
    assert place.draft(9) == []  # it ends there
    place.read([*text, 401])
    assert place.draft(9) == []


def test_copies_take_the_place_of_their_rows_only():
    tree = TokenTree(torch.tensor([[7, 1, 2], [8, 3, 4]]), torch.tensor([[-1, 0, 0], [-1, 0, 1]]), depth=2)
    q = torch.rand(2, 3, 9)
    found = with_copies(Draft(tree, Law.IID, q, torch.zeros(2, 3)), [[], [5, 6, 7]])
    assert found.tree.tokens[0, :3].tolist() == [7, 1, 2] and found.tree.parents[0].tolist() == [-1, 0, 0, PAD]
    assert found.tree.tokens[1].tolist() == [8, 5, 6, 7] and found.tree.parents[1].tolist() == [-1, 0, 1, 2]
    assert found.copied is not None and found.copied.tolist() == [False, True]
    assert found.tree.depth == 3 and not found.tree.linear and found.law is Law.IID
    assert found.q is not None and torch.equal(found.q[:, :3], q) and found.q.shape == (2, 4, 9)
    shorter = with_copies(Draft(TokenTree.chain(tree.tokens), Law.FIXED), [[5], []])
    assert shorter.tree.parents.tolist() == [[-1, 0, PAD], [-1, 0, 1]] and shorter.tree.linear


def test_copies_are_verified_whole():
    """What the policy finds too dear of the other rows' drafts is cut."""
    tree = TokenTree.chain(torch.tensor([[7, 1, 2, 3], [8, 4, 5, 6], [9, 0, 0, 0]]), torch.tensor([4, 4, 1]))
    draft = with_copies(Draft(tree, Law.FIXED, scores=torch.zeros(3, 4)), [[], [], [4, 4]])
    dear = Worth(Features(0.0, 0.0, 0.0, 0.0), 0.5, (0.5,) * 3, {1: 0.0, 2: 0.5, 6: 9.0})
    found = fitted(draft, Plan((3, 3, 0), worth=dear, copies=(0, 0, 2)), any_width=True).tree
    assert found.lists == ([[7, 1, 7], [8, 4, 8], [9, 4, 4]], [[-1, 0, PAD], [-1, 0, PAD], [-1, 0, 1]])
    alone = Draft(TokenTree.chain(tree.tokens[:2]), Law.FIXED, scores=torch.zeros(2, 4))
    kept = fitted(alone, Plan((3, 3), worth=replace(dear, recent=(0.5,) * 2)), any_width=True).tree
    assert kept.lists == ([[7, 1], [8, 4]], [[-1, 0], [-1, 0]])


def test_without_a_copy_the_draft_is_the_drafters():
    made = Draft(TokenTree.root(torch.tensor([1, 2])), Law.FIXED)
    drafter = PredictedOutputs(tiny.ScriptedDrafter(lambda view, plan: made))
    params = [SamplingParams(), SamplingParams(prediction=[5, 6])]
    tiny.admit(drafter, [[0, 1], [0, 2]])
    view = replace(tiny.view([[0, 1], [0, 2]], params), params=tuple(params), outputs=([], [7]))
    assert drafter.copies(view, [9, 9]) == (0, 0) and drafter.propose(view, Plan((9, 9))) is made
    assert not any(drafter.copies(replace(view, params=(SamplingParams(),) * 2), [9, 9]))


@pytest.mark.parametrize("rule", [rule for rule in SPECS if rule != "target_sampling"])
def test_copied_rows_are_verified_by_target_sampling(rule: str):
    rows, generator = 400, torch.Generator().manual_seed(2)
    p, q = (torch.randn(rows, 4, 5, generator=generator).softmax(-1) for _ in range(2))
    tree = TokenTree.chain(torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, 4))
    law = Law.IID if rule == "kseq" else Law.CHAIN
    copied = torch.arange(rows) % 3 == 0
    q[copied] = torch.nan  # never read
    noise = Noise(torch.arange(rows), torch.full((rows,), 7))
    found = verify(Target(p.argmax(-1), p), Draft(tree, law, q, copied=copied), HashedRng(noise), rule)
    own = function_of(rule)(p, Draft(tree, law, q), HashedRng(noise))
    picked = function_of("target_sampling")(p, Draft(tree, Law.FIXED), HashedRng(noise))
    target = picked if rule_of(rule).lossless else own
    assert torch.equal(found.path, torch.where(copied[:, None], target.path, own.path))
    assert torch.equal(found.bonus, torch.where(copied, target.bonus, own.bonus))


NEW = 24


def predictions(outputs: Sequence[Sequence[int]]) -> list[list[int] | None]:
    """The output, with a token changed; half of it; another text; none."""
    changed = [*outputs[0][:9], (outputs[0][9] + 1) % tiny.VOCAB, *outputs[0][10:]]
    return [changed, list(outputs[1][NEW // 2 :]), list(outputs[0]), None]


def run(g: Generator, prompts: Sequence[Sequence[int]], given: Sequence[Any], **options: Any) -> list[Any]:
    """One request for each prompt and prediction, in one batch."""
    sequences = [
        g.submit([prompt], SamplingParams(**{"max_new_tokens": NEW, "prediction": each, "seed": 3, **options}))[0]
        for prompt, each in zip(prompts, given, strict=True)
    ]
    g.engine.run(sequences)
    return [g.result_of(sequence) for sequence in sequences]


@pytest.mark.parametrize("drafter", ["none", "lookup", "trees"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "repetition_penalty": 1.2, "seed": 5}])
def test_picked_drafts_give_the_same_output_with_and_without(drafter: str, options: dict[str, Any]):
    prompts = tiny.prompts()
    lookup = PromptLookup(LookupOptions(prompt_lookup_num_tokens=3, continuations=2))
    made = {"none": None, "lookup": lookup, "trees": tiny.liar([], nodes=5)}[drafter]
    g = tiny.generator(model(), made)
    plain = [result.tokens for result in run(g, prompts, [None] * 4, **options)]
    given = predictions(plain)
    found = run(g, prompts, given, **options)
    assert [result.tokens for result in found] == plain
    assert found[0].stats.accepted_prediction_tokens >= 12 and found[0].stats.rejected_prediction_tokens > 0
    assert found[3].stats.accepted_prediction_tokens == found[3].stats.rejected_prediction_tokens == 0
    alone = [run(g, [prompt], [each], **options)[0].tokens for prompt, each in zip(prompts, given, strict=True)]
    assert alone == plain
    pieces = found[0].pieces
    assert sum(len(piece.tokens) for piece in pieces if piece.copied) == found[0].stats.accepted_prediction_tokens
    assert all(piece.drafted for piece in pieces if piece.copied)


def test_a_copy_is_looked_up_once_a_step(monkeypatch: pytest.MonkeyPatch):
    calls, draft = [], PredictionCursor.draft
    monkeypatch.setattr(PredictionCursor, "draft", lambda self, most: calls.append(most) or draft(self, most))
    [result] = run(tiny.generator(model()), tiny.prompts()[:1], [[1, 2, 3, 4] * 9])
    assert len(calls) == result.stats.target_forwards


@pytest.mark.parametrize(
    ("drafter", "options", "wanted"),
    [
        ("none", {}, [(5, 31, 19), (15, 41, 9), (24, 33, 0), (24, 0, 0)]),
        ("none", {"exact_nodes": 8}, [(6, 27, 18), (15, 36, 9), (24, 25, 0), (24, 0, 0)]),
        ("chain", {}, [(5, 31, 19), (8, 35, 8), (8, 35, 0), (5, 19, 0)]),
        ("chain", {"exact_nodes": 8}, [(6, 27, 18), (8, 30, 8), (8, 27, 0), (5, 19, 0)]),
        ("chain", {"rule": "block"}, [(5, 31, 19), (8, 35, 8), (8, 35, 0), (5, 19, 0)]),
    ],
)
def test_numbers_of_steps(drafter: str, options: dict[str, Any], wanted: list[tuple[int, int, int]]):
    """Forwards, drafted tokens and accepted copies of each request, alone and beside the others."""
    made = tiny.draft_model(model(), model()) if drafter == "chain" else (None, None)
    g, prompts = tiny.generator(model(), *made, **options), tiny.prompts()
    given = predictions([result.tokens for result in run(g, prompts, [None] * 4)])
    alone = [run(g, [prompt], [each])[0] for prompt, each in zip(prompts, given, strict=True)]
    for results in (run(g, prompts, given), alone):
        stats = [result.stats for result in results]
        found = [(each.target_forwards, each.drafted, each.accepted_prediction_tokens) for each in stats]
        assert found == wanted


@pytest.mark.parametrize(
    ("drafter", "setting"),
    [
        ("tree", "temperature"),
        ("lookup", "history"),
        pytest.param("chain", "temperature", marks=pytest.mark.slow),
        pytest.param("chain", "history", marks=pytest.mark.slow),
        pytest.param("tree", "history", marks=pytest.mark.slow),
        pytest.param("eagle1", "temperature", marks=pytest.mark.slow),
        pytest.param("eagle1", "history", marks=pytest.mark.slow),
        pytest.param("lookup", "temperature", marks=pytest.mark.slow),
    ],
)
def test_rows_with_and_without_a_prediction_keep_their_law(drafter: str, setting: str, monkeypatch: pytest.MonkeyPatch):
    """The likeliest and the least likely text of all are predicted, beside drafts that the target seldom follows."""
    monkeypatch.setattr(copying, "NODES", 10**6)
    law = laws.law(setting)
    best, worst = ([int(i) for i in torch.unravel_index(place, law.shape)] for place in (law.argmax(), law.argmin()))
    g = laws.generator(drafter)
    seen: dict[str, list[list[int]]] = {"without": [], "likely": [], "unlikely": []}
    accepted = 0
    for part in range(2):
        sequences = []
        for number, prediction in enumerate((None, best, worst)):
            own = replace(laws.params(setting), prediction=prediction, seed=10 * part + number)
            sequences += g.submit([laws.PROMPT], own, 1000)
        g.engine.run(sequences)
        for number, name in enumerate(seen):
            seen[name] += [sequence.tokens for sequence in sequences[1000 * number : 1000 * (number + 1)]]
        accepted += sum(sequence.stats.accepted_prediction_tokens for sequence in sequences)
    assert accepted > 1000
    for name, texts in seen.items():
        assert laws.p_value(laws.tally(texts), law) > 1e-3, name


def test_drawn_drafts_beside_predictions_have_streams_of_their_own():
    drafter, policy = tiny.draft_model(model(), model())
    for rule, own in (("block", True), (None, False)):
        g = tiny.generator(model(), drafter, policy, rule=rule)
        assert (g.submit([[1, 2]], SamplingParams(prediction=[1], seed=1))[0].stream != 1) == own


def test_drafters_draft_where_nothing_is_copied():
    """A row with a copy is not drafted for, and the drafter is not called where all rows have copies."""
    prompts = tiny.prompts((5, 6))
    plain = [runs.plain(prompt, max_new_tokens=NEW) for prompt in prompts]
    plans: list[tuple[int, ...]] = []

    def propose(view: View, plan: Plan) -> Draft:
        plans.append(plan.lengths)
        return tiny.Liar([[*prompt, *text] for prompt, text in zip(prompts, plain, strict=True)])(view, plan)

    g = tiny.generator(model(), tiny.ScriptedDrafter(propose))
    run(g, prompts[:1], [plain[0]])
    assert not plans
    run(g, prompts, [plain[0], None])
    assert plans[0][0] == 0 and plans[0][1] > 0


def test_lengths_of_requests_are_capped():
    prompt = tiny.prompts((9,))[0] * 4
    g = tiny.generator(model(), PromptLookup(LookupOptions()))
    plain = runs.plain(prompt, max_new_tokens=NEW)
    for cap in (0, 1, 3):
        for prediction in (None, plain):
            found = g.generate(prompt, max_new_tokens=NEW, num_assistant_tokens=cap, prediction=prediction)
            assert found.tokens == plain and len(found.stats.drafted_by_depth) <= cap
            assert (found.stats.drafted > 0) == (cap > 0)
    assert g.generate(prompt, max_new_tokens=NEW, speculate=False, prediction=plain).stats.drafted == 0


def test_caches_are_not_grown_for_copies():
    """A copy is cut where a row of the batch is at the end of its cache."""
    g = tiny.generator(model())
    long, short = tiny.prompts((230, 5))
    plain = runs.plain(short, max_new_tokens=60)
    sequences = g.submit([long], SamplingParams(max_new_tokens=10))
    g.engine.step()
    slots = g.engine._stepper.cache.slots
    assert slots == bucket(230 + 10)
    sequences += g.submit([short], SamplingParams(max_new_tokens=60, prediction=plain))
    grown = []
    while not all(sequence.finished for sequence in sequences):
        g.engine.step()
        grown.append(g.engine._stepper.cache.slots)
    assert max(grown) == slots and sequences[1].tokens == plain
    assert sequences[1].stats.accepted_prediction_tokens > 40


def test_in_exact_mode_copies_fit_its_nodes():
    prompt = tiny.prompts((9,))[0]
    for nodes in (1, 6):
        g = tiny.generator(model(), exact_nodes=nodes)
        plain = g.generate(prompt, max_new_tokens=NEW, speculate=False).tokens
        found = g.generate(prompt, max_new_tokens=NEW, prediction=plain)
        assert found.tokens == plain and len(found.stats.drafted_by_depth) < nodes


def test_steps_with_copies_are_no_timings():
    """They have their own width, so they say nothing about the drafter's sizes."""
    prompts = tiny.prompts((5, 6))
    lookup = PromptLookup(LookupOptions())
    policy = Throughput(lookup.needs)
    g = tiny.generator(model(), lookup, policy)
    run(g, prompts, [runs.plain(prompt, max_new_tokens=NEW) for prompt in prompts])
    assert not any(pace["forward"] or pace["tokens"] for pace in policy.state()["paces"].values())
    run(g, prompts, [[], [tiny.VOCAB - 1]])
    assert any(pace["forward"] for pace in policy.state()["paces"].values())


def test_a_prediction_is_a_text_or_token_ids():
    g = tiny.generator(model())
    with pytest.raises(PromptError, match="without a tokenizer"):
        g.generate([1, 2], prediction="abc")
    with pytest.raises(OptionError, match="prediction: token 96 is outside the vocabulary"):
        g.generate([1, 2], prediction=[96])
    with pytest.raises(OptionError, match="prediction must be token ids here"):
        g.engine.request([1, 2], SamplingParams(prediction="abc"), [])
    assert g.generate([1, 2], max_new_tokens=4, prediction=[]).tokens == g.generate([1, 2], max_new_tokens=4).tokens
