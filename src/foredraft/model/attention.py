"""Attention over slots, registered with transformers under one name.

With grouped queries (GQA) the heads of a group are laid side by side as more queries of one head, so that keys
and values are read as they lie in the cache. Stock SDPA repeats them first as soon as a mask is given.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from foredraft.core.errors import ModelError

NAME = "foredraft_slots"
_FIELD = "_attn_implementation_internal"
_FEW = 64
"""Up to so many queries a head, two products and a softmax cost less on a CPU than its fused kernel."""


class AttentionObserver(ABC):
    """Sees the queries of one forward, layer by layer, and says over which keys and values they attend.

    It is handed to the model as the argument ``watch``, which models pass on to their attention function.
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
        """Keys and values for these queries, those of the N new nodes, ``key`` and ``value``, among them."""

    @abstractmethod
    def attended(self, layer: int, weights: Float[Tensor, "B K S"]) -> None:
        """If it wants them: the weights with which the first node attended, summed over the heads of a group."""


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
    watch: AttentionObserver | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention with an additive mask, in the call shape that transformers gives to an attention function.

    Args:
        query: [B, heads, N, E]; ``key`` [B, groups, S, E]; ``value`` [B, groups, S, F].
        attention_mask: [B, 1, N, S], additive; never None here, since masks are always made by ``masks``.
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.
        s_aux: one sink logit a head that takes a share of the softmax, as in GPT-OSS.
        watch: with one, ``key`` and ``value`` are those of the new nodes alone.

    Returns:
        [B, N, heads, F], and None for the weights.
    """
    if attention_mask is None:
        raise ModelError("This model is running in a generator of foredraft: run it when that has returned.")
    if watch is not None:
        layer, scale = module.layer_idx, query.shape[-1] ** -0.5 if scaling is None else scaling
        assert isinstance(layer, int)
        key, value = watch.attend_to(layer, query, key, value, scale)
        if watch.wants_weights:
            first = attention_weights(query[:, :, :1], key, attention_mask[:, :, :1], scale, softcap, s_aux)
            watch.attended(layer, first[:, :, :, 0].sum(2))
    return _mixed(query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux), None


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """The same for callers that are no transformers model: [B, N, heads, F]."""
    with NoCudnn(query.device):  # a model's forward has that as a whole
        return _mixed(query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux)


def _mixed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    rows, heads, nodes, _ = query.shape
    groups = key.shape[1]
    share = heads // groups
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = query.reshape(rows, groups, share * nodes, query.shape[-1])
    plain = softcap is None and s_aux is None
    if plain and (query.is_cuda or share * nodes > _FEW):
        mask = attention_mask.repeat(1, 1, share, 1) if share > 1 else attention_mask
        mixed = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    else:
        weights = attention_weights(query, key, attention_mask, scale, softcap, s_aux).to(value.dtype)
        mixed = weights.view(rows, groups, share * nodes, -1) @ value
    return mixed.reshape(rows, heads, nodes, -1).transpose(1, 2).contiguous()  # as stock functions do


def attention_weights(
    query: Float[Tensor, "B H N E"],
    key: Float[Tensor, "B K S E"],
    mask: Float[Tensor, "B 1 N S"],
    scale: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Float[Tensor, "B K G N S"]:
    """How much each query attends to each slot, the G heads of a group side by side; float32 at least."""
    rows, heads, nodes, width = query.shape
    share = heads // key.shape[1]
    packed = query.reshape(rows, key.shape[1], share * nodes, width)
    scores = (packed * scale) @ key.transpose(2, 3)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return _softmax(scores.view(rows, -1, share, nodes, key.shape[2]) + mask[:, :, None], s_aux)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of [B, groups, share, N, S], in float32 at least; sinks are one logit a head."""
    if sinks is None:
        return scores.softmax(-1, dtype=_wide(scores))
    rows, groups, share, nodes, _ = scores.shape
    sink = sinks.view(1, groups, share, 1, 1).expand(rows, groups, share, nodes, 1)
    return torch.cat([scores, sink.to(scores.dtype)], dim=-1).softmax(-1, dtype=_wide(scores))[..., :-1]


def _wide(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)


def _no_mask(*args: object, **kwargs: object) -> None:
    """Masks are handed in ready-made, in four dimensions or by layer type; there is never one to build."""


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, _no_mask)


class AttentionSwap:
    """Our attention on a model, while the context lasts; before and after, the model has its own.

    A model that does not take its attention from transformers' interface keeps its own: an additive mask in four
    dimensions works with that too. Not for two threads at once.

    An interruption may come just before the context is left: ``off`` does that again, as often as one likes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._configs: list[dict[str, Any]] = []  # their attributes: a config's own way of setting one is slow
        self._before: list[str | None] = []
        if not model._supports_attention_backend:
            return
        self._configs = [vars(config) for config in _configs_of(model)]
        self._before = [config[_FIELD] for config in self._configs]
        try:
            model.set_attn_implementation(NAME)
            takes = [config[_FIELD] == NAME for config in self._configs]
            self.off()
        except BaseException:
            self.off()
            raise
        self._configs = [config for config, our in zip(self._configs, takes, strict=True) if our]
        self._before = [own for own, our in zip(self._before, takes, strict=True) if our]

    def __enter__(self) -> None:
        for index, config in enumerate(self._configs):
            if config[_FIELD] != NAME:  # else it was left there, and is not the model's own
                self._before[index] = config[_FIELD]
                config[_FIELD] = NAME

    def __exit__(self, *error: object) -> None:
        self.off()

    def off(self) -> None:
        """Give the model its own attention back if it has ours."""
        for config, own in zip(self._configs, self._before, strict=True):
            if config[_FIELD] == NAME:
                config[_FIELD] = own


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model and of the models in it, and those that are inside of these."""
    waiting = [each.config for each in model.modules() if isinstance(each, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name) for name in config.sub_configs]
    return list(found.values())


class _CudnnSwitch:
    """Torch's flag for cuDNN's scaled dot products: off while anybody wants that, then as it was.

    The flag belongs to the process, so what it was and who wants it off is kept once for the process too. Who is
    interrupted and dropped before it has let go wants it no longer.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may close a model in the middle of this
        self._wanted_by: weakref.WeakSet[NoCudnn] = weakref.WeakSet()
        self._before: bool | None = None

    def off(self, who: "NoCudnn") -> None:
        with self._lock:
            if self._before is None:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
            self._wanted_by.add(who)
            torch.backends.cuda.enable_cudnn_sdp(False)

    def let_go(self, who: "NoCudnn") -> None:
        with self._lock:
            self._wanted_by.discard(who)
            if self._before is not None and not self._wanted_by:
                torch.backends.cuda.enable_cudnn_sdp(self._before)
                self._before = None


_CUDNN = _CudnnSwitch()


class NoCudnn:
    """On a CUDA device scaled dot products leave cuDNN alone while the context lasts.

    It makes a plan for every new shape, which takes tens of milliseconds, and here shapes change as rows grow.
    """

    def __init__(self, device: torch.device) -> None:
        self._applies = device.type == "cuda"

    def __enter__(self) -> None:
        if self._applies:
            _CUDNN.off(self)

    def __exit__(self, *error: object) -> None:
        self.off()

    def off(self) -> None:
        """Leave the context, if that has not been done."""
        if self._applies:
            _CUDNN.let_go(self)
