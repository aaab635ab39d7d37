"""Types of GGUF tensors, and their blocks as codes or as floats.

A quantised row is a sequence of blocks, each with the codes of 32 or 256 weights and their scales. The native engine
stores most types as they are. Where floats are asked for, the operations and their order are ggml's, so the bits are,
too.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.model.threads import operators_in_one_thread

_PART = 1 << 17
"""Weights that are read at a time: what lies between stays in the processor's cache. In one thread, since operators
that are so small wait for each other's threads: a machine that is busy otherwise took 20 times as long."""
_LOW_HALVES = 0x0F0F0F0F0F0F0F0F


class BlockType(NamedTuple):
    """A type of tensors: weights and bytes of a block."""

    name: str
    values: int
    bytes: int


KINDS = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""All types by their number in a file."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_WHOLE = {"I8", "I16", "I32", "I64"}


KEPT = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q8_0": 8,
    "Q3_K": 4,
    "Q4_K": 4,
    "Q5_K": 5,
    "Q6_K": 6,
    "IQ4_NL": 8,
    "IQ4_XS": 8,
}
"""Types that the native engine stores without another rounding, and the bits of a code there (``kernels/blocks.h``)."""


def number_of(kind: BlockType) -> int:
    """The number of a type in a file."""
    return next(number for number, each in KINDS.items() if each is kind)


def is_float(kind: BlockType) -> bool:
    """Whether the type holds floats as they are."""
    return kind.name in _FLOATS


def reading(kind: BlockType) -> str:
    """How tensors of a type are read by torch, for people."""
    return "as it is" if is_float(kind) else "dequantised without another rounding"


def dequantize(kind: BlockType, data: UInt8[Tensor, "O bytes"], dtype: torch.dtype) -> Float[Tensor, "O I"]:
    """Weights of any type, computed in float32 and rounded to ``dtype`` once.

    Raises:
        ModelError: the type holds no weights, or only the ``gguf`` package knows it and it is missing.
    """
    if is_float(kind):
        return data.contiguous().view(_FLOATS[kind.name]).to(dtype, copy=True)
    floats, rows = _FLOAT.get(kind.name) or _from_package(kind), data.shape[0]
    blocks = data.reshape(-1, kind.bytes)
    weights = torch.empty(len(blocks), kind.values, dtype=dtype)
    with operators_in_one_thread():
        for part in _slices(len(blocks), kind.values):
            weights[part] = floats(blocks[part]).view(-1, kind.values)
    return weights.view(rows, -1)


def _slices(blocks: int, values: int) -> Iterator[slice]:
    """Slices over blocks of ``values`` weights, with ``_PART`` weights each."""
    step = _PART // values
    return (slice(first, first + step) for first in range(0, blocks, step))


_Parts = tuple[Float16[Tensor, "N 1"], Float16[Tensor, "N 1"], UInt8[Tensor, "N 32"]]


def _half(data: UInt8[Tensor, "N bytes"], first: int) -> Float16[Tensor, "N 1"]:
    """The float16 number of each block that begins at a byte."""
    return data[:, first : first + 2].contiguous().view(torch.float16)


def _nibbles(data: UInt8[Tensor, "N half"]) -> UInt8[Tensor, "N both"]:
    """The low halves of the bytes, then the high ones; eight bytes are read at a time."""
    words = data.contiguous().view(torch.int64)
    both = torch.empty(len(data), 2 * words.shape[1], dtype=torch.int64)
    torch.bitwise_and(words, _LOW_HALVES, out=both[:, : words.shape[1]])
    torch.bitwise_and(words >> 4, _LOW_HALVES, out=both[:, words.shape[1] :])
    return both.view(torch.uint8)


def _fifth(data: UInt8[Tensor, "N 4"]) -> UInt8[Tensor, "N 32"]:
    """Bit i of 32, as 16 or 0: the fifth bit of code i."""
    return (_bits(data) << 4).view(-1, 32)


def _bits(data: UInt8[Tensor, "N bytes"]) -> UInt8[Tensor, "N bytes 8"]:
    return (data[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1


def _q4_0(data: Tensor) -> _Parts:
    scale = _half(data, 0)
    return scale, scale * -8, _nibbles(data[:, 2:])


def _q4_1(data: Tensor) -> _Parts:
    return _half(data, 0), _half(data, 2), _nibbles(data[:, 4:])


def _q5_0(data: Tensor) -> _Parts:
    scale = _half(data, 0)
    return scale, scale * -16, _nibbles(data[:, 6:]) | _fifth(data[:, 2:6])


def _q5_1(data: Tensor) -> _Parts:
    return _half(data, 0), _half(data, 2), _nibbles(data[:, 8:]) | _fifth(data[:, 4:8])


def _q8_0(data: Tensor) -> _Parts:
    scale = _half(data, 0)
    return scale, scale * -128, data[:, 2:] ^ 128


def _legacy(offset: int, unpack: Callable[[Tensor], _Parts]) -> Callable[[Tensor], Tensor]:
    """``scale * (code - offset)``, or ``scale * code + minimum`` for an offset of 0."""

    def floats(data: Tensor) -> Float[Tensor, "N 32"]:
        scales, minima, codes = unpack(data)
        weights = codes.float()
        if offset:
            return weights.sub_(offset).mul_(scales.float())
        return weights.mul_(scales.float()).add_(minima.float())

    return floats


def _q2_k(data: Tensor) -> Float[Tensor, "N 16 16"]:
    small, codes = data[:, :16], _fields(data[:, 16:80].reshape(-1, 2, 1, 32), (0, 2, 4, 6), 3)
    scale = _half(data, 80).float() * (small & 15).float()
    minimum = _half(data, 82).float() * (small >> 4).float()
    return codes.reshape(-1, 16, 16).float().mul_(scale[..., None]).sub_(minimum[..., None])


def _q3_k(data: Tensor) -> Float[Tensor, "N 16 16"]:
    low = _fields(data[:, 32:96].reshape(-1, 2, 1, 32), (0, 2, 4, 6), 3).reshape(-1, 8, 32)
    high = _fields(data[:, :32].reshape(-1, 1, 32), tuple(range(8)), 1)
    small = _fields(data[:, 96:104].reshape(-1, 1, 8), (0, 4), 15).reshape(-1, 16)
    large = _fields(data[:, 104:108].reshape(-1, 1, 4), (0, 2, 4, 6), 3).reshape(-1, 16)
    scale = _half(data, 108).float() * ((small | (large << 4)).float() - 32)
    return ((low | (high << 2)).reshape(-1, 16, 16).float() - 4).mul_(scale[..., None])


def _q4_k(data: Tensor) -> Float[Tensor, "N 8 32"]:
    codes = _fields(data[:, 16:].reshape(-1, 4, 1, 32), (0, 4), 15).reshape(-1, 8, 32)
    scale, minimum = _six_bits(data)
    return codes.float().mul_(scale).sub_(minimum)


def _q5_k(data: Tensor) -> Float[Tensor, "N 8 32"]:
    low = _fields(data[:, 48:].reshape(-1, 4, 1, 32), (0, 4), 15).reshape(-1, 8, 32)
    high = _fields(data[:, 16:48].reshape(-1, 1, 32), tuple(range(8)), 1)
    scale, minimum = _six_bits(data)
    return (low | (high << 4)).float().mul_(scale).sub_(minimum)


def _q6_k(data: Tensor) -> Float[Tensor, "N 16 16"]:
    low = _fields(data[:, :128].reshape(-1, 2, 1, 64), (0, 4), 15).reshape(-1, 8, 32)
    high = _fields(data[:, 128:192].reshape(-1, 2, 1, 32), (0, 2, 4, 6), 3).reshape(-1, 8, 32)
    scale = _half(data, 208).float() * data[:, 192:208].view(torch.int8).float()
    return ((low | (high << 4)).reshape(-1, 16, 16).float() - 32).mul_(scale[..., None])


def _six_bits(data: Tensor) -> tuple[Float[Tensor, "N 8 1"], Float[Tensor, "N 8 1"]]:
    """Scales and minima of the eight groups in a block of Q4_K or Q5_K, six bits each in 12 bytes."""
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return (_half(data, 0).float() * scales.float())[..., None], (_half(data, 2).float() * minima.float())[..., None]


def _fields(data: UInt8[Tensor, "*N 1 W"], shifts: tuple[int, ...], mask: int) -> UInt8[Tensor, "*N S W"]:
    """Fields of some bits of each byte: all bytes' first field, then all bytes' second, and so on."""
    return (data >> torch.tensor(shifts, dtype=torch.uint8)[:, None]) & mask


_FLOAT: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _legacy(8, _q4_0),
    "Q4_1": _legacy(0, _q4_1),
    "Q5_0": _legacy(16, _q5_0),
    "Q5_1": _legacy(0, _q5_1),
    "Q8_0": _legacy(128, _q8_0),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _from_package(kind: BlockType) -> Callable[[Tensor], Tensor]:
    """The ``gguf`` package's dequantisation, for rare types: exact, and slow."""
    if kind.name in _WHOLE:
        raise ModelError(f"The file holds weights of the type {kind.name}, which are no weights of a language model.")
    try:
        from gguf import GGMLQuantizationType, dequantize as slow
    except ImportError as error:
        raise ModelError(
            f"Weights of the type {kind.name} need the gguf package: pip install foredraft[gguf]."
        ) from error

    def floats(data: Tensor) -> Tensor:
        return torch.from_numpy(slow(data.numpy(), GGMLQuantizationType[kind.name]))

    return floats
