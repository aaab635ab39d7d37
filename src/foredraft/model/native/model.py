"""A decoder on the native engine, behind the ``TargetModel`` forward."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.target_parts import FINAL, TargetParts
from foredraft.core.tree import TokenTree
from foredraft.model.base import TargetModel
from foredraft.model.hf.support import context_of, layout_of
from foredraft.model.hf.weight_state import WeightState
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn, address
from foredraft.model.linear.packed import any_weight
from foredraft.model.native import library as c
from foredraft.model.native.decoder import NO_SKIPS, Decoder, Skips
from foredraft.model.native.ops import NativeOps
from foredraft.model.native.outline import Outline
from foredraft.model.native.runner import KernelRuntime, Runner, RunnerShape
from foredraft.model.threads import operators_in_one_thread

_HOST = torch.device("cpu")


@final
class NativeLM(TargetModel):
    """Runs a packed decoder over a slot cache, as one call of the kernels.

    A row's logits depend on its own history alone: trees, chains, batches, parts of a prompt and numbers of threads
    give the same bits as plain decoding.

    Args:
        decoder: the weights.
        outline: gives config and context.
        kv_cache_dtype: of keys and values; see ``runner.KV_DTYPES``. Those of int8 have their scales behind them.
        contents: see ``TargetModel``.
    """

    same_bits = True
    any_width = True

    def __init__(
        self,
        decoder: Decoder,
        outline: Outline,
        *,
        first_token: int = 0,
        kv_cache_dtype: str = "float16",
        contents: str | None = None,
    ) -> None:
        shape = decoder.shape
        self.decoder = decoder
        self.outline = outline
        self.name = outline.name
        self.weights = decoder.precision.name
        self.config = outline.config.get_text_config()
        self.origin = outline.config.name_or_path or ""
        self.layers = shape.layers
        self.vocab_size = shape.vocabulary
        self.first_token = first_token
        self.max_length = context_of(outline.config)
        self.layout = layout_of(outline.config)
        self.weight_bytes = decoder.read_bytes
        self.why_eager = "the native engine runs it as one call"
        sizes = RunnerShape(
            shape.layers, shape.kv_heads, shape.head_dim, tuple(self.layout.kinds), shape.frequencies, self.max_length
        )
        self.engine = KernelRuntime(decoder.library)
        self.ops = NativeOps(self.engine, decoder)
        self.runner = Runner(self.engine, sizes, kv_cache_dtype)
        self.kv_cache_dtype = kv_cache_dtype
        self._struct, self._kept = self._struct_without(NO_SKIPS)
        self._taps: frozenset[int] = frozenset()
        self._contents = contents
        self._holders = 1
        self._watched: tuple[weakref.ref[PreTrainedModel], WeightState] | None = None
        self._closed = False
        self._kinds = self.runner.allocated(SlotCache(self.layers))
        self.token_bytes = 2 * self.layers * shape.kv_heads * self.runner.state_bytes

    @property
    def device(self) -> torch.device:
        return _HOST

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def isa(self) -> str:
        """The instruction set of the kernels, such as avx512."""
        return self.engine.library.isa().decode()

    def new_cache(self) -> SlotCache:
        return SlotCache(self.layers, like=self._kinds)

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], used_slots: int, *, start: int = 0
    ) -> StepIn:
        tree.read()
        return address(tree, bases, rows, used_slots, self.layout, max_position=self.max_length, start=start)

    def stepping(self) -> AbstractContextManager[None]:
        return operators_in_one_thread()

    def running(self) -> AbstractContextManager[object]:
        return self.engine.lock

    def compute(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        rows, nodes = step.tokens.shape
        keep = None if keep is None else keep.contiguous()
        kept = nodes if keep is None else len(keep)
        width = self.decoder.head.width
        logits = torch.empty(rows, kept, width)
        hidden = {layer: torch.empty(rows, nodes, self.decoder.shape.hidden) for layer in self._taps}
        taps = [c.Tap(self.layers + 1 if layer == FINAL else layer, each.data_ptr()) for layer, each in hidden.items()]
        given, held = self.runner.step(step, cache)
        given.keep, given.kept = c.pointer(keep), kept
        given.logits, given.logits_stride = logits.data_ptr(), width
        given.taps, given.tap_count = (c.Tap * len(taps))(*taps), len(taps)
        self.runner.forward(self._struct, given, step.positions)
        del held
        return StepOut(logits[..., : self.vocab_size] if width != self.vocab_size else logits, hidden)

    def _struct_without(self, skips: Skips) -> tuple[c.Model, object]:
        return self.decoder.struct(len(self.layout.kinds), self.runner.kv, skips)

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
        with self.engine.lock:
            self._taps = self._taps | set(layers)
            self.version += 1

    def contents(self) -> str | None:
        return self._contents

    def watch(self, source: PreTrainedModel) -> None:
        """Refuse to run after ``source``, of whose weights these are, has got others. It may be moved or let go."""
        self._watched = weakref.ref(source), WeightState(source)

    def notice_changes(self) -> None:
        if self._watched is None:
            return
        held, state = self._watched
        model = held()
        if model is None or any_weight(model).device != _HOST:
            self._watched = None
        elif not state.same(model):
            raise ModelError(
                f"The weights of this {self.name} have changed since they were quantised to {self.weights}: load it "
                "again."
            )

    def check_ready(self) -> None:
        if self._closed:
            raise ModelError(f"This {self.name} was released or closed: make a new generator with foredraft.load.")

    def stock_logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits of whole sequences without a tree and with a cache of their own: this engine has no other forward."""
        return self._whole(tokens).logits

    def read(self, tokens: Int[Tensor, "B T"], layers: Sequence[int]) -> dict[int, Float[Tensor, "B T H"]]:
        with self.engine.lock:
            before, self._taps = self._taps, frozenset(layers)
            try:
                return dict(self._whole(tokens).hidden)
            finally:
                self._taps = before

    def _whole(self, tokens: Int[Tensor, "B T"]) -> StepOut:
        rows, count = tokens.shape
        cache = self.new_cache()
        cache.reserve(range(rows), count)
        bases = torch.zeros(rows, dtype=torch.long)
        return self.forward(self.address(TokenTree.chain(tokens), bases, range(rows), count), cache)

    def parts(self) -> TargetParts:
        return TargetParts(self._embed, self._head, self.vocab_size, self.decoder.shape.hidden)

    def embedding(self) -> Float[Tensor, "V H"]:
        return self.decoder.embedding.dequantised()

    def _embed(self, tokens: Int[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """Embeddings as the model's own embedding layer has them."""
        rows = self.decoder.embedding.rows(tokens.flatten())
        return (rows * self.decoder.embedding_factor).unflatten(0, tokens.shape)

    def _head(self, states: Float[Tensor, "... H"]) -> Float[Tensor, "... V"]:
        """Logits of states after the final norm."""
        shape, logits = self.decoder.shape, self.engine.product(self.decoder.head, states)
        if shape.logit_scale != 1.0:
            logits = logits * shape.logit_scale
        return torch.tanh(logits / shape.logit_cap) * shape.logit_cap if shape.logit_cap else logits

    def retain(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        self._closed = self._holders <= 0
