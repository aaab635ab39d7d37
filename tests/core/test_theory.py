"""The published tables, and the formulas at their edges."""

import math

import pytest
import torch

from foredraft.core.divergence import acceptance
from foredraft.core.errors import OptionError
from foredraft.core.theory import (
    best_length,
    expected_tokens,
    operations_factor,
    speed_up,
)

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
# cost: (best length, speed-up) for each of ALPHAS; the lengths at .6 are the constants of Liu et al. (2310.07177)
OPTIMA = {
    0.01: ((5, 1.88), (7, 2.30), (9, 2.97), (14, 4.23), (24, 7.49)),
    0.02: ((4, 1.79), (6, 2.17), (8, 2.76), (11, 3.82), (19, 6.37)),
    0.05: ((3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)),
    0.10: ((2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)),
    0.20: ((2, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)),
}
# Leviathan et al., table 1, at c = 0: alpha, length, operations, speed-up
TABLE_1 = (
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)


@pytest.mark.parametrize("cost", OPTIMA)
@pytest.mark.parametrize("column", range(len(ALPHAS)))
def test_best_lengths_are_the_tables(cost: float, column: int):
    best = best_length(ALPHAS[column], cost)
    length, gain = OPTIMA[cost][column]
    assert best.length == length
    assert best.speed_up == pytest.approx(gain, abs=0.0051)
    assert best.speed_up == speed_up(ALPHAS[column], length, cost)


@pytest.mark.parametrize("alpha, length, operations, gain", TABLE_1)
def test_leviathan_table_1(alpha: float, length: int, operations: float, gain: float):
    assert operations_factor(alpha, length, 0.0) == pytest.approx(operations, abs=0.0051)
    assert speed_up(alpha, length, 0.0) == pytest.approx(gain, abs=0.0051)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.61, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.03, 0.3, 0.999, 1.0, 2.0])
def test_best_length_is_the_argmax_of_all(alpha: float, cost: float):
    gains = [speed_up(alpha, length, cost) for length in range(41)]
    best = best_length(alpha, cost, longest=40)
    assert best.speed_up == pytest.approx(max(gains), rel=1e-12)
    assert best.speed_up == gains[best.length]
    assert (best.length > 0) == (alpha > cost)


def test_operations_count_the_draft():
    # three drafted tokens, none right: one token for 4 of the target's and 3 of the draft's
    assert operations_factor(0.0, 3, 0.5) == pytest.approx(3 * 0.5 + 4)
    assert operations_factor(1.0, 3, 0.5) == pytest.approx((3 * 0.5 + 4) / 4)


@pytest.mark.parametrize("alpha", [0.0, 1e-300, 0.3, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("length", [0, 1, 7, 200])
def test_expected_tokens_is_the_geometric_sum(alpha: float, length: int):
    by_hand = math.fsum(alpha**i for i in range(length + 1))
    assert expected_tokens(alpha, length) == pytest.approx(by_hand, rel=1e-14)


def test_acceptance_of_known_laws():
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.7, 0.3, 0.0]])
    q = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.5, 0.5], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(acceptance(p, q), torch.tensor([1.0, 0.0, 0.8]).double())
    assert acceptance(p, q).shape == (3,)


def test_acceptance_is_one_minus_total_variation_and_never_above_one():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.softmax(4 * torch.randn(2, 50, 1000, generator=generator), -1)
    distance = 0.5 * (p.double() - q.double()).abs().sum(-1)
    torch.testing.assert_close(acceptance(p, q), 1.0 - distance, atol=1e-6, rtol=0.0)
    assert acceptance(p, p).max() <= 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tokens(-0.1, 3),
        lambda: expected_tokens(1.1, 3),
        lambda: expected_tokens(math.nan, 3),
        lambda: expected_tokens(0.5, -1),
        lambda: speed_up(0.5, 3, -0.1),
        lambda: speed_up(0.5, 3, math.inf),
        lambda: operations_factor(0.5, 3, math.nan),
        lambda: best_length(0.5, 0.1, longest=-1),
        lambda: best_length(1.5, 0.1),
    ],
)
def test_values_out_of_range_are_errors(call):
    with pytest.raises(OptionError):
        call()
