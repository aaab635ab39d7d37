"""What is particular to OPT-Tree: a draft model's best paths, and no others."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import LevelPrice, Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.opt_tree import Options, OptTree
from foredraft.drafters.trees import dynamic
from foredraft.drafters.trees.candidates import GUESSES, SHARPEST
from foredraft.model.hf.causal_lm import CausalLM

VOCAB = 12
TEXTS = [[0, 1, 0], [3], [5, 2, 4, 1, 1, 0, 2]]
Path = tuple[int, ...]


@functools.cache
def model(seed: int) -> CausalLM:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    return CausalLM(tiny.build("llama", seed=seed, spread=1.0, **sizes), fast=False)


def shown(drafter: OptTree, params: SamplingParams) -> View:
    tiny.admit(drafter, TEXTS)
    return tiny.view(TEXTS, params, VOCAB)


def said(draft: Draft, row: int) -> dict[Path, float]:
    """The paths of a tree, and what they score."""
    assert draft.scores is not None
    return {path: float(draft.scores[row, node]) for node, path in tiny.paths(draft.tree, row).items() if path}


def slow_tree(
    text: list[int], options: Options, heat: float, penalty: float, times: list[Tensor], children_each: int
) -> dict[Path, float]:
    """The best paths: expand the best ``top_k`` of each level, then keep the best of all that was scored."""
    level: dict[Path, float] = {(): 0.0}
    found: dict[Path, float] = {}
    for depth in range(options.depth):
        children: dict[Path, float] = {}
        for path, score in level.items():
            logits = model(2).stock_logits(torch.tensor([[*text, *path]]))[0, -1].double()
            for token in {*text, *path}:  # transformers' repetition penalty
                logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            best = (logits / heat - times[depth].double().log()).log_softmax(-1).topk(children_each)
            children |= {(*path, int(i)): score + float(s) for i, s in zip(best.indices, best.values, strict=True)}
        found |= children
        level = dict(sorted(children.items(), key=lambda child: -child[1])[: options.top_k])
    return dict(sorted(found.items(), key=lambda path: -path[1])[: options.nodes])


@pytest.mark.parametrize(
    ("params", "heat", "penalty"),
    [
        (SamplingParams(), SHARPEST, 1.0),
        (SamplingParams(temperature=1.3), 1.3, 1.0),
        (SamplingParams(temperature=0.2), 0.2, 1.0),
        (SamplingParams(repetition_penalty=1.8), SHARPEST, 1.8),
    ],
    ids=["greedy", "hot", "cold", "penalty"],
)
def test_the_best_paths_are_drafted(params: SamplingParams, heat: float, penalty: float):
    options = Options(nodes=10, depth=3, top_k=3)
    drafter = OptTree(options, model(2), VOCAB)
    view = shown(drafter, params)
    draft = drafter.propose(view, Plan((3,) * 3))
    assert draft.law is Law.FIXED and draft.q is None
    for row, text in enumerate(TEXTS):
        noise = [torch.ones(VOCAB) if params.greedy else view.noise.times(depth, VOCAB)[row] for depth in range(3)]
        each = options.top_k if params.greedy else GUESSES
        wanted, found = slow_tree(text, options, heat, penalty, noise, each), said(draft, row)
        assert found.keys() == wanted.keys()
        assert all(math.isclose(found[path], wanted[path], abs_tol=1e-4) for path in wanted)


def test_of_fewer_nodes_the_likeliest_are_drafted_and_a_worthless_level_is_not():
    drafter = OptTree(Options(nodes=10, depth=3, top_k=3), model(2), VOCAB)
    view = shown(drafter, SamplingParams())
    whole = drafter.propose(view, Plan((3,) * 3))
    few = drafter.propose(view, Plan((3,) * 3, nodes=4))
    for row in range(3):
        best = sorted(said(whole, row).values(), reverse=True)[:4]
        assert sorted(said(few, row).values(), reverse=True) == pytest.approx(best, abs=1e-4)
    assert whole.tree.depth == 3
    assert drafter.propose(view, Plan((3,) * 3, level_price=LevelPrice(2.9))).tree.depth == 1
    assert drafter.propose(view, Plan((0, 2, 1))).tree.depth == 2


def test_levels_whose_nodes_would_all_be_dropped_are_not_drafted(monkeypatch: pytest.MonkeyPatch):
    """The tree is the one that all levels would give, with fewer forwards."""
    ended: list[bool] = []
    full = dynamic._full

    def trees(stops: bool) -> list[dict[Path, float]]:
        def noted(*args: Any) -> bool:
            ended.append(full(*args))
            return stops and ended[-1]

        monkeypatch.setattr(dynamic, "_full", noted)
        found = []
        for temperature, nodes in itertools.product((0.0, 0.3, 1.0), (3, 5, 8, 12)):
            drafter = OptTree(Options(nodes=nodes, depth=5, top_k=8), model(2), VOCAB)
            draft = drafter.propose(shown(drafter, SamplingParams(temperature=temperature)), Plan((5,) * 3))
            found += [said(draft, row) for row in range(3)]
        return found

    for few, every in zip(trees(True), trees(False), strict=True):
        assert few.keys() == every.keys() and all(math.isclose(few[path], every[path], abs_tol=1e-5) for path in few)
    assert any(ended)
