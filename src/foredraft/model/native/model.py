"""A decoder on the native engine, behind the ``TargetModel`` forward."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.openmp import kernel_threads, operators_in_one_thread
from foredraft.core.rng import Exponentials
from foredraft.core.tree import TokenTree
from foredraft.heads.nets.target_parts import FINAL, TargetParts
from foredraft.model.base import TargetModel
from foredraft.model.cache import SlotCache
from foredraft.model.masks import StepIn, address
from foredraft.model.native import library as c
from foredraft.model.native.decoder import NO_SKIPS, Decoder, Skips
from foredraft.model.support import context_of, layout_of

_TABLE = 2048
"""Rotary tables grow by so many positions."""
KV_DTYPES = {"float16": (c.KV_F16, torch.float16), "float32": (c.KV_F32, torch.float32), "int8": (c.KV_I8, torch.uint8)}
"""Types of keys and values: the kernels' number, and what the cache holds them in."""


@final
class NativeLM(TargetModel):
    """Runs a packed decoder over a slot cache, as one call of the kernels.

    A row's logits depend on its own history alone: trees, chains, batches, parts of a prompt and numbers of threads
    give the same bits as plain decoding.

    Args:
        decoder: the weights.
        model: on the meta device; gives config and context.
        kv_cache_dtype: of keys and values; see ``KV_DTYPES``. Those of int8 have their scales behind them.
    """

    same_bits = True

    def __init__(
        self, decoder: Decoder, model: PreTrainedModel, *, first_token: int = 0, kv_cache_dtype: str = "float16"
    ) -> None:
        shape = decoder.shape
        self.decoder = decoder
        self.model = model
        self.name = model.__class__.__name__
        self.weights = decoder.precision.name
        self.config = model.config.get_text_config()
        self.origin = model.config.name_or_path or ""
        self.layers = shape.layers
        self.vocab_size = shape.vocabulary
        self.first_token = first_token
        self.max_length = context_of(model)
        self.layout = layout_of(model)
        self.weight_bytes = decoder.read_bytes
        self.why_eager = "the native engine runs it as one call"
        self._library = decoder.library
        self._engine = self._library.engine_new()
        weakref.finalize(self, self._library.engine_free, self._engine)
        self.kv_cache_dtype = kv_cache_dtype
        self._kv, self._stored_in = KV_DTYPES[kv_cache_dtype]
        self._state_bytes = self._library.state_bytes(self._kv, shape.head_dim)
        self._struct, self._kept = self._struct_without(NO_SKIPS)
        self._tables: list[Tensor] = []
        self._grow_tables(_TABLE)
        self._taps: frozenset[int] = frozenset()
        self._running = threading.RLock()
        self._holders = 1
        self._closed = False
        self._pointers: weakref.WeakKeyDictionary[SlotCache, tuple[int, Any]] = weakref.WeakKeyDictionary()
        self._kinds = self._allocated(SlotCache(self.layers))
        self.token_bytes = 2 * self.layers * shape.kv_heads * self._state_bytes

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def isa(self) -> str:
        """The instruction set of the kernels, such as avx512."""
        return self._library.isa().decode()

    def new_cache(self) -> SlotCache:
        return SlotCache(self.layers, like=self._kinds)

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], reach: int, *, start: int = 0
    ) -> StepIn:
        return address(tree, bases, rows, reach, self.layout, max_position=self.max_length, start=start)

    @property
    def exponentials(self) -> Exponentials:
        return self._exponentials

    def _exponentials(self, bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
        out = torch.empty(*bits.shape, count)
        self._library.exponentials(c.pointer(bits.contiguous()), bits.numel(), count, c.pointer(out))
        return out

    def stepping(self) -> AbstractContextManager[None]:
        return operators_in_one_thread()

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._running:
            yield

    @torch.inference_mode()
    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        with self.running():
            return self.compute(step, cache, keep)

    def compute(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        rows, nodes = step.tokens.shape
        tokens, positions, slots = (each.contiguous() for each in (step.tokens, step.positions, step.slots))
        lines = torch.tensor(cache.lines(step.rows))
        keep = None if keep is None else keep.contiguous()
        kept = nodes if keep is None else len(keep)
        width = self.decoder.head.width
        logits = torch.empty(rows, kept, width)
        hidden = {layer: torch.empty(rows, nodes, self.decoder.shape.hidden) for layer in self._taps}
        visible, held = self._visible(step)
        taps = [c.Tap(self.layers + 1 if layer == FINAL else layer, each.data_ptr()) for layer, each in hidden.items()]
        given = c.Step(
            rows=rows,
            nodes=nodes,
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            lines=lines.data_ptr(),
            visible=visible,
            cache=self._cache_pointers(cache),
            cache_rows=cache.rows,
            cache_slots=cache.slots,
            keep=c.pointer(keep),
            kept=kept,
            logits=logits.data_ptr(),
            logits_stride=width,
            taps=(c.Tap * len(taps))(*taps),
            tap_count=len(taps),
        )
        self._call(given, positions)
        del held
        return StepOut(logits[..., : self.vocab_size] if width != self.vocab_size else logits, hidden)

    def _call(self, step: c.Step, positions: Int[Tensor, "B N"]) -> None:
        """Run the kernels, with larger rotary tables if a position is beyond them."""
        fault = self._attempt(step)
        if fault == c.BAD_POSITION and len(self._tables[0]) <= (highest := int(positions.max())) < self.max_length:
            self._grow_tables(highest + 1)
            fault = self._attempt(step)
        c.check(fault)

    def _attempt(self, step: c.Step) -> int:
        step.rotary = (c.c_void_p * len(self._tables))(*(table.data_ptr() for table in self._tables))
        step.rotary_positions = len(self._tables[0])
        return self._library.forward(self._engine, self._struct, step, kernel_threads())

    def _visible(self, step: StepIn) -> tuple[Any, list[Tensor]]:
        """What the nodes attend to, by kind of layer, and the tensors that it points to."""
        held: list[Tensor] = []

        def pointer(tensor: Tensor | None) -> int | None:
            if tensor is None:
                return None
            held.append(tensor.contiguous())
            return held[-1].data_ptr()

        each = []
        for kind in self.layout.kinds:
            visible = step.visible[kind]
            nodes = 0 if visible.tree is None else visible.tree.shape[2]
            pointers = (pointer(part) for part in (visible.begin, visible.end, visible.base, visible.tree))
            each.append(c.Visible(*pointers, visible.end.shape[1], nodes))
        return (c.Visible * len(each))(*each), held

    def _cache_pointers(self, cache: SlotCache) -> Any:
        """The buffers of each layer; looked up again when the cache has allocated others."""
        found = self._pointers.get(cache)
        if found is None or found[0] != cache.version:
            self._allocated(cache)
            each = [c.LayerCache(*(part.data_ptr() for part in cache.stored(layer))) for layer in range(self.layers)]
            found = self._pointers[cache] = (cache.version, (c.LayerCache * self.layers)(*each))
        return found[1]

    def _allocated(self, cache: SlotCache) -> SlotCache:
        """The cache with buffers for all layers."""
        width = self._state_bytes // self._stored_in.itemsize
        like = torch.empty(1, self.decoder.shape.kv_heads, 0, width, dtype=self._stored_in)
        for layer in range(self.layers):
            if not cache.holds(layer):
                cache.buffers(layer, like, like)
        return cache

    def _grow_tables(self, positions: int) -> None:
        """Cosines and sines of at least so many positions; always in parts of the same size."""
        counts = range(0, positions, _TABLE)
        self._tables = [
            torch.cat([each.table(start, _TABLE) for start in counts]) for each in self.decoder.shape.frequencies
        ]

    def _struct_without(self, skips: Skips) -> tuple[c.Model, object]:
        return self.decoder.struct(len(self.layout.kinds), self._kv, skips)

    def without(self, skips: Skips) -> Callable[[], AbstractContextManager[None]]:
        """A function that makes contexts within ``running`` in which forwards leave these parts out."""
        struct, kept = self._struct_without(skips)

        @contextmanager
        def skipping() -> Iterator[None]:
            before = self._struct, self._kept
            self._struct, self._kept = struct, kept
            try:
                yield
            finally:
                self._struct, self._kept = before

        return skipping

    def empty_hidden(self) -> dict[int, Float[Tensor, "1 T H"]]:
        return dict.fromkeys(self._taps, torch.zeros(1, 0, self.decoder.shape.hidden))

    def tap(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if layer != FINAL and not 0 <= layer <= self.layers:
                raise ModelError(f"There is no hidden layer {layer}: the model has layers 0 to {self.layers}.")
        with self._running:
            self._taps = self._taps | set(layers)
            self.version += 1

    def check_ready(self) -> None:
        if self._closed:
            raise ModelError(f"This {self.name} was released or closed: make a new generator with foredraft.load.")

    def stock_logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits of whole sequences without a tree and with a cache of their own: this engine has no other forward."""
        return self._whole(tokens).logits

    def hidden_after(self, layers: int, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """Hidden states of whole sequences after so many layers."""
        with self._running:
            before, self._taps = self._taps, frozenset({layers})
            try:
                return self._whole(tokens).hidden[layers]
            finally:
                self._taps = before

    def _whole(self, tokens: Int[Tensor, "B T"]) -> StepOut:
        rows, count = tokens.shape
        cache = self.new_cache()
        cache.reserve(rows, count)
        bases = torch.zeros(rows, dtype=torch.long)
        return self.forward(self.address(TokenTree.chain(tokens), bases, range(rows), count), cache)

    def parts(self) -> TargetParts:
        shape = self.decoder.shape
        return TargetParts(self._embed, self._head, shape.vocabulary, shape.hidden)

    def embedding(self) -> Float[Tensor, "V H"]:
        return self.decoder.embedding.dequantised()

    def _embed(self, tokens: Int[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """Embeddings as the model's own embedding layer has them."""
        rows = self.decoder.embedding.rows(tokens.flatten())
        return (rows * self.decoder.embedding_factor).unflatten(0, tokens.shape)

    def _head(self, states: Float[Tensor, "... H"]) -> Float[Tensor, "... V"]:
        """Logits of states after the final norm."""
        shape, matrix = self.decoder.shape, self.decoder.head
        flat = states.float().reshape(-1, shape.hidden).contiguous()
        out = torch.empty(len(flat), matrix.width)
        with self._running:
            given = (c.pointer(flat), len(flat), c.pointer(out), matrix.width, kernel_threads())
            c.check(self._library.product(self._engine, matrix.struct(), *given))
        logits = out[:, : shape.vocabulary] * shape.logit_scale
        if shape.logit_cap:
            logits = torch.tanh(logits / shape.logit_cap) * shape.logit_cap
        return logits.unflatten(0, states.shape[:-1])

    def retain(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        self._closed = self._holders <= 0
