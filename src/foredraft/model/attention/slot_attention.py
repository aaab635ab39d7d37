"""Attention over slots, registered with transformers under one name.

Its mask is additive, or a table for the kernel in ``tree_attention``. With grouped-query attention (GQA) the heads of a
group become additional queries of one head, so keys and values are read from the cache without a copy. Stock SDPA
repeats them if a mask is given.
"""

import functools
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from foredraft.core.errors import ModelError
from foredraft.model.hf_types import PreTrainedModel

_log = logging.getLogger(__name__)

NAME = "foredraft_slots"
_FIELD = "_attn_implementation_internal"
_FEW = 64
"""On a CPU, up to this many queries per head, two matrix products and a softmax beat the fused kernel."""
_MOST_SCORES = 1 << 25
"""Most scores in memory at a time where no fused kernel applies; bounds the prefill of such models."""


class AttentionObserver(ABC):
    """Receives the queries of one forward, layer by layer, and chooses the keys and values that they attend to.

    It is passed to the model as the keyword ``observer``, which models pass on to their attention function.
    """

    wants_weights: bool = False

    @abstractmethod
    def attend_to(
        self,
        layer: int,
        query: Float[Tensor, "B H N E"],
        key: Float[Tensor, "B K N E"],
        value: Float[Tensor, "B K N F"],
        scale: float,
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S F"]]:
        """The keys and values for these queries, including those of the N new nodes (``key`` and ``value``)."""

    def mask(self, layer: int, mask: Float[Tensor, "B 1 M S"]) -> Float[Tensor, "B #K M T"]:
        """The additive mask over the keys of ``attend_to``, given that of the forward (``repeated`` or not)."""
        return mask

    @abstractmethod
    def record_weights(self, layer: int, weights: Float[Tensor, "B K S"]) -> None:
        """Called if ``wants_weights``, with the first node's attention weights, summed over the heads of a group."""


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    observer: AttentionObserver | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention with an additive mask, with the signature of a transformers attention function.

    Args:
        query: [B, heads, N, E]; ``key`` [B, groups, S, E]; ``value`` [B, groups, S, F].
        attention_mask: [B, 1, N, S], additive, or ``repeated``; or a ``Visible.table``, with key and value as the cache
            stores them; None only if something else runs the model during a forward.
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.
        s_aux: one sink logit per head that takes part in the softmax, as in GPT-OSS.
        observer: if given, ``key`` and ``value`` are those of the new nodes only.

    Returns:
        [B, N, heads, F], and None for the weights.

    Raises:
        ModelError: the model was called while a generator is running it.
    """
    if attention_mask is None:
        raise ModelError("This model is in use by a foredraft generator: call it after the generator has returned.")
    if observer is not None:
        layer, scale = module.layer_idx, query.shape[-1] ** -0.5 if scaling is None else scaling
        assert isinstance(layer, int)
        key, value = observer.attend_to(layer, query, key, value, scale)
        attention_mask = observer.mask(layer, attention_mask)
        if observer.wants_weights:
            first = attention_weights(query[:, :, :1], key, attention_mask[:, :, :1], scale, softcap, s_aux)
            observer.record_weights(layer, first[:, :, :, 0].sum(2))
    return _attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux), None


def masked_attention(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
    """Like ``slot_attention``, for callers other than transformers models: [B, N, heads, F]."""
    with NoCudnn(query.device):  # a ``CausalLM`` forward is in this context already
        return _attend(query, key, value, attention_mask)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask.dtype == torch.int64:
        from foredraft.model.attention.tree_attention import tree_attention  # needs Triton

        return tree_attention(query, key, value, attention_mask, scaling=scale, softcap=softcap, s_aux=s_aux)
    rows, heads, nodes, _ = query.shape
    groups = key.shape[1]
    share = heads // groups
    plain = softcap is None and s_aux is None
    if plain and _fused(query.device, share * nodes):
        packed = query.reshape(rows, groups, share * nodes, query.shape[-1])
        mask = repeated(attention_mask, share, nodes)
        output = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    else:
        step = max(_MOST_SCORES // (rows * heads * key.shape[2]), 1)
        parts = []
        for queries, mask in zip(query.split(step, 2), attention_mask[:, :, :nodes].split(step, 2), strict=True):
            weights = attention_weights(queries, key, mask, scale, softcap, s_aux).to(value.dtype)
            parts.append((weights.flatten(2, 3) @ value).view(rows, heads, queries.shape[2], -1))
        output = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return output.reshape(rows, heads, nodes, -1).transpose(1, 2).contiguous()  # as stock functions do


def _fused(device: torch.device, queries: int) -> bool:
    """Whether the fused kernel is faster for this number of queries per head."""
    return device.type == "cuda" or queries > _FEW


def repeated(mask: Float[Tensor, "B 1 M S"], share: int, nodes: int) -> Float[Tensor, "B 1 L S"]:
    """The mask of the packed queries of ``share`` heads at these nodes. Layers that get it repeated copy nothing."""
    return mask if mask.shape[2] == share * nodes else mask[:, :, :nodes].repeat(1, 1, share, 1)


def attention_weights(
    query: Float[Tensor, "B H N E"],
    key: Float[Tensor, "B K S E"],
    mask: Float[Tensor, "B 1 N S"],
    scale: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Float[Tensor, "B K G N S"]:
    """Attention weights of each query on each slot, for the G heads of each group; float32 at least."""
    rows, heads, nodes, width = query.shape
    share = heads // key.shape[1]
    packed = query.reshape(rows, key.shape[1], share * nodes, width)
    scores = (packed * scale) @ key.transpose(2, 3)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return _softmax(scores.view(rows, -1, share, nodes, key.shape[2]) + mask[:, :, None], s_aux)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of [B, groups, share, N, S], in float32 at least; ``sinks``: one logit per head."""
    if sinks is None:
        return scores.softmax(-1, dtype=_wide(scores))
    rows, groups, share, nodes, _ = scores.shape
    sink = sinks.view(1, groups, share, 1, 1).expand(rows, groups, share, nodes, 1)
    return torch.cat([scores, sink.to(scores.dtype)], dim=-1).softmax(-1, dtype=_wide(scores))[..., :-1]


def _wide(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)


@functools.cache
def runs_kernel(device: torch.device) -> bool:
    """Whether ``tree_attention`` runs on this device: on a GPU with Triton, and anywhere in Triton's interpreter."""
    if find_spec("triton") is None or not (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    values = torch.arange(1024.0, device=device).half().view(1, 1, 64, 16)
    table = torch.tensor([[[[0, 0, 64, 7, 8]]]], device=device)  # slot 7 alone
    try:
        found = masked_attention(values[:, :, :1], values, values, table)
        works = bool((found[0, 0] == values[0, :, 7]).all())
        reason = "wrong results"
    except Exception as error:  # a driver, a GPU or a C compiler that Triton misses
        works, reason = False, str(error)
    if not works:
        _log.warning("Triton does not run on %s, so attention reads masks: %s", device, reason)
    return works


def _no_mask(*args: object, **kwargs: object) -> None:
    """Builds no mask: callers always pass 4-D masks, or a dict of them by layer type."""


def _register() -> None:
    """Make our attention known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface  # modelling code: see ``hf_types``

    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


class AttentionSwap:
    """A context in which a model uses our attention instead of its own.

    Models that do not use transformers' attention interface keep their own, which also accepts an additive 4-D mask.
    Not thread-safe.

    An interruption may prevent ``__exit__``; ``off`` restores the model and may be called any number of times.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        self._share = heads // (getattr(config, "num_key_value_heads", None) or heads)
        self._configs: list[dict[str, Any]] = []  # their attribute dicts, since a config's own setter is slow
        self._before: list[str | None] = []
        if not model._supports_attention_backend:
            return
        _register()
        self._configs = [vars(config) for config in _configs_of(model)]
        self._before = [config[_FIELD] for config in self._configs]
        try:
            model.set_attn_implementation(NAME)
            swapped = [config[_FIELD] == NAME for config in self._configs]
            self.off()
        except BaseException:
            self.off()
            raise
        configs = [config for config, ours in zip(_configs_of(model), swapped, strict=True) if ours]
        configs += _other_configs(model, configs)
        self._configs = [vars(config) for config in configs]
        self._before = [config[_FIELD] for config in self._configs]

    @property
    def applies(self) -> bool:
        """Whether the model takes our attention."""
        return bool(self._configs)

    def prepared(self, masks: dict[str, Float[Tensor, "B 1 N S"]]) -> dict[str, Float[Tensor, "B 1 M S"]]:
        """The masks as the layers read them, ``repeated`` where each layer would do it."""
        first = next(iter(masks.values()))
        nodes = first.shape[2]
        if not self.applies or self._share == 1 or not _fused(first.device, self._share * nodes):
            return masks
        return {kind: repeated(mask, self._share, nodes) for kind, mask in masks.items()}

    def __enter__(self) -> None:
        for index, config in enumerate(self._configs):
            if config[_FIELD] != NAME:  # else it is left over from an interrupted forward
                self._before[index] = config[_FIELD]
                config[_FIELD] = NAME

    def __exit__(self, *error: object) -> None:
        self.off()

    def off(self) -> None:
        """Restore the model's own attention."""
        for config, own in zip(self._configs, self._before, strict=True):
            if config[_FIELD] == NAME:
                config[_FIELD] = own


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model and its submodels, with their sub-configs."""
    from transformers import PreTrainedModel as model_type

    pending = [each.config for each in model.modules() if isinstance(each, model_type)]
    found: dict[int, PreTrainedConfig] = {}
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name) for name in config.sub_configs]
    return list(found.values())


def _other_configs(model: PreTrainedModel, known: list[PreTrainedConfig]) -> list[PreTrainedConfig]:
    """Configs like the known ones of single layers, such as those that were copied from another model."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and config.__class__ in map(type, known):
            configs[id(config)] = config
    return [config for number, config in configs.items() if number not in map(id, known)]


class NoCudnn:
    """A context without cuDNN scaled-dot-product attention, for CUDA devices.

    cuDNN builds a plan for every new shape, which takes tens of milliseconds, and shapes change as rows grow. Torch's
    flag is one for the process: off while any context lasts, then restored. One that is interrupted and collected
    before it is left does not keep the flag off.
    """

    _lock = threading.RLock()  # reentrant, since a finalizer may close a model at any point
    _entered: ClassVar["weakref.WeakSet[NoCudnn]"] = weakref.WeakSet()
    _before: bool | None = None

    def __init__(self, device: torch.device) -> None:
        self._applies = device.type == "cuda"

    def __enter__(self) -> None:
        if self._applies:
            with self._lock:
                if NoCudnn._before is None:
                    NoCudnn._before = torch.backends.cuda.cudnn_sdp_enabled()
                self._entered.add(self)
                torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *error: object) -> None:
        self.off()

    def off(self) -> None:
        """Leave the context, if not left already."""
        if self._applies:
            with self._lock:
                self._entered.discard(self)
                if NoCudnn._before is not None and not self._entered:
                    torch.backends.cuda.enable_cudnn_sdp(NoCudnn._before)
                    NoCudnn._before = None
