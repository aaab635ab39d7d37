"""The kernels' operations are those of torch, and what they do not do is torch's."""

import itertools
from typing import Any

import pytest
import torch
from test_native_bits import same_bits

import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.native.ops import MOST_GUESSES
from foredraft.model.ops import TORCH, Ops
from native import native, needs_compiler

pytestmark = needs_compiler
ROWS = {
    "greedy": [SamplingParams()] * 3,
    "sampled": [SamplingParams(temperature=t) for t in (1.0, 0.3, 2.5)],
    "mixed": [SamplingParams(), SamplingParams(temperature=1.4), SamplingParams()],
}


def guesses(ops: Ops, params: list[SamplingParams], count: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, ...]:
    """The ranked guesses after four nodes of each row, some of whose logits are no numbers."""
    source = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(len(params), 4, vocabulary + 3, generator=source)[..., :vocabulary]
    logits[0, 1, ::3], logits[1, 2] = torch.nan, -torch.inf
    warp = tiny.warp(params, vocabulary)
    times = None if warp.greedy else torch.empty(len(params), vocabulary).exponential_(generator=source)
    return ops.rank(logits, count, warp, times, 0.8)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("vocabulary", [7, 256, 5003])
def test_guesses_and_their_shares_are_those_of_torch(kind: str, vocabulary: int):
    for seed, count in itertools.product(range(5), (1, 8, 20)):
        found, wanted = (guesses(ops, ROWS[kind], count, vocabulary, seed) for ops in (native().ops, TORCH))
        assert torch.equal(found[0], wanted[0])
        shares = (each[1].clamp(min=-1e30) for each in (found, wanted))  # below, of what is no number
        torch.testing.assert_close(*shares, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.9}, {}])
def test_what_the_kernels_do_not_rank_is_torchs_to_the_bit(cut: dict[str, Any]):
    params, count = [SamplingParams(temperature=0.7, **cut)] * 2, 5 if cut else MOST_GUESSES + 1
    found, wanted = (guesses(ops, params, count, 3000, 1) for ops in (native().ops, TORCH))
    assert all(same_bits(own, other) for own, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 255, 256, 5000])
def test_the_times_of_races_are_those_of_torchs_operators_but_for_the_last_places(count: int):
    bits = torch.randint(-(2**63), 2**63 - 1, (9,))
    found, wanted = native().ops.times(bits, count), TORCH.times(bits, count)
    assert found.shape == wanted.shape == (9, count)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    one = native().ops.times(bits[4], count)
    assert one.shape == (count,) and same_bits(one, found[4])


@pytest.mark.parametrize("count", [1, 15, 256, 5003])
def test_the_kernel_chooses_what_torchs_operators_choose(count: int):
    ops, scores = native().ops, 3 * torch.randn(2, 40, count + 5)[..., :count]
    oracle = Ops()
    oracle.times = ops.times  # type: ignore[method-assign]
    scores[:, ::2, 1::3] = -torch.inf
    bits = torch.randint(-(2**63), 2**63 - 1, (40,))
    for temperature in (0.0, 0.2, 1.0, 30.0):
        for row, node in itertools.product((0, 1), range(40)):
            asked = scores, row, node, temperature, int(bits[node])
            assert ops.choose(*asked) == oracle.choose(*asked)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_the_kernel_finds_no_law_in_scores_without_one(temperature: float, kind: str):
    ops, count = native().ops if kind == "kernels" else TORCH, 300
    for bad in (torch.nan, torch.inf):
        for place in (0, 255, 256, count - 1):
            scores = torch.randn(1, 1, count)
            scores[..., place] = bad
            assert ops.choose(scores, 0, 0, temperature, 1) == -1
    scores = torch.full((1, 1, count), -torch.inf)
    assert ops.choose(scores, 0, 0, temperature, 1) == -1
    scores[..., 7] = -1e30
    assert ops.choose(scores, 0, 0, temperature, 1) == 7
    assert ops.choose(torch.zeros(1, 1, count), 0, 0, 0.0, 1) == 0, "of equal scores the first"
