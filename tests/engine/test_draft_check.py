"""A drafter of the user's own that gets its drafts wrong: a sentence that names it, and never another output."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import runs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, StepOut, View
from foredraft.core.errors import DrafterError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, TokenTree
from foredraft.engine import draft_check
from foredraft.engine.draft_check import checked
from foredraft.engine.generator import Generator
from foredraft.model.kv.masks import StepIn
from runs import model

PROMPTS = tiny.prompts((5, 9))
NEW = 6
Fault = Callable[[Draft], Any]
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=3)


def plain() -> list[list[int]]:
    return [runs.plain(prompt, max_new_tokens=NEW) for prompt in PROMPTS]


def chain(view: View) -> Draft:
    """Two tokens, drawn from a law that is uniform over the tokens 0 to 9."""
    tokens = torch.cat([view.roots[:, None], torch.tensor([[4, 5]] * len(view.rows))], 1)
    q = torch.zeros(len(view.rows), 3, tiny.VOCAB)
    q[..., :10] = 0.1
    return Draft(TokenTree.chain(tokens), Law.CHAIN, q)


def tree(view: View) -> Draft:
    """Two children of the root, one of which has a child; picked."""
    tokens = torch.cat([view.roots[:, None], torch.tensor([[4, 5, 6]] * len(view.rows))], 1)
    parents = torch.tensor([[-1, 0, 0, 1]] * len(view.rows))
    return Draft(TokenTree(tokens, parents, depth=2), Law.FIXED)


def with_tree(draft: Draft, **changes: object) -> Draft:
    return replace(draft, tree=replace(draft.tree, **changes))


def put(values: torch.Tensor, node: int, value: float) -> torch.Tensor:
    """The same, with another value at a node of the last row."""
    values = values.clone()
    values[-1, node] = value
    return values


def parent(node: int, value: int, **changes: object) -> Fault:
    """Another parent of a node of the last row."""
    return lambda d: with_tree(d, parents=put(d.tree.parents, node, value), **changes)


def forced(made: Any, **changes: object) -> Any:
    """The same with other fields, also such as are refused where types are checked, as they are in tests."""
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


FORM: dict[str, tuple[Callable[[View], Draft], Fault, str]] = {
    "one row for two": (
        tree,
        lambda d: with_tree(d, tokens=d.tree.tokens[:1], parents=d.tree.parents[:1]),
        r"shape \(1, 4\), and must have 2 rows",
    ),
    "parents of another shape": (
        tree,
        lambda d: replace(d, tree=forced(d.tree, parents=d.tree.parents[:, :3])),
        r"parents have shape \(2, 3\)",
    ),
    "numbers of another type": (tree, lambda d: with_tree(d, tokens=d.tree.tokens.int()), "must be torch.int64"),
    "drawn without q": (chain, lambda d: replace(d, q=None), "its law is 'chain', so it must come with q"),
    "picked with q": (chain, lambda d: replace(d, law=Law.FIXED), "its law is 'fixed', so it must have no q"),
    "a narrow q": (chain, lambda d: replace(d, q=torch.rand(2, 3, 50)), r"its q has shape \(2, 3, 50\)"),
    "scores of another shape": (tree, lambda d: replace(d, scores=torch.zeros(2, 3)), "its scores have shape"),
    "whole scores": (tree, lambda d: forced(d, scores=torch.zeros(2, 4, dtype=torch.long)), "its scores have shape"),
    "a copied row too many": (
        tree,
        lambda d: replace(d, copied=torch.ones(3, dtype=torch.bool)),
        "its copied has shape",
    ),
    "whole copied": (tree, lambda d: forced(d, copied=torch.ones(2, dtype=torch.long)), "its copied has shape"),
    "copied elsewhere": (
        tree,
        lambda d: replace(d, copied=torch.ones(2, dtype=torch.bool, device="meta")),
        "its copied must be on cpu, not on meta",
    ),
    "nothing": (tree, lambda d: None, "must return a Draft"),
    "a tuple": (tree, lambda d: (d.tree, d.law), "must return a Draft"),
    "a law by its name": (chain, lambda d: forced(d, law="chain"), "must return a Draft"),
    "q elsewhere": (chain, lambda d: replace(d, q=d.q.to("meta")), "its q must be on cpu, not on meta"),
    "parents elsewhere": (
        tree,
        lambda d: with_tree(d, parents=d.tree.parents.to("meta")),
        "its parents must be on cpu, not on meta",
    ),
    "half a depth": (tree, lambda d: replace(d, tree=forced(d.tree, depth=1.5)), "its depth must be a whole number"),
    "half a turn": (tree, lambda d: replace(d, tree=forced(d.tree, turns=(1.5,))), "its turns must be whole numbers"),
}
VALUES: dict[str, tuple[Callable[[View], Draft], Fault, str]] = {
    "no root": (tree, lambda d: with_tree(d, tokens=put(d.tree.tokens, 0, 95)), "node 0 is token 95 below -1"),
    "a root that is padding": (chain, parent(0, PAD), "node 0 is token .* below -2"),
    "two roots": (tree, parent(2, -1), "the parent of node 2 is -1"),
    "a child before its parent": (tree, parent(1, 3), "the parent of node 1 is 3, and must be one of 0 to 0"),
    "a parent that is nowhere": (tree, parent(1, 99), "the parent of node 1 is 99"),
    "a chain that is none": (chain, parent(2, 0), "the parent of node 2 is 0, and must be 1"),
    "siblings in a chain": (chain, parent(2, 0, linear=False), "'chain', but node 0 has several children"),
    "deeper than it says": (tree, lambda d: with_tree(d, depth=1), "a path of 2 tokens is deeper than the 1"),
    "a token that there is not": (
        tree,
        lambda d: with_tree(d, tokens=put(d.tree.tokens, 3, tiny.VOCAB)),
        f"node 3 is token {tiny.VOCAB}, and the target's tokens are 0 to {tiny.VOCAB - 1}",
    ),
}


@pytest.mark.parametrize("name", [name for name in (*FORM, *VALUES) if name != "deeper than it says"])
def test_a_wrong_draft_beside_a_copy_is_refused(name: str):
    """But for a depth that is too small: the draft with the copy has the copy's."""
    make, spoil, sentence = {**FORM, **VALUES}[name]
    g = tiny.generator(model(), tiny.ScriptedDrafter(lambda view, plan: spoil(make(view)), max_nodes=3))
    sequences = g.submit(PROMPTS[:1], replace(GREEDY, prediction=plain()[0][:2])) + g.submit(PROMPTS[1:], GREEDY)
    with pytest.raises(DrafterError, match=f"^ScriptedDrafter proposed a draft that cannot be verified: .*{sentence}"):
        g.engine.step()
    assert all("ScriptedDrafter" in str(sequence.error) for sequence in sequences)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_copied_rows_need_no_law(name: str):
    """Their q is not read, under ratio rules also, and the others are still checked."""

    def propose(view: View, plan: Plan) -> Draft:
        draft = chain(view)
        assert draft.q is not None
        return replace(draft, q=put(draft.q, 1, 0.7), copied=torch.tensor([number == 1 for number in view.rows]))

    g = tiny.generator(model(), tiny.ScriptedDrafter(propose, max_nodes=2), rule="block")
    params = GREEDY if name == "greedy" else SAMPLED
    g.engine.run(g.submit(PROMPTS, params))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*FORM, *VALUES])
def test_a_wrong_draft_is_refused_and_says_nothing(name: str, params: SamplingParams):
    """The fault is in the last row alone, and comes after two good drafts; then the generator goes on as before."""
    make, spoil, sentence = {**FORM, **VALUES}[name]
    steps = 0

    def propose(view: View, plan: Plan) -> Draft:
        nonlocal steps
        steps += 1
        return spoil(make(view)) if steps == 3 else make(view)

    g = tiny.generator(model(), tiny.ScriptedDrafter(propose, max_nodes=3))
    sequences = g.submit(PROMPTS, params)
    g.engine.step()
    g.engine.step()
    before = [list(sequence.tokens) for sequence in sequences]
    with pytest.raises(DrafterError, match=f"^ScriptedDrafter proposed a draft that cannot be verified: .*{sentence}"):
        g.engine.step()
    assert [sequence.tokens for sequence in sequences] == before and all(before)
    assert all("ScriptedDrafter" in str(sequence.error) for sequence in sequences)
    if params is GREEDY:
        assert [result.tokens for result in g.generate(PROMPTS, params)] == plain()


def drawing(spoil: Callable[[torch.Tensor], object]) -> Generator:
    """Chains whose q is changed by this function."""

    def propose(view: View, plan: Plan) -> Draft:
        draft = chain(view)
        assert draft.q is not None
        spoil(draft.q)
        return draft

    return tiny.generator(model(), tiny.ScriptedDrafter(propose, max_nodes=2))


def with_chance(token: float) -> Generator:
    """The drawn token at node 2 of the last row has this probability; 0 all over if it is negative."""

    def spoil(q: torch.Tensor) -> None:
        q[-1, 2, :10] = 0.0 if token < 0 else (1 - token) / 9
        q[-1, 2, 5] = max(token, 0.0)

    return drawing(spoil)


@pytest.mark.parametrize("share", [0.2, 3.0])
def test_a_q_must_sum_to_one(share: float):
    """Handed in as it is, a law that was cut off and not normalised would be accepted too often, or too seldom."""
    g = drawing(lambda q: q.mul_(share))
    with pytest.raises(DrafterError, match=rf"the q of node 1 sums to {share:g}, and must sum to 1 \(row 0\)"):
        g.generate(PROMPTS, SAMPLED)
    assert g.generate(PROMPTS[0], GREEDY).tokens == plain()[0]


def test_a_drawn_token_must_have_been_possible():
    g = with_chance(0.0)
    with pytest.raises(DrafterError, match=r"node 2 is token 5, to which its q gives no probability.*\(row 1\)"):
        g.generate(PROMPTS, SAMPLED)


@pytest.mark.parametrize("token", [0.1, -1.0, float("nan")], ids=["drawn from it", "no law", "not a number"])
def test_a_node_whose_q_is_no_law_is_left_out_as_ever(token: float):
    results = with_chance(token).generate(PROMPTS, SAMPLED)
    assert [len(result.tokens) for result in results] == [NEW, NEW]


def test_greedy_rows_need_no_q():
    """Beside a sampled row, and alone: of a picked token q may say anything."""
    g = with_chance(0.0)
    sampled, greedy = runs.run_each(g, PROMPTS, [SAMPLED, GREEDY])
    assert sampled.error is greedy.error is None
    assert greedy.tokens == g.generate(PROMPTS[1], GREEDY).tokens == plain()[1]


def test_padding_may_hold_anything():
    def propose(view: View, plan: Plan) -> Draft:
        draft = tree(view)
        return with_tree(draft, tokens=put(draft.tree.tokens, 3, -7), parents=put(draft.tree.parents, 3, PAD))

    g = tiny.generator(model(), tiny.ScriptedDrafter(propose, max_nodes=3))
    assert [result.tokens for result in g.generate(PROMPTS, GREEDY)] == plain()


def test_padding_hides_no_fault():
    def unlike(view: View, plan: Plan) -> Draft:
        draft = chain(view)
        tokens, parents = put(draft.tree.tokens, 2, -7), put(draft.tree.parents, 2, PAD)
        return with_tree(replace(draft, q=draft.q * 2), tokens=tokens, parents=parents)

    with pytest.raises(DrafterError, match="the q of node 1 sums to 2,"):
        tiny.generator(model(), tiny.ScriptedDrafter(unlike, max_nodes=2)).generate(PROMPTS[:1], SAMPLED)


@pytest.mark.parametrize("linear", [False, True])
def test_what_the_host_finds_sound_a_device_leaves_as_it_is(linear: bool, monkeypatch: pytest.MonkeyPatch):
    """Random parents and tokens, most of them wrong somewhere."""
    source, found = random.Random(0), {True: 0, False: 0}
    view = tiny.view([[3, 5, 7]])
    for _ in range(400):
        parents = [[-1, *(source.choice([node - 1, node - 1, *range(node + 1), PAD]) for node in range(1, 4))]]
        tokens = [[source.choice([7, 7, 7, 6]), *(source.choice([0, 4, 5, tiny.VOCAB]) for _ in range(3))]]
        made = TokenTree(torch.tensor(tokens), torch.tensor(parents), depth=source.choice([2, 3]), linear=linear)
        draft, left = checked(Draft(made, Law.FIXED), view, tiny.VOCAB, "Drafter")
        with monkeypatch.context() as patch:
            patch.setattr(draft_check, "_is_sound", lambda *given: False)
            other, judged = checked(Draft(made, Law.FIXED), view, tiny.VOCAB, "Drafter")
        found[left is None] += 1
        if left is None:
            assert judged is not None and bool(judged.sound.all())
            assert (draft.tree.tokens.tolist(), draft.tree.parents.tolist()) == (tokens, parents)
            assert (other.tree.tokens.tolist(), other.tree.parents.tolist()) == (tokens, parents)
    assert min(found.values()) > 20


@pytest.mark.parametrize(("any_width", "width"), [(False, 6), (True, 5)])
def test_drafts_are_padded_where_new_widths_are_slow(any_width: bool, width: int, monkeypatch: pytest.MonkeyPatch):
    def propose(view: View, plan: Plan) -> Draft:
        tokens = torch.cat([view.roots[:, None], torch.tensor([[4, 5, 6, 7]] * len(view.rows))], 1)
        return Draft(TokenTree.chain(tokens), Law.FIXED)

    g = tiny.generator(model(), tiny.ScriptedDrafter(propose, max_nodes=4))
    target = g.engine.target
    monkeypatch.setattr(target, "any_width", any_width)
    widths, compute = set[int](), target.compute

    def spy(step: StepIn, *given: Any) -> StepOut:
        widths.add(step.tokens.shape[1])
        return compute(step, *given)

    monkeypatch.setattr(target, "compute", spy)
    result = g.generate(PROMPTS[0], SamplingParams(max_new_tokens=12))
    assert result.tokens == runs.plain(PROMPTS[0], max_new_tokens=12)
    assert width in widths and widths <= {1, len(PROMPTS[0]), len(PROMPTS[0]) - 1, width}


@pytest.mark.parametrize("made", [tree, chain], ids=["tree", "chain"])
def test_a_bound_that_no_node_reaches_takes_no_memory(made: Callable[[View], Draft]):
    """Tensors of a step are as large as ``depth`` and ``turns`` say."""
    wide = lambda d: with_tree(d, depth=2**24, turns=(2**24,) * 5)  # noqa: E731
    nodes = made(tiny.view([[3, 5, 7]])).tree.tokens.shape[1]
    draft, _ = checked(wide(made(tiny.view([[3, 5, 7]]))), tiny.view([[3, 5, 7]]), tiny.VOCAB, "Drafter")
    assert draft.tree.depth == nodes - 1 and draft.tree.turns == (nodes - 1,) * (nodes - 1)
    g = tiny.generator(model(), tiny.ScriptedDrafter(lambda view, plan: wide(made(view)), max_nodes=3))
    assert [result.tokens for result in g.generate(PROMPTS, GREEDY)] == plain()
