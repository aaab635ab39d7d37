"""The theory of speculative decoding: acceptance, expected tokens, speed-up and the best draft length.

From Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), with
the paper's letters: alpha is the acceptance rate, k (gamma there) the number of drafted tokens, c the time of one draft
step relative to one target step. The analysis is for chains and assumes independent acceptances with equal alpha. No
torch: ``foredraft theory`` starts at once. ``divergence.acceptance`` measures alpha.
"""

import math
from typing import NamedTuple

from foredraft.core.errors import OptionError


def expected_tokens(alpha: float, length: int) -> float:
    """Tokens per step, bonus included: (1 - alpha^(k+1)) / (1 - alpha), equation (1); k + 1 at alpha = 1."""
    _check(0.0 <= alpha <= 1.0, "alpha must be a probability between 0 and 1", alpha)
    _check(length >= 0, "length must be a whole number, 0 or more", length)
    return _geometric(alpha, length + 1)


def speed_up(alpha: float, length: int, cost: float) -> float:
    """Plain time over speculative time: (1 - alpha^(k+1)) / ((1 - alpha) (c k + 1)), Theorem 3.8.

    Assumes that a target forward of k + 1 tokens takes the time of one; below 1 speculation is slower.
    """
    _check(0.0 <= cost < math.inf, "cost must be a finite number, 0 or more", cost)
    return expected_tokens(alpha, length) / (cost * length + 1.0)


def operations_factor(alpha: float, length: int, cost: float) -> float:
    """Speculative over plain operations: (1 - alpha) (k c + k + 1) / (1 - alpha^(k+1)), Theorem 3.11.

    Here ``cost`` is a ratio of operations (c hat in the paper), not of time: the draft's per token over the target's.
    """
    _check(0.0 <= cost < math.inf, "cost must be a finite number, 0 or more", cost)
    return (length * cost + length + 1.0) / expected_tokens(alpha, length)


_ROUNDING = 1e-12


class BestLength(NamedTuple):
    """The number of tokens to draft, and its expected speed-up."""

    length: int
    speed_up: float


def best_length(alpha: float, cost: float, longest: int = 64) -> BestLength:
    """The k <= ``longest`` with the largest speed-up; (0, 1.0) if no draft is faster than plain decoding.

    The speed-up has a single peak, since each further token adds alpha^k at the same cost. The search stops at the
    first k that is slower than the one before. On ties the longer k is taken.
    """
    _check(longest >= 0, "longest must be a whole number, 0 or more", longest)
    best = BestLength(0, speed_up(alpha, 0, cost))
    if alpha <= cost:
        return best
    for length in range(1, longest + 1):
        gain = speed_up(alpha, length, cost)
        if gain < best.speed_up * (1.0 - _ROUNDING):
            break
        best = BestLength(length, gain)
    return best


def _geometric(ratio: float, terms: int) -> float:
    """The sum 1 + ratio + ratio^2 + ... of ``terms`` terms, accurate for a ratio near 1."""
    if ratio in (0.0, 1.0):
        return 1.0 if ratio == 0.0 else float(terms)
    return -math.expm1(terms * math.log(ratio)) / (1.0 - ratio)


def _check(valid: bool, rule: str, given: float) -> None:
    if not valid:
        raise OptionError(f"{rule}, not {given!r}.")
