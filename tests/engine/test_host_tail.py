"""Following a draft on the host gives what the tensors of ``Tail`` give: trees, chains, mixed rows, all rules."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import View
from foredraft.core.errors import DrafterError
from foredraft.core.rng import Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.core.transfer import HostCopy
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.engine.draft_check import Proposed, checked
from foredraft.engine.tail import StepEnd, read_back, tail, walk
from foredraft.model.ops import TORCH

VOCABULARY, NODES, PROMPT = 5, 9, 4
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}, {}],
    "greedy with a rule": [{"repetition_penalty": 3.0}, {}, {"logit_bias": {2: -math.inf}}],
    "temperatures": [{"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 2.5}],
    "mixed": [{"temperature": 0.7}, {}, {"temperature": 1.0, "presence_penalty": 1.0}],
    "cut": [{"temperature": 1.3, "top_k": 2}, {}, {"temperature": 0.8}],
}


def view(params: list[SamplingParams]) -> View:
    count = len(params)
    warp = Warp.of(
        params,
        vocab_size=VOCABULARY,
        eos_token_ids=[()] * count,
        prompt_lengths=[PROMPT] * count,
        device="cpu",
    )
    lengths = torch.arange(count) + PROMPT
    history = torch.randint(VOCABULARY, (count, PROMPT + count + NODES))
    host_lengths = tuple(lengths.tolist())
    return View(tuple(range(count)), history, lengths, host_lengths, warp, Noise(torch.randint(99, (count,)), lengths))


def draft(source: random.Random, seen: View, *, linear: bool) -> Draft:
    """Random trees with padding and equal siblings; few tokens, so that paths are accepted."""
    parents = []
    for _ in seen.rows:
        used = source.randint(1, NODES)
        own = [node - 1 if linear else source.randrange(node) for node in range(1, used)]
        parents.append([ROOT, *own, *[PAD] * (NODES - used)])
    tokens = torch.randint(VOCABULARY, (len(parents), NODES))
    tokens[:, 0] = seen.roots
    tree = TokenTree(tokens, torch.tensor(parents), depth=NODES - 1, linear=linear)
    return Draft(tree, Law.FIXED, scores=-torch.rand(len(parents), NODES).double())


def both(seen: View, proposed: Draft, logits: Tensor) -> tuple[StepEnd, StepEnd, list[Any]]:
    safe, proposal = checked(proposed, seen, VOCABULARY, "Test")
    wanted = tail(seen, safe, logits, None, None if proposal is None else proposal.columns, False)
    assert wanted.table is not None
    rows = read_back(safe, proposal, HostCopy(wanted.table), wanted.emitted.shape[1])
    return walk(TORCH, seen, safe, logits, proposal), wanted, rows


def logits_of(tree: TokenTree) -> Tensor:
    """Peaked logits that depend on a node's path alone, as a model's do."""
    path = torch.zeros_like(tree.tokens)
    for node in range(tree.tokens.shape[1]):
        above = path.gather(1, tree.parents[:, node : node + 1].clamp(min=0))[:, 0] if node else 0
        path[:, node] = above * 31 + tree.tokens[:, node] + 1
    return ((path[..., None] * 7919 + torch.arange(VOCABULARY) * 104729) % 1009).float() / 150


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linear", [False, True])
def test_the_host_finds_the_verdicts_of_the_tensors(kind: str, linear: bool):
    torch.manual_seed(len(kind))
    source, accepted = random.Random(kind), 0
    for _ in range(80):
        seen = view([SamplingParams(**each) for each in KINDS[kind]])
        proposed = draft(source, seen, linear=linear)
        found, wanted, rows = both(seen, proposed, logits_of(proposed.tree))
        for own, other in zip(found.rows or [], rows, strict=True):
            assert own.emitted == other.emitted and list(own.path) == list(other.path) and own.healthy
            assert (own.drafted, own.depth, own.accepted) == (other.drafted, other.depth, other.accepted)
            assert own.nodes.parents == other.nodes.parents
            assert own.nodes.scores == pytest.approx(other.nodes.scores, abs=1e-6)
            accepted += own.accepted
        assert torch.equal(found.emitted, wanted.emitted)
        assert torch.equal(found.verdict.path, wanted.verdict.path)
        assert torch.equal(found.verdict.bonus, wanted.verdict.bonus)
    assert accepted > 20


def test_a_root_alone_is_plain_decoding():
    seen = view([SamplingParams(temperature=1.0), SamplingParams()])
    proposed = Draft(TokenTree.root(seen.roots), Law.FIXED)
    found, wanted, rows = both(seen, proposed, torch.randn(2, 1, VOCABULARY))
    assert [each.emitted for each in found.rows or []] == [each.emitted for each in rows]
    assert torch.equal(found.emitted, wanted.emitted) and torch.equal(found.verdict.path, wanted.verdict.path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_nodes_that_are_reached_need_a_law(bad: float):
    seen = view([SamplingParams(), SamplingParams()])
    tokens = torch.stack([seen.roots, torch.tensor([3, 3])], 1)
    proposed = Draft(TokenTree.chain(tokens), Law.FIXED)
    logits = torch.zeros(2, 2, VOCABULARY)
    logits[0, 0, 3], logits[1, 0, 4] = 1.0, 1.0  # the first row reaches its node
    logits[:, 1] = bad
    found, _, rows = both(seen, proposed, logits)
    assert [each.healthy for each in found.rows or []] == [each.healthy for each in rows] == [False, True]


def test_a_draft_that_cannot_be_verified_is_reported():
    seen = view([SamplingParams()])
    tree = TokenTree(torch.tensor([[int(seen.roots[0]), VOCABULARY]]), torch.tensor([[ROOT, 0]]), depth=1)
    safe, proposal = checked(Draft(tree, Law.FIXED), seen, VOCABULARY, "Test")
    assert isinstance(proposal, Proposed)
    with pytest.raises(DrafterError, match=f"node 1 is token {VOCABULARY}"):
        walk(TORCH, seen, safe, torch.zeros(1, 2, VOCABULARY), proposal)
