"""The decoder layers of draft heads on the kernels: EAGLE's, and Hydra++'s prefix layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foredraft.core.draft import Draft
from foredraft.core.drafter import View
from foredraft.heads.layers import HeadLayers
from foredraft.heads.nets.blocks import Block, BlockConfig, Rotary
from foredraft.heads.nets.eagle import Eagle, Eagle3, EagleNet, MidLayer
from foredraft.heads.nets.hydra import PrefixLayer
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.native import library as c
from foredraft.model.native.drafting import TreeDrafter, TreeSize, UnreadStates
from foredraft.model.native.families import ACTIVATIONS, Frequencies
from foredraft.model.native.linear import NativeEmbedding, NativeLinear
from foredraft.model.native.model import NativeParts
from foredraft.model.native.runner import Runner, RunnerShape
from foredraft.model.native.weights import PackedMatrix

STATES, FUSED, BESIDE = 1, 2, 3
"""What the first layer reads; see ``kernels/engine.h``."""
_UNLIMITED = 1 << 30
"""Heads have no largest position."""


@dataclass(frozen=True, eq=False, slots=True)
class _Layers:
    """What the kernels run of a head. ``given``: fields of ``c.Model`` that differ between heads."""

    config: BlockConfig
    blocks: Sequence[nn.Module]  # Block or MidLayer
    rotary: Rotary
    norm: nn.RMSNorm | None
    given: Mapping[str, Any]


@final
class NativeHeadLayers(HeadLayers):
    """The layers of a head over a slot cache, as ``FeatureCache`` takes them; the weights are those of the net.

    Returns states before the final norm, of Hydra++'s prefix after it.

    Args:
        net: all of its linear layers are ``NativeLinear``.
        kv_cache_dtype: of keys and values; see ``runner.KV_DTYPES``.
    """

    reads_masks = False
    fused_taps: tuple[int, ...] = ()
    """The target's layers of which ``draft`` makes the features of new entries; none: they were made before."""

    def __init__(self, net: EagleNet | PrefixLayer, parts: NativeParts, *, kv_cache_dtype: str = "float16") -> None:
        layers = _prefix(net) if isinstance(net, PrefixLayer) else _eagle(net, parts)
        config = layers.config
        frequencies = Frequencies(layers.rotary.frequencies.detach().cpu(), layers.rotary.scale)
        sizes = (len(layers.blocks), config.num_key_value_heads, config.head_dim, ("rows",), (frequencies,), _UNLIMITED)
        self.runner = Runner(parts.engine, RunnerShape(*sizes), kv_cache_dtype)
        self.model = _model(layers, self.runner.kv)
        self._held = net, parts, layers
        count = len(layers.blocks)
        self._tap = count + 1 if isinstance(net, PrefixLayer) else count
        self._trees: TreeDrafter | None = None
        if isinstance(net, EagleNet):
            carried = count + 1 if isinstance(net, Eagle3) and net.config.norm_carried else count
            vocabulary = None if net.vocabulary is None else net.vocabulary.contiguous()
            tokens = parts.vocab_size if vocabulary is None else len(vocabulary)
            windows = c.numbers((net.window or 0,))
            self.fused_taps = net.taps if not isinstance(net, Eagle3) or net.fuses_linearly else ()
            fused = _matrix(net.fc).struct() if isinstance(net, Eagle3) and self.fused_taps else None
            self._trees = TreeDrafter(self.runner, self.model, fused, windows, carried, tokens, vocabulary)

    def reserve(self, length: int) -> int:
        """Make tables for positions below ``length``; 0, since no other forward reads them."""
        self.runner.reserve(length)
        return 0

    def __call__(
        self, step: StepIn, cache: SlotCache, features: Float[Tensor, "B N F"], mask: Float[Tensor, "B 1 N S"] | None
    ) -> Float[Tensor, "B N H"]:
        """The states of a step, whose keys and values are written to their slots."""
        features = features.float().contiguous()
        states = torch.empty(*step.tokens.shape, self.model.hidden)
        with self.runner.engine.lock:
            given, held = self.runner.step(step, cache)
            given.states = features.data_ptr()
            given.taps, given.tap_count = (c.Tap * 1)(c.Tap(self._tap, states.data_ptr())), 1
            self.runner.forward(self.model, given, step.positions)
        del held
        return states

    def draft(self, view: View, cache: SlotCache, unread: UnreadStates, size: TreeSize) -> Draft:
        """A dynamic tree of the head, which first reads the last committed entries; see ``TreeDrafter``."""
        assert self._trees is not None
        return self._trees.draft(view, cache, unread, size)


def head_layers(net: EagleNet | PrefixLayer, parts: object) -> NativeHeadLayers | None:
    """The layers on the kernels, if the net is there."""
    quantised = any(isinstance(module, NativeLinear) for module in net.modules())
    return NativeHeadLayers(net, parts) if quantised and isinstance(parts, NativeParts) else None


def _eagle(net: EagleNet, parts: NativeParts) -> _Layers:
    embedding, factor = parts.embedding, parts.embedding_factor
    shared = {"head": parts.output.struct(), "logit_scale": parts.logit_scale, "logit_cap": parts.logit_cap}
    if isinstance(net, Eagle):
        given = {"entry": FUSED, "fusion": _matrix(net.fc).struct(), **shared}
        blocks, norm = tuple(net.layers), None
    else:
        assert isinstance(net, Eagle3)
        first = net.midlayer
        if net.embed_tokens is not None:
            embedding, factor = _matrix(net.embed_tokens), 1.0
        own = {} if net.lm_head is None else {"head": _matrix(net.lm_head).struct(), "logit_scale": 1.0}
        given = {
            "entry": BESIDE,
            "token_norm": first.input_layernorm.weight.data_ptr(),
            "state_norm": first.hidden_norm.weight.data_ptr(),
            "normed_residual": int(net.config.norm_before_residual),
            **(own or shared),
        }
        blocks, norm = (first, *net.layers), net.norm
    given |= {"embedding": embedding.struct(), "embedding_scale": factor, "outputs": given["head"].outputs}
    given |= {"vocabulary": embedding.outputs}
    return _Layers(net.config.block, blocks, net.rotary, norm, given)


def _prefix(net: PrefixLayer) -> _Layers:
    return _Layers(net.config, (net.layer,), net.rotary, net.norm, {"entry": STATES})


def _model(layers: _Layers, kv: int) -> c.Model:
    config = layers.config
    each = [_layer(block, config) for block in layers.blocks]
    return c.Model(
        layers=len(each),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        rotary_dim=2 * len(layers.rotary.frequencies),
        rotary_tables=1,
        kinds=1,
        activation=ACTIVATIONS[config.hidden_act],
        gated=1,
        head_norm=int(config.qk_norm),
        kv=kv,
        eps=config.rms_norm_eps,
        residual_scale=1.0,
        attention_scale=config.head_dim**-0.5,
        layer=(c.Layer * len(each))(*each),
        final_norm=None if layers.norm is None else layers.norm.weight.data_ptr(),
        **layers.given,
    )


def _layer(block: nn.Module, config: BlockConfig) -> c.Layer:
    assert isinstance(block, (Block, MidLayer))
    attention, mlp = block.self_attn, block.mlp
    assert attention.fused is not None and mlp.fused is not None
    each = (attention.fused, attention.o_proj, mlp.fused, mlp.down_proj)
    norms = {"before_mlp": block.post_attention_layernorm, "before_attention": block.input_layernorm}
    if config.qk_norm:
        norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    pointers = {name: norm.weight.data_ptr() for name, norm in norms.items() if isinstance(norm, nn.RMSNorm)}
    return c.Layer(*(_matrix(layer).struct() for layer in each), **pointers)


def _matrix(layer: nn.Module) -> PackedMatrix:
    assert isinstance(layer, (NativeLinear, NativeEmbedding))
    return layer.matrix
