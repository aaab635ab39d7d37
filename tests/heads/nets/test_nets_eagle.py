"""EAGLE heads as the drafters run them, over slots and trees, equal heads.md computed row by row."""

from typing import Any

import pytest
import torch
from slow_nets import DraftRunner, Path, fill, grow
from watched_nets import CLOSE, VOCAB, Proposal, doubled, every_row, gap, reader, target, watch

import random_heads as heads
from foredraft.core.draft import Law
from foredraft.core.target_parts import FINAL
from foredraft.drafters.eagle1 import Eagle1, Options as Options1
from foredraft.drafters.eagle2 import Eagle2, Options as Options2
from foredraft.drafters.eagle3 import Eagle3Drafter, Options as Options3
from foredraft.drafters.trees.shapes import Template
from foredraft.heads.nets.eagle import EagleNet

DEPTH, TOP_K, NODES = 3, 3, 8
SOME = torch.tensor([0, 1, 3, 4, 6, 7, 8, 11, 12, 15])

EAGLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"fc_bias": False},
    "two layers": {"num_layers": 2},
    "window": {"sliding_window": 5},
    "biases": {"attention_bias": True, "num_key_value_heads": 4},
}
EAGLE3S: dict[str, dict[str, Any]] = {
    "plain": {"taps": (1, 2, 3)},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_carried": {"norm_carried": True},
    "fc_bias": {"fc_bias": True},
    "own_embedding": {"own_embedding": True},
    "the target's head": {"own_head": False},
    "two layers": {"num_layers": 2},
    "qk_norm": {"block": {"qk_norm": True}},
    "biases": {"block": {"attention_bias": True, "output_bias": True, "mlp_bias": True}},
    "window": {"block": {"sliding_window": 5}, "num_layers": 2},
    "vocabulary": {"vocabulary": SOME},
    "five taps": {"taps": (0, 1, 2, 3, 4), "fc_norm": True},
    "the last state": {"taps": (1, FINAL)},
    "one key head": {"block": {"num_key_value_heads": 1, "head_dim": 10}},
    "narrow": {"block": {"hidden_size": 24}, "own_embedding": True},
    "slow rope": {"block": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    "speculators": {
        "vocabulary": SOME,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_carried": True,
        "block": {"sliding_window": 6},
    },
}


def dynamic(net: EagleNet) -> list[Proposal]:
    shape = {"nodes": NODES, "depth": DEPTH, "top_k": TOP_K}
    drafter = Eagle2(Options2(**shape), net) if net.taps == (FINAL,) else Eagle3Drafter(Options3(**shape), net)
    return watch(drafter, net)


def check_dynamic(net: EagleNet) -> None:
    proposals = dynamic(net)

    def check(proposal: Proposal, b: int) -> None:
        slow = reader(net, proposal.texts[b])
        frontiers = grow(slow, len(proposal.calls), TOP_K, NODES).frontiers
        for call, paths in zip(proposal.calls, frontiers, strict=True):
            assert gap(call.out[b], [slow.logits(path) for path in paths]) < CLOSE
        check_tree(proposal, b, slow)

    every_row(proposals, check)
    assert max(len(proposal.calls) for proposal in proposals) == DEPTH


def check_tree(proposal: Proposal, b: int, slow: DraftRunner) -> None:
    """The best that the row's plan allows, which may be shorter than its neighbours'."""
    depth = min(proposal.plan.lengths[b], DEPTH)
    paths = proposal.paths(b)
    assert len(paths) == len(set(paths))
    assert set(paths) == grow(slow, depth, TOP_K, NODES).tree


@pytest.mark.parametrize("name", EAGLES)
def test_eagle_2_is_the_slow_one(name: str):
    check_dynamic(doubled(heads.eagle(target(), **EAGLES[name])))


@pytest.mark.parametrize("name", EAGLE3S)
def test_eagle_3_is_the_slow_one(name: str):
    check_dynamic(doubled(heads.eagle3(target(), **{"taps": (0, 2, 3), **EAGLE3S[name]})))


STATIC = {
    "eagle": (lambda: heads.eagle(target()), "3x2x1"),
    "two layers": (lambda: heads.eagle(target(), num_layers=2), "2x2"),
    "eagle3": (lambda: heads.eagle3(target(), taps=(1, 2, 3), vocabulary=SOME), "3x1x2"),
    "published": (lambda: heads.eagle(target(), seed=1), "eagle"),
}


@pytest.mark.parametrize("name", STATIC)
def test_eagle_1_is_the_slow_one(name: str):
    make, tree = STATIC[name]
    net, template = doubled(make()), Template.of(tree)
    proposals = watch(Eagle1(Options1(tree=tree), net), net)

    def check(proposal: Proposal, b: int) -> None:
        slow = reader(net, proposal.texts[b])

        def logits(path: Path) -> torch.Tensor:
            return widened(slow, slow.logits(path))

        depth = len(proposal.calls)
        tokens = fill(logits, [path for path in template.paths if len(path) <= depth])
        for level, call in enumerate(proposal.calls):
            inner = {path[:-1] for path in template.paths if len(path) == level + 1}
            assert gap(call.out[b], [slow.logits(tokens[path]) for path in inner]) < CLOSE
        allowed = proposal.plan.lengths[b]
        assert set(proposal.paths(b)) == {path for path in tokens.values() if 0 < len(path) <= allowed}

    every_row(proposals, check)


def widened(slow: DraftRunner, logits: torch.Tensor) -> torch.Tensor:
    """Over the target's vocabulary."""
    wide = torch.full((VOCAB,), -1e30, dtype=torch.float64)
    for i, value in enumerate(logits):
        wide[slow.target_id(i)] = value
    return wide


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_eagle_1_claims_the_law_that_its_logits_have(name: str):
    """Siblings are drawn one after another, each from the softmax without those before it."""
    make, tree = STATIC[name]
    net = doubled(make())
    proposals = watch(Eagle1(Options1(tree=tree), net), net, "traversal", temperature=0.7, seed=4)

    def check(proposal: Proposal, b: int) -> None:
        draft, slow = proposal.draft, reader(net, proposal.texts[b])
        assert draft.law is Law.WITHOUT_REPLACEMENT and draft.q is not None
        paths: dict[int, Path] = {0: ()}
        for node, parent in enumerate(draft.tree.parents[b].tolist()):
            if parent < 0:
                continue
            law = (widened(slow, slow.logits(paths[parent])) / 0.7).softmax(-1)
            elder = [path[-1] for path in paths.values() if path and path[:-1] == paths[parent]]
            law[elder] = 0.0
            assert (draft.q[b, node] - law / law.sum()).abs().max() < CLOSE
            paths[node] = (*paths[parent], int(draft.tree.tokens[b, node]))

    every_row(proposals, check)
