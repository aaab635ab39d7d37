"""Counter-based random numbers, and the random number generator of the verifiers.

Each number is a hash of (row seed, position, stream, index). So a request's output does not depend on its batch or on
how many numbers other requests use, drafting and accepting never share a stream, and a captured graph can replay it.
All arithmetic is torch int64, which wraps around.
"""

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.cached import cached


class Stream(IntEnum):
    """Independent random streams within one request."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    TARGET = 4
    NESTED = 5


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LEAST = 1e-300
"""Least rate in a race: what has probability 0 arrives after all else, at a finite time."""


def _shift(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Logical right shift; torch's ``>>`` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of x affects every bit of the result."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


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
    """Seed of one request's private stream: requests with the same ``seed`` but different numbers are independent."""
    return int(_mix(_mix(torch.tensor(seed) + _MIX_1) ^ (torch.tensor(number + 1) * _GOLDEN)))


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers of B rows at their current positions.

    ``positions[b]`` is the number of committed tokens of row b. It grows with every step, so a request never reuses
    a (position, stream, index). The hashes of seeds and positions are computed once.
    """

    seeds: Int[Tensor, "B"]
    positions: Int[Tensor, "B"]
    _cache: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def uniform(self, stream: Stream, index: Int[Tensor, "B *k"]) -> Float[Tensor, "B *k"]:
        """Float64 numbers in [0, 1), one per index, at the rows' positions."""
        return _uniform(self.bits(stream, index))

    def uniform_at(
        self, positions: Int[Tensor, "B *#k"], stream: Stream, index: Int[Tensor, "B *k"]
    ) -> Float[Tensor, "B *k"]:
        """Like ``uniform``, at given positions: keyed by a token's position, not by the step that draws it."""
        return _uniform(self.bits_at(positions, stream, index))

    def bits(self, stream: Stream, index: Int[Tensor, "B *k"]) -> Int[Tensor, "B *k"]:
        """64 random bits per index, at the rows' positions; the input of ``draw``."""
        return self.bits_of(_code(stream, index))

    def bits_of(self, codes: Int[Tensor, "B *k"]) -> Int[Tensor, "B *k"]:
        """Like ``bits``, by codes: 8 times the index plus the stream."""
        return _mix((_wide(self._here, codes) ^ codes) + _GOLDEN)

    def bits_at(
        self, positions: Int[Tensor, "B *#k"], stream: Stream, index: Int[Tensor, "B *k"]
    ) -> Int[Tensor, "B *k"]:
        """Like ``bits``, at given positions."""
        state = _mix((_wide(self._rows, index) ^ positions) + _GOLDEN)
        return _mix((state ^ _code(stream, index)) + _GOLDEN)

    def at(self, positions: Int[Tensor, "B"]) -> "Noise":
        """The same rows at other positions; hashes of their seeds are not made again."""
        moved = Noise(self.seeds, positions)
        if "_rows" in self._cache:
            moved._cache["_rows"] = self._cache["_rows"]
        return moved

    def nested(self, level: int) -> "Noise":
        """Random numbers for a nested loop that starts in this step, at the same positions.

        Nested loops revisit positions in later steps, so child seeds hash (seed, start position, level). Steps and
        nesting levels then never share a number. Loops that start in the same step need different levels.
        """
        return Noise(self.bits(Stream.NESTED, torch.full_like(self.positions, level)), self.positions)

    @cached
    def _rows(self) -> Int[Tensor, "B"]:
        return _mix(self.seeds + _GOLDEN)

    @cached
    def _here(self) -> Int[Tensor, "B"]:
        return _mix((self._rows ^ self.positions) + _GOLDEN)


def _code(stream: Stream, index: Int[Tensor, "*k"]) -> Int[Tensor, "*k"]:
    return index * 8 + int(stream)


def _wide(rows: Int[Tensor, "B"], index: Int[Tensor, "B *k"]) -> Int[Tensor, "B *#k"]:
    """One value per row, to be broadcast over its indices."""
    return rows.view(-1, *[1] * (index.ndim - 1))


def _uniform(bits: Int[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    return _shift(bits, 12).double() * 2.0**-52


def draw(law: Float[Tensor, "*k V"], bits: Int[Tensor, "*k"]) -> Int[Tensor, "*k"]:
    """Draw a token from each law by the Gumbel-max trick; a law need not sum to 1.

    Returns argmax of law[i] / e[i] with independent exponentials e[i], hashed from ``bits`` and i; token i wins with
    probability law[i] / sum(law). Two laws that differ by rounding give different tokens only if the two best values
    are within rounding of each other. Inverting a cumulative sum would be less stable: each of the thousands of
    boundaries could flip.

    There are two rounds, first between blocks of neighbouring tokens and then within the winning block, so it hashes
    about 2 * sqrt(V) numbers instead of V. A token of probability 0 is never returned unless the whole law is 0.
    """
    return draw_first(law, exponentials(bits, race_size(law.shape[-1])))


def race_size(vocab_size: int) -> int:
    """How many exponentials a draw from a law over ``vocab_size`` tokens needs."""
    size = _block_size(vocab_size)
    return -(-vocab_size // size) + size


def draw_first(law: Float[Tensor, "*k V"], times: Float[Tensor, "*k n"]) -> Int[Tensor, "*k"]:
    """``draw`` with given exponentials."""
    vocab_size = law.shape[-1]
    size = _block_size(vocab_size)
    whole = vocab_size - vocab_size % size
    masses = law[..., :whole].unflatten(-1, (-1, size)).sum(-1)
    if whole < vocab_size:
        masses = torch.cat([masses, law[..., whole:].sum(-1, keepdim=True)], -1)
    blocks = masses.shape[-1]
    first = (masses / times[..., :blocks]).argmax(-1) * size
    tokens = first[..., None] + torch.arange(size, device=law.device)
    own = times[..., blocks : blocks + size]
    if whole == vocab_size:
        return first + (law.gather(-1, tokens) / own).argmax(-1)
    block = law.gather(-1, tokens.clamp(max=vocab_size - 1)) / own
    block = torch.where(tokens < vocab_size, block, 0.0)
    return (first + block.argmax(-1)).clamp(max=vocab_size - 1)


def draw_distinct(
    law: Float[Tensor, "*k V"], times: Float[Tensor, "*k n"], count: int
) -> tuple[Int[Tensor, "*k c"], Float[Tensor, "*k c"]]:
    """Draw ``count`` tokens from each law one after another, each from the law without the earlier ones.

    They are the first arrivals of a race in which token i arrives after an exponential time of rate law[i] (Efraimidis
    and Spirakis 2006; the Gumbel top-k trick). As in ``draw`` there are two rounds. A block's first arrival is
    exponential with its mass, and the winners are in the ``count`` blocks whose first arrivals are earliest. In these,
    a fresh race gives the first token and the delays of the others after it, which do not depend on its time.

    Args:
        times: independent exponentials, ``count * race_size(V)`` for each law.

    Returns:
        the tokens in the order drawn, and their probabilities. Where the law has fewer tokens, the last ones do not
        exist: their probabilities are 0.
    """
    vocab_size = law.shape[-1]
    size = _block_size(vocab_size)
    padding = -(-max(vocab_size, count) // size) * size - vocab_size
    blocks = (torch.nn.functional.pad(law, (0, padding)) if padding else law).unflatten(-1, (-1, size))
    masses = blocks.sum(-1).double().clamp_(min=_LEAST)
    number, entered = masses.shape[-1], min(count, masses.shape[-1])
    first, places = (times[..., :number] / masses).topk(entered, dim=-1, largest=False)
    inside = blocks.gather(-2, places[..., None].expand(*places.shape, size)).double()
    delays = times[..., number : number + entered * size].unflatten(-1, (entered, size)) / inside.clamp(min=_LEAST)
    arrivals = first[..., None] + (delays - delays.amin(-1, keepdim=True))
    chosen = arrivals.flatten(-2).topk(count, dim=-1, largest=False).indices
    tokens = (places[..., None] * size + torch.arange(size, device=law.device)).flatten(-2).gather(-1, chosen)
    return tokens.clamp_(max=vocab_size - 1), inside.flatten(-2).gather(-1, chosen).to(law.dtype)


def _block_size(vocab_size: int) -> int:
    return 1 << (vocab_size.bit_length() // 2)


def exponentials(bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
    """``count`` independent float64 exponentials for each entry of ``bits``, from splitmix64."""
    steps = torch.arange(1, count + 1, device=bits.device) * _GOLDEN
    uniform = (_shift(_mix(bits[..., None] + steps), 11).double() + 0.5) * 2.0**-53
    return -uniform.log()


class VerifierRng(ABC):
    """The random choices of a verification rule. Tests enumerate all outcomes; the loop uses ``HashedRng``."""

    @abstractmethod
    def accept(self, probability: Float[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
        """True with the given probability, independently for each node (0: never, 1: always); one call per step."""

    @abstractmethod
    def residual(self, law: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        """Draw one token per row from a law that need not be normalised; at most one call per step."""

    @abstractmethod
    def target(self, law: Float[Tensor, "B N V"], depths: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
        """Draw one token per node from the target's law there; at most one call per step.

        The number is keyed by the token's position alone, which is the depth of its node after the root. So the output
        does not depend on the draft, and nodes with the same path draw the same token.
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
        codes = torch.arange(int(Stream.ACCEPT), 8 * probability.shape[1], 8, device=probability.device)
        bits = self.noise.bits_of(torch.cat([codes.expand_as(probability), self._code[:, None]], 1))
        self._bonus.append(bits[:, -1])
        return _uniform(bits[:, :-1]) < probability

    def residual(self, law: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        return draw(law, self._bonus.pop() if self._bonus else self.noise.bits_of(self._code))

    @property
    def _code(self) -> Int[Tensor, "B"]:
        if self.plain is None:
            return torch.full_like(self.noise.positions, int(Stream.RESIDUAL))
        return torch.where(self.plain, int(Stream.TARGET), int(Stream.RESIDUAL))

    def target(self, law: Float[Tensor, "B N V"], depths: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
        positions = self.noise.positions[:, None] + depths
        return draw(law, self.noise.bits_at(positions, Stream.TARGET, torch.zeros_like(depths)))
