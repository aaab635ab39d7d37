"""Hidden states by layer, taken with forward hooks.

Not by ``output_hidden_states``: what its index means changed between transformers 5.17 and 5.23. Here index i is
the state after i decoder layers, so 0 is the embedding and the number of layers is what the final norm reads;
``FINAL`` is what that norm says, and the output layer reads.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.heads.nets.target_parts import FINAL


class Taps:
    """Hooks on some layers of a model, while the context lasts; ``take`` hands out what the forward left there."""

    def __init__(self, model: PreTrainedModel, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(set(layers)))
        self._states: dict[int, Tensor] = {}
        self._places: list[tuple[dict[Any, Any], Any]] = []  # torch's tables of hooks, and what stands there
        blocks = list(decoder_layers(model)) if self.layers else []
        for layer in self.layers:
            if layer != FINAL and not 0 <= layer <= len(blocks):
                raise ModelError(f"There is no hidden layer {layer}: the model has layers 0 to {len(blocks)}.")
            if layer == 0:
                first = blocks[0]
                self._places += [(first._forward_pre_hooks, self._before), (first._forward_pre_hooks_with_kwargs, True)]
            else:
                module = body(model) if layer == FINAL else blocks[layer - 1]
                self._places.append((module._forward_hooks, self._after(layer)))

    def __enter__(self) -> "Taps":
        for hooks, own in self._places:  # by hand: in a loop, register_forward_hook and its handles take their time
            hooks[self] = own
        return self

    def __exit__(self, *error: object) -> None:
        self.off()

    def off(self) -> None:
        """Take the hooks off, if they are there."""
        for hooks, _ in self._places:
            hooks.pop(self, None)

    def take(self) -> dict[int, Tensor]:
        """States [B, N, H] of the last forward, by layer; they are handed out once."""
        states, self._states = self._states, {}
        return states

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._states[0] = args[0] if args else kwargs["hidden_states"]

    def _after(self, layer: int):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self._states[layer] = output if isinstance(output, Tensor) else output[0]  # a tuple or a ModelOutput

        return hook


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the model keeps it: the one list as long as its config says."""
    return _owner_and_layers(model)[1]


def body(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer: whoever owns the decoder layers, and returns states after the final norm."""
    return _owner_and_layers(model)[0]


def _owner_and_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise ModelError(f"{model.__class__.__name__} has no list of {count} decoder layers to take hidden states from.")
