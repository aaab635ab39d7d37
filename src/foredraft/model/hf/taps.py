"""Hidden states by layer, captured with forward hooks.

``output_hidden_states`` is not used, since the meaning of its index changed between transformers 5.17 and 5.23. Here
index i is the state after i decoder layers: 0 is the embedding, the number of layers the input of the final norm, and
``FINAL`` the norm's output, which the output layer reads.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from foredraft.core.errors import ModelError
from foredraft.core.target_parts import FINAL
from foredraft.model.hf_types import PreTrainedModel


class Taps:
    """A context with hooks on some layers of a model; ``take`` returns the states of the last forward."""

    def __init__(self, model: PreTrainedModel, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(set(layers)))
        self._states: dict[int, Tensor] = {}
        self._hooks: list[tuple[dict[Any, Any], Any]] = []  # torch's hook tables, and our entry for each
        blocks = list(decoder_layers(model)) if self.layers else []
        for layer in self.layers:
            if layer != FINAL and not 0 <= layer <= len(blocks):
                raise ModelError(f"There is no hidden layer {layer}: the model has layers 0 to {len(blocks)}.")
            if layer == 0:
                first = blocks[0]
                self._hooks += [(first._forward_pre_hooks, self._before), (first._forward_pre_hooks_with_kwargs, True)]
            else:
                module = body(model) if layer == FINAL else blocks[layer - 1]
                self._hooks.append((module._forward_hooks, self._after(layer)))

    def __enter__(self) -> "Taps":
        for table, hook in self._hooks:  # directly, since register_forward_hook is slow in a decoding loop
            table[id(self)] = hook  # an integer, as compilers expect
        return self

    def __exit__(self, *error: object) -> None:
        self.off()

    def off(self) -> None:
        """Remove the hooks, if present."""
        for table, _ in self._hooks:
            table.pop(id(self), None)

    def take(self) -> dict[int, Tensor]:
        """Return and drop the states [B, N, H] of the last forward, by layer."""
        states, self._states = self._states, {}
        return states

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._states[0] = args[0] if args else kwargs["hidden_states"]

    def _after(self, layer: int):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self._states[layer] = output if isinstance(output, Tensor) else output[0]  # a tuple or a ModelOutput

        return hook


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers: its first module list with as many entries as the config has layers."""
    return _owner_and_layers(model)[1]


def body(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer: the module that owns the decoder layers and ends with the final norm."""
    return _owner_and_layers(model)[0]


def _owner_and_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise ModelError(f"{model.__class__.__name__} has no list of {count} decoder layers to read hidden states from.")
