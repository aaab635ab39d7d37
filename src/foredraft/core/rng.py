"""Random numbers by counter, and the coins that verifiers toss.

A number is a hash of (seed of the row, position, stream, index): the text of a request depends neither on who
shares its batch nor on how many numbers others used, drafting and accepting never share a stream, and a
captured graph can replay it. All arithmetic is torch int64, which wraps around.
"""

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Stream(IntEnum):
    """Independent sequences of random numbers within one request."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    TARGET = 4
    NESTED = 5


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_BLOCK = 64


def _shift(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of x reaches every bit of the result."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def resolve_seed(seed: int | None) -> int:
    """The seed of a call, or where it was given none, one from the system's entropy; 53 bits, as JSON readers keep."""
    return secrets.randbits(53) if seed is None else seed


def derive_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the ``count`` outputs of one call; the first one is ``seed`` itself."""
    return [seed, *_derived(seed, torch.arange(1, count)).tolist()]


def derived_seed(seed: int, number: int) -> int:
    """The seed of output ``number`` of a call, as ``derive_seeds`` lists them."""
    return int(_derived(seed, torch.tensor(number))) if number else seed


def _derived(seed: int, numbers: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    return _shift(_mix(_mix(torch.tensor(seed) + _GOLDEN) ^ (numbers * _MIX_2)), 11)  # 53 bits: JSON readers keep them


def request_seed(seed: int, number: int) -> int:
    """The seed of one request's private stream: requests with the same ``seed`` but other numbers share nothing."""
    return int(_mix(_mix(torch.tensor(seed) + _MIX_1) ^ (torch.tensor(number + 1) * _GOLDEN)))


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers of B rows at their present positions.

    ``positions[b]`` is the number of tokens that row b has committed. It grows with every step, so no
    (position, stream, index) is ever used twice by one request.
    """

    seeds: Int[Tensor, "B"]
    positions: Int[Tensor, "B"]

    def uniform(self, stream: Stream, index: Int[Tensor, "B *k"]) -> Float[Tensor, "B *k"]:
        """Float64 numbers in [0, 1), one for each index, at the rows' positions."""
        return self.uniform_at(self.positions.view(-1, *[1] * (index.ndim - 1)), stream, index)

    def uniform_at(
        self, positions: Int[Tensor, "B *#k"], stream: Stream, index: Int[Tensor, "B *k"]
    ) -> Float[Tensor, "B *k"]:
        """The same at positions of the caller's: a token keyed by where it stands, not by when it was drawn."""
        return _shift(self._state(positions, stream, index), 12).double() * 2.0**-52

    def bits(self, stream: Stream, index: Int[Tensor, "B *k"]) -> Int[Tensor, "B *k"]:
        """64 random bits for each index, at the rows' positions: what ``draw`` takes."""
        return self.bits_at(self.positions.view(-1, *[1] * (index.ndim - 1)), stream, index)

    def bits_at(
        self, positions: Int[Tensor, "B *#k"], stream: Stream, index: Int[Tensor, "B *k"]
    ) -> Int[Tensor, "B *k"]:
        """The same at positions of the caller's."""
        return self._state(positions, stream, index)

    def nested(self, level: int) -> "Noise":
        """Numbers for a loop inside this step, at the same positions to begin with.

        A loop inside a drafter comes by the same position again in later steps. So its seeds are hashed from the row's
        seed, the position at which it begins, and ``level``: no two steps share a number, and no loop shares one with
        the loop around it. Loops that begin at one and the same step need different levels.
        """
        state = self._state(self.positions, Stream.NESTED, torch.full_like(self.positions, level))
        return Noise(state, self.positions)

    def _state(
        self, positions: Int[Tensor, "B *#k"], stream: Stream, index: Int[Tensor, "B *k"]
    ) -> Int[Tensor, "B *k"]:
        """64 random bits."""
        seeds = self.seeds.view(-1, *[1] * (index.ndim - 1))
        state = _mix(seeds + _GOLDEN)
        state = _mix((state ^ positions) + _GOLDEN)
        return _mix((state ^ (index * 8 + int(stream))) + _GOLDEN)


def draw(law: Float[Tensor, "*k V"], bits: Int[Tensor, "*k"]) -> Int[Tensor, "*k"]:
    """Draw a token from each law by an exponential race; a law need not sum to 1.

    Token i wins with probability law[i] / sum(law) if it has the largest law[i] / e[i], the e[i] being independent
    exponential numbers hashed from ``bits`` and i (the Gumbel-max trick). Two laws that differ by rounding then give
    another token only where the two best are within rounding of each other. The inverse of a running sum has an edge
    at every token, and each of thousands of edges is a chance to fall on the other side.

    The race has two rounds, one between blocks of neighbouring tokens and one within the block that has won, so it
    hashes about 2 * sqrt(V) numbers and not V. A token of probability 0 is never returned unless the whole law is 0.
    """
    vocab_size = law.shape[-1]
    size = 1 << (vocab_size.bit_length() // 2)
    whole = vocab_size - vocab_size % size
    masses = law[..., :whole].unflatten(-1, (-1, size)).sum(-1)
    if whole < vocab_size:
        masses = torch.cat([masses, law[..., whole:].sum(-1, keepdim=True)], -1)
    blocks = masses.shape[-1]
    times = _exponentials(bits, blocks + size)
    first = (masses / times[..., :blocks]).argmax(-1) * size
    tokens = first[..., None] + torch.arange(size, device=law.device)
    block = law.gather(-1, tokens.clamp(max=vocab_size - 1)) / times[..., blocks:]
    if whole < vocab_size:
        block = torch.where(tokens < vocab_size, block, 0.0)
    return (first + block.argmax(-1)).clamp(max=vocab_size - 1)


def _exponentials(bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
    """``count`` independent exponential numbers for each entry of ``bits``, in float64: the output of splitmix64."""
    steps = torch.arange(1, count + 1, device=bits.device) * _GOLDEN
    uniform = (_shift(_mix(bits[..., None] + steps), 11).double() + 0.5) * 2.0**-53
    return -uniform.log()


class VerifierRng(ABC):
    """What a verifier may ask of chance. Tests enumerate every answer; the loop answers from ``Noise``."""

    @abstractmethod
    def accept(self, probability: Float[Tensor, "B"], index: int) -> Bool[Tensor, "B"]:
        """True with the given probability, afresh for each ``index`` within a step (0 is never, 1 is always)."""

    @abstractmethod
    def residual(self, law: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        """One token a row from a law that need not be normalised; asked at most once a step."""

    @abstractmethod
    def target(self, law: Float[Tensor, "B V"], depth: int) -> Int[Tensor, "B"]:
        """One token a row from the target's law at a node of this depth; asked at most once a depth and step.

        It is keyed by the token's place in the text, so a request says the same whatever was drafted for it.
        """


@dataclass(frozen=True, slots=True)
class HashedRng(VerifierRng):
    """Coins of the running loop, for one step.

    A hash is some fifty small operations however many numbers it makes, and a rule tosses one coin a node: so
    numbers for accepting are made, and kept for the step, a block of indices at a time.

    ``plain`` marks rows for which nothing was drafted. Their residual is the target's law itself, and they draw from
    it by the number of plain decoding: whether others of their batch have a draft must not show in their text.
    """

    noise: Noise
    plain: Bool[Tensor, "B"] | None = None
    _blocks: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def _index(self, index: int) -> Int[Tensor, "B"]:
        return torch.full_like(self.noise.positions, index)

    def accept(self, probability: Float[Tensor, "B"], index: int) -> Bool[Tensor, "B"]:
        number, column = divmod(index, _BLOCK)
        if number not in self._blocks:
            indices = torch.arange(_BLOCK, device=self.noise.positions.device) + number * _BLOCK
            self._blocks[number] = self.noise.uniform(Stream.ACCEPT, indices.expand(self.noise.positions.shape[0], -1))
        return self._blocks[number][:, column] < probability

    def residual(self, law: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        bits = self.noise.bits(Stream.RESIDUAL, self._index(0))
        if self.plain is not None:
            bits = torch.where(self.plain, self.noise.bits(Stream.TARGET, self._index(0)), bits)
        return draw(law, bits)

    def target(self, law: Float[Tensor, "B V"], depth: int) -> Int[Tensor, "B"]:
        positions = self.noise.positions + depth
        return draw(law, self.noise.bits_at(positions, Stream.TARGET, self._index(0)))
