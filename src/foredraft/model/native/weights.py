"""Quantised matrices: weights in tiles, from floats or from the codes of a file."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.model.native.library import MINIMA, Library, Matrix, check, pointer

GROUP, TILE = 32, 16
_HUGE = 1 << 21
_ZEROS = (8, 16, 128)
"""Of Q4_0, Q5_0 and Q8_0."""
_STORED_ZEROS = {4: MINIMA, 8: 128, 32: 0}
"""How floats are quantised: 4 bits need minima, which cost half a bit per weight and save a fifth of the error."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How the floats of a checkpoint are stored: ``bits`` of a linear layer, and of embedding and output layer."""

    name: str
    bits: int
    outer: int


PRECISIONS = {
    each.name: each for each in (Precision("int4", 4, 4), Precision("int8", 8, 8), Precision("float32", 32, 32))
}
"""``float32`` serves tests: the same forward without rounding."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix as a file holds it: weight = scale * code + minimum, in groups of 32 inputs.

    ``codes``: below 16 where they are stored in 4 bits, else in 8.
    """

    codes: UInt8[Tensor, "O I"]
    scales: Float[Tensor, "O G"]
    minima: Float[Tensor, "O G"]

    def dequantised(self) -> Float[Tensor, "O I"]:
        groups = self.codes.unflatten(1, (-1, GROUP)).float()
        return (groups * self.scales.float()[..., None] + self.minima.float()[..., None]).flatten(1)

    @property
    def zero(self) -> int:
        """The code of weight 0 if it is the same in all groups, as of Q4_0, Q5_0 and Q8_0; else ``MINIMA``."""
        for zero in _ZEROS:
            if torch.equal(self.minima.float(), self.scales.float() * -zero):
                return zero
        return MINIMA

    @staticmethod
    def joined(parts: "list[Codes]") -> "Codes":
        """Several matrices with the same inputs, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return Codes(
            torch.cat([each.codes for each in parts]),
            torch.cat([each.scales for each in parts]),
            torch.cat([each.minima for each in parts]),
        )


@dataclass(frozen=True, eq=False, slots=True)
class PackedMatrix:
    """A matrix in the kernels' layout. ``zero``: see ``Codes.zero``; ``bits`` 32: float weights."""

    library: Library
    data: UInt8[Tensor, "N"]
    bias: Float[Tensor, "P"] | None
    outputs: int
    inputs: int
    bits: int
    zero: int

    @classmethod
    def of_floats(
        cls,
        library: Library,
        weight: Float[Tensor, "O I"],
        bias: Float[Tensor, "O"] | None,
        bits: int,
        arena: "Arena | None" = None,
    ) -> "PackedMatrix":
        """Quantise a matrix, or store it as it is if ``bits`` is 32."""
        weight = weight.detach().float().contiguous()
        outputs, inputs = weight.shape
        zero = _STORED_ZEROS[bits]
        data = (arena or Arena(library, 0)).matrix(outputs, inputs, bits, zero)
        check(library.pack_floats(pointer(weight), outputs, inputs, bits, zero, pointer(data)))
        return cls(library, data, _padded(bias, outputs), outputs, inputs, bits, zero)

    @classmethod
    def of_codes(
        cls,
        library: Library,
        codes: Codes,
        bias: Float[Tensor, "O"] | None = None,
        arena: "Arena | None" = None,
    ) -> "PackedMatrix":
        """Store codes without another rounding: in 4 bits if all are below 16, else in 8.

        Raises:
            ModelError: the inputs are no multiple of 32, or the scales do not belong to the codes.
        """
        outputs, inputs = codes.codes.shape
        if (
            inputs % GROUP
            or codes.scales.shape != (outputs, inputs // GROUP)
            or codes.minima.shape != codes.scales.shape
        ):
            raise ModelError("Codes of a matrix need one scale and one minimum for each group of 32 inputs.")
        bits = 4 if not outputs or int(codes.codes.max()) < 16 else 8
        zero = codes.zero
        zero = zero if zero < 1 << bits else MINIMA
        given = codes.codes.contiguous()
        scales, minima = codes.scales.half().contiguous(), codes.minima.half().contiguous()
        data = (arena or Arena(library, 0)).matrix(outputs, inputs, bits, zero)
        own = pointer(minima) if zero == MINIMA else None
        check(library.pack_codes(pointer(given), pointer(scales), own, outputs, inputs, bits, zero, pointer(data)))
        return cls(library, data, _padded(bias, outputs), outputs, inputs, bits, zero)

    def repack(self, weight: Float[Tensor, "O I"]) -> None:
        """Quantise other floats in place of these weights."""
        given = weight.detach().float().contiguous()
        shape = (self.outputs, self.inputs, self.bits, self.zero)
        check(self.library.pack_floats(pointer(given), *shape, pointer(self.data)))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def width(self) -> int:
        """Columns that a product writes: the outputs, rounded up to whole tiles."""
        return -(-self.outputs // TILE) * TILE

    def struct(self) -> Matrix:
        """The C struct, valid as long as this object."""
        bias = pointer(self.bias)
        return Matrix(self.data.data_ptr(), bias, self.outputs, self.inputs, self.bits, self.zero)

    def rows(self, ids: Int[Tensor, "T"]) -> Float[Tensor, "T I"]:
        """Weights of these outputs as floats, without the bias.

        Raises:
            ModelError: an id is out of range.
        """
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), self.inputs)
        check(self.library.unpack(self.struct(), pointer(ids), len(ids), pointer(out), self.inputs))
        return out

    def unpacked(self) -> Codes:
        """The codes of a quantised matrix; ``of_codes`` packs them to the same bits.

        Raises:
            ModelError: the inputs are no multiple of 32.
        """
        codes = torch.empty(self.outputs, self.inputs, dtype=torch.uint8)
        scales = torch.empty(self.outputs, -(-self.inputs // GROUP), dtype=torch.float16)
        minima = torch.empty_like(scales)
        stored = pointer(minima) if self.zero == MINIMA else None
        check(self.library.unpack_codes(self.struct(), pointer(codes), pointer(scales), stored))
        return Codes(codes, scales, minima if self.zero == MINIMA else scales * -self.zero)

    def dequantised(self) -> Float[Tensor, "O I"]:
        """All weights as floats."""
        return self.rows(torch.arange(self.outputs))


class Arena:
    """Memory for matrices, next to each other on huge pages where the system has them.

    On small pages a forward waits for page tables: the processor fetches ahead only within a page. A block lives as
    long as one of its matrices.

    Args:
        block: bytes that are allocated at a time; a larger matrix gets a block of its own.
    """

    def __init__(self, library: Library, block: int = 1 << 25) -> None:
        self._library = library
        self._block = block
        self._rest = np.empty(0, dtype=np.uint8)

    def matrix(self, outputs: int, inputs: int, bits: int, zero: int) -> UInt8[Tensor, "N"]:
        """Memory for a packed matrix, aligned to 64 bytes.

        Raises:
            ModelError: there is no such matrix.
        """
        size = self._library.matrix_bytes(outputs, inputs, bits, zero)
        if size < 0:
            raise ModelError(f"A matrix of {outputs} x {inputs} cannot be stored in {bits} bits.")
        if size > len(self._rest):
            self._rest = self._allocated(max(size, self._block))
        part, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
        return torch.from_numpy(part)

    def _allocated(self, size: int) -> np.ndarray:
        align = _HUGE if size >= _HUGE else 64
        memory = np.empty(size + align, dtype=np.uint8)
        begin = -memory.ctypes.data % align
        block = memory[begin : begin + size]
        if align == _HUGE:
            self._library.advise_huge(block.ctypes.data, size)
        return block


def _padded(bias: Float[Tensor, "O"] | None, outputs: int) -> Float[Tensor, "P"] | None:
    if bias is None:
        return None
    return torch.nn.functional.pad(bias.detach().float(), (0, -outputs % TILE)).contiguous()
