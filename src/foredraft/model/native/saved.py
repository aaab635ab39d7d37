"""Quantised weights on disk: a folder with config, tokenizer and one safetensors file.

A matrix is stored by its name in transformers: NAME.codes, two codes per byte where they have four bits, the first in
the low half; NAME.scales and NAME.minima, one for each group of 32 inputs. So the file does not depend on the kernels'
layout or the processor. Vectors are stored in single precision.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from foredraft.core.errors import ModelError, first_line
from foredraft.files.write import atomic_write
from foredraft.model.native.checks import checked
from foredraft.model.native.decoder import Source
from foredraft.model.native.files import read_tensor
from foredraft.model.native.library import HALF_SCALES, library
from foredraft.model.native.outline import Outline
from foredraft.model.native.weights import GROUP, PRECISIONS, Blocks, Codes, PackedMatrix

FILE = "foredraft.safetensors"
_FORMAT, _VERSION = "foredraft quantised weights", "1"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}
"""safetensors' names."""
_LONGEST = len(json.dumps({".minima": {"dtype": "F16", "shape": [1 << 63] * 2, "data_offsets": [1 << 63] * 2}}))
"""Characters that a tensor takes in the header, but for its weight's name."""


class SavedWeights(NamedTuple):
    """The weights in a folder, and what they were quantised to: int4 or int8."""

    weights: str
    source: Source


def save_weights(
    folder: Path,
    outline: Outline,
    source: Source,
    weights: str,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Quantise a model's weights and write them, one at a time, in the memory of one weight.

    Args:
        weights: int4 or int8.
        progress: called with the name of each weight that is done.

    Raises:
        ModelError: a matrix has inputs that are no multiple of 32, or a weight is damaged.
        OSError: the file cannot be written.
    """
    precision, names = PRECISIONS[weights], list(outline.shapes)
    read, vectors_first = checked(source), sorted(names, key=lambda name: len(outline.shapes[name]) == 2)

    def write(file: BinaryIO) -> None:
        out = _SafetensorsWriter(file, names, {"format": _FORMAT, "version": _VERSION, "weights": weights})
        for name in vectors_first:
            found = read(name)
            if found is None:
                raise ModelError(f"The weight {name} is missing.")
            for key, tensor in _stored(name, found, precision.bits if ".layers." in name else precision.outer).items():
                out.add(key, tensor)
            progress(name)
        out.close()

    atomic_write(folder / FILE, write)


class _SafetensorsWriter:
    """Writes a safetensors file as its tensors come, in space for the header that is left before them.

    Vectors in float32 must come before matrices of smaller types, so that each tensor is aligned.

    Args:
        names: of all weights; each may have three parts.
    """

    def __init__(self, file: BinaryIO, names: list[str], metadata: Mapping[str, str]) -> None:
        self._file = file
        self._header: dict[str, Any] = {"__metadata__": metadata}
        self._space = len(json.dumps(self._header)) + sum(3 * (_LONGEST + len(json.dumps(name))) for name in names)
        self._space += -self._space % 8
        self._end = 0
        file.write(bytes(8 + self._space))

    def add(self, name: str, tensor: Tensor) -> None:
        begin, self._end = self._end, self._end + tensor.nbytes
        about = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, self._end]}
        self._header[name] = about
        self._file.write(tensor.contiguous().numpy().data)

    def close(self) -> None:
        """Write the header; spaces fill what is left of its space."""
        self._file.seek(0)
        self._file.write(self._space.to_bytes(8, "little") + json.dumps(self._header).encode().ljust(self._space))


def _stored(name: str, found: Tensor | Codes | Blocks, bits: int) -> dict[str, Tensor]:
    """The tensors of a weight; the scales of K-quants do not fit the file's, so these are quantised anew."""
    if isinstance(found, Tensor) and found.ndim != 2:
        return {name: found.detach().float()}
    if isinstance(found, Blocks):
        packed = PackedMatrix.of_blocks(library(), [found])
        found = packed.unpacked() if packed.form.scales == HALF_SCALES else packed.dequantised()
    codes = found if isinstance(found, Codes) else _quantised(name, found, bits)
    values = codes.codes
    if int(values.max()) < 1 << 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    scales, minima = codes.scales.half(), codes.minima.half()
    return {f"{name}.codes": values, f"{name}.scales": scales.contiguous(), f"{name}.minima": minima.contiguous()}


def _quantised(name: str, weight: Tensor, bits: int) -> Codes:
    if weight.shape[1] % GROUP:
        raise ModelError(
            f"The weight {name} has {weight.shape[1]} inputs, which is no multiple of {GROUP}, so it cannot be saved."
        )
    return PackedMatrix.of_floats(library(), weight, None, bits).unpacked()


def saved_weights(folder: Path) -> SavedWeights | None:
    """The weights that ``save_weights`` has written to a folder; None if it has none.

    Raises:
        ModelError: the file is damaged, or of another version.
    """
    path = folder / FILE
    if not os.path.isfile(path):  # also False for a folder that may not be read, which whoever reads it next says
        return None
    try:
        file: Any = safe_open(path, "pt")
        metadata: Mapping[str, str] = file.metadata() or {}
    except Exception as error:  # safetensors raises several types
        raise ModelError(f"{str(path)!r} is damaged: {first_line(error).rstrip('.')}.") from error
    weights = metadata.get("weights", "")
    if metadata.get("format") != _FORMAT or weights not in ("int4", "int8"):
        raise ModelError(f"{str(path)!r} holds no weights of foredraft quantize.")
    if metadata.get("version") != _VERSION:
        raise ModelError(f"{str(path)!r} is of another version of foredraft: quantise the model again.")
    names = frozenset(file.keys())
    del file  # and its pages

    def read(name: str) -> Tensor | Codes | None:
        if name in names:
            return read_tensor(path, name)
        parts = [f"{name}.{part}" for part in ("codes", "scales", "minima")]
        if not names.issuperset(parts):
            return None
        return _codes(path, name, *(read_tensor(path, part) for part in parts))

    return SavedWeights(weights, read)


def _codes(path: Path, name: str, values: Tensor, scales: Tensor, minima: Tensor) -> Codes:
    """The codes of a matrix, after checks of types and shapes."""
    floats = all(each.dtype is torch.float16 and each.ndim == 2 for each in (scales, minima))
    whole = values.ndim == 2 and values.dtype is torch.uint8 and values.numel() > 0
    if not floats or not whole or scales.shape != minima.shape or len(scales) != len(values):
        raise ModelError(f"The weight {name} in {str(path)!r} has a wrong shape or type.")
    inputs = scales.shape[1] * GROUP
    if 2 * values.shape[1] == inputs:
        values = torch.stack([values & 15, values >> 4], dim=2).flatten(1)
    if values.shape[1] != inputs:
        raise ModelError(f"The weight {name} in {str(path)!r} has a wrong shape or type.")
    return Codes(values, scales, minima)
