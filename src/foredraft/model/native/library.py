"""The kernels' C interface; see ``kernels/engine.h``."""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float as c_float, c_int32, c_int64 as c_int64, c_void_p as c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.model.native.build import libraries

MINIMA = -1
"""``zero`` of a matrix with stored minima."""
HALF_SCALES, SMALL_SCALES = range(2)
"""Kinds of scales: halves in groups of 32 inputs, or the small integers of K-quants."""
KV_F16, KV_F32, KV_I8 = range(3)
BAD_POSITION, BAD_NUMBER = 3, 10
_FAULTS = (
    "",
    "sizes that do not fit each other",
    "a token outside of the vocabulary",
    "a position outside of the rotary table",
    "a slot outside of the cache",
    "a row outside of the cache",
    "visible slots outside of the cache",
    "a node that does not exist",
    "no memory for its buffers",
    "a hidden layer that does not exist",
    "a scale that is infinite or not a number",
)


class Form(Structure):
    _fields_ = [("bits", c_int32), ("zero", c_int32), ("scales", c_int32)]


class Matrix(Structure):
    pass


Matrix._fields_ = [
    ("data", c_void_p),
    ("bias", c_void_p),
    ("outputs", c_int64),
    ("inputs", c_int64),
    ("form", Form),
    ("next", POINTER(Matrix)),
]


class Layer(Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        *((name, c_void_p) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("kind", c_int32),
        ("rotary", c_int32),
    ]


class Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        *((name, c_int64) for name in ("vocabulary", "outputs", "rotary_dim", "rotary_tables", "kinds")),
        *((name, c_int32) for name in ("activation", "gated", "head_norm", "kv")),
        *((name, c_int32) for name in ("entry", "normed_residual")),
        *((name, c_float) for name in ("eps", "embedding_scale", "residual_scale", "attention_scale")),
        *((name, c_float) for name in ("attention_cap", "logit_scale", "logit_cap")),
        ("layer", POINTER(Layer)),
        *((name, Matrix) for name in ("embedding", "head", "fusion")),
        *((name, c_void_p) for name in ("token_norm", "state_norm", "final_norm")),
    ]


class VisibleStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("begin", "end", "base", "tree")),
        ("ends", c_int64),
        ("nodes", c_int64),
    ]


class LayerCache(Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p)]


class Tap(Structure):
    _fields_ = [("layer", c_int64), ("states", c_void_p)]


class StepStruct(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("nodes", c_int64),
        *((name, c_void_p) for name in ("tokens", "positions", "slots", "states", "buffer_rows")),
        ("visible", POINTER(VisibleStruct)),
        ("cache", POINTER(LayerCache)),
        ("cache_rows", c_int64),
        ("cache_slots", c_int64),
        ("rotary", POINTER(c_void_p)),
        ("rotary_positions", c_int64),
        ("keep", c_void_p),
        ("kept", c_int64),
        ("keep_stride", c_int64),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("taps", POINTER(Tap)),
        ("tap_count", c_int64),
    ]


class Ranking(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "nodes", "count", "wanted")),
        ("logits", c_void_p),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("temperatures", "times", "raced", "tokens", "shares")),
    ]


class DraftStruct(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("width", c_int64),
        ("history", c_void_p),
        ("history_stride", c_int64),
        ("lengths", c_void_p),
        ("buffer_rows", POINTER(c_int64)),
        ("ahead", c_int64),
        ("states", c_void_p),
        ("places", POINTER(c_int64)),
        *((name, c_int64) for name in ("state_rows", "state_slots", "fresh", "parts")),
        ("sources", POINTER(c_void_p)),
        ("targets", POINTER(c_int64)),
        ("fused", POINTER(Matrix)),
        ("carried", c_int64),
        ("cache", POINTER(LayerCache)),
        ("cache_rows", c_int64),
        ("cache_slots", c_int64),
        ("rotary", POINTER(c_void_p)),
        ("rotary_positions", c_int64),
        ("windows", POINTER(c_int64)),
        *((name, c_int64) for name in ("nodes", "depth", "expanded", "children")),
        ("level_price", c_float),
        ("node_price", c_float),
        ("allowed", POINTER(c_int64)),
        ("count", c_int64),
        *((name, c_void_p) for name in ("ids", "temperatures", "seeds", "numbers", "raced")),
        *((name, c_void_p) for name in ("tokens", "parents", "scores")),
        ("drafted", POINTER(c_int64)),
    ]


class Library:
    """The functions of a compiled library.

    Raises:
        ModelError: the file is no such library.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._inner = ctypes.CDLL(str(path))
            self.runs_here = self._function("fd_runs_here", c_int32)
            self.isa = self._function("fd_isa", c_char_p)
            shape = (c_int64, c_int64, POINTER(Form))
            self.matrix_bytes = self._function("fd_matrix_bytes", c_int64, *shape)
            self.state_bytes = self._function("fd_state_bytes", c_int64, c_int32, c_int64)
            self.pack_floats = self._function("fd_pack_floats", c_int32, c_void_p, *shape, c_void_p)
            self.pack_codes = self._function("fd_pack_codes", c_int32, c_void_p, c_void_p, c_void_p, *shape, c_void_p)
            self.block_form = self._function("fd_block_form", c_int32, c_int32, POINTER(Form))
            self.pack_blocks = self._function(
                "fd_pack_blocks", c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32
            )
            self.unpack = self._function("fd_unpack", c_int32, POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64)
            self.unpack_codes = self._function(
                "fd_unpack_codes", c_int32, POINTER(Matrix), c_void_p, c_void_p, c_void_p
            )
            self.engine_new = self._function("fd_engine_new", c_void_p)
            self.engine_free = self._function("fd_engine_free", None, c_void_p)
            self.product = self._function(
                "fd_product", c_int32, c_void_p, POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64, c_int32
            )
            self.forward = self._function("fd_forward", c_int32, c_void_p, POINTER(Model), POINTER(StepStruct), c_int32)
            self.rank = self._function("fd_rank", c_int32, c_void_p, POINTER(Ranking))
            self.draft = self._function("fd_draft", c_int32, c_void_p, POINTER(Model), POINTER(DraftStruct), c_int32)
            self.exponentials = self._function("fd_exponentials", None, c_void_p, c_int64, c_int64, c_void_p)
            self.choose = self._function("fd_choose", c_int64, c_void_p, c_int64, c_float, c_int64)
            self.advise_huge = self._function("fd_advise_huge", None, c_void_p, c_int64)
        except (OSError, AttributeError) as error:
            raise ModelError(
                f"{str(path)!r} is no library of native kernels: delete it, and it is compiled again."
            ) from error

    def _function(self, name: str, result: type | None, *arguments: type) -> "ctypes._NamedFuncPointer":
        function = getattr(self._inner, name)
        function.restype, function.argtypes = result, arguments
        return function


@functools.cache
def library() -> Library:
    """The best library that runs on this processor.

    Raises:
        ModelError: there is none, and none can be compiled.
    """
    for path in libraries():
        found = Library(path)
        if found.runs_here():
            return found
    raise ModelError("No native kernels run on this processor.")  # the portable ones do


def check(fault: int) -> None:
    """Raise a ``ModelError`` for a fault that a function has returned."""
    if fault:
        raise ModelError(f"The native engine was given {_FAULTS[fault]}.")


def pointer_to(struct: Matrix) -> Any:
    """A pointer to a struct, which it keeps alive."""
    return ctypes.pointer(struct)


def numbers(values: Sequence[int]) -> "ctypes.Array[c_int64]":
    """Integers for the kernels; a structure that points to them keeps them alive."""
    return (c_int64 * len(values))(*values)


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element; None for NULL."""
    return None if tensor is None else tensor.data_ptr()
