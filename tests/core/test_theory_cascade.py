"""The formulas for cascades against a simulation of the process, and where they have to be those of a plain draft."""

import random
from statistics import fmean, stdev

import pytest

from foredraft.core.errors import OptionError
from foredraft.core.theory import expected_tokens, speed_up
from foredraft.core.theory_cascade import (
    block_generating,
    blocks_speed_up,
    blocks_tokens,
    cascade_speed_up,
    inner_work,
    relay_speed_up,
)

CASES = [(0.8, 0.6, 4, 3), (0.5, 0.9, 1, 5), (0.95, 0.3, 6, 2), (1.0, 0.7, 3, 3), (0.7, 1.0, 3, 2), (0.7, 0.0, 3, 4)]
STEPS = 20_000


def block(source: random.Random, beta: float, drafted: int) -> int:
    """Tokens that one inner step says."""
    said = 1
    while said <= drafted and source.random() < beta:
        said += 1
    return said


def judged(source: random.Random, alpha: float, drafted: int) -> int:
    """Tokens that a step of the target says."""
    return block(source, alpha, drafted)


def near(values: list[float], expected: float) -> bool:
    return abs(fmean(values) - expected) <= 5 * stdev(values) / len(values) ** 0.5 + 1e-9


@pytest.mark.parametrize("alpha, beta, inner, blocks", CASES)
def test_simulation_of_blocks(alpha: float, beta: float, inner: int, blocks: int):
    source = random.Random(1)
    sizes = [block(source, beta, inner) for _ in range(STEPS)]
    assert near([0.6**size for size in sizes], block_generating(beta, inner, 0.6))
    drafted = [sum(block(source, beta, inner) for _ in range(blocks)) for _ in range(STEPS)]
    said = [float(judged(source, alpha, length)) for length in drafted]
    assert near(said, blocks_tokens(alpha, beta, inner, blocks))
    spent = 1 + blocks * (0.1 + inner * 0.01)
    gain = blocks_speed_up(alpha, beta, inner, blocks, (0.1, 0.01))
    assert gain == pytest.approx(blocks_tokens(alpha, beta, inner, blocks) / spent)


@pytest.mark.parametrize("alpha, beta, inner, length", CASES)
def test_simulation_of_a_draft_of_exactly_so_many_tokens(alpha: float, beta: float, inner: int, length: int):
    source = random.Random(2)
    steps, drafted, said = [], [], []
    for _ in range(STEPS):
        left, count, offered = length, 0, 0
        while left:
            mine = min(inner, left - 1)
            left -= block(source, beta, mine)
            count, offered = count + 1, offered + mine
        steps.append(float(count))
        drafted.append(float(offered))
        said.append(float(judged(source, alpha, length)))
    work = inner_work(beta, inner, length)
    assert near(steps, work[0]) and near(drafted, work[1])
    assert near(said, expected_tokens(alpha, length))
    gain = cascade_speed_up(alpha, beta, inner, length, (0.2, 0.03))
    assert gain == pytest.approx(expected_tokens(alpha, length) / (1 + 0.2 * work[0] + 0.03 * work[1]))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_without_an_inner_draft_it_is_a_plain_draft_model(alpha: float, length: int):
    for beta in (0.0, 0.5):
        assert blocks_tokens(alpha, beta, 0, length) == pytest.approx(expected_tokens(alpha, length))
        assert blocks_speed_up(alpha, beta, 0, length, (0.1, 9.0)) == pytest.approx(speed_up(alpha, length, 0.1))
        assert cascade_speed_up(alpha, beta, 0, length, (0.1, 9.0)) == pytest.approx(speed_up(alpha, length, 0.1))
    assert relay_speed_up([alpha] * length, [0.1] * length) == pytest.approx(speed_up(alpha, length, 0.1))


def test_an_inner_draft_that_is_always_right_saves_all_forwards_but_one():
    assert inner_work(1.0, 7, 8) == (1.0, 7.0)
    assert inner_work(0.0, 7, 8) == pytest.approx((8.0, 7 + 6 + 5 + 4 + 3 + 2 + 1))
    # free inner drafts: one middle forward for the whole draft
    assert cascade_speed_up(0.9, 1.0, 7, 8, (0.1, 0.0)) == pytest.approx(expected_tokens(0.9, 8) / 1.1)


def test_simulation_of_a_relay():
    source = random.Random(3)
    alphas, costs = [0.9, 0.9, 0.6, 0.3], [0.2, 0.2, 0.01, 0.01]
    said = []
    for _ in range(STEPS):
        count = 1
        for alpha in alphas:
            if source.random() >= alpha:
                break
            count += 1
        said.append(float(count))
    assert near(said, relay_speed_up(alphas, costs) * (1 + sum(costs)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: block_generating(1.1, 3, 0.5),
        lambda: blocks_tokens(0.5, 0.5, -1, 2),
        lambda: blocks_tokens(0.5, 0.5, 1, -2),
        lambda: blocks_speed_up(0.5, 0.5, 1, 2, (0.1, -0.1)),
        lambda: cascade_speed_up(-0.5, 0.5, 1, 2, (0.1, 0.1)),
        lambda: inner_work(0.5, 2, -1),
        lambda: relay_speed_up([0.5], [0.1, 0.1]),
        lambda: relay_speed_up([1.5], [0.1]),
    ],
)
def test_values_out_of_range_are_errors(call):
    with pytest.raises(OptionError):
        call()
