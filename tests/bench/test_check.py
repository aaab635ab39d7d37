"""What ``check`` says of a sound loop, and of loops with planted faults."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import tiny
from foredraft.bench import check
from foredraft.bench.check import check_identity, check_sampled
from foredraft.cli import main
from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.drafter import Plan, View
from foredraft.core.rng import HashedRng, Noise, RandomStream
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree
from foredraft.drafters.draft_model import DraftModel, Options
from foredraft.engine import tail
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache

VOCAB, TOKENS = 24, 4500
SAMPLED = SamplingParams(temperature=0.8, max_new_tokens=3, eos_token_id=(), seed=0)
GREEDY = SamplingParams(max_new_tokens=24, eos_token_id=())
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 1], [3] * 6]


def pair() -> tuple[CausalLM, CausalLM]:
    """A target, and a draft that is often wrong."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    target, draft = (tiny.build("llama", spread=spread, seed=seed, **sizes) for spread, seed in ((1.0, 1), (0.7, 2)))
    return CausalLM(target), CausalLM(draft)


def sound(branching: tuple[int, ...] | None = None, tokens: int = 3, rule: str | None = None) -> Generator:
    target, draft = pair()
    options = Options(num_assistant_tokens=tokens, branching=branching)
    drafter = DraftModel(options, draft, target.vocab_size)
    return tiny.generator(target, drafter, Constant(drafter.needs.longest), rule=rule)


def scripted(propose: Callable[[View, Plan], Draft]) -> Generator:
    return tiny.generator(pair()[0], tiny.ScriptedDrafter(propose, max_nodes=2), rule="block")


def other_law(view: View) -> torch.Tensor:
    """Some law that is not the target's, from the last token alone: [B, 1, V]."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))[view.roots][:, None] * 2
    paths = Paths(view.history, view.lengths, TokenTree.root(view.roots))
    return view.warp.law(logits, paths)


def one(view: View, token: torch.Tensor, q: torch.Tensor) -> Draft:
    tree = TokenTree.chain(torch.stack([view.roots, token], 1))
    return Draft(tree, Law.CHAIN, torch.cat([torch.zeros_like(q), q], 1))


def draw(view: View, q: torch.Tensor) -> torch.Tensor:
    u = view.noise.uniform(RandomStream.DRAFT, torch.ones_like(view.lengths))
    return (q[:, 0].cumsum(-1) < u[:, None]).sum(-1).clamp(max=VOCAB - 1)


@pytest.mark.slow
@pytest.mark.parametrize("branching", [None, (3, 2)])
def test_a_sound_loop_passes_twenty_times(branching: tuple[int, ...] | None):
    generator = sound(branching, rule="traversal" if branching else "block")
    for seed in range(20):
        params = SamplingParams(temperature=0.8, max_new_tokens=3, eos_token_id=(), seed=seed)
        found = check_sampled(generator, PROMPTS, params, 1200)
        assert found.passed and found.accepted > 0
    assert check_identity(generator, PROMPTS, GREEDY).differences == ()


@pytest.mark.parametrize(
    "params", [{"top_p": 0.8}, {"top_k": 5}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str
)
def test_a_sound_loop_passes_with_any_sampling(params: dict[str, Any]):
    options = SamplingParams(temperature=0.9, max_new_tokens=3, eos_token_id=(), seed=0, **params)
    assert check_sampled(sound(rule="block"), PROMPTS, options, TOKENS // 3).passed


@pytest.mark.slow
def test_p_values_are_spread_evenly_where_all_is_well():
    """Not only not small: the law is the right one."""
    generator = sound(rule="block")
    values = []
    for seed in range(25):
        params = SamplingParams(temperature=0.8, max_new_tokens=3, eos_token_id=(), seed=1000 + seed)
        values.append(check_sampled(generator, PROMPTS, params, 800).p_value)
    assert 0.2 < sum(values) / len(values) < 0.95 and min(values) < 0.5


def argmax_with_softmax_q(view: View, plan: Plan) -> Draft:
    q = other_law(view)
    return one(view, q[:, 0].argmax(-1), q)


def pruned_tree(view: View, plan: Plan) -> Draft:
    """A drawn token is thrown away where it was unlikely."""
    q = other_law(view)
    token = draw(view, q)
    draft = one(view, token, q)
    sure = q[:, 0].gather(1, token[:, None])[:, 0] > 0.2
    return Draft(TokenTree.chain(draft.tree.tokens, 1 + sure.long()), Law.CHAIN, draft.q)


def top_p_of_the_draft_only(view: View, plan: Plan) -> Draft:
    """The draft is cut off, its q is not."""
    q = other_law(view)
    cut = torch.where(q >= q.amax(-1, keepdim=True) * 0.5, q, 0.0)
    return one(view, draw(view, cut / cut.sum(-1, keepdim=True)), q)


def one_of_another(view: View, plan: Plan) -> Draft:
    q = other_law(view)
    return one(view, draw(view, q), q)


@pytest.mark.parametrize(
    ("fault", "tokens"),
    [(argmax_with_softmax_q, TOKENS), (pruned_tree, 2 * TOKENS), (top_p_of_the_draft_only, TOKENS)],
)
def test_drafts_that_lie_about_their_law_are_caught(fault: Callable[[View, Plan], Draft], tokens: int):
    found = check_sampled(scripted(fault), PROMPTS, SAMPLED, tokens)
    assert found.accepted > 0 and found.p_value < 1e-9 and not found.passed


def test_the_same_drafts_without_a_fault_pass():
    found = check_sampled(scripted(one_of_another), PROMPTS, SAMPLED, TOKENS)
    assert found.accepted > 0 and found.passed


def test_a_shared_random_stream_is_caught(monkeypatch: pytest.MonkeyPatch):
    def same(self: HashedRng, probability: torch.Tensor) -> torch.Tensor:
        nodes = torch.arange(probability.shape[1]).expand_as(probability)
        return self.noise.uniform(RandomStream.DRAFT, nodes) < probability

    monkeypatch.setattr(HashedRng, "accept", same)
    assert check_sampled(scripted(one_of_another), PROMPTS, SAMPLED, TOKENS).p_value < 1e-9


def test_a_temperature_that_the_bonus_ignores_is_caught(monkeypatch: pytest.MonkeyPatch):
    before, cold = tail.verify, SamplingParams(temperature=0.5, max_new_tokens=3, eos_token_id=(), seed=0)

    def warmer(law: Target, draft: Draft, coins: HashedRng, rule: str | None) -> Verdict:
        assert law.p is not None
        hot = law.p**cold.temperature
        nodes = torch.arange(law.p.shape[1])
        leaf = ~(draft.tree.parents[:, None] == nodes[:, None]).any(2)
        p = torch.where(leaf[..., None], hot / hot.sum(-1, keepdim=True), law.p)
        return before(Target(law.best, p, law.sound), draft, coins, rule)

    monkeypatch.setattr(tail, "verify", warmer)
    assert not check_sampled(sound(tokens=1, rule="block"), PROMPTS, cold, 2 * TOKENS).passed


def test_a_cache_that_keeps_what_was_rejected_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotCache, "compact", lambda *args: None)
    found = check_identity(sound((3, 2)), PROMPTS, GREEDY)
    assert not found.passed and found.differences


def test_near_ties_are_excused_unless_in_exact_mode(monkeypatch: pytest.MonkeyPatch):
    """Another order of two tokens that are equal but for rounding is not speculation's fault."""
    generator = sound()
    plain = check._run

    def turned(generator: Generator, requests: Any, params: SamplingParams) -> Any:
        results = plain(generator, requests, params)
        if not params.speculate:
            results[0].tokens[2] = (results[0].tokens[2] + 1) % VOCAB
        return results

    monkeypatch.setattr(check, "_run", turned)
    found = check_identity(generator, PROMPTS, GREEDY)
    assert not found.passed and [(each.output, each.place, each.tied) for each in found.differences] == [(0, 2, False)]
    for gap, passed in ((0.0, True), (1e-6, True), (1e-3, False)):
        monkeypatch.setattr(check, "_logits", lambda *args, gap=gap: gap * torch.arange(VOCAB).view(1, 1, -1) + 4)
        assert check_identity(generator, PROMPTS, GREEDY).passed == passed
        assert not check_identity(generator, PROMPTS, GREEDY, exact=True).passed


@pytest.mark.parametrize("setting", check.SETTINGS, ids=str)
def test_texts_of_a_seed_are_compared_at_any_temperature(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """They are equal; a draft that is taken though the target's token is another is seen, and is no near-tie."""
    params = SamplingParams(max_new_tokens=16, seed=3, eos_token_id=(), **setting)
    for together in (0, 1, 3):
        assert check_identity(sound((3, 2)), PROMPTS, params, together=together).differences == ()
    before = tail.verify

    def lenient(law: Target, draft: Draft, coins: HashedRng, rule: str | None) -> Verdict:
        if draft.tree.depth == 0 or law.p is None:
            return before(law, draft, coins, rule)
        return before(Target(law.best, (law.p + 0.2) / (1 + 0.2 * VOCAB), law.sound), draft, coins, rule)

    monkeypatch.setattr(tail, "verify", lenient)
    found = check_identity(sound((3, 2)), PROMPTS, params)
    assert found.passed == (setting["temperature"] == 0)
    assert all(each.gap > 1e-3 and not each.tied for each in found.differences)


def test_the_margin_of_a_difference_is_that_of_the_race():
    """Of log p minus log arrival time: 0 for a token and itself, and positive between the winner and any other."""
    generator, params = sound(), SamplingParams(temperature=0.8, max_new_tokens=4, eos_token_id=(), seed=5)
    (sequence,) = check._run(generator, [(PROMPTS[0], 5)], params)
    for place in range(4):
        won = sequence.tokens[place]
        assert check._difference(generator, 0, sequence, (won, won), place).tied
        gaps = [check._difference(generator, 0, sequence, (won, t), place).gap for t in range(VOCAB) if t != won]
        assert min(gaps) > 0
        law = check._law(generator, sequence.prompt, sequence.tokens[:place], params)
        noise = Noise(torch.tensor([5]), torch.tensor([len(PROMPTS[0]) + place]))
        assert int((law / noise.times(0, VOCAB)[0]).argmax()) == won


def test_the_power_is_what_it_says():
    """By scipy's noncentral chi-square."""
    for freedom in (1, 19, 300):
        limit = stats.chi2.isf(check.SIGNIFICANCE, freedom)
        assert stats.ncx2.sf(limit, freedom, check.detectable_noncentrality(freedom)) == pytest.approx(
            check.POWER, abs=1e-3
        )
        assert check.chi_square_tail(30.0, freedom) == pytest.approx(stats.chi2.sf(30.0, freedom))


def test_a_shift_of_the_stated_size_is_seen():
    """Draws from laws of which so much was moved from one token to another."""
    source = torch.Generator().manual_seed(5)
    law = torch.full((10,), 0.1, dtype=torch.float64)

    def trial(shift: float) -> check._ChiSquareSum:
        found = check._ChiSquareSum()
        for _ in range(5):
            moved = law.clone()
            moved[2] += shift
            moved[7] -= shift
            found.add(law, torch.multinomial(moved, 2000, replacement=True, generator=source))
        return found

    shift = trial(0.0).shift
    assert 0.01 < shift < 0.03
    assert sum(trial(shift).p_value < check.SIGNIFICANCE for _ in range(60)) >= 56
    assert sum(trial(0.0).p_value < 0.05 for _ in range(200)) <= 22


def test_a_token_that_the_law_excludes_is_enough():
    found = check._ChiSquareSum()
    law = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert found.add(law, torch.tensor([0, 1] * 50 + [2])) and found.p_value == 0.0
    assert 0 < found.shift < 1, "the other draws are still draws"


def test_an_excluded_token_is_seen_where_nothing_else_can_be():
    """A law of a single token: there is no second cell that a part of it could have been moved to."""
    found = check._ChiSquareSum()
    law = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert not found.add(law, torch.tensor([0] * 60)) and found.shift == 1.0
    assert found.add(law, torch.tensor([0] * 60 + [1])) and (found.p_value, found.shift) == (0.0, 1.0)


def test_the_command_says_it_in_a_line_and_a_status(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    asked = tmp_path / "p.txt"
    asked.write_text("def f(x):\n---\nOnce upon a time\n")
    arguments = ["check", "--drafter", "prompt_lookup", "--prompts", str(asked), "--output-tokens", "12"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "Verdict: lossless." in out and out.count("2 of 2 outputs") == 4 and "distribution" not in out
    arguments += ["--law", "--tokens", "600"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lossless"] is True and found["sampled"]["tokens"] >= 600


def test_the_command_fails_where_it_is_lossy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotCache, "compact", lambda *args: None)
    assert main(["check", "--drafter", "eagle3", "--count", "4"]) == 1
    assert "NOT lossless" in capsys.readouterr().out
