"""New heads for a target: shapes, and a warm start from the target's weights."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.block import block_like, rotary_of
from foredraft.heads.formats.layers import default_taps
from foredraft.heads.glide_model import check_readable
from foredraft.heads.nets.blocks import Attention
from foredraft.heads.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.heads.nets.glide import Glide, GlideConfig
from foredraft.heads.nets.hydra import Hydra, HydraConfig
from foredraft.heads.nets.medusa import Blockwise, BlockwiseConfig, Medusa, MedusaConfig
from foredraft.model.base import TargetModel
from foredraft.model.hf.head_parts import output_weight
from foredraft.model.hf.taps import body, decoder_layers
from foredraft.model.memory import is_plain


def new_eagle(target: TargetModel, warm: bool = True) -> Eagle:
    """An EAGLE-1/2 head in the shape of the target's layers."""
    block = block_like(target.config)
    net = Eagle(EagleConfig(block=block, fc_bias=False), rotary_of(block), target.parts())
    _initialize(net)
    if warm:
        last = decoder_layers(target.module)[-1]
        _copy_layer(net.layers[0], last)
        with torch.no_grad():
            width = block.hidden_size
            net.fc.weight[:, width:] += torch.eye(width)
    return net


def new_eagle3(
    target: TargetModel, vocabulary: Tensor | None, taps: tuple[int, ...] | None = None, warm: bool = True
) -> Eagle3:
    """An EAGLE-3 head in the shape of the target's layers.

    Args:
        vocabulary: sorted target ids of the draft vocabulary; None for all.
        taps: hidden layers to read; by default 2, N/2 and N - 3, as in the published code.
    """
    block = block_like(target.config)
    parts = target.parts()
    config = Eagle3Config(
        block=block,
        vocab_size=parts.vocab_size,
        draft_vocab_size=parts.vocab_size if vocabulary is None else len(vocabulary),
        target_hidden_size=parts.hidden_size,
        taps=taps or _new_taps(target.layers),
    )
    net = Eagle3(config, rotary_of(block), parts)
    _initialize(net)
    if vocabulary is not None:
        net.vocabulary = vocabulary.to(torch.long)
    if warm:
        _warm_eagle3(net, target)
    return net


def _new_taps(layers: int) -> tuple[int, ...]:
    """The default taps, or nearby layers in small models where these coincide.

    Raises:
        DrafterError: fewer than three layers.
    """
    if layers < 3:
        raise DrafterError(f"EAGLE-3 fuses three hidden layers; this target has {layers}.")
    taps = default_taps(layers)
    return taps if len(taps) == 3 and taps[0] > 0 else (1, max(2, (layers + 1) // 2), layers)


@torch.no_grad()
def _warm_eagle3(net: Eagle3, target: TargetModel) -> None:
    """Copy output layer, norms and last decoder layer from the target; pass the highest feature through."""
    if net.lm_head is not None:
        rows = slice(None) if net.vocabulary is None else net.vocabulary
        net.lm_head.weight.copy_(output_weight(target.module)[rows])
    _copy_final_norm(net.norm, target)
    width = net.fc.weight.shape[0]
    if net.fc.weight.shape[1] == len(net.taps) * width:
        net.fc.weight[:, -width:] += torch.eye(width)
    _copy_layer(net.midlayer, decoder_layers(target.module)[-1])


def new_glide(target: TargetModel, warm: bool = True) -> Glide:
    """A GLIDE head in the shape of the target's layers, which reads the keys of the last one.

    Raises:
        DrafterError: the target's last layer attends within a window, or stores keys of another shape.
    """
    config = GlideConfig(block=block_like(target.config), layer=target.layers - 1)
    check_readable(config, target)
    net = Glide(config, rotary_of(config.block), target.parts())
    _initialize(net)
    if warm:
        _warm_glide(net, target)
    return net


@torch.no_grad()
def _warm_glide(net: Glide, target: TargetModel) -> None:
    """The target's first attention, which reads embeddings as ours does, and the queries and MLP of its last layer,
    whose keys ours reads."""
    layers = decoder_layers(target.module)
    first, last = layers[0], layers[-1]
    for mine in (net.input_layernorm, net.self_attn):
        _copy_parts(net, mine, first)
    for mine in (net.post_attention_layernorm, net.mlp):
        _copy_parts(net, mine, last)
    theirs = dict(last.named_parameters())
    for name, weight in net.cross_attn.named_parameters():
        _copy_same(weight, theirs.get(f"self_attn.{name}"))
    _copy_same(net.cross_layernorm.weight, theirs.get("input_layernorm.weight"))
    _copy_final_norm(net.norm, target)


def _copy_parts(net: nn.Module, mine: nn.Module, theirs: nn.Module) -> None:
    """Copy the parameters of a child of the net from those of the same names in the target's layer."""
    name = next(name for name, child in net.named_children() if child is mine)
    source = dict(theirs.named_parameters())
    for own, weight in mine.named_parameters():
        _copy_same(weight, source.get(f"{name}.{own}"))


def _copy_same(mine: Tensor, theirs: Tensor | None) -> None:
    """Copy a parameter, unless the other has another shape or is quantised."""
    if theirs is not None and theirs.shape == mine.shape and is_plain(theirs):
        mine.copy_(theirs)


def _copy_final_norm(mine: nn.RMSNorm, target: TargetModel) -> None:
    norm = getattr(body(target.module), "norm", None)
    _copy_same(mine.weight, getattr(norm, "weight", None))


@torch.no_grad()
def _copy_layer(mine: nn.Module, theirs: nn.Module) -> None:
    """Copy parameters of the same name from the target's layer, but no quantised ones; wider projections keep new
    weights for the rest."""
    source: dict[str, Tensor] = {name: each for name, each in theirs.named_parameters() if is_plain(each)}
    if isinstance(getattr(mine, "self_attn", None), Attention) and hasattr(mine, "hidden_norm"):
        source["hidden_norm.weight"] = source.get("input_layernorm.weight", torch.empty(0))
    for name, weight in mine.named_parameters():
        other = source.get(name)
        if other is None or other.ndim != weight.ndim or other.shape[0] != weight.shape[0]:
            continue
        if other.shape == weight.shape:
            weight.copy_(other)
        elif other.shape[1] * 2 == weight.shape[1]:  # EAGLE-3's projections read embedding and feature
            weight[:, other.shape[1] :].copy_(other)
            weight[:, : other.shape[1]] *= 0.2


@torch.no_grad()
def _initialize(net: nn.Module) -> None:
    """Small random matrices, scaled by fan-in."""
    rng = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            spread = 0.5 / math.sqrt(module.in_features)
            module.weight.copy_(torch.randn(module.weight.shape, generator=rng) * spread)
            if module.bias is not None:
                module.bias.zero_()


def frequent_tokens(ids: np.ndarray, counts: np.ndarray, size: int, vocab_size: int) -> Tensor:
    """The ``size`` most frequent ids that count in the loss, sorted; filled up with the lowest ids."""
    seen = np.bincount(ids[counts > 0], minlength=vocab_size)[:vocab_size]
    order = np.argsort(-seen, kind="stable")[:size]
    return torch.from_numpy(np.sort(order).copy())


def new_medusa(target: TargetModel, heads: int, layers: int = 1, own_heads: bool = False) -> Medusa:
    """Medusa heads that initially predict the target's next token: zero residual blocks, the target's output layer."""
    parts = target.parts()
    net = Medusa(
        MedusaConfig(
            hidden_size=parts.hidden_size,
            vocab_size=parts.vocab_size,
            num_heads=heads,
            num_layers=layers,
            own_heads=own_heads,
        ),
        parts,
    )
    _copy_output_layers(net.heads, target)
    return net


def new_blockwise(target: TargetModel, heads: int) -> Blockwise:
    """Heads of blockwise decoding, with the inner size of the target's MLP."""
    parts = target.parts()
    inner = block_like(target.config).intermediate_size
    config = BlockwiseConfig(
        hidden_size=parts.hidden_size, vocab_size=parts.vocab_size, num_heads=heads, inner_size=inner
    )
    return Blockwise(config, parts)


def new_hydra(target: TargetModel, heads: int, layers: int, own_heads: bool, prefix: bool) -> Hydra:
    """Hydra heads (Hydra++ with ``prefix``) that initially pass the target's state through."""
    parts, block = target.parts(), block_like(target.config)
    config = HydraConfig(
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        num_heads=heads,
        num_layers=layers,
        prefix=block if prefix else None,
        own_heads=own_heads,
    )
    net = Hydra(config, rotary_of(block) if prefix else None, parts)
    if net.prefix is not None:
        _copy_layer(net.prefix.layer, decoder_layers(target.module)[-1])
    width = parts.hidden_size
    with torch.no_grad():
        for mlp in net.mlps:
            mlp.res_connection.weight.mul_(0.1)  # type: ignore[union-attr]
            mlp.res_connection.weight[:, :width] += torch.eye(width)  # type: ignore[union-attr,index]
    _copy_output_layers(net.heads, target)
    return net


@torch.no_grad()
def _copy_output_layers(heads: nn.ModuleList, target: TargetModel) -> None:
    """Initialize every output layer with the target's."""
    weight = output_weight(target.module)
    for head in heads:
        head.weight.copy_(weight)  # type: ignore[union-attr,operator]
        if head.bias is not None:
            head.bias.zero_()  # type: ignore[union-attr,operator]
