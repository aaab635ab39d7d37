"""Weights of a GGUF file by their names in transformers: blocks as they are, or floats."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from foredraft.model.gguf.architectures import Architecture
from foredraft.model.gguf.blocks import KEPT, BlockType, dequantize, number_of
from foredraft.model.gguf.config import architecture_of
from foredraft.model.gguf.file import GgufError, GgufFile, shown
from foredraft.model.native.outline import Outline
from foredraft.model.native.weights import Blocks

_UNUSED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that became part of the config."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a weight of transformers lies: tensors of the file, of which the rows are taken one after another.

    No tensors: a bias that the file leaves out, which is 0.
    """

    pieces: tuple[tuple[str, slice], ...]
    shape: tuple[int, ...]
    heads: int = 0
    """Heads whose rows are interleaved, 0 for none."""


class GgufWeights:
    """All weights of a model, read when they are asked for.

    Raises:
        GgufError: tensors are missing, unknown or of other shapes than the config says.
    """

    def __init__(self, file: GgufFile, outline: Outline) -> None:
        self._file = file
        self._architecture = architecture_of(file)
        self._offset = self._architecture.norm_offset
        self._sources, shapes = _sources(file, self._architecture, outline.config), outline.shapes
        left_out = [name for name in shapes if name.endswith(".bias") and name not in self._sources]
        self._sources |= {name: _Source((), shapes[name]) for name in left_out}
        self._check(shapes)

    @property
    def names(self) -> list[str]:
        """All weights, as transformers names them; a tied output layer is not among them."""
        return list(self._sources)

    def kinds(self, name: str) -> list[BlockType]:
        """The types of the tensors that a weight is made of: one, but for fused ones and biases that are left out."""
        return [self._file.tensors[piece].kind for piece, _ in self._sources[name].pieces]

    def blocks(self, name: str) -> Blocks | None:
        """A quantised weight without another rounding, as views of the file; None for what the kernels do not keep."""
        source, kinds = self._sources[name], self.kinds(name)
        if not kinds or kinds[0].name not in KEPT or any(kind is not kinds[0] for kind in kinds):
            return None
        self._file.forget()
        rows = tuple(self._file.data(piece, part) for piece, part in source.pieces)
        found = Blocks(name, number_of(kinds[0]), rows, source.shape[-1])
        return replace(found, order=_order(source)) if source.heads else found

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Float[Tensor, "..."]:
        """A weight in floats, dequantised if need be."""
        source = self._sources[name]
        if not source.pieces:
            return torch.zeros(source.shape, dtype=dtype)
        exact = torch.float32 if self._is_offset(name) else dtype
        self._file.forget()
        found = [
            dequantize(self._file.tensors[piece].kind, self._file.data(piece, rows), exact)
            for piece, rows in source.pieces
        ]
        weight = (found[0] if len(found) == 1 else torch.cat(found)).view(source.shape)
        if source.heads:
            weight = weight[_order(source)]
        return (weight - self._offset).to(dtype) if self._is_offset(name) else weight

    def _is_offset(self, name: str) -> bool:
        return self._offset != 0 and name.endswith("norm.weight")

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise unless file and model have the same weights in the same shapes."""
        path = self._file.path
        missing = sorted(shapes.keys() - self._sources.keys())
        unknown = sorted(self._sources.keys() - shapes.keys())
        if missing:
            raise GgufError(f"{path!r} lacks {missing[0]} and {len(missing) - 1} more weights of its model.")
        if unknown:
            raise GgufError(f"{path!r} has {unknown[0]} and {len(unknown) - 1} more weights that its model has not.")
        for name, source in self._sources.items():
            if shapes[name] != source.shape:
                raise GgufError(
                    f"{path!r} has {name} in the shape {source.shape}, and its metadata says {shapes[name]}."
                )


def _sources(file: GgufFile, architecture: Architecture, config: PreTrainedConfig) -> dict[str, _Source]:
    """Where each weight lies, by its name in transformers."""
    values = config.to_dict()
    heads, sharing, size = values["num_attention_heads"], values["num_key_value_heads"], values.get("head_dim")
    size = size or values["hidden_size"] // heads
    widths = {"attn_q": heads * size, "attn_k": sharing * size, "attn_v": sharing * size}
    interleaved = {"attn_q": heads, "attn_k": sharing} if architecture.permuted else {}
    found: dict[str, _Source] = {}
    for name, pieces in _pieces(file, architecture, widths).items():
        target = architecture.in_transformers(name)
        if target is None:
            raise GgufError(
                f"{file.path!r} has the tensor {shown(name)}, which a {architecture.model_type} model has not."
            )
        rows = sum(len(range(*rows.indices(file.tensors[piece].rows))) for piece, rows in pieces)
        _, *inputs = file.tensors[pieces[0][0]].shape
        found[target] = _Source(tuple(pieces), (rows, *inputs), interleaved.get(name.split(".")[-2], 0))
    return found


def _pieces(
    file: GgufFile, architecture: Architecture, widths: Mapping[str, int]
) -> dict[str, list[tuple[str, slice]]]:
    """Tensors by the names that the architecture has, each with the tensors of the file that it is made of.

    Q, K and V may be one tensor in the file and three in the model, or the other way round.
    """
    found: dict[str, list[tuple[str, slice]]] = {}
    for name, info in file.tensors.items():
        if name in _UNUSED:
            continue
        if len(info.shape) > 2 or (len(info.shape) == 1 and info.kind.values > 1):
            raise GgufError(f"The tensor {shown(name)} of {file.path!r} has a wrong shape or type.")
        stem, _, kind = name.rpartition(".")
        block, _, part = stem.rpartition(".")
        if part == "attn_qkv" and part not in architecture.layer:
            first = 0
            for each, width in widths.items():
                found[f"{block}.{each}.{kind}"] = [(name, slice(first, first + width))]
                first += width
            if first != info.rows:
                raise GgufError(f"The tensor {shown(name)} of {file.path!r} has a wrong shape or type.")
        elif part in widths and "attn_qkv" in architecture.layer:
            names = [f"{block}.{each}.{kind}" for each in widths]
            if not file.tensors.keys() >= set(names) or len({file.tensors[each].shape[1:] for each in names}) > 1:
                raise GgufError(f"{file.path!r} has {shown(name)}, and not all of Q, K and V.")
            found[f"{block}.attn_qkv.{kind}"] = [(each, slice(None)) for each in names]
        else:
            found[name] = [(name, slice(None))]
    return found


def _order(source: _Source) -> Int[Tensor, " O"]:
    """The rows of a head as transformers has them: those of the first half are the even ones of the file."""
    rows = torch.arange(source.shape[0])
    return rows.view(source.heads, -1, 2).transpose(1, 2).reshape(-1)
