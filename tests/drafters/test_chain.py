"""Chains with siblings: the best nodes of all that a chain's levels offer, by a slow search."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import specs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.trees.chain import ChainLimits, build_chain
from foredraft.model.hf.causal_lm import CausalLM

TEXTS = tiny.prompts((4, 11))
HOT = SamplingParams(temperature=1.3)
Path = tuple[int, ...]


def chain_of(view: View, limits: ChainLimits, seed: int) -> tuple[Draft, Callable[[int, Path], Tensor], list[int]]:
    """A draft by random logits, these by row and path, and the levels that were read."""
    read: list[int] = []

    def logits(row: int, path: Path) -> Tensor:
        return torch.randn(tiny.VOCAB, generator=torch.Generator().manual_seed(hash((seed, row, path)) % 2**31)) * 3

    paths: list[Path] = [()] * len(TEXTS)

    def read_next(tokens: Tensor, index: int) -> Tensor:
        read.append(index)
        paths[:] = [(*path, int(token)) for path, token in zip(paths, tokens, strict=True)]
        return torch.stack([logits(row, path) for row, path in enumerate(paths)])[:, None]

    first = torch.stack([logits(row, ()) for row in range(len(TEXTS))])[:, None]
    return build_chain(view, limits, first, read_next), logits, read


def best_nodes(shares: Callable[[Path], Tensor], levels: int, nodes: int) -> dict[Path, float]:
    """The paths with the largest products of shares, of the chain of best tokens with all siblings."""
    found: dict[Path, float] = {}
    at, score = (), 0.0
    for _ in range(levels):
        law = shares(at)
        found |= {(*at, token): score + float(share.log()) for token, share in enumerate(law)}
        at, score = (*at, int(law.argmax())), score + float(law.max().log())
    return dict(sorted(found.items(), key=lambda each: -each[1])[:nodes])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("allowed", [(6, 6), (6, 3), (2, 0)])
def test_the_tree_has_the_likeliest_of_the_chain_and_its_siblings(seed: int, allowed: tuple[int, int]):
    view, depth = tiny.view(TEXTS, HOT), max(allowed)
    draft, logits, _ = chain_of(view, ChainLimits.of(Plan(allowed), depth, view.lengths.device), seed)
    assert draft.law is Law.FIXED and draft.scores is not None
    for row in range(len(TEXTS)):

        def shares(path: Path, row: int = row) -> Tensor:
            law = (logits(row, path) / HOT.temperature).softmax(-1) / view.noise.times(len(path), tiny.VOCAB)[row]
            return law / law.sum()

        expected = best_nodes(shares, allowed[row], depth if allowed[row] else 0)
        found = {path: float(draft.scores[row, node]) for node, path in tiny.paths(draft.tree, row).items() if node}
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_chain_ends_where_its_tree_has_no_room_left():
    """Nothing is read for tokens that would not be kept."""
    view, shorter = tiny.view(TEXTS, HOT), 0
    for seed in range(8):
        draft, _, read = chain_of(view, ChainLimits.of(Plan((6, 6)), 6, view.lengths.device), seed)
        deepest = max(len(path) for row in range(2) for path in tiny.paths(draft.tree, row).values())
        assert len(read) in (deepest - 1, deepest), "the level after the deepest node is where that shows"
        shorter += len(read) < 5
    assert shorter


@pytest.mark.parametrize(
    ("params", "plan", "draws"),
    [
        (tiny.GREEDY, Plan((4, 4)), False),
        (HOT, Plan((4, 4), chain=True), False),
        (HOT, Plan((4, 4), 1e-9), False),
        (HOT, Plan((4, 4)), True),
    ],
    ids=["greedy", "continued", "ended", "drawn"],
)
def test_others_are_chains(params: SamplingParams, plan: Plan, draws: bool):
    view = tiny.view(TEXTS, params, draws=draws)
    draft, _, _ = chain_of(view, ChainLimits.of(plan, 4, view.lengths.device), 0)
    assert draft.tree.linear and draft.law is (Law.CHAIN if draws else Law.FIXED)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cascade_of_any_height_drafts_what_its_middle_drafts_alone(temperature: float):
    """The same nodes, siblings included, whatever drafts inside; where it is cut by a penalty, too."""
    models = {
        name: CausalLM(tiny.build("llama", seed=seed, spread=3.0)) for name, seed in zip("tmns", range(4), strict=True)
    }
    params, found = SamplingParams(temperature=temperature, repetition_penalty=1.4, top_k=30), []
    low = "cascade:n+[draft_model:s,num_assistant_tokens=3],num_assistant_tokens=3"
    for spec in ("draft_model:m", "cascade:m+[max_gram]", "cascade:m+[draft_model:s]", f"cascade:m+[{low}]"):
        drafter = specs.build(f"{spec},num_assistant_tokens=6", models["t"], models)
        tiny.admit(drafter, TEXTS)
        tree = drafter.propose(tiny.view(TEXTS, params), Plan((6, 4))).tree
        found.append([set(tiny.paths(tree, row).values()) for row in range(len(TEXTS))])
    assert found[1] == found[0] and found[2] == found[0] and found[3] == found[0]
    siblings = [sum(len(path) == depth for path in row) > 1 for row in found[0] for depth in range(1, 7)]
    assert any(siblings) == (temperature > 0)
