"""Medusa, blockwise and Hydra heads as the drafters run them equal heads.md computed vector by vector."""

import functools
from typing import Any

import pytest
import slow_heads as slow
import torch
from slow_nets import Path, Weights, best, fill
from torch import Tensor
from watched_nets import CLOSE, FAR, Proposal, doubled, every_row, target, truth, watch

import random_heads as heads
from foredraft.drafters.blockwise import BlockwiseDrafter, Options as BlockwiseOptions
from foredraft.drafters.hydra import HydraDrafter, Options as HydraOptions
from foredraft.drafters.medusa import MedusaDrafter, Options as MedusaOptions
from foredraft.drafters.trees.shapes import Template

MEDUSAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"layers": 2},
    "shared": {"own_heads": False},
    "shared, two layers": {"own_heads": False, "layers": 2},
}
HYDRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three layers": {"layers": 3},
    "shared": {"own_heads": False},
    "prefix": {"prefix": True},
    "prefix, three layers": {"prefix": True, "layers": 3},
}


@functools.cache
def weights(net: Any) -> Weights:
    return Weights(net, target().model)


def last_state(text: Path) -> Tensor:
    """h_t, t being the token before the root."""
    return truth(text)[-1][len(text) - 2]


def check_heads(proposal: Proposal, b: int, wanted: list[Tensor], paths: tuple[Path, ...]) -> None:
    """Heads that do not know each other: the token of rank r on level i + 1 is head i's."""
    for head, (call, one) in enumerate(zip(proposal.calls, wanted, strict=False)):
        assert call.args[-1] == head
        assert (call.out[b, 0] - one).abs().max() < CLOSE
    allowed = proposal.plan.lengths[b]
    filled = {
        tuple(best(wanted[i], rank + 1)[rank] for i, rank in enumerate(ranks))
        for ranks in paths
        if len(ranks) <= allowed
    }
    assert set(proposal.paths(b)) == filled and len(proposal.paths(b)) == len(filled)


@pytest.mark.parametrize("name", MEDUSAS)
@pytest.mark.parametrize("tree", ["3x2x1", "eagle"])
def test_medusa_is_the_slow_one(name: str, tree: str):
    net = doubled(heads.medusa(target(), **{"heads": 3, **MEDUSAS[name]}))
    paths = tuple(path for path in Template.of(tree).paths if len(path) <= 3)

    def check(proposal: Proposal, b: int) -> None:
        h = last_state(proposal.texts[b])
        check_heads(proposal, b, [slow.medusa(weights(net), net.config, h, head) for head in range(3)], paths)

    every_row(watch(MedusaDrafter(MedusaOptions(tree=tree), net), net, max_new_tokens=12), check)


@pytest.mark.parametrize("seed", [0, 2])
def test_blockwise_is_the_slow_one(seed: int):
    net = doubled(heads.blockwise(target(), seed=seed))

    def check(proposal: Proposal, b: int) -> None:
        h = last_state(proposal.texts[b])
        wanted = [slow.blockwise(weights(net), net.config, h, head) for head in range(3)]
        check_heads(proposal, b, wanted, ((0,), (0, 0), (0, 0, 0)))

    every_row(watch(BlockwiseDrafter(BlockwiseOptions(), net), net, max_new_tokens=8), check)


@functools.cache
def slow_hydra(net: Any, text: Path) -> Tensor:
    """What Hydra's heads read."""
    if net.config.prefix is None:
        return last_state(text)
    return slow.hydra_prefix(weights(net), net.config, truth(text)[-1][:-1])


@pytest.mark.parametrize("name", HYDRAS)
def test_hydra_is_the_slow_one(name: str):
    net = doubled(heads.hydra(target(), **HYDRAS[name]))
    template = Template.of("3x2x1")

    def check(proposal: Proposal, b: int) -> None:
        text = proposal.texts[b]
        h = slow_hydra(net, text)

        def logits(path: Path) -> Tensor:
            return slow.hydra(weights(net), net.config, h, (text[-1], *path))

        depth = len(proposal.calls)
        filled = fill(logits, [path for path in template.paths if len(path) <= depth])
        for level, call in enumerate(proposal.calls):
            asked = [tuple(line) for line in call.args[1][b].tolist()]
            assert set(asked) == {(text[-1], *filled[path]) for path in (*template.paths, ()) if len(path) == level}
            for path, out in zip(asked, call.out[b], strict=True):
                assert (out - logits(path[1:])).abs().max() < CLOSE
        allowed = proposal.plan.lengths[b]
        assert set(proposal.paths(b)) == {path for path in filled.values() if 0 < len(path) <= allowed}

    every_row(watch(HydraDrafter(HydraOptions(tree="3x2x1"), net), net, max_new_tokens=12), check)


def test_the_state_of_another_token_is_seen():
    """The root's own state is not known yet; a head that read the one before the last would be found out."""
    for text in ((1, 2, 3, 4), (5, 9, 5)):
        states = truth(text)[-1]
        net = doubled(heads.medusa(target()))
        right, early, late = (slow.medusa(weights(net), net.config, states[len(text) - 2 + i], 0) for i in (0, -1, 1))
        assert min((right - early).abs().max(), (right - late).abs().max()) > FAR
        hydra = doubled(heads.hydra(target(), prefix=True))
        whole, part = (slow.hydra_prefix(weights(hydra), hydra.config, states[a:-1]) for a in (0, 1))
        assert (whole - part).abs().max() > FAR
        assert not torch.equal(whole, states[-2])
