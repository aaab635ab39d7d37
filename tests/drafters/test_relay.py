"""Relays: what each drafter adds, the law of mixed drafts by enumeration, and what cannot be handed on."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import foredraft
import tiny
from foredraft.core.draft import Law
from foredraft.core.drafter import Plan, Rewindable, View
from foredraft.core.errors import DrafterError, LawError, OptionError
from foredraft.core.rng import Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.verify import RULES
from foredraft.drafters.context import NestedDrafter
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.early_exit import EarlyExit, Options as ExitOptions
from foredraft.drafters.lookahead import Lookahead, Options as LookaheadOptions
from foredraft.drafters.max_gram import MaxGram, Options as MaxGramOptions
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.prompt_lookup import Options as LookupOptions, PromptLookup
from foredraft.drafters.relay import Options, Relay
from foredraft.drafters.triforce import Options as TriForceOptions, TriForce
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from nested import PROMPT, Chances, TableDrafter, at, enumerated
from oracle import Draws, loss, random_table

VOCAB = 12


def view_of(texts: list[list[int]], temperature: float = 0.0) -> View:
    return tiny.view(texts, SamplingParams(temperature=temperature), VOCAB, range(len(texts)), draws=True)


def model_part(tokens: int, confidence: float = 0.0) -> NestedDrafter:
    model = CausalLM(tiny.build("llama", vocab_size=VOCAB))
    return NestedDrafter(DraftModel(DraftOptions(num_assistant_tokens=tokens), model, VOCAB), True, confidence)


def max_gram(tokens: int) -> NestedDrafter:
    return NestedDrafter(MaxGram(MaxGramOptions(num_assistant_tokens=tokens), VOCAB), draws=False)


def lookup(tokens: int, **options: int) -> NestedDrafter:
    return NestedDrafter(PromptLookup(LookupOptions(prompt_lookup_num_tokens=tokens, **options)), draws=False)


def relay(*parts: NestedDrafter, vocab: int = VOCAB) -> Relay:
    return Relay(Options(), parts, vocab)


def admitted(relay: Relay, texts: list[list[int]]) -> Relay:
    tiny.admit(relay, texts)
    return relay


SMALL, SMALLER, P = (random_table(3, 4, seed) for seed in (1, 2, 3))


@pytest.mark.parametrize("picks", [(False, True), (True, False), (False, False), (True, True)])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafts_of_mixed_sources_are_exact(picks: tuple[bool, bool], rule: str, monkeypatch: pytest.MonkeyPatch):
    """The one-hot of a picked token is the law that it was really drawn from: TV < 1e-12 over all coins."""

    def make(chances: Chances) -> Rewindable:
        first, second = TableDrafter(SMALL, 2, chances, picks[0]), TableDrafter(SMALLER, 1, chances, picks[1])
        return Relay(Options(), [NestedDrafter(first, not picks[0]), NestedDrafter(second, not picks[1])], 3)

    nested = enumerated(make, 3, 3, monkeypatch)
    tokens = nested.draft.tree.tokens
    assert len(tokens) == 3 ** (2 * (not picks[0]) + (not picks[1]))
    assert nested.draft.law is (Law.FIXED if all(picks) else Law.CHAIN)
    texts = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens[:, 1:]], 1)
    laws = torch.stack([at(P, texts, level) for level in range(4)], 1)
    if all(picks):
        rule = "target_sampling"
    assert loss(RULES[rule].function, Draws(nested.draft, nested.weights, laws), P) < 1e-12


def test_each_goes_on_from_what_was_drafted_before_it():
    texts = [[1, 2, 3, 4, 5, 1, 2, 3], [7, 8], [6, 9, 6, 9, 6]]
    draft = admitted(relay(lookup(2), max_gram(3)), texts).propose(view_of(texts), Plan((5, 5, 3)))
    assert draft.law is Law.FIXED and draft.q is None and draft.tree.linear
    found = [t[v][1:].tolist() for t, v in zip(draft.tree.tokens, draft.tree.valid, strict=True)]
    assert found == [[4, 5, 1, 2, 3], [8], [9, 6, 9]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_second_is_told_what_the_first_has_drafted(temperature: float):
    """Its tokens and laws are those that it drafts alone for the longer text."""
    texts = tiny.prompts((3, 9, 5), vocab=VOCAB)
    parts = [model_part(2), model_part(3)]
    both = admitted(relay(*parts), texts)
    view = view_of(texts, temperature)
    for _ in range(2):  # the second time everything has been taken back once
        draft = both.propose(view, Plan((5, 5, 5)))
        assert bool(draft.tree.valid.all()) and draft.tree.tokens.shape[1] == 6
        assert draft.law is (Law.CHAIN if temperature else Law.FIXED)
        other = model_part(3).drafter
        longer = [text + draft.tree.tokens[b, 1:3].tolist() for b, text in enumerate(texts)]
        tiny.admit(other, [[1, 2]] * 3)
        ahead = view_of(longer, temperature)
        noise = Noise(view.noise.nested(1).seeds, ahead.lengths)
        alone = other.propose(replace(ahead, noise=noise), Plan((3,) * 3, chain=True))
        assert torch.equal(alone.tree.tokens[:, 1:], draft.tree.tokens[:, 3:])
        if alone.q is not None and draft.q is not None:
            torch.testing.assert_close(alone.q[:, 1:], draft.q[:, 3:], atol=1e-5, rtol=0.0)


def test_no_number_is_used_twice_by_two_drafters_or_two_steps():
    """A late drafter of one step and an early one of the next may stand at the same place."""
    seeds, positions = torch.arange(50), torch.full((50,), 7)
    now, later = Noise(seeds, positions), Noise(seeds, positions + 2)
    kept = torch.cat([noise.nested(part).seeds for noise in (now, later) for part in range(3)])
    assert kept.unique().numel() == kept.numel()
    flat = tiny.build("llama", vocab_size=VOCAB, tie_word_embeddings=False)
    torch.nn.init.zeros_(flat.lm_head.weight)
    model = CausalLM(flat, verify=False)
    texts = [[1, 2]] * 600
    both = relay(*(NestedDrafter(DraftModel(DraftOptions(2), model, VOCAB), draws=True) for _ in range(2)))
    first = admitted(both, texts).propose(view_of(texts, 1.0), Plan((4,) * 600)).tree.tokens
    second = both.propose(view_of([[1, 2, 3, 4]] * 600, 1.0), Plan((4,) * 600)).tree.tokens
    for a in range(1, 5):
        for b in range(1, 5):
            same = float((first[:, a] == second[:, b]).double().mean())
            assert abs(same - 1 / VOCAB) < 5 * (1 / VOCAB / 600) ** 0.5


def test_an_unsure_token_ends_the_first_segment_and_the_next_goes_on():
    texts = tiny.prompts((5, 5, 5, 5), vocab=VOCAB)
    unsure = relay(model_part(3, confidence=1.1), max_gram(2))
    draft = admitted(unsure, texts).propose(view_of(texts, 1.0), Plan((4,) * 4))
    assert draft.q is not None
    certain = (draft.q == 1).any(-1) & draft.tree.valid
    assert not bool(certain[:, 1].any()) and bool(certain[:, 2].all())


def test_where_one_drafts_nothing_the_next_goes_on_from_the_text():
    model = CausalLM(tiny.build("llama", vocab_size=VOCAB, max_position_embeddings=16))
    short = NestedDrafter(DraftModel(DraftOptions(num_assistant_tokens=2), model, VOCAB), draws=True)
    texts = [[1, 2, 3, 4] * 4, [5, 6] * 8]  # as long as the model's context
    draft = admitted(relay(short, max_gram(3)), texts).propose(view_of(texts, 1.0), Plan((5, 2)))
    # picked, all of them, but in another batch there might be drawn ones beside them, and the rule must be the same
    assert draft.law is Law.CHAIN and draft.q is not None
    assert torch.equal(draft.q[:, 1:].argmax(-1), draft.tree.tokens[:, 1:]) and bool((draft.q.sum(-1) == 1).all())
    assert [t[v][1:].tolist() for t, v in zip(draft.tree.tokens, draft.tree.valid, strict=True)] == [[1, 2, 3], [5, 6]]


def test_the_target_as_first_drafter_is_accepted_whole():
    target = CausalLM(tiny.build("llama"))
    first = DraftModel(DraftOptions(num_assistant_tokens=3), target, target.vocab_size)
    copying = MaxGram(MaxGramOptions(num_assistant_tokens=2), target.vocab_size)
    both = relay(NestedDrafter(first, draws=True), NestedDrafter(copying, draws=False), vocab=target.vocab_size)
    assert both.needs.max_nodes == 5
    result = tiny.generator(target, both, Constant(5)).generate(tiny.prompts((9,))[0], max_new_tokens=24)
    assert result.stats.accepted >= 3 * (result.stats.target_forwards - 2)


def test_who_drafts_in_the_targets_cache_comes_first():
    """There it is accepted whole; as a later drafter it would read what nobody has written."""
    target = CausalLM(tiny.build("llama"))
    cache, size = target.new_cache(), target.vocab_size
    options = ExitOptions(num_assistant_tokens=3, assistant_early_exit=target.layers)
    own = NestedDrafter(EarlyExit(options, target, cache, size), draws=True)
    copying = NestedDrafter(MaxGram(MaxGramOptions(num_assistant_tokens=2), size), draws=False)
    both = relay(own, copying, vocab=size)
    assert both.needs.target_cache and not relay(lookup(2), max_gram(2)).needs.target_cache
    result = tiny.generator(target, both, Constant(5), cache=cache).generate(tiny.prompts((9,))[0], max_new_tokens=24)
    assert result.stats.accepted >= 3 * (result.stats.target_forwards - 2)
    for wrong in (own, NestedDrafter(both, draws=True)):
        with pytest.raises(DrafterError, match="put it first"):
            relay(copying, wrong, vocab=size)
    with pytest.raises(DrafterError, match="middle level of triforce"):
        TriForce(TriForceOptions(), target, cache, own, size)


@pytest.mark.parametrize(
    "spec", ["relay:[prompt_lookup]+[max_gram]", "relay:[relay:[prompt_lookup]+[max_gram]]+max_gram"]
)
def test_where_all_pick_it_is_a_picker_also_inside_another(spec: str):
    target = CausalLM(tiny.build("llama"))
    g = foredraft.load(target, spec, verifier="target_sampling")
    assert g.engine.drafter.needs.law is Law.FIXED
    with pytest.raises(LawError, match="'block' would not be lossless for a 'fixed' draft"):
        foredraft.load(target, spec, verifier="block")


def test_what_cannot_be_a_relay_is_refused():
    learning = NestedDrafter(MaxGram(MaxGramOptions(bigrams=True), VOCAB), draws=False)
    with pytest.raises(DrafterError, match="two drafters or more"):
        relay(lookup(2))
    with pytest.raises(DrafterError, match="trees"):
        relay(lookup(2), lookup(2, continuations=2))
    with pytest.raises(DrafterError, match="nothing"):
        relay(lookup(2), NestedDrafter(NoDrafter(), draws=False))
    with pytest.raises(DrafterError, match="without bigrams"):
        relay(model_part(2), learning)
    assert relay(lookup(2), learning).needs.learns
    shared = LookaheadOptions(window_size=1, ngram_size=2, guess_set_size=1, pool="shared")
    for options, learns in ((shared, True), (replace(shared, pool="request"), False)):
        part = NestedDrafter(Lookahead(options, torch.device("cpu")), draws=False)
        assert relay(lookup(2), part).needs.learns == learns
        with pytest.raises(DrafterError, match="pool=request") if learns else nullcontext():
            relay(model_part(2), part)
    with pytest.raises(OptionError, match="1 or more"):
        Options(num_assistant_tokens=0)
