"""Heads with random weights for tiny targets: what a drafter says then is nonsense, and must still be lossless."""

from typing import Any

import torch

import tiny
from foredraft.model.causal import CausalLM
from foredraft.model.parts import block_like, parts_of, rotary_of
from foredraft.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.nets.hydra import Hydra, HydraConfig
from foredraft.nets.medusa import Blockwise, BlockwiseConfig, Medusa, MedusaConfig


def _shaken(net: Any, seed: int, spread: float = 1.5) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tiny.shake(net, spread)
    return net.eval().requires_grad_(False)


def eagle(target: CausalLM, *, seed: int = 0, num_layers: int = 1, fc_bias: bool = True, **block: Any) -> Eagle:
    shape = block_like(target.model, **block)
    config = EagleConfig(block=shape, num_layers=num_layers, fc_bias=fc_bias)
    return _shaken(Eagle(config, rotary_of(shape), parts_of(target.model)), seed)


def eagle3(
    target: CausalLM,
    *,
    seed: int = 0,
    taps: tuple[int, ...] = (0, 1, 2),
    vocabulary: torch.Tensor | None = None,
    block: dict[str, Any] | None = None,
    **flags: Any,
) -> Eagle3:
    shape = block_like(target.model, **(block or {}))
    parts = parts_of(target.model)
    config = Eagle3Config(
        block=shape,
        vocab_size=parts.vocab_size,
        draft_vocab_size=parts.vocab_size if vocabulary is None else len(vocabulary),
        target_hidden_size=parts.hidden_size,
        taps=taps,
        **flags,
    )
    net = Eagle3(config, rotary_of(shape), parts)
    if vocabulary is not None:
        net.vocabulary = vocabulary
    return _shaken(net, seed)


def medusa(
    target: CausalLM, *, seed: int = 0, heads: int = 3, layers: int = 1, own_heads: bool = True, **more: Any
) -> Medusa:
    parts = parts_of(target.model)
    config = MedusaConfig(
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        num_heads=heads,
        num_layers=layers,
        own_heads=own_heads,
        **more,
    )
    return _shaken(Medusa(config, parts), seed)


def blockwise(target: CausalLM, *, seed: int = 0, heads: int = 3) -> Blockwise:
    parts = parts_of(target.model)
    config = BlockwiseConfig(hidden_size=parts.hidden_size, vocab_size=parts.vocab_size, num_heads=heads, inner_size=24)
    return _shaken(Blockwise(config, parts), seed)


def hydra(
    target: CausalLM, *, seed: int = 0, heads: int = 3, layers: int = 1, prefix: bool = False, own_heads: bool = True
) -> Hydra:
    parts = parts_of(target.model)
    shape = block_like(target.model)
    config = HydraConfig(
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        num_heads=heads,
        num_layers=layers,
        prefix=shape if prefix else None,
        own_heads=own_heads,
    )
    return _shaken(Hydra(config, rotary_of(shape) if prefix else None, parts), seed)
