"""The best of many scores: equal ones in the order of their ids, whatever the path of the code."""

import pytest
import torch

from foredraft.core.best import _by_keys, best_of
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.core.topk_distribution import topk_distribution
from foredraft.drafters.trees.static import likeliest
from foredraft.engine.request import token_logprobs
from foredraft.model.ops import TORCH


def scores(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    if kind == "few values":
        return torch.randint(-3, 4, shape, generator=source).float() / 3
    found = torch.randn(shape, generator=source)
    if kind == "banned":
        return found.round(decimals=1).masked_fill(torch.rand(shape, generator=source) < 0.7, -torch.inf)
    if kind == "zeros":
        return torch.where(torch.rand(shape, generator=source) < 0.5, 0.0, -0.0)
    return found.to({"half": torch.bfloat16, "double": torch.float64}.get(kind, torch.float32))


@pytest.mark.parametrize("kind", ["floats", "half", "double", "few values", "banned", "zeros"])
@pytest.mark.parametrize("shape", [(40,), (3, 1000), (2, 3, 70), (2, 0, 5)])
def test_equal_scores_are_in_the_order_of_their_ids(kind: str, shape: tuple[int, ...]):
    for seed in range(20):
        given = scores(kind, shape, seed)
        expected = given.sort(dim=-1, descending=True, stable=True)
        for count in {1, 2, min(17, shape[-1]), shape[-1]}:
            for found in (best_of(given, count), _by_keys(given, count)):
                assert torch.equal(found.indices, expected.indices[..., :count])
                assert torch.equal(found.values, expected.values[..., :count])
            assert torch.equal(best_of(given, 1).indices[..., 0], given.argmax(-1))


def test_every_place_has_the_order_of_argmax():
    """Of 40 equal likeliest tokens the guess is the one that a greedy target takes, and so are the alternatives."""
    logits = torch.zeros(1, 1, 500)
    logits[..., 101::7] = 3.25
    expected = list(range(101, 500, 7))[:6]
    assert int(logits.argmax()) == expected[0]
    warp = Warp.of(
        [SamplingParams()], vocab_size=500, eos_token_ids=[()], prompt_lengths=[0], device=torch.device("cpu")
    )
    assert TORCH.rank(logits, 6, warp, None, 0.8)[0].flatten().tolist() == expected
    assert likeliest(logits, 6)[0].flatten().tolist() == expected
    assert topk_distribution(logits[0], 6).ids.flatten().tolist() == expected
    alternatives = token_logprobs(logits[0].log_softmax(-1), [expected[0]], 6)[0]
    assert list(alternatives.top) == expected and alternatives.token == expected[0]
