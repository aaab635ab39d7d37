"""A stock model without some of its decoder layers, or without the attention or the MLP of some.

For the length of a forward, what is left out has a ``forward`` of another kind: a layer hands its states on as they
come, an attention or an MLP adds nothing to them. Modules, hooks and whatever the model asks of its layers (their
types, their masks) stay as they are, no weight is copied, and after the forward nothing is left. Layers are numbered
from 0 on, as in the model's own list.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.tree import TokenTree
from foredraft.model.cache import SlotCache
from foredraft.model.hf import ODD, CausalLM, brief
from foredraft.model.masks import StepIn
from foredraft.model.memory import has_matrices, stored_bytes
from foredraft.model.taps import decoder_layers

Forward = Callable[..., Any]


@final
class ThinnedLM:
    """A model that leaves something out: the same weights, the same cache, fewer layers.

    Only the thread that runs the model may run this. Where an attention is left out, no keys and values are written.

    Args:
        stand_ins: what each module that is left out does instead.
        cost: the share of the model's weights that a forward still reads.
    """

    def __init__(self, model: CausalLM, stand_ins: list[tuple[nn.Module, Forward]], cost: float) -> None:
        self.model = model
        self.cost = cost
        self._stand_ins = stand_ins

    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        """As ``CausalLM.forward``. Hidden states behind a layer that is left out are those before it."""
        with _in_place(self._stand_ins):
            return self.model.forward(step, cache, keep)


@final
class Layers:
    """The decoder layers of a model, and what they are made of, as two small forwards show it.

    Raises:
        ModelError: the model cannot run without its layers.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._blocks = list(decoder_layers(model.model))
        try:
            self._seen = _look(model, self._blocks)
            self._bare = _probe(self._partial([*range(len(self))], []), model.new_cache())
        except ODD as error:
            raise ModelError(f"{model.name} cannot run without its layers: {brief(error)}.") from error
        self._adds_up: bool | None = None  # found out when somebody wants to know

    def __len__(self) -> int:
        return len(self._blocks)

    def first(self, count: int) -> ThinnedLM:
        """The first so many layers, then the final norm and the output layer.

        Raises:
            ModelError: there are not so many.
        """
        if not 1 <= count <= len(self):
            raise ModelError(f"{self.model.name} has {len(self)} layers: a draft can have 1 to {len(self)} of them.")
        return self._partial(range(count, len(self)), [])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> ThinnedLM:
        """All layers but the attention of some and the MLP of some; a layer that has to do without both is not run.

        Raises:
            ModelError: there is no such layer, or the two are no separate parts of it.
        """
        for number in (*attention, *mlp):
            if not 0 <= number < len(self):
                raise ModelError(f"{self.model.name} has layers 0 to {len(self) - 1}; there is no layer {number}.")
        whole = set(attention) & set(mlp)
        parts = [part for number in set(attention) - whole for part in self._attention(number)]
        parts += [part for number in set(mlp) - whole for part in self._seen.mlp[number]]
        if parts and not self._separate():
            raise ModelError(
                f"{self.model.name} does not add attention and MLP to its states one by one, so only whole layers can "
                "be left out: name the same ones in skip_attention and skip_mlp."
            )
        return self._partial(whole, parts)

    def _attention(self, number: int) -> list[nn.Module]:
        found = self._seen.attention[number]
        return [] if found is None else [found]

    def _partial(self, whole: Collection[int], parts: Collection[nn.Module]) -> ThinnedLM:
        layers = [self._blocks[number] for number in sorted(whole)]
        gone = [(layer, _handing_on(self._seen.returns[layer])) for layer in layers]
        gone += [(part, _adding_nothing(self._seen.returns[part])) for part in parts]
        left = sum(stored_bytes(module) for module, _ in gone)
        return ThinnedLM(self.model, gone, 1.0 - left / self.model.weight_bytes)

    def _separate(self) -> bool:
        """Whether a layer whose attention and MLP add nothing hands its states on as they come."""
        if self._adds_up is None:
            numbers = range(len(self))
            parts = [part for number in numbers for part in (*self._attention(number), *self._seen.mlp[number])]
            found = all(self._attention(number) and self._seen.mlp[number] for number in numbers)
            try:
                bare = _probe(self._partial([], parts), self.model.new_cache())
                self._adds_up = found and torch.equal(bare, self._bare)
            except ODD:
                self._adds_up = False
        return self._adds_up


@dataclass(frozen=True, slots=True)
class _Seen:
    """``returns``: how many things a module returns in a tuple, the states first; 0 for the states alone.
    ``attention`` and ``mlp``: which children of each layer these are; the former is the one that writes to the cache,
    the latter are all others with matrices."""

    returns: dict[nn.Module, int] = field(default_factory=dict)
    attention: list[nn.Module | None] = field(default_factory=list)
    mlp: list[list[nn.Module]] = field(default_factory=list)


def _look(model: CausalLM, blocks: list[nn.Module]) -> _Seen:
    """Run the whole model once, and watch its layers and their children."""
    seen, cache, handles = _Seen(), model.new_cache(), []

    def watch(number: int, child: bool) -> Forward:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            seen.returns[module] = _width(model, output)
            if not child:
                return
            if seen.attention[number] is None and cache.holds(number):
                seen.attention[number] = module
            elif module is not seen.attention[number] and module not in seen.mlp[number]:
                seen.mlp[number].append(module)

        return hook

    try:
        for number, block in enumerate(blocks):
            seen.attention.append(None)
            seen.mlp.append([])
            handles.append(block.register_forward_hook(watch(number, child=False)))
            for child in block.children():
                if has_matrices(child):
                    handles.append(child.register_forward_hook(watch(number, child=True)))
        _probe(model, cache)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _probe(model: CausalLM | ThinnedLM, cache: SlotCache) -> Float[Tensor, "3 V"]:
    """Logits of three tokens."""
    whole = model.model if isinstance(model, ThinnedLM) else model
    cache.reserve(1, 16)
    size = whole.model.config.get_text_config().vocab_size
    tokens = torch.arange(1, 4, device=whole.device)[None] % size
    base = torch.zeros(1, dtype=torch.long, device=whole.device)
    return model.forward(whole.address(TokenTree.chain(tokens), base, (0,), 3), cache).logits[0]


def _width(model: CausalLM, output: Any) -> int:
    if isinstance(output, Tensor):
        return 0
    if isinstance(output, tuple) and isinstance(output[0], Tensor):
        return len(output)
    raise ModelError(f"{model.name} cannot run without its layers: they return {output.__class__.__name__}.")


def _handing_on(returns: int) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _shaped(_states(args, kwargs), returns)

    return forward


def _adding_nothing(returns: int) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _shaped(torch.zeros_like(_states(args, kwargs)), returns)

    return forward


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _shaped(states: Tensor, returns: int) -> Any:
    return (states, *[None] * (returns - 1)) if returns else states


@contextmanager
def _in_place(stand_ins: list[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Let modules do something else for a while. Some have a ``forward`` of their own already (offloading)."""
    before = [vars(module).get("forward") for module, _ in stand_ins]
    try:
        for module, forward in stand_ins:
            module.forward = forward
        yield
    finally:
        for (module, _), own in zip(stand_ins, before, strict=True):
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own
