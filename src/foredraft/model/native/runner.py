"""Runs packed decoder layers over a slot cache: what a model and a draft head have in common."""

import ctypes
import threading
import weakref
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.native import library as c
from foredraft.model.native.families import Frequencies
from foredraft.model.native.weights import PackedMatrix
from foredraft.model.threads import kernel_threads

_TABLE = 2048
"""Positions by which rotary tables grow."""
KV_DTYPES = {"float16": (c.KV_F16, torch.float16), "float32": (c.KV_F32, torch.float32), "int8": (c.KV_I8, torch.uint8)}
"""Types of keys and values: the kernels' number, and what the cache holds them in."""


class KernelRuntime:
    """The kernels' threads and buffers, for one call at a time: ``lock`` is held meanwhile."""

    def __init__(self, library: c.Library) -> None:
        self.library = library
        self.handle = library.engine_new()
        self.lock = threading.RLock()
        weakref.finalize(self, library.engine_free, self.handle)

    def product(self, matrix: PackedMatrix, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        """``x @ weight.T + bias``; a view of a wider tensor if the outputs are no multiple of the tiles."""
        x = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], matrix.width)
        rows = out.numel() // matrix.width
        with self.lock:
            given = (x.data_ptr(), rows, out.data_ptr(), matrix.width, kernel_threads())
            c.check(self.library.product(self.handle, matrix.struct(), *given))
        return out if matrix.width == matrix.outputs else out[..., : matrix.outputs]


class RunnerShape(NamedTuple):
    """Of the layers: their number, key heads and head size, the types of layers, and the largest position plus one."""

    layers: int
    kv_heads: int
    head_dim: int
    kinds: tuple[str, ...]
    frequencies: tuple[Frequencies, ...]
    positions: int


class Runner:
    """The caches and rotary tables of packed layers, and their forwards.

    Args:
        kv_cache_dtype: of keys and values; see ``KV_DTYPES``. Those of int8 have their scales behind them.
    """

    def __init__(self, engine: KernelRuntime, shape: RunnerShape, kv_cache_dtype: str) -> None:
        self.engine = engine
        self.shape = shape
        self.kv, self._stored_in = KV_DTYPES[kv_cache_dtype]
        self.state_bytes = engine.library.state_bytes(self.kv, shape.head_dim)
        self._pointers: weakref.WeakKeyDictionary[SlotCache, tuple[int, Any]] = weakref.WeakKeyDictionary()
        self._tables: list[Tensor] = []
        self.reserve(1)

    def step(self, step: StepIn, cache: SlotCache) -> tuple[c.StepStruct, object]:
        """A step of the kernels without results, and what must live as long."""
        rows, nodes = step.tokens.shape
        tokens, positions, slots = (each.contiguous() for each in (step.tokens, step.positions, step.slots))
        buffer_rows = (c.c_int64 * rows)(*cache.buffer_rows(step.rows))
        visible, held = self._visible(step)
        given = c.StepStruct(
            rows=rows,
            nodes=nodes,
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            buffer_rows=ctypes.addressof(buffer_rows),
            visible=visible,
            cache=self.cache_pointers(cache),
            cache_rows=cache.rows,
            cache_slots=cache.slots,
        )
        return given, (tokens, positions, slots, buffer_rows, held)

    def forward(self, model: c.Model, step: c.StepStruct, positions: Int[Tensor, "B N"]) -> None:
        """Run the kernels, with larger rotary tables if a position is beyond them."""
        fault = self._attempt(model, step)
        if fault == c.BAD_POSITION and len(self._tables[0]) <= (highest := int(positions.max())) < self.shape.positions:
            self.reserve(highest + 1)
            fault = self._attempt(model, step)
        c.check(fault)

    def _attempt(self, model: c.Model, step: c.StepStruct) -> int:
        step.rotary, step.rotary_positions = self.tables()
        return self.engine.library.forward(self.engine.handle, model, step, kernel_threads())

    def tables(self) -> tuple[Any, int]:
        """The rotary tables, as the kernels take them, and the number of their positions."""
        return self._rotary, len(self._tables[0])

    def _visible(self, step: StepIn) -> tuple[Any, list[Tensor]]:
        """What the nodes attend to, by kind of layer, and the tensors that it points to."""
        held: list[Tensor] = []

        def pointer(tensor: Tensor | None) -> int | None:
            if tensor is None:
                return None
            held.append(tensor.contiguous())
            return held[-1].data_ptr()

        each = []
        for kind in self.shape.kinds:
            visible = step.visible[kind]
            nodes = 0 if visible.tree is None else visible.tree.shape[2]
            pointers = (pointer(part) for part in (visible.begin, visible.end, visible.base, visible.tree))
            each.append(c.VisibleStruct(*pointers, visible.end.shape[1], nodes))
        return (c.VisibleStruct * len(each))(*each), held

    def cache_pointers(self, cache: SlotCache) -> Any:
        """The buffers of each layer; looked up again when the cache has allocated others."""
        found, layers = self._pointers.get(cache), range(self.shape.layers)
        if found is None or found[0] != cache.version:
            self.allocated(cache)
            each = [c.LayerCache(*(part.data_ptr() for part in cache.stored(layer))) for layer in layers]
            found = self._pointers[cache] = (cache.version, (c.LayerCache * len(each))(*each))
        return found[1]

    def allocated(self, cache: SlotCache) -> SlotCache:
        """The cache with buffers for all layers."""
        width = self.state_bytes // self._stored_in.itemsize
        like = torch.empty(1, self.shape.kv_heads, 0, width, dtype=self._stored_in)
        for layer in range(self.shape.layers):
            if not cache.holds(layer):
                cache.buffers(layer, like, like)
        return cache

    def reserve(self, positions: int) -> None:
        """Cosines and sines of at least ``positions`` positions; always in parts of the same size."""
        if self._tables and positions <= len(self._tables[0]):
            return
        counts = range(0, positions, _TABLE)
        self._tables = [torch.cat([each.table(start, _TABLE) for start in counts]) for each in self.shape.frequencies]
        self._rotary = (c.c_void_p * len(self._tables))(*(table.data_ptr() for table in self._tables))
