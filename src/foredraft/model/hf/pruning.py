"""Structured pruning of Llama-like models: by masks during training, or by cutting to a smaller model.

The cut model computes exactly the outputs of the masked one: masked norms take their mean over the kept hidden
dimensions, and all other masks are factors on outputs.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from foredraft.core.errors import ModelError
from foredraft.model.hf.pruned_parts import Kept, Masks, TransformerSizes
from foredraft.model.hf_types import PreTrainedModel

LAYOUTS = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` with Llama's layer structure."""

_AXES: dict[str, tuple[str | None, str | None]] = {
    "embed_tokens": (None, "hidden"),
    "lm_head": (None, "hidden"),
    "norm": ("hidden", None),
    "input_layernorm": ("hidden", None),
    "post_attention_layernorm": ("hidden", None),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "q_norm": (None, None),
    "k_norm": (None, None),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
}
"""The dimensions of the rows and columns of each module's weight; a bias has those of the rows."""


def sizes_of(model: PreTrainedModel) -> TransformerSizes:
    """The sizes of a model's parts.

    Raises:
        ModelError: it cannot be pruned, since its layer structure is not Llama's or its weights are quantised.
    """
    config, name = model.config, model.__class__.__name__
    if config.model_type not in LAYOUTS:
        raise ModelError(
            f"{name} cannot be pruned: only {', '.join(LAYOUTS[:-1])} and {LAYOUTS[-1]} models are supported."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{name} cannot be pruned: its weights are quantised; load plain ones.")
    return TransformerSizes(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
    )


class Masking:
    """A context in which hooks multiply a model's parts by ``masks``, which may change between forwards."""

    def __init__(self, model: PreTrainedModel, masks: Masks) -> None:
        self.masks = masks
        self._sizes = sizes_of(model)
        self._head_dim = _head_dim(model)
        decoder: Any = model.model
        self._handles = [decoder.embed_tokens.register_forward_hook(self._after(lambda z: z.hidden))]
        self._hook_norm(decoder.norm)
        for number, layer in enumerate(decoder.layers):
            self._hook_norm(layer.input_layernorm)
            self._hook_norm(layer.post_attention_layernorm)
            self._hook_part(layer.self_attn.o_proj, number, self._queries)
            self._hook_part(layer.mlp.down_proj, number, lambda z, n: z.intermediate[n])

    def __enter__(self) -> "Masking":
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _queries(self, masks: Masks, number: int) -> Tensor:
        """A factor for each dimension of each query head: the mask of its group."""
        return masks.groups[number].repeat_interleave(self._sizes.heads // self._sizes.groups * self._head_dim)

    def _hook_part(self, output: nn.Module, number: int, inner: Callable[[Masks, int], Tensor]) -> None:
        """Mask the input and output of an attention's or MLP's last product."""
        self._handles.append(output.register_forward_pre_hook(self._before(lambda z: inner(z, number))))
        self._handles.append(output.register_forward_hook(self._after(lambda z: z.layers[number] * z.hidden)))

    def _hook_norm(self, norm: nn.Module) -> None:
        """Scale a norm's input so that its mean over all dimensions equals that over the kept ones; same epsilon."""
        self._handles.append(norm.register_forward_pre_hook(self._before(self._norm_scale)))
        self._handles.append(norm.register_forward_hook(self._after(lambda z: 1 / self._norm_scale(z))))

    def _norm_scale(self, masks: Masks) -> Tensor:
        # detached: the number of kept dimensions is fixed, so it needs no gradient
        return (self._sizes.hidden / masks.hidden.detach().sum().clamp(min=1)).sqrt()

    def _before(self, factor: Callable[[Masks], Tensor]):
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0] * factor(self.masks).to(args[0].dtype), *args[1:])

        return hook

    def _after(self, factor: Callable[[Masks], Tensor]):
        def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return output * factor(self.masks).to(output.dtype)

        return hook


def resized(model: PreTrainedModel, sizes: TransformerSizes) -> Any:
    """The model's config with other sizes.

    Raises:
        ModelError: transformers does not save models of these sizes.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = sizes.layers
    config.hidden_size = sizes.hidden
    config.intermediate_size = sizes.intermediate
    config.num_key_value_heads = sizes.groups
    config.num_attention_heads = sizes.heads
    config.head_dim = _head_dim(model)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: sizes.layers]
    try:
        config.validate()
    except StrictDataclassError as error:
        raise ModelError(f"transformers refuses this shape: {str(error).rpartition('Error: ')[2]}") from error
    return config


@torch.no_grad()
def cut(model: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """A new model of the same class with the kept parts of another, which is not modified."""
    sizes, head_dim = sizes_of(model), _head_dim(model)
    groups = len(kept.groups[0])
    heads = groups * (sizes.heads // sizes.groups)
    wanted = TransformerSizes(len(kept.layers), len(kept.hidden), len(kept.intermediate[0]), heads, groups)
    config = resized(model, wanted)
    if getattr(config, "layer_types", None):
        config.layer_types = [model.config.layer_types[layer] for layer in kept.layers]
    with torch.random.fork_rng(devices=[]):  # initialisation draws random weights, which are replaced
        small = model.__class__(config).to(model.dtype).to(model.device).eval()  # type: ignore[arg-type]
    weights = dict(model.named_parameters())
    share = sizes.heads // sizes.groups * head_dim
    for name, weight in small.named_parameters():
        words = name.split(".")
        number = int(words[2]) if words[1] == "layers" else None
        chosen = {"hidden": kept.hidden}
        if number is not None:
            words[2] = str(kept.layers[number])
            chosen["queries"] = _spread(kept.groups[number], share)
            chosen["keys"] = _spread(kept.groups[number], head_dim)
            chosen["intermediate"] = kept.intermediate[number]
        _take(weight, weights[".".join(words)], _AXES[words[-2]], chosen)
    small.generation_config = copy.deepcopy(model.generation_config)
    return small


def _take(weight: Tensor, whole: Tensor, axes: tuple[str | None, ...], chosen: dict[str, tuple[int, ...]]) -> None:
    for axis in range(whole.ndim):
        kind = axes[axis]
        if kind is not None:
            whole = whole.index_select(axis, torch.tensor(chosen[kind], device=whole.device))
    weight.copy_(whole)


def _spread(places: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(place * size + offset for place in places for offset in range(size))


def _head_dim(model: PreTrainedModel) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
