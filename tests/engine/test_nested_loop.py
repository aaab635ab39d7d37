"""A loop inside a drafter says what its middle says, exactly: all coins of all levels, summed; TV < 1e-12.

And what it remembers between steps is worth nothing but time: a loop that has seen much drafts what a fresh one drafts.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Rewindable, View
from foredraft.core.errors import DrafterError
from foredraft.core.rng import VerifierRng
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.core.verify import DEFAULT, RULES, Rule
from foredraft.core.verify.parts import at as at_node, descend, drawn_from, of_tokens, path_from, ratio
from foredraft.drafters.cascade import Cascade, Options
from foredraft.drafters.context import NestedDrafter
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.states.nested_loop import NestedLoop, NestedLoopParts
from foredraft.model.hf.causal_lm import CausalLM
from nested import PROMPT, Chances, Nested, TableDrafter, TableLM, at, enumerated
from oracle import Draws, Table, loss, random_table, total_variation

LONG = 3
P, MIDDLE, SMALL, SMALLER = (random_table(3, LONG + 1, seed) for seed in (1, 2, 3, 4))


def cascade(middle: Table, drafter: Rewindable, length: int) -> Cascade:
    """A cascade over a table, which is over chains: with a threshold, drafts have no siblings."""
    model, options = TableLM(middle), Options(num_assistant_tokens=LONG, inner_tokens=length)
    part = NestedDrafter(drafter, draws=False, confidence=1e-9)
    return Cascade(options, model, part, model.new_cache(), model.vocab_size)


def outer(nested: Nested, p: Table, lengths: Tensor | None = None) -> Draws:
    """What the target is asked to judge."""
    tree = nested.draft.tree
    if lengths is not None:
        tree = TokenTree.chain(tree.tokens, lengths + 1)
    texts = torch.cat([torch.tensor(PROMPT).expand(len(tree.tokens), -1), tree.tokens[:, 1:]], 1)
    laws = torch.stack([at(p, texts, level) for level in range(tree.tokens.shape[1])], 1)
    return Draws(replace(nested.draft, tree=tree), nested.weights, laws)


def off(nested: Nested, middle: Table) -> float:
    """Distance of the drafts from what the middle says, and of the claimed law from the middle's own."""
    tokens, q = nested.draft.tree.tokens, nested.draft.q
    assert q is not None
    vocabulary, length = q.shape[2], tokens.shape[1] - 1
    texts = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens[:, 1:]], 1)
    said = torch.zeros(vocabulary**length, dtype=torch.float64)
    number = tokens[:, 1:] @ vocabulary ** torch.arange(length - 1, -1, -1)
    said.index_add_(0, number, nested.weights)
    law, claimed = middle[0][0], 0.0
    for level in range(length):
        claimed = max(claimed, float((q[:, 1 + level] - at(middle, texts, level)).abs().max()))
        law = law if level == 0 else (law[:, None] * middle[level]).flatten()
    return max(total_variation(said, law), claimed)


Make = Callable[[Chances], Rewindable]


def drawn(length: int = 2, picks: bool = False) -> Make:
    return lambda chances: cascade(MIDDLE, TableDrafter(SMALL, length, chances, picks), length)


def test_the_enumeration_is_of_everything(monkeypatch: pytest.MonkeyPatch):
    nested = enumerated(drawn(), 3, LONG, monkeypatch)
    assert float(nested.weights.sum()) == pytest.approx(1, abs=1e-12)
    assert len(nested.weights) > 100 and set(nested.first.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("length", [1, 2])
def test_three_levels_are_exact(length: int, monkeypatch: pytest.MonkeyPatch):
    nested = enumerated(drawn(length), 3, LONG, monkeypatch)
    assert nested.draft.law is Law.CHAIN
    assert off(nested, MIDDLE) < 1e-12
    for name in ("token", "block"):
        assert loss(RULES[name].function, outer(nested, P), P) < 1e-12


def test_a_picked_draft_inside_is_exact(monkeypatch: pytest.MonkeyPatch):
    nested = enumerated(drawn(picks=True), 3, LONG, monkeypatch)
    assert off(nested, MIDDLE) < 1e-12
    assert loss(RULES["block"].function, outer(nested, P), P) < 1e-12


def test_forbidden_tokens_are_exact(monkeypatch: pytest.MonkeyPatch):
    p, middle, small = (random_table(3, LONG + 1, seed, zeros=0.4) for seed in (5, 6, 7))
    nested = enumerated(lambda c: cascade(middle, TableDrafter(small, 2, c), 2), 3, LONG, monkeypatch)
    assert off(nested, middle) < 1e-12
    assert loss(RULES["block"].function, outer(nested, p), p) < 1e-12


def test_four_levels_are_exact(monkeypatch: pytest.MonkeyPatch):
    """A cascade in a cascade: target, middle, smaller, and a table that draws."""

    p, middle, small, smaller = (random_table(2, LONG + 1, seed) for seed in (1, 2, 3, 4))

    def make(chances: Chances) -> Cascade:
        return cascade(middle, cascade(small, TableDrafter(smaller, 1, chances), 1), 2)

    nested = enumerated(make, 2, LONG, monkeypatch, alone=True)
    assert len(nested.weights) > 50
    assert off(nested, middle) < 1e-12
    assert loss(RULES["block"].function, outer(nested, p), p) < 1e-12


def from_p_instead_of_the_residual(p: Tensor, draft: Draft, coins: VerifierRng) -> Verdict:
    """Token verification as TriForce's code has it inside: after a rejection it draws from p (methods.md 10)."""
    if draft.q is None:
        return Verdict(torch.zeros_like(draft.tree.tokens[:, :1]), coins.residual(p[:, 0]))
    chance = ratio(*of_tokens(p, drawn_from(draft), draft.tree)).clamp(max=1.0)
    path = path_from(descend(draft.tree, coins.accept(chance)), draft.tree)
    return Verdict(path, coins.residual(at_node(p, path.amax(1))))


def test_it_is_seen_if_a_rejection_inside_draws_from_p(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setitem(RULES, DEFAULT, Rule(from_p_instead_of_the_residual, frozenset(Law), "it is wrong"))
        nested = enumerated(drawn(), 3, LONG, monkeypatch)
    assert off(nested, MIDDLE) > 1e-2
    assert loss(RULES["block"].function, outer(nested, P), P) > 1e-3


def test_it_is_seen_if_only_accepted_tokens_are_handed_on(monkeypatch: pytest.MonkeyPatch):
    """Whether a token is submitted then depends on whether it was accepted, hence on the token itself."""
    nested = enumerated(drawn(), 3, LONG, monkeypatch)
    for name in ("token", "block"):
        assert loss(RULES[name].function, outer(nested, P, nested.first - 1), P) > 1e-3


def test_a_draft_may_also_end_where_an_inner_step_ends(monkeypatch: pytest.MonkeyPatch):
    """With the token that replaces the first refused one. An exact rule says each token by p, given those before it
    and that it says one more at all; so the paper's drafts of n blocks are lossless too."""
    nested = enumerated(drawn(), 3, LONG, monkeypatch)
    for name in ("token", "block"):
        assert loss(RULES[name].function, outer(nested, P, nested.first), P) < 1e-12


def test_it_is_seen_if_the_claimed_law_is_the_small_drafts(monkeypatch: pytest.MonkeyPatch):
    nested = enumerated(drawn(), 3, LONG, monkeypatch)
    draws = outer(nested, P)
    assert draws.draft.q is not None
    texts = torch.cat([torch.tensor(PROMPT).expand(len(draws.weights), -1), draws.draft.tree.tokens[:, 1:]], 1)
    q = torch.stack([draws.draft.q[:, 0], *(at(SMALL, texts, level) for level in range(LONG))], 1)
    assert loss(RULES["block"].function, replace(draws, draft=replace(draws.draft, q=q)), P) > 1e-2


# Between steps, on models.

TEXTS = tiny.prompts((5, 9, 17), vocab=12)


def models(count: int, vocab: int = 12) -> list[CausalLM]:
    """Near relatives, so that inner drafts are accepted and rejected."""
    made = []
    for seed in range(count):
        model = tiny.build("llama", spread=1.0, vocab_size=vocab)
        tiny.nudge(model, 0.03 * seed, seed)
        made.append(CausalLM(model))
    return made


def with_head(value: float) -> CausalLM:
    """A model whose output layer holds nothing but this."""
    model = tiny.build("llama", vocab_size=12, tie_word_embeddings=False)
    torch.nn.init.constant_(model.lm_head.weight, value)
    return CausalLM(model, verify=False)


def loop(middle: CausalLM, draft: CausalLM, vocab: int = 12) -> NestedLoop:
    drafter = DraftModel(DraftOptions(num_assistant_tokens=3), draft, vocab)
    return NestedLoop(NestedLoopParts(middle, drafter, middle.new_cache(), 3), vocab)


def view_of(texts: list[list[int]], temperature: float, vocab: int = 12, *, draws: bool = False) -> View:
    return tiny.view(texts, SamplingParams(temperature=temperature), vocab, range(len(texts)), draws=draws)


def admitted(loop: NestedLoop, rows: int) -> NestedLoop:
    for row in range(rows):
        loop.admit(row, torch.tensor([1]), {})
    return loop


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_taken_back_leaves_no_trace(temperature: float):
    """Step after step, each keeping another part of the draft: the same tokens and laws as from a fresh loop."""
    middle, draft = models(2)
    used = admitted(loop(middle, draft), 3)
    texts = [list(text) for text in TEXTS]
    steps = [(0, 3, (4, 4, 4)), (2, 5, (6, 0, 3)), (4, 1, (4, 5, 5)), (5, 7, (1, 5, 2)), (1, 2, (4, 4, 4))]
    for keep, wrong, lengths in steps:
        view = view_of(texts, temperature)
        found, fresh = used.extend(view, lengths).draft, admitted(loop(middle, draft), 3).extend(view, lengths).draft
        assert torch.equal(found.tree.tokens, fresh.tree.tokens) and torch.equal(found.tree.parents, fresh.tree.parents)
        assert (found.tree.valid.sum(1) - 1).tolist() == list(lengths)
        if found.q is not None and fresh.q is not None:
            torch.testing.assert_close(found.q, fresh.q, atol=1e-5, rtol=0.0)
        for b, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            text += [*found.tree.tokens[b, 1 : 1 + min(keep, length)].tolist(), wrong]
    view = view_of([text[:4] for text in texts], temperature)
    for row in range(3):
        used.rewind(row, 4)
    found, fresh = used.extend(view, (5,) * 3).draft, admitted(loop(middle, draft), 3).extend(view, (5,) * 3).draft
    assert torch.equal(found.tree.tokens, fresh.tree.tokens)


def test_greedy_drafts_are_what_the_middle_says_alone():
    middle, draft = models(2)
    found = admitted(loop(middle, draft), 3).extend(view_of(TEXTS, 0.0), (7, 3, 5)).draft
    assert found.law is Law.FIXED and found.q is None
    for b, (text, length) in enumerate(zip(TEXTS, (7, 3, 5), strict=True)):
        said = list(text)
        for _ in range(length):
            said.append(int(middle.stock_logits(torch.tensor([said]))[0, -1].argmax()))
        assert found.tree.tokens[b, 1 : 1 + length].tolist() == said[len(text) :]


def test_what_the_middle_said_and_the_target_accepted_is_not_read_again():
    """After a partly accepted draft nothing is to be caught up; after a whole one, its last token."""
    table = random_table(3, 12, 2)[:8]
    table += [table[0].expand(3**level, -1) for level in range(8, 12)]
    model = TableLM(table)
    drafter = TableDrafter(table, 2, Chances(torch.zeros(1, 0, dtype=torch.long), 3, 99), picks=True)
    used = NestedLoop(NestedLoopParts(model, drafter, model.new_cache(), 2), 3)
    used.admit(0, torch.tensor(PROMPT[:-1]), {})
    text = list(PROMPT)
    reads = []
    read = used._read

    def noted(rows: list[int], starts: list[int], device: torch.device) -> None:
        reads.append([used._cached[row][start:] for row, start in zip(rows, starts, strict=True)])
        read(rows, starts, device)

    used._read = noted
    for keep in (2, 4, 1):
        first = used.extend(view_of([text], 0.0, 3), (4,)).draft.tree.tokens[0, 1:].tolist()
        text += [*first[:keep], (first[keep] + 1) % 3 if keep < 4 else 0]
    used.extend(view_of([text], 0.0, 3), (1,))
    assert reads == [[list(PROMPT[:-1])], [[text[3 + 3 + 3]]]]


def test_loops_of_later_steps_draw_afresh():
    """The same inner position is visited again in the next outer step, and must not repeat what was drawn there."""
    text, rows = TEXTS[0], 400
    flat = with_head(0.0)  # every token is as likely as any other
    used = admitted(loop(flat, flat), rows)
    first = used.extend(view_of([text] * rows, 1.0, draws=True), (4,) * rows).draft.tree.tokens
    second = used.extend(view_of([[*text, 1]] * rows, 1.0, draws=True), (4,) * rows).draft.tree.tokens
    for a, b in itertools.product(range(1, 5), range(1, 5)):
        same = float((first[:, a] == second[:, b]).double().mean())
        assert abs(same - 1 / 12) < 5 * (1 / 12 * 11 / 12 / rows) ** 0.5


@pytest.mark.parametrize("vocab", [9, 12, 15])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_middle_of_another_width(vocab: int, temperature: float):
    """The claimed laws are as wide as the target's, and nothing is drafted that the target does not have."""
    middle, draft = models(2, vocab)
    used = admitted(
        NestedLoop(NestedLoopParts(middle, DraftModel(DraftOptions(), draft, 12), middle.new_cache(), 3), 12), 3
    )
    texts = tiny.prompts((5, 9, 17), vocab=9)
    found = used.extend(view_of(texts, temperature), (4, 4, 4)).draft
    assert int(found.tree.tokens.max()) < 12
    if found.q is not None:
        assert found.q.shape == (3, 5, 12)
        torch.testing.assert_close(found.q[:, 1:].sum(-1), torch.ones(3, 4))


def test_a_text_that_outgrows_the_middle_goes_on_alone():
    middle = CausalLM(tiny.build("llama", vocab_size=12, max_position_embeddings=16))
    used = admitted(loop(middle, models(1)[0]), 3)
    texts = [text[:size] for text, size in zip(tiny.prompts((17, 17, 17), 12), (6, 14, 17), strict=True)]
    found = used.extend(view_of(texts, 1.0), (4,) * 3).draft
    assert (found.tree.valid.sum(1) - 1).tolist() == [4, 2, 0]


def test_a_middle_that_says_nothing_sensible_drafts_something():
    middle, draft = with_head(torch.nan), models(1)[0]
    assert bool(middle.stock_logits(torch.tensor([[1, 2]])).isnan().all())
    for temperature in (0.0, 1.0):
        found = admitted(loop(middle, draft), 3).extend(view_of(TEXTS, temperature), (4,) * 3).draft
        assert found.q is None or bool((found.q[:, 1:].sum(-1) - 1).abs().max() < 1e-5)
        assert (found.tree.valid.sum(1) - 1).tolist() == [4, 4, 4]


def test_who_cannot_take_back_is_refused():
    middle, _ = models(2)
    scripted = tiny.ScriptedDrafter(lambda view, plan: Draft(TokenTree.root(view.roots), Law.FIXED))
    with pytest.raises(DrafterError, match="cannot be rewound"):
        NestedLoop(NestedLoopParts(middle, scripted, middle.new_cache(), 3), 12)
    drafter = DraftModel(DraftOptions(), middle, 12)
    drafter.needs = replace(drafter.needs, hidden_layers=(1,))
    with pytest.raises(DrafterError, match="hidden states"):
        NestedLoop(NestedLoopParts(middle, drafter, middle.new_cache(), 3), 12)
