"""A model that skips some of its decoder layers, or the attention or MLP of some layers.

Of a transformers model, skipped modules have their ``forward`` replaced during a forward: a layer returns its input, an
attention or MLP returns zeros. Modules, hooks and layer attributes (types, masks) are unchanged, and the replacement is
undone after the forward. The native engine gets a list of layers without the skipped matrices. No weight is copied.
Layers are numbered from 0, as in the model's list.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError, first_line
from foredraft.core.tree import TokenTree
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import MODEL_ERRORS, CausalLM
from foredraft.model.hf.taps import Taps, body, decoder_layers
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.memory import has_matrices, stored_bytes
from foredraft.model.native.decoder import Skips
from foredraft.model.native.model import NativeLM

Forward = Callable[..., Any]
LayeredLM = CausalLM | NativeLM
"""Models that know how their layers attend (``layout``)."""


@final
class LayerSkipLM:
    """A model that skips parts: the same weights and cache, fewer layers.

    Only the thread that runs the model may run this. A skipped attention writes no keys and values.

    Args:
        skipping: makes a context in which ``model.compute`` skips the parts.
        cost: fraction of the model's weights that a forward still reads.
    """

    def __init__(self, model: LayeredLM, skipping: Callable[[], AbstractContextManager[None]], cost: float) -> None:
        self.model = model
        self.cost = cost
        self._skipping = skipping

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context in which ``model.compute`` skips the parts."""
        with self.model.running(), self._skipping():
            yield

    @torch.inference_mode()
    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        """Like the model's ``forward``. A skipped layer's hidden states are its input."""
        with self.running():
            return self.model.compute(step, cache, keep)


class DecoderLayers(ABC):
    """The decoder layers of a model."""

    model: LayeredLM

    def __len__(self) -> int:
        return self.model.layers

    def first(self, count: int) -> LayerSkipLM:
        """The first ``count`` layers, then the final norm and the output layer.

        Raises:
            ModelError: ``count`` is not between 1 and the number of layers.
        """
        if not 1 <= count <= len(self):
            raise ModelError(f"{self.model.name} has {len(self)} layers: a draft can have 1 to {len(self)} of them.")
        return self._without(*[frozenset(range(count, len(self)))] * 2)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> LayerSkipLM:
        """The model without the attention and the MLP of the given layers; a layer in both lists is skipped as a whole.

        Raises:
            ModelError: there is no such layer, or its attention and MLP cannot be skipped separately.
        """
        for number in (*attention, *mlp):
            if not 0 <= number < len(self):
                raise ModelError(f"{self.model.name} has layers 0 to {len(self) - 1}; there is no layer {number}.")
        return self._without(frozenset(attention), frozenset(mlp))

    @abstractmethod
    def _without(self, attention: frozenset[int], mlp: frozenset[int]) -> LayerSkipLM:
        """``without`` layers that exist."""


def layers_of(model: TargetModel) -> DecoderLayers:
    """The layers of a model.

    Raises:
        ModelError: the model cannot run with skipped layers.
    """
    if isinstance(model, NativeLM):
        return _NativeLayers(model)
    if isinstance(model, CausalLM):
        return _StockLayers(model)
    raise ModelError(f"{model.name} cannot run with skipped layers.")


@final
class _NativeLayers(DecoderLayers):
    """Layers on the native engine."""

    def __init__(self, model: NativeLM) -> None:
        self.model = model
        self._native = model

    def _without(self, attention: frozenset[int], mlp: frozenset[int]) -> LayerSkipLM:
        skips, decoder = Skips(attention, mlp), self._native.decoder
        cost = 1.0 - decoder.skipped_bytes(skips) / decoder.read_bytes
        return LayerSkipLM(self._native, self._native.without(skips), cost)


@final
class _StockLayers(DecoderLayers):
    """The layers of a transformers model and their attention and MLP modules, found by two small forwards."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._blocks = list(decoder_layers(model.model))
        try:
            self._parts = _find_parts(model, self._blocks)
            self._all_skipped = _probe(self._skip([*range(len(self))], []), model.new_cache())
        except MODEL_ERRORS as error:
            raise ModelError(
                f"{model.name} cannot run with skipped layers: {first_line(error).rstrip('.')}."
            ) from error

    def __len__(self) -> int:
        return len(self._blocks)

    def replaced(self, outputs: dict[int, Callable[[Tensor], Tensor]]) -> AbstractContextManager[None]:
        """The context in which each of these layers returns this function of its input."""
        blocks = {self._blocks[number]: output for number, output in outputs.items()}
        return _patched([(block, _returning(output, self._parts.returns[block])) for block, output in blocks.items()])

    def _without(self, attention: frozenset[int], mlp: frozenset[int]) -> LayerSkipLM:
        whole = attention & mlp
        parts = [part for number in attention - whole for part in self._parts.attention[number]]
        parts += [part for number in mlp - whole for part in self._parts.mlp[number]]
        if parts and not self._separable:
            raise ModelError(
                f"{self.model.name} does not add attention and MLP separately to its hidden states, so only whole "
                "layers can be skipped: list the same layers in skip_attention and skip_mlp."
            )
        return self._skip(whole, parts)

    def _skip(self, whole: Collection[int], parts: Collection[nn.Module]) -> LayerSkipLM:
        layers = [self._blocks[number] for number in sorted(whole)]
        replacements = [(layer, _returning(_unchanged, self._parts.returns[layer])) for layer in layers]
        replacements += [(part, _returning(torch.zeros_like, self._parts.returns[part])) for part in parts]
        skipped = sum(stored_bytes(module) for module, _ in replacements)
        return LayerSkipLM(self.model, partial(_patched, replacements), 1.0 - skipped / self.model.weight_bytes)

    @cached_property
    def _separable(self) -> bool:
        """Whether a layer whose attention and MLP return zeros returns its input."""
        found = [*self._parts.attention, *self._parts.mlp]
        try:
            logits = _probe(self._skip([], list(chain(*found))), self.model.new_cache())
        except MODEL_ERRORS:
            return False
        return all(found) and torch.equal(logits, self._all_skipped)


@final
class Exits:
    """The states that the output layer reads after some of a model's layers, with gradients, for training.

    They are those of ``DecoderLayers.first``, for several numbers of layers in one forward: the model's own code
    applies what it has between its last layer and its output layer.

    Raises:
        ModelError: the model cannot run with skipped layers.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._layers = _StockLayers(model)
        self._body = body(model.model)

    def states(
        self, tokens: Int[Tensor, "B T"], exits: Sequence[int], dropped: Collection[int] = ()
    ) -> Float[Tensor, "E B T H"]:
        """The states after the first ``exits`` layers each.

        Args:
            dropped: layers that are skipped, numbered from 0.
        """
        count = len(self._layers)
        taps = Taps(self.model.model, [exit for exit in exits if exit < count])
        with self._layers.replaced(dict.fromkeys(dropped, _unchanged)), taps:
            last = self._body(input_ids=tokens, use_cache=False)[0]
            found = taps.take()
        return torch.stack([last if exit == count else self._after_layers(tokens, found[exit]) for exit in exits])

    def _after_layers(self, tokens: Int[Tensor, "B T"], states: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """What the output layer reads if the last layer returns ``states``."""
        last = len(self._layers) - 1
        with self._layers.replaced({**dict.fromkeys(range(last), _unchanged), last: lambda _: states}):
            return self._body(input_ids=tokens, use_cache=False)[0]


class LastLayer(NamedTuple):
    """The keys and values of a model's last layer, as its KV cache has them, and what the output layer reads."""

    keys: Float[Tensor, "B K T E"]
    values: Float[Tensor, "B K T F"]
    final: Float[Tensor, "B T H"]


@final
class LastLayerOnly:
    """The last layer of a model, run on the states after the layer before, for training: the model's own code.

    Raises:
        ModelError: the model cannot run with skipped layers.
    """

    def __init__(self, model: CausalLM) -> None:
        self._layers = _StockLayers(model)
        self._body = body(model.model)
        self._cache_argument = model.cache_argument

    @torch.no_grad()
    def __call__(self, tokens: Int[Tensor, "B T"], states: Float[Tensor, "B T H"]) -> LastLayer:
        """Args:
        states: of the tokens, after all layers but the last.
        """
        last, cache = len(self._layers) - 1, DynamicCache()
        replaced: dict[int, Callable[[Tensor], Tensor]] = dict.fromkeys(range(last - 1), _unchanged)
        if last:
            replaced[last - 1] = lambda _: states
        with self._layers.replaced(replaced):
            final = self._body(input_ids=tokens, use_cache=True, **{self._cache_argument: cache})[0]
        own: Any = cache.layers[last]
        return LastLayer(own.keys, own.values, final)


@dataclass(frozen=True, slots=True)
class _Parts:
    """``returns``: length of a module's output tuple, which starts with the hidden states; 0 for a plain tensor.
    ``attention``: of each layer, the child that writes to the cache, if any. ``mlp``: its other children with
    matrices."""

    returns: dict[nn.Module, int] = field(default_factory=dict)
    attention: list[list[nn.Module]] = field(default_factory=list)
    mlp: list[list[nn.Module]] = field(default_factory=list)


def _find_parts(model: CausalLM, blocks: list[nn.Module]) -> _Parts:
    """Run the whole model once with hooks on its layers and their children."""
    parts, cache, handles = _Parts(), SlotCache(model.layers), []

    def hook_for(number: int, child: bool) -> Forward:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            parts.returns[module] = _output_length(model, output)
            attention, mlp = parts.attention[number], parts.mlp[number]
            if not child or module in (*attention, *mlp):
                return
            writes = not attention and cache.holds(number)
            (attention if writes else mlp).append(module)

        return hook

    try:
        for number, block in enumerate(blocks):
            parts.attention.append([])
            parts.mlp.append([])
            handles.append(block.register_forward_hook(hook_for(number, child=False)))
            for child in block.children():
                if has_matrices(child):
                    handles.append(child.register_forward_hook(hook_for(number, child=True)))
        _probe(model, cache)
    finally:
        for handle in handles:
            handle.remove()
    return parts


def _probe(model: CausalLM | LayerSkipLM, cache: SlotCache) -> Float[Tensor, "3 V"]:
    """Logits of three tokens."""
    whole = model.model if isinstance(model, LayerSkipLM) else model
    cache.reserve([0], 16)
    tokens = torch.arange(1, 4, device=whole.device)[None] % whole.vocab_size
    base = torch.zeros(1, dtype=torch.long, device=whole.device)
    return model.forward(whole.address(TokenTree.chain(tokens), base, (0,), 3), cache).logits[0]


def _output_length(model: CausalLM, output: Any) -> int:
    if isinstance(output, Tensor):
        return 0
    if isinstance(output, tuple) and isinstance(output[0], Tensor):
        return len(output)
    raise ModelError(f"{model.name} cannot run with skipped layers: they return {output.__class__.__name__}.")


def _returning(output: Callable[[Tensor], Tensor], returns: int) -> Forward:
    """A ``forward`` whose hidden states are a function of its input; for ``returns`` see ``_Parts``."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        states = output(args[0] if args else kwargs["hidden_states"])
        return (states, *[None] * (returns - 1)) if returns else states

    return forward


def _unchanged(states: Tensor) -> Tensor:
    return states


@contextmanager
def _patched(replacements: list[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Replace modules' ``forward`` within the context. Some instances already have one (offloading)."""
    before = [vars(module).get("forward") for module, _ in replacements]
    try:
        for module, forward in replacements:
            module.forward = forward
        yield
    finally:
        for (module, _), own in zip(replacements, before, strict=True):
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own
