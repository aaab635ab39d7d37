"""Quantised matrices: weights in tiles, from floats or as a file has them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.model.native import library as c
from foredraft.model.native.library import HALF_SCALES, MINIMA, Library, Matrix, check, pointer
from foredraft.model.threads import kernel_threads

GROUP, TILE = 32, 16
_HUGE = 1 << 21
_ZEROS = (8, 16, 128)
"""Of Q4_0, Q5_0 and Q8_0."""
_CODE_BITS = (4, 5, 6, 8)
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
class Blocks:
    """A matrix in the blocks of a GGUF file, of a type that the kernels store as it is (``fd_block_form``).

    Args:
        name: of the weight, for errors.
        type: its number in GGUF files.
        rows: the blocks of each output, views of the file's bytes.
        inputs: weights of a row.
        order: the matrix's outputs among these rows, None for all in their order.
    """

    name: str
    type: int
    rows: tuple[UInt8[Tensor, "O bytes"], ...]
    inputs: int
    order: Int[Tensor, "O"] | None = None

    @property
    def outputs(self) -> int:
        return sum(len(each) for each in self.rows)

    def addresses(self) -> Int[Tensor, "O"]:
        """Where the blocks of each output begin in memory."""
        starts = torch.cat([each.data_ptr() + each.stride(0) * torch.arange(len(each)) for each in self.rows])
        return starts if self.order is None else starts[self.order]


class Form(NamedTuple):
    """How a matrix is stored: see ``Form`` in ``kernels/engine.h``."""

    bits: int
    zero: int
    scales: int = HALF_SCALES

    def struct(self) -> c.Form:
        return c.Form(*self)


@dataclass(frozen=True, eq=False, slots=True)
class PackedMatrix:
    """A matrix in the kernels' layout.

    Args:
        bias: of all outputs, rounded up to whole tiles.
        outputs: of this matrix and of the ``next`` ones.
        form: ``bits`` 32: float weights; ``zero``: see ``Codes.zero``.
        next: the outputs that are stored in another form, behind whole tiles of this one's.
    """

    library: Library
    data: UInt8[Tensor, "N"]
    bias: Float[Tensor, "P"] | None
    outputs: int
    inputs: int
    form: Form
    next: "PackedMatrix | None" = None

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
        form = Form(bits, _STORED_ZEROS[bits])
        data = (arena or Arena(library, 0)).matrix(outputs, inputs, form)
        check(library.pack_floats(pointer(weight), outputs, inputs, form.struct(), pointer(data)))
        return cls(library, data, _padded(bias, outputs), outputs, inputs, form)

    @classmethod
    def of_codes(
        cls,
        library: Library,
        codes: Codes,
        arena: "Arena | None" = None,
    ) -> "PackedMatrix":
        """Store codes without another rounding, in as few bits as they fit.

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
        most = int(codes.codes.max()) if outputs else 0
        bits = next(each for each in _CODE_BITS if most < 1 << each)
        zero = codes.zero
        form = Form(bits, zero if zero < 1 << bits else MINIMA)
        given = codes.codes.contiguous()
        scales, minima = codes.scales.half().contiguous(), codes.minima.half().contiguous()
        data = (arena or Arena(library, 0)).matrix(outputs, inputs, form)
        own = pointer(minima) if form.zero == MINIMA else None
        check(library.pack_codes(pointer(given), pointer(scales), own, outputs, inputs, form.struct(), pointer(data)))
        return cls(library, data, None, outputs, inputs, form)

    @classmethod
    def of_blocks(
        cls,
        library: Library,
        parts: "Sequence[Blocks]",
        arena: "Arena | None" = None,
    ) -> "PackedMatrix":
        """Store blocks of one type without another rounding, one matrix after the other; all cores share the work.

        Raises:
            ModelError: a scale is infinite or not a number.
        """
        stored, inputs = c.Form(), parts[0].inputs
        check(library.block_form(parts[0].type, stored))
        form = Form(stored.bits, stored.zero, stored.scales)
        rows = torch.cat([each.addresses() for each in parts])
        data = (arena or Arena(library, 0)).matrix(len(rows), inputs, form)
        given = (pointer(rows), len(rows), inputs, pointer(data), kernel_threads())
        fault = library.pack_blocks(parts[0].type, *given)
        if fault == c.BAD_NUMBER and len(parts) > 1:
            for each in parts:  # says which of them
                cls.of_blocks(library, [each])
        if fault == c.BAD_NUMBER:
            raise ModelError(f"The weight {parts[0].name} has NaN or infinite values: it is damaged.")
        check(fault)
        return cls(library, data, None, len(rows), inputs, form)

    @classmethod
    def of_parts(
        cls,
        library: Library,
        parts: "Sequence[Tensor | Codes | Blocks]",
        bias: Float[Tensor, "O"] | None,
        bits: int,
        arena: "Arena | None" = None,
    ) -> "PackedMatrix":
        """Matrices with the same inputs, one after the other: what a file has in codes as it is, floats in ``bits``.

        Parts that do not fill whole tiles become floats, unless all are stored alike.
        """
        alike = [list(each) for _, each in groupby(parts, _sort_of)]
        sizes = [sum(outputs_of(part) for part in each) for each in alike]
        if bits == 32 or any(size % TILE for size in sizes[:-1]):
            whole = torch.cat([floats_of(library, part) for part in parts])
            return cls.of_floats(library, whole, bias, bits, arena)
        found: PackedMatrix | None = None
        own, first = _padded(bias, sum(sizes)), sum(sizes)
        for each, size in zip(reversed(alike), reversed(sizes), strict=True):
            first -= size
            packed = cls._of_alike(library, each, bits, arena)
            joined = size + (0 if found is None else found.outputs)
            found = replace(packed, outputs=joined, next=found, bias=None if own is None else own[first:])
        assert found is not None
        return found

    @classmethod
    def _of_alike(
        cls,
        library: Library,
        parts: "Sequence[Tensor | Codes | Blocks]",
        bits: int,
        arena: "Arena | None",
    ) -> "PackedMatrix":
        if blocks := [part for part in parts if isinstance(part, Blocks)]:
            return cls.of_blocks(library, blocks, arena)
        if codes := [part for part in parts if isinstance(part, Codes)]:
            return cls.of_codes(library, Codes.joined(codes), arena)
        floats = [floats_of(library, part) for part in parts]
        return cls.of_floats(library, floats[0] if len(floats) == 1 else torch.cat(floats), None, bits, arena)

    def repack(self, weight: Float[Tensor, "O I"]) -> None:
        """Quantise other floats in place of these weights."""
        given = weight.detach().float().contiguous()
        shape = (self.outputs, self.inputs, self.form.struct())
        check(self.library.pack_floats(pointer(given), *shape, pointer(self.data)))

    @property
    def bits(self) -> int:
        """Most bits of a code."""
        return self.form.bits if self.next is None else max(self.form.bits, self.next.bits)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.next is None else self.next.nbytes)

    @property
    def width(self) -> int:
        """Columns that a product writes: the outputs, rounded up to whole tiles."""
        return -(-self.outputs // TILE) * TILE

    def struct(self) -> Matrix:
        """The C struct, valid as long as this object."""
        own = self.outputs - (0 if self.next is None else self.next.outputs)
        rest = None if self.next is None else c.pointer_to(self.next.struct())
        return Matrix(self.data.data_ptr(), pointer(self.bias), own, self.inputs, self.form.struct(), rest)

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
            ModelError: the inputs are no multiple of 32, or the scales are those of a K-quant.
        """
        codes = torch.empty(self.outputs, self.inputs, dtype=torch.uint8)
        scales = torch.empty(self.outputs, -(-self.inputs // GROUP), dtype=torch.float16)
        minima = torch.empty_like(scales)
        stored = pointer(minima) if self.form.zero == MINIMA else None
        check(self.library.unpack_codes(self.struct(), pointer(codes), pointer(scales), stored))
        return Codes(codes, scales, minima if self.form.zero == MINIMA else scales * -self.form.zero)

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

    def matrix(self, outputs: int, inputs: int, form: Form) -> UInt8[Tensor, "N"]:
        """Memory for a packed matrix, aligned to 64 bytes.

        Raises:
            ModelError: there is no such matrix.
        """
        size = self._library.matrix_bytes(outputs, inputs, form.struct())
        if size < 0:
            raise ModelError(f"A matrix of {outputs} x {inputs} cannot be stored in {form.bits} bits.")
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


def outputs_of(part: Tensor | Codes | Blocks) -> int:
    """Outputs of a matrix, however it is held."""
    return part.outputs if isinstance(part, Blocks) else (part.codes if isinstance(part, Codes) else part).shape[0]


def inputs_of(part: Tensor | Codes | Blocks) -> int:
    """Inputs of a matrix, however it is held."""
    return part.inputs if isinstance(part, Blocks) else (part.codes if isinstance(part, Codes) else part).shape[1]


def floats_of(library: Library, part: Tensor | Codes | Blocks) -> Float[Tensor, "O I"]:
    """A matrix as floats, however it is held."""
    if isinstance(part, Blocks):
        return PackedMatrix.of_blocks(library, [part]).dequantised()
    return part.dequantised() if isinstance(part, Codes) else part.detach().float()


def _sort_of(part: Tensor | Codes | Blocks) -> int:
    """Parts with the same number are stored in one form: that of a type of blocks, of codes, or of floats."""
    return part.type if isinstance(part, Blocks) else -1 if isinstance(part, Codes) else -2
