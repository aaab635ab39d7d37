"""A stock causal LM behind the ``TargetModel`` forward."""

import inspect
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError, first_line, kind_of
from foredraft.core.target_parts import TargetParts
from foredraft.core.tree import TokenTree
from foredraft.model.attention.slot_attention import AttentionObserver, AttentionSwap, NoCudnn, runs_kernel
from foredraft.model.base import TargetModel
from foredraft.model.hf.contents import contents_of
from foredraft.model.hf.head_parts import embedding_rows, parts_of, wide
from foredraft.model.hf.support import (
    check_supported,
    context_of,
    first_token_of,
    has_alibi,
    layout_of,
    why_eager,
)
from foredraft.model.hf.taps import Taps, body
from foredraft.model.hf.weight_state import WeightState
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.kv.cache import SlotCache, SlotView
from foredraft.model.kv.masks import MAX_TABLE_NODES, Layout, StepIn, address
from foredraft.model.linear.packed import PackedWeights, any_weight, plain_copy
from foredraft.model.memory import weight_bytes

_log = logging.getLogger(__name__)

MODEL_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, AssertionError)
"""Errors that an unsupported model may raise in a forward."""
_ALIBI = (
    "{} adds a bias to attention that it computes from the length of its cache (ALiBi), not from positions: in a draft "
    "tree, several tokens have one position, so its drafts cannot be verified."
)


@final
class CausalLM(TargetModel):
    """Runs a transformers model over a slot cache.

    Attention and taps are installed only during a forward, so the model can be run, copied, saved and trained between
    forwards. Packed layers and evaluation mode stay until ``close``.

    Args:
        model: a decoder-only causal LM; it is put into evaluation mode.
        fast: on a CPU, pack the weights of float32 linear layers (see ``linear.packed``).
        verify: compare the slot forward with the stock forward once, and refuse the model if they differ.
        owned: nothing else holds the model, so packed layers may drop their plain weights.
        packed_dtype: of packed weights; with int8, each row and output channel has a scale.

    Raises:
        ModelError: the model's drafts cannot be verified or rolled back; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fast: bool = True,
        verify: bool = True,
        owned: bool = False,
        packed_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_supported(model)
        config = model.config.get_text_config()
        self._trained = [module for module in model.modules() if module.training]
        self.model = model
        self.closed = False
        self.name = model.__class__.__name__
        self.config = config
        self.origin = model.config.name_or_path or ""
        self.layers: int = config.num_hidden_layers
        self.first_token: int = first_token_of(config)
        self.max_length: int = context_of(model.config)
        self.layout: Layout = layout_of(model.config)
        self.weight_bytes: int = weight_bytes(model)
        self.ranks: int = model.tp_size or 1
        self.why_eager = why_eager(model)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # its name from transformers 5.24 on; before, and in models with code of their own, past_key_values
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._taps = Taps(model, ())
        self._width = 0  # of logits if the model's are narrower than its embedding
        weight = any_weight(model)
        self._device_and_dtype = (weight.device, weight.dtype)
        self._attention = AttentionSwap(model)
        self._kernels = NoCudnn(weight.device)
        self._tables = self._attention.applies and runs_kernel(weight.device)
        self._running = threading.RLock()
        self._holders = 1  # the constructor's caller
        self._owned = owned
        self._packed_dtype = packed_dtype
        self.weights = "int8" if packed_dtype is torch.int8 else None
        self._packed: PackedWeights | None = None
        self._verify = verify
        self._probed: SlotCache | None = None
        try:
            model.eval()
            self.vocab_size: int = self._probed_vocabulary()
            if fast:
                self.pack()
            self._weights_seen = WeightState(model)
            vars(model)[_OWNER] = _Owner(self)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        return self._device_and_dtype[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._device_and_dtype[1]

    @property
    def packed_layers(self) -> int:
        """Number of linear layers with packed weights."""
        return len(self._packed) if self._packed is not None else 0

    def tap(self, layers: Sequence[int]) -> None:
        with self._running:  # a forward hands out the layers that it began with
            self._taps = Taps(self.model, {*self._taps.layers, *layers})
            self.version += 1

    def empty_hidden(self) -> dict[int, Float[Tensor, "1 T H"]]:
        size = self.model.config.get_text_config().hidden_size
        empty = torch.zeros(1, 0, size, dtype=self.dtype, device=self.device)
        return dict.fromkeys(self._taps.layers, empty)

    def new_cache(self) -> SlotCache:
        return SlotCache(self.layers, like=self._probed)

    def pack(self) -> None:
        """Pack the linear layers' weights if the model is on a CPU."""
        if self.device.type == "cpu" and (self._packed is None or not self._packed.whole):
            with self._running:
                if self._packed is not None:
                    self._packed.undo()
                self._packed = PackedWeights(self.model, self._packed_dtype, keep=not self._owned)
                self.version += 1

    def check_ready(self) -> None:
        """Check that the model is unchanged since it was loaded. Packs layers again that a conversion has unpacked.

        Raises:
            ModelError: the model was closed, moved, converted or put into training mode.
        """
        if self.closed:
            raise ModelError(f"This {self.name} was released or closed: make a new generator with foredraft.load.")
        now = any_weight(self.model)
        if (now.device, now.dtype) != self._device_and_dtype:
            raise ModelError(
                f"This {self.name} was on {self.device} in {self.dtype} and is now on {now.device} in {now.dtype}: "
                "call close() on its generator and load it again."
            )
        if self.model.training:
            raise ModelError(f"This {self.name} is in training mode: call its eval() before generating.")
        if self._packed is not None:
            self.pack()

    def notice_changes(self) -> None:
        if self.ranks > 1:  # all processes would have to notice the same
            return
        with self._running:  # another thread's forward has its taps on the model
            if self._weights_seen.same(self.model):
                return
            if not self._weights_seen.same_structure(self.model):
                self._restructured()
            self._weights_seen = WeightState(self.model)
            self.weights_version += 1

    def _restructured(self) -> None:
        """Modules, tensors or hooks were replaced: hook the present ones, and check that the model still runs."""
        self._taps = Taps(self.model, self._taps.layers)
        self._attention = AttentionSwap(self.model)
        size = self._probed_vocabulary()
        if size != self.vocab_size:
            raise ModelError(
                f"This {self.name} had {self.vocab_size} tokens when it was loaded and has {size} now: call close() "
                "on its generator and load it again."
            )
        self.version += 1

    def _probed_vocabulary(self) -> int:
        """The tokens that the model can read or write, after a check that it runs; see ``_probe``."""
        self._width = 0
        own = self._choose_attention(self._expected() if self._verify else None)
        size = max(own, embedding_rows(self.model))
        self._width = size if own < size else 0
        return size

    def contents(self) -> str | None:
        return contents_of(self.model) if self.ranks == 1 else None

    def invalidate(self) -> None:
        with self._running:
            if self._packed is not None:
                self._packed.undo()
                self._packed = None
                self.pack()
            self.version += 1
            self.weights_version += 1

    def retain(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders <= 0 and not self.closed:
            self.close()

    @property
    def module(self) -> PreTrainedModel:
        return self.model

    def parts(self) -> TargetParts:
        return parts_of(self.model)

    def embedding(self) -> Float[Tensor, "V H"]:
        weight: Any = self.model.get_input_embeddings().weight
        return weight

    def plain_copy(self) -> PreTrainedModel:
        """A trainable float32 copy of the model, with stock attention and plain layers."""
        return plain_copy(self.model)

    def close(self) -> None:
        """Restore the model, once no forward is running. An interruption is raised after that."""
        self.closed = True
        with self._running:
            try:
                self._restore()
            except BaseException:
                self._restore()
                raise

    def reset_hooks(self) -> None:
        """Between two forwards: remove attention and taps that an interruption may have left."""
        with self._running:
            self._taps.off()
            self._kernels.off()
            self._attention.off()

    def _restore(self) -> None:
        self.reset_hooks()
        if self._packed is not None:
            self._packed.undo()
        if owner_of(self.model) is self:
            del vars(self.model)[_OWNER]
        for module in self._trained:
            module.training = True

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], used_slots: int, *, start: int = 0
    ) -> StepIn:
        return address(tree, bases, rows, used_slots, self.layout, max_position=self.max_length, start=start)

    def compute(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        step = step.within(cache.slots)
        return self._call(step, SlotView(cache, step, stored=self._tables and step.few), keep)

    def kv_extent(self, used_slots: int, nodes: int, slots: int) -> int:
        return slots if self._tables and nodes <= MAX_TABLE_NODES else super().kv_extent(used_slots, nodes, slots)

    @torch.inference_mode()
    def run(
        self, step: StepIn, view: Cache, keep: Int[Tensor, "M"] | None = None, observer: AttentionObserver | None = None
    ) -> StepOut:
        """``forward`` over the given cache view; an observer chooses the keys and values to attend to."""
        with self.running():
            return self._call(step, view, keep, observer)

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self.collective:
            raise ModelError(
                "This target runs on several processes, which meet only in the steps of a generator: beam search, "
                "scores of prompts and measurements of costs need a target in one process."
            )
        with self._running:
            try:
                with self._attention, self._kernels, self._taps:
                    yield
            except BaseException as error:
                self.reset_hooks()
                if isinstance(error, MODEL_ERRORS):
                    self.check_ready()  # a clearer error for a model that was moved or converted meanwhile
                raise

    def _call(
        self, step: StepIn, view: Cache, keep: Int[Tensor, "M"] | None, observer: AttentionObserver | None = None
    ) -> StepOut:
        if isinstance(view, SlotView) and view.stored:
            by_type = step.tables(view.buffer_rows)
        else:
            by_type = self._attention.prepared(step.masks(self.dtype))
        masks = by_type if self.layout.by_type else next(iter(by_type.values()))
        options: dict[str, Any] = {self.cache_argument: view}
        if keep is not None and self._keeps_logits:
            options["logits_to_keep"] = keep
        if observer is not None:
            options["observer"] = observer
        output = self.model(
            input_ids=step.tokens,
            position_ids=step.positions,
            attention_mask=masks,
            use_cache=True,
            **options,
        )
        logits = output.logits
        if keep is not None and not self._keeps_logits:
            logits = logits[:, keep]
        return StepOut(wide(logits, self._width), self._taps.take())

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"], layers: Sequence[int]) -> dict[int, Float[Tensor, "B T H"]]:
        taps = Taps(self.model, layers)
        with self._running:
            try:
                with taps:
                    body(self.model)(input_ids=tokens, use_cache=False)
                    return taps.take()
            except BaseException:
                taps.off()
                raise

    @torch.inference_mode()
    def stock_logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        with self._running:
            return wide(self.model(input_ids=tokens, use_cache=False).logits, self._width)

    def _expected(self) -> Float[Tensor, "2 V"]:
        """Stock logits after the path 1, 2, 3, 4 and after its sibling 1, 2, 5."""
        ids = self._probe_tokens()
        long, short = ids[:4], torch.cat([ids[:2], ids[4:]])
        try:
            logits = torch.stack([self.stock_logits(path[None])[0, -1] for path in (long, short)])
        except MODEL_ERRORS as error:
            raise ModelError(f"{self.name} cannot run a plain forward: {first_line(error).rstrip('.')}.") from error
        if not bool((logits > -torch.inf).any(-1).all() and (logits < torch.inf).all()):  # False for NaN
            raise ModelError(_without_logits(self.model, self.name))
        return logits

    def _choose_attention(self, expected: Tensor | None) -> int:
        """Probe the model with the tree attention kernel, where it runs, or else with masks; see ``_probe``."""
        if self._tables:
            try:
                return self._probe(expected)
            except Exception as error:  # Triton's own too, such as heads too wide for the GPU's shared memory
                self._tables = False
                _log.warning("Tree attention does not suit this model, so its attention reads masks: %s", error)
        return self._probe(expected)

    @torch.inference_mode()
    def _probe(self, expected: Tensor | None) -> int:
        """Run a tree over slots, compare with the stock forward, and return the width of the logits.

        Refuses every architecture whose result depends on more than tokens, positions and masks (such as a state, or
        a bias computed from the cache length), without a list of model names.
        """
        ids = self._probe_tokens()
        cache = self.new_cache()
        cache.reserve([0], 16)
        base = torch.zeros(1, dtype=torch.long, device=self.device)
        # other children of the root come first, so that slots and positions differ
        parents = torch.tensor([[-1, *[0] * 9, 9, 0]], device=self.device)
        tokens = torch.cat([ids[1:2], ids[:1].expand(8), ids[2:]])
        tree = TokenTree(tokens[None], parents, depth=2)
        try:
            self.forward(self.address(TokenTree.chain(ids[None, :1]), base, (0,), 1), cache)
            logits = self.forward(self.address(tree, base + 1, (0,), 13), cache).logits[0]
        except MODEL_ERRORS as error:
            if has_alibi(self.model):
                raise ModelError(_ALIBI.format(self.name)) from error
            raise ModelError(
                f"{self.name} cannot run over foredraft's slot cache: {first_line(error).rstrip('.')}."
            ) from error
        self.token_bytes: int = cache.slot_bytes
        cache.free()
        self._probed = cache
        if expected is not None:
            found, stock = logits[[10, 11]].float(), expected.float()
            error = (found - stock).square().mean().sqrt() / stock.std().clamp(min=1e-6)
            if not error <= (0.1 if self.dtype.itemsize < 4 else 1e-2):  # NaN counts as different
                if has_alibi(self.model):
                    raise ModelError(_ALIBI.format(self.name))
                raise ModelError(
                    f"{self.name} gives other logits for a draft tree than for its paths alone (they differ by "
                    f"{error:.0%} of their standard deviation), so its drafts cannot be verified; its attention or "
                    "state does not follow masks and positions."
                )
        return logits.shape[-1]

    def _probe_tokens(self) -> Int[Tensor, "5"]:
        return torch.arange(1, 6, device=self.device) % self.model.config.get_text_config().vocab_size


def _without_logits(model: PreTrainedModel, name: str) -> str:
    """Why a model has no finite logits, as a sentence."""
    for weight, values in model.named_parameters():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            return f"The weight {weight} of this {name} has NaN or infinite values: it is damaged."
    kind = str(model.dtype).removeprefix("torch.")
    return f"The logits of this {name} are NaN or infinite in {kind}: load it in bfloat16 or float32."


_OWNER = "_foredraft"


class _Owner:
    """Weak reference on a model to the ``CausalLM`` that runs it; None in copies and pickles of the model."""

    def __init__(self, owner: CausalLM) -> None:
        self.owner = weakref.ref(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def owner_of(model: PreTrainedModel) -> CausalLM | None:
    """The ``CausalLM`` that runs this model, if any."""
    found = vars(model).get(_OWNER)
    return found.owner() if isinstance(found, _Owner) else None


def acquire(model: PreTrainedModel, *, fast: bool, owned: bool = False) -> CausalLM:
    """The ``CausalLM`` that runs this model, with one more reference, or a new one. The caller must ``release`` it."""
    found = owner_of(model)
    if found is not None and found.ready:
        found.retain()
        if fast:
            found.pack()
        return found
    if found is not None:  # its generators are unusable, so a new one replaces it
        found.close()
    return CausalLM(model, fast=fast, owned=owned)


def release(model: object) -> None:
    """Remove foredraft from a model. Generators and ``speculative`` objects that use it cannot be used afterwards. A
    model without foredraft is unchanged.

    Raises:
        ModelError: the argument is not a transformers model.
    """
    from transformers import PreTrainedModel as model_type

    if not isinstance(model, model_type):
        raise ModelError(f"release takes the transformers model of a generator, not {kind_of(model)}.")
    found = owner_of(model)
    if found is not None:
        found.close()
