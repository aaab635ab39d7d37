"""New heads for a target: their shapes, and a warm start from the target's own weights."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from foredraft.core.errors import DrafterError
from foredraft.heads.nets.blocks import Attention
from foredraft.heads.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.heads.nets.hydra import Hydra, HydraConfig
from foredraft.heads.nets.medusa import Blockwise, BlockwiseConfig, Medusa, MedusaConfig
from foredraft.model.head_parts import block_like, parts_of, rotary_of
from foredraft.model.hf import CausalLM
from foredraft.model.taps import body, decoder_layers


def new_eagle(target: CausalLM, warm: bool = True) -> Eagle:
    """An EAGLE-1/2 head in the shape of the target's layers."""
    block = block_like(target.model)
    net = Eagle(EagleConfig(block=block, fc_bias=False), rotary_of(block), parts_of(target.model))
    _initialize(net)
    if warm:
        last = decoder_layers(target.model)[-1]
        _take_layer(net.layers[0], last)
        with torch.no_grad():
            width = block.hidden_size
            net.fc.weight[:, width:] += torch.eye(width)
    return net


def new_eagle3(
    target: CausalLM, vocabulary: Tensor | None, taps: tuple[int, ...] | None = None, warm: bool = True
) -> Eagle3:
    """An EAGLE-3 head in the shape of the target's layers.

    Args:
        vocabulary: the target ids that it can say, rising; None for all.
        taps: the hidden layers that it reads; by default 2, N/2 and N - 3, as the published code has it.
    """
    block = block_like(target.model)
    parts = parts_of(target.model)
    config = Eagle3Config(
        block=block,
        vocab_size=parts.vocab_size,
        draft_vocab_size=parts.vocab_size if vocabulary is None else len(vocabulary),
        target_hidden_size=parts.hidden_size,
        taps=taps or default_taps(target.layers),
    )
    net = Eagle3(config, rotary_of(block), parts)
    _initialize(net)
    if vocabulary is not None:
        net.vocabulary = vocabulary.to(torch.long)
    if warm:
        _warm_eagle3(net, target)
    return net


def default_taps(layers: int) -> tuple[int, ...]:
    """2, N/2 and N - 3 decoder layers passed; small models, where these coincide, get what is next to it."""
    taps = (2, layers // 2, layers - 3)
    if 0 < taps[0] < taps[1] < taps[2]:
        return taps
    if layers < 3:
        raise DrafterError(f"EAGLE-3 fuses three hidden layers; this target has {layers}.")
    return (1, max(2, (layers + 1) // 2), layers)


@torch.no_grad()
def _warm_eagle3(net: Eagle3, target: CausalLM) -> None:
    """Output layer, norms and decoder layer from the target's last ones; the highest feature passes through."""
    head: nn.Module | None = target.model.get_output_embeddings()
    if net.lm_head is not None and head is not None:
        rows = slice(None) if net.vocabulary is None else net.vocabulary
        net.lm_head.weight.copy_(head.weight[rows])  # type: ignore[index]
    norm = getattr(body(target.model), "norm", None)
    if norm is not None and norm.weight.shape == net.norm.weight.shape:
        net.norm.weight.copy_(norm.weight)
    width = net.fc.weight.shape[0]
    if net.fc.weight.shape[1] == len(net.taps) * width:
        net.fc.weight[:, -width:] += torch.eye(width)
    _take_layer(net.midlayer, decoder_layers(target.model)[-1])


@torch.no_grad()
def _take_layer(mine: nn.Module, theirs: nn.Module) -> None:
    """Copy what has the same name from the target's layer; a projection that reads more than it gets the rest new."""
    source: dict[str, Tensor] = dict(theirs.named_parameters())
    if isinstance(getattr(mine, "self_attn", None), Attention) and hasattr(mine, "hidden_norm"):
        source["hidden_norm.weight"] = source.get("input_layernorm.weight", torch.empty(0))
    for name, weight in mine.named_parameters():
        other = source.get(name)
        if other is None or other.ndim != weight.ndim or other.shape[0] != weight.shape[0]:
            continue
        if other.shape == weight.shape:
            weight.copy_(other)
        elif other.shape[1] * 2 == weight.shape[1]:  # EAGLE-3's projections read the embedding, then the feature
            weight[:, other.shape[1] :].copy_(other)
            weight[:, : other.shape[1]] *= 0.2


@torch.no_grad()
def _initialize(net: nn.Module) -> None:
    """Small random matrices, by their number of inputs."""
    chance = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            spread = 0.5 / math.sqrt(module.in_features)
            module.weight.copy_(torch.randn(module.weight.shape, generator=chance) * spread)
            if module.bias is not None:
                module.bias.zero_()


def frequent_tokens(ids: np.ndarray, counts: np.ndarray, size: int, vocab_size: int) -> Tensor:
    """The ``size`` ids that count most often, rising; the lowest ids fill up where the text has fewer."""
    seen = np.bincount(ids[counts > 0], minlength=vocab_size)[:vocab_size]
    order = np.argsort(-seen, kind="stable")[:size]
    return torch.from_numpy(np.sort(order).copy())


def new_medusa(target: CausalLM, heads: int, layers: int = 1, own_heads: bool = False) -> Medusa:
    """Medusa heads that say at first what the target says next: residual blocks of zeros, the target's output layer."""
    parts = parts_of(target.model)
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
    _take_heads(net.heads, target)
    return net


def new_blockwise(target: CausalLM, heads: int) -> Blockwise:
    """Heads of blockwise decoding, as wide inside as the target's feed-forward layers."""
    parts = parts_of(target.model)
    inner = block_like(target.model).intermediate_size
    config = BlockwiseConfig(
        hidden_size=parts.hidden_size, vocab_size=parts.vocab_size, num_heads=heads, inner_size=inner
    )
    return Blockwise(config, parts)


def new_hydra(target: CausalLM, heads: int, layers: int, own_heads: bool, prefix: bool) -> Hydra:
    """Hydra heads (with ``prefix``, Hydra++) whose shortcuts pass the target's state through at first."""
    parts, block = parts_of(target.model), block_like(target.model)
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
        _take_layer(net.prefix.layer, decoder_layers(target.model)[-1])
    width = parts.hidden_size
    with torch.no_grad():
        for mlp in net.mlps:
            mlp.res_connection.weight.mul_(0.1)  # type: ignore[union-attr]
            mlp.res_connection.weight[:, :width] += torch.eye(width)  # type: ignore[union-attr,index]
    _take_heads(net.heads, target)
    return net


@torch.no_grad()
def _take_heads(heads: nn.ModuleList, target: CausalLM) -> None:
    """Every output layer begins as the target's."""
    theirs: nn.Module | None = target.model.get_output_embeddings()
    for head in heads:
        if theirs is not None:
            head.weight.copy_(theirs.weight)  # type: ignore[union-attr,operator]
            if head.bias is not None:
                head.bias.zero_()  # type: ignore[union-attr,operator]
