"""The header of a GGUF file: metadata, and where each tensor lies.

Nothing is believed before it is checked: a count, length or offset is compared with the bytes that are there before
anything is read or allocated. So a damaged or crafted file costs an error, not memory. The ``gguf`` package's reader
checks none of this and takes 3 s for a vocabulary of 49,152.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.model.gguf.blocks import KINDS, BlockType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 256
_MOST_STRINGS = 1 << 22
"""Strings in all arrays together: they become Python objects of several times their bytes. The largest vocabularies
and their merges have a fifth of it."""

_STRING, _ARRAY = 8, 9
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

Value = bool | int | float | str | list[str] | np.ndarray
"""A value of the metadata; arrays of numbers are views of the file."""


class GgufError(ModelError):
    """The file is damaged, or it is no GGUF file."""


def shown(value: object) -> str:
    """A value from a file for an error's sentence, not longer than it may be."""
    return repr(value[:40]) if isinstance(value, str) else str(value)[:40]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file: its type, its shape as torch has it (outputs before inputs) and its first byte."""

    kind: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def rows(self) -> int:
        """Outputs: the product of all dimensions but the last, or the length of a vector of numbers."""
        return prod(self.shape[:-1] if len(self.shape) > 1 or self.kind.values > 1 else self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: a whole number of blocks."""
        return prod(self.shape) // self.rows // self.kind.values * self.kind.bytes


class GgufFile:
    """Metadata and tensors of a file, which stays mapped; no tensor is read before it is asked for.

    Raises:
        GgufError: it is no GGUF file, it is damaged, or of a version or a part of a split that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._map = _mapped(self.path)
        header = _Header(self._map)
        try:
            self.metadata, found, self._start = header.read()
            self.tensors: Mapping[str, TensorInfo] = _checked(found, self._start, header.size, self._alignment())
        except _UnknownType as error:
            raise GgufError(
                f"{self.path!r} has {error}. Take the file in another type, such as Q4_K_M or Q8_0, or the original "
                "model's folder."
            ) from None
        except _Damaged as error:
            raise GgufError(f"{self.path!r} is no GGUF file that can be read: {error}.") from None
        self._bytes = torch.frombuffer(header.buffer, dtype=torch.uint8)
        if (parts := self.metadata.get("split.count", 0)) not in (0, 1):
            raise GgufError(
                f"{self.path!r} is one of {shown(parts)} parts: join them with llama-gguf-split --merge first."
            )

    def data(self, name: str, rows: slice = slice(None)) -> UInt8[Tensor, "O bytes"]:
        """The raw rows of a tensor, a view of the file."""
        info = self.tensors[name]
        size = info.row_bytes
        return self._bytes[info.start : info.start + info.rows * size].view(info.rows, size)[rows]

    def forget(self) -> None:
        """Give back the pages that were read; those that are read again come from the file again."""
        if (advice := getattr(mmap, "MADV_DONTNEED", None)) is not None:  # not on Windows
            self._map.madvise(advice)

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string of the metadata; the default if it is missing or something else."""
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else default

    def _alignment(self) -> int:
        found = self.metadata.get("general.alignment", _ALIGNMENT)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1 or found % 8 or found > 1 << 20:
            raise _Damaged(f"its alignment is {shown(found)}")
        return found


class _Damaged(Exception):
    """What is wrong with a file, as a clause."""


class _UnknownType(Exception):
    """Which tensor has a type that is not known, as an object."""


_WITHDRAWN = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
"""Types that llama.cpp once had, by number."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor as the header names it, with its offset behind the header."""

    kind: BlockType
    shape: tuple[int, ...]
    offset: int


class _Header:
    """Reads values from the start of a buffer, never past its end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self._place = 0
        self._strings = 0

    def read(self) -> tuple[dict[str, Any], dict[str, _Found], int]:
        """Metadata, tensors by name, and the first byte behind them."""
        if self._take(4) != MAGIC:
            raise _Damaged("it does not start with GGUF")
        version = self._number(_U32)
        if version not in _VERSIONS:
            odd = "it is big-endian" if version & 0xFFFF == 0 else f"its version is {version}"
            raise _Damaged(f"{odd}, and versions 2 and 3 for little-endian machines are supported")
        tensors, entries = self._number(_U64), self._number(_U64)
        self._check_count(tensors, 24, "tensors")
        self._check_count(entries, 13, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name()
            if key in metadata:
                raise _Damaged(f"it has {shown(key)} twice")
            metadata[key] = self._value(self._number(_U32), key)
        found: dict[str, _Found] = {}
        for _ in range(tensors):
            name = self._name()
            if name in found:
                raise _Damaged(f"it has the tensor {shown(name)} twice")
            found[name] = self._tensor(name)
        return metadata, found, self._place

    def _take(self, count: int) -> bytes:
        end = self._place + count
        if end > self.size:
            raise _Damaged("it ends within its header")
        taken = self.buffer[self._place : end]
        self._place = end
        return taken

    def _number(self, kind: struct.Struct) -> int:
        return kind.unpack(self._take(kind.size))[0]

    def _check_count(self, count: int, size: int, what: str) -> None:
        """Raise unless as many entries of at least this many bytes may still follow."""
        if count > (self.size - self._place) // size:
            raise _Damaged(f"it ends before the {count} {what} that it announces")

    def _name(self) -> str:
        length = self._number(_U64)
        if length > _LONGEST_NAME:
            raise _Damaged(f"a name in it has {length} bytes")
        return self._take(length).decode(errors="replace")

    def _value(self, kind: int, key: str) -> Value:
        if kind in _SCALARS:
            return _SCALARS[kind].unpack(self._take(_SCALARS[kind].size))[0]
        if kind == _STRING:
            return self._take(self._number(_U64)).decode(errors="replace")
        if kind != _ARRAY:
            raise _Damaged(f"{shown(key)} has the unknown type {kind}")
        kind, count = self._number(_U32), self._number(_U64)
        if kind == _STRING:
            return self._strings_of(count, key)
        if kind not in _SCALARS:
            raise _Damaged(f"{shown(key)} is an array of the unknown type {kind}")
        scalar = _SCALARS[kind]
        self._check_count(count, scalar.size, f"values of {shown(key)}")
        view = np.frombuffer(self.buffer, np.dtype(scalar.format), count, self._place)
        self._place += count * scalar.size
        return view

    def _strings_of(self, count: int, key: str) -> list[str]:
        self._check_count(count, 8, f"strings of {shown(key)}")
        self._strings += count
        if self._strings > _MOST_STRINGS:
            raise _Damaged(f"it has more than {_MOST_STRINGS:,} strings")
        buffer, place, size, length_at = self.buffer, self._place, self.size, _U64.unpack_from
        found = []
        for _ in range(count):
            if place + 8 > size:
                raise _Damaged("it ends within its header")
            begin = place + 8
            place = begin + length_at(buffer, place)[0]
            if place > size:
                raise _Damaged("it ends within its header")
            found.append(buffer[begin:place].decode(errors="replace"))
        self._place = place
        return found

    def _tensor(self, name: str) -> _Found:
        dimensions = self._number(_U32)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _Damaged(f"the tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number(_U64) for _ in range(dimensions))[::-1]
        number = self._number(_U32)
        if number in _WITHDRAWN:
            what = f"in the type {_WITHDRAWN[number]}, which llama.cpp has withdrawn"
            raise _UnknownType(f"the tensor {shown(name)} {what}")
        if number not in KINDS:
            what = f"in the unknown type {number}, of a newer llama.cpp or of another program"
            raise _UnknownType(f"the tensor {shown(name)} {what}")
        return _Found(KINDS[number], shape, self._number(_U64))


def _mapped(path: str) -> mmap.mmap:
    """The file's bytes, mapped."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns of buffers that are read-only
    except ValueError:
        raise GgufError(f"{path!r} is empty.") from None
    except OSError as error:
        raise GgufError(f"Cannot read {path!r}: {error.strerror}.") from error


def _checked(found: Mapping[str, _Found], end: int, size: int, alignment: int) -> dict[str, TensorInfo]:
    """Tensors with their place in the file.

    They lie within it and do not overlap, so that all weights together take at most a fixed multiple of its bytes.
    """
    start = -(-end // alignment) * alignment
    placed = {}
    for name, tensor in found.items():
        if 0 in tensor.shape or tensor.shape[-1] % tensor.kind.values or tensor.offset % alignment:
            raise _Damaged(f"the tensor {shown(name)} has a wrong shape or offset")
        placed[name] = TensorInfo(tensor.kind, tensor.shape, start + tensor.offset)
    last, behind = "header", start
    for name, info in sorted(placed.items(), key=lambda item: item[1].start):
        if info.start < behind:
            raise _Damaged(f"the tensors {shown(last)} and {shown(name)} overlap")
        last, behind = name, info.start + info.rows * info.row_bytes
        if behind > size:
            raise _Damaged(f"it ends within the tensor {shown(name)}")
    return placed
