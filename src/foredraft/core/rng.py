"""Counter-based random numbers, and the random number generator of the verifiers.

Each number is a hash of (row seed, position, stream, index). So a request's output does not depend on its batch or on
how many numbers other requests use, drafting and accepting never share a stream, and a captured graph can replay it.
All arithmetic is torch int64, which wraps around.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.cached import cached

Exponentials = Callable[[Int[Tensor, "*k"], int], Float[Tensor, "*k n"]]
"""See ``exponentials``."""


class RandomStream(IntEnum):
    """Independent random streams within one request."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    TARGET = 4
    NESTED = 5


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_MOST = 1 - 2.0**-24
"""Largest float32 below 1, so that every arrival time is finite."""


def _shift(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Logical right shift; torch's ``>>`` keeps the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of x affects every bit of the result."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shift(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shift(x, 31).bitwise_xor_(x)


def target_bits(seed: int, position: int) -> int:
    """The bits that arrival times at a position are hashed from, as ``Noise.target_bits``, by the host alone."""
    row = _mix_int(seed + _GOLDEN)
    state = _mix_int((row ^ position) + _GOLDEN)
    return _mix_int((state ^ int(RandomStream.TARGET)) + _GOLDEN)


def _mix_int(x: int) -> int:
    """``_mix`` of an integer of Python; the result is that of 64 bits with a sign, like torch's."""
    x &= _WORD
    x = (x ^ (x >> 30)) * _MIX_1 & _WORD
    x = (x ^ (x >> 27)) * _MIX_2 & _WORD
    x ^= x >> 31
    return x - (x >> 63 << 64)


def resolve_seed(seed: int | None) -> int:
    """``seed``, or a new seed from system entropy if it is None; 53 bits, which JSON readers preserve."""
    return secrets.randbits(53) if seed is None else seed


def derive_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the ``count`` outputs of one call; the first is ``seed`` itself."""
    return [seed, *_derived(seed, torch.arange(1, count)).tolist()]


def derived_seed(seed: int, number: int) -> int:
    """The seed of output ``number`` of a call, as ``derive_seeds`` lists them."""
    return int(_derived(seed, torch.tensor(number))) if number else seed


def _derived(seed: int, numbers: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    return _shift(_mix(_mix(torch.tensor(seed) + _GOLDEN) ^ (numbers * _MIX_2)), 11)  # 53 bits, for JSON


def request_seed(seed: int, number: int) -> int:
    """Seed of a request whose drafts are drawn: those with one ``seed`` but different numbers are independent."""
    return int(_mix(_mix(torch.tensor(seed) + _MIX_1) ^ (torch.tensor(number + 1) * _GOLDEN)))


class RecentTimes:
    """Arrival times of two steps by seed and position: most positions of a draft are seen again by the next step.

    For rows whose positions are known to the host. ``exponentials``: as the function of this name; another one may
    differ from it in the last places.
    """

    def __init__(self, exponentials: Exponentials | None = None) -> None:
        self._exponentials = exponentials
        self._now: dict[tuple[int, int, int], Tensor] = {}
        self._before = self._now

    def begin_step(self) -> None:
        """Drop what the last step has not used."""
        self._before, self._now = self._now, {}

    def times(self, noise: "Noise", ahead: int, vocab_size: int) -> Float[Tensor, "B V"]:
        """See ``Noise.times``."""
        keys = [
            (seed, position + ahead, vocab_size)
            for seed, position in zip(noise.seeds.tolist(), noise.positions.tolist(), strict=True)
        ]
        known = {**self._before, **self._now}
        make = self._exponentials or exponentials
        for key in keys:
            if key not in known:
                known[key] = make(torch.tensor(target_bits(*key[:2])), vocab_size)
        found = [known[key] for key in keys]
        self._now |= zip(keys, found, strict=True)
        return found[0][None] if len(found) == 1 else torch.stack(found)


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers of B rows at their current positions.

    ``positions[b]`` is the number of committed tokens of row b. It grows with every step, so a request never reuses
    a (position, stream, index). What was computed is kept; ``recent`` keeps arrival times for the next step, too.
    """

    seeds: Int[Tensor, "B"]
    positions: Int[Tensor, "B"]
    recent: RecentTimes | None = field(default=None, repr=False, compare=False)
    _cache: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def times(self, ahead: int, vocab_size: int) -> Float[Tensor, "B V"]:
        """When each token arrives in the race for the position ``ahead`` after the rows': exponentials, hashed from
        seed, position and token.

        The target takes the token with the least time / p: one drawn from p (Efraimidis and Spirakis 2006; the
        Gumbel-max trick in another form). A draft that ranks its tokens by time / q guesses with the same noise.
        """
        key = ahead, vocab_size
        if key not in self._cache:
            recent = self.recent
            self._cache[key] = (
                exponentials(self.target_bits(ahead), vocab_size)
                if recent is None
                else recent.times(self, ahead, vocab_size)
            )
        return self._cache[key]

    def target_bits(self, ahead: int) -> Int[Tensor, "B"]:
        """The bits that ``times`` is hashed from."""
        return self.bits_at(self.positions + ahead, RandomStream.TARGET, torch.zeros_like(self.positions))

    def uniform(self, stream: RandomStream, index: Int[Tensor, "B *k"]) -> Float[Tensor, "B *k"]:
        """Float64 numbers in [0, 1), one per index, at the rows' positions."""
        return _uniform(self.bits(stream, index))

    def uniform_at(
        self, positions: Int[Tensor, "B *#k"], stream: RandomStream, index: Int[Tensor, "B *k"]
    ) -> Float[Tensor, "B *k"]:
        """Like ``uniform``, at given positions: keyed by a token's position, not by the step that draws it."""
        return _uniform(self.bits_at(positions, stream, index))

    def bits(self, stream: RandomStream, index: Int[Tensor, "B *k"]) -> Int[Tensor, "B *k"]:
        """64 random bits per index, at the rows' positions; the input of ``draw``."""
        return self.bits_of(_code(stream, index))

    def bits_of(self, codes: Int[Tensor, "B *k"]) -> Int[Tensor, "B *k"]:
        """Like ``bits``, by codes: 8 times the index plus the stream."""
        return _mix((_wide(self._here, codes) ^ codes) + _GOLDEN)

    def bits_at(
        self, positions: Int[Tensor, "B *#k"], stream: RandomStream, index: Int[Tensor, "B *k"]
    ) -> Int[Tensor, "B *k"]:
        """Like ``bits``, at given positions."""
        state = _mix((_wide(self._rows, index) ^ positions) + _GOLDEN)
        return _mix((state ^ _code(stream, index)) + _GOLDEN)

    def at(self, positions: Int[Tensor, "B"]) -> "Noise":
        """The same rows at other positions; hashes of their seeds are not made again."""
        moved = Noise(self.seeds, positions, self.recent)
        if "_rows" in self._cache:
            moved._cache["_rows"] = self._cache["_rows"]
        return moved

    def nested(self, level: int) -> "Noise":
        """Random numbers for a nested loop that starts in this step, at the same positions.

        Nested loops revisit positions in later steps, so child seeds hash (seed, start position, level). Steps and
        nesting levels then never share a number. Loops that start in the same step need different levels.
        """
        return Noise(
            self.bits(RandomStream.NESTED, torch.full_like(self.positions, level)), self.positions, self.recent
        )

    @cached
    def _rows(self) -> Int[Tensor, "B"]:
        return _mix(self.seeds + _GOLDEN)

    @cached
    def _here(self) -> Int[Tensor, "B"]:
        return _mix((self._rows ^ self.positions) + _GOLDEN)


def _code(stream: RandomStream, index: Int[Tensor, "*k"]) -> Int[Tensor, "*k"]:
    return index * 8 + int(stream)


def _wide(rows: Int[Tensor, "B"], index: Int[Tensor, "B *k"]) -> Int[Tensor, "B *#k"]:
    """One value per row, to be broadcast over its indices."""
    return rows.view(-1, *[1] * (index.ndim - 1))


def _uniform(bits: Int[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    return _shift(bits, 12).double() * 2.0**-52


def draw(law: Float[Tensor, "*k V"], bits: Int[Tensor, "*k"]) -> Int[Tensor, "*k"]:
    """Draw a token from each law with exponentials hashed from ``bits``; see ``first``."""
    return first(law, exponentials(bits, law.shape[-1]))


def first(law: Float[Tensor, "*k V"], times: Float[Tensor, "*k V"]) -> Int[Tensor, "*k"]:
    """The first arrival of a race in which token i takes times[i] / law[i]; a law need not sum to 1.

    With independent exponentials, i wins with probability law[i] / sum(law). Two laws that differ by rounding give
    different tokens only if the two best values are within rounding of each other. Inverting a cumulative sum would be
    less stable: each of the thousands of boundaries could flip. A token of probability 0 is never returned unless the
    whole law is 0.
    """
    return (law / times).argmax(-1)


def draw_distinct(
    law: Float[Tensor, "*k V"], times: Float[Tensor, "*k V"], count: int
) -> tuple[Int[Tensor, "*k c"], Float[Tensor, "*k c"]]:
    """Draw ``count`` tokens from each law one after another, each from the law without the earlier ones: the first
    arrivals of a race (see ``first``).

    Returns:
        the tokens in the order drawn, and their probabilities. Where the law has fewer tokens, the last ones do not
        exist: their probabilities are 0.
    """
    tokens = (law / times).topk(min(count, law.shape[-1]), dim=-1).indices
    missing = (0, count - tokens.shape[-1])
    return torch.nn.functional.pad(tokens, missing), torch.nn.functional.pad(law.gather(-1, tokens), missing)


def exponentials(bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
    """``count`` independent float32 exponentials for each entry of ``bits``, from splitmix64.

    The earliest arrivals decide, and float32 keeps their relative precision: a uniform number of 53 bits is rounded
    to float32 before the logarithm.
    """
    steps = torch.arange(1, count + 1, device=bits.device).mul_(_GOLDEN)
    uniform = _shift(_mix(bits[..., None] + steps), 11).float().add_(0.5).mul_(2.0**-53).clamp_(max=_MOST)
    return uniform.neg_().log1p_().neg_()


class VerifierRng(ABC):
    """The random choices of a verification rule. Tests enumerate all outcomes; the loop uses ``HashedRng``.

    ``reads``: the host may read values at no cost.
    """

    @property
    def reads(self) -> bool:
        return False

    @abstractmethod
    def accept(self, probability: Float[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
        """True with the given probability, independently for each node (0: never, 1: always); one call per step."""

    @abstractmethod
    def residual(self, law: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        """Draw one token per row from a law that need not be normalised; at most one call per step."""

    @abstractmethod
    def target(self, law: Float[Tensor, "B V"], depth: int, going: Bool[Tensor, "B"]) -> Int[Tensor, "B"]:
        """Draw one token for each row that is ``going`` from the target's law at a node of this depth; at most one call
        per depth and step. The tokens of other rows are undefined.

        The noise is keyed by the token's position alone, which is ``depth`` after the rows'. So the output does not
        depend on the draft.
        """


@dataclass(frozen=True, slots=True)
class HashedRng(VerifierRng):
    """The decoding loop's random numbers for one step.

    ``plain`` marks rows without a draft. Their residual is the target's law, and they draw it with the random number of
    plain decoding, so their output does not depend on whether other rows of the batch have drafts.

    A hash takes the same number of operations regardless of its size, so ``accept`` also hashes for ``residual``.
    """

    noise: Noise
    plain: Bool[Tensor, "B"] | None = None
    _bonus: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def accept(self, probability: Float[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
        codes = torch.arange(int(RandomStream.ACCEPT), 8 * probability.shape[1], 8, device=probability.device)
        bits = self.noise.bits_of(torch.cat([codes.expand_as(probability), self._code[:, None]], 1))
        self._bonus.append(bits[:, -1])
        return _uniform(bits[:, :-1]) < probability

    def residual(self, law: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        return draw(law, self._bonus.pop() if self._bonus else self.noise.bits_of(self._code))

    @property
    def reads(self) -> bool:
        return self.noise.recent is not None

    @property
    def _code(self) -> Int[Tensor, "B"]:
        if self.plain is None:
            return torch.full_like(self.noise.positions, int(RandomStream.RESIDUAL))
        return torch.where(self.plain, int(RandomStream.TARGET), int(RandomStream.RESIDUAL))

    def target(self, law: Float[Tensor, "B V"], depth: int, going: Bool[Tensor, "B"]) -> Int[Tensor, "B"]:
        return first(law, self.noise.times(depth, law.shape[-1]))
