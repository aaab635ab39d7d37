"""Heads with random weights for tiny targets: what a drafter says then is nonsense, and must still be lossless."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specs
import tiny
from foredraft.core.drafter import Drafter
from foredraft.heads.formats.block import block_like, rotary_of
from foredraft.heads.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.heads.nets.glide import Glide, GlideConfig
from foredraft.heads.nets.hydra import Hydra, HydraConfig
from foredraft.heads.nets.medusa import Blockwise, BlockwiseConfig, Medusa, MedusaConfig
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache


def seeded(make: Callable[..., Any]) -> Callable[..., Any]:
    """Weights that are drawn from ``seed`` alone, however many nets were made before."""

    @functools.wraps(make)
    def shaken(*args: Any, seed: int = 0, **kwargs: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = make(*args, **kwargs)
            tiny.shake(net, 1.5)
        return net.eval().requires_grad_(False)

    return shaken


@seeded
def eagle(target: CausalLM, *, num_layers: int = 1, fc_bias: bool = True, **block: Any) -> Eagle:
    shape = block_like(target.config, **block)
    config = EagleConfig(block=shape, num_layers=num_layers, fc_bias=fc_bias)
    return Eagle(config, rotary_of(shape), target.parts())


@seeded
def eagle3(
    target: CausalLM,
    *,
    taps: tuple[int, ...] = (0, 1, 2),
    vocabulary: torch.Tensor | None = None,
    block: dict[str, Any] | None = None,
    **flags: Any,
) -> Eagle3:
    shape = block_like(target.config, **(block or {}))
    parts = target.parts()
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
    return net


@seeded
def medusa(target: CausalLM, *, heads: int = 3, layers: int = 1, own_heads: bool = True, **more: Any) -> Medusa:
    parts = target.parts()
    config = MedusaConfig(
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        num_heads=heads,
        num_layers=layers,
        own_heads=own_heads,
        **more,
    )
    return Medusa(config, parts)


@seeded
def blockwise(target: CausalLM, *, heads: int = 3) -> Blockwise:
    parts = target.parts()
    config = BlockwiseConfig(hidden_size=parts.hidden_size, vocab_size=parts.vocab_size, num_heads=heads, inner_size=24)
    return Blockwise(config, parts)


@seeded
def hydra(target: CausalLM, *, heads: int = 3, layers: int = 1, prefix: bool = False, own_heads: bool = True) -> Hydra:
    parts = target.parts()
    shape = block_like(target.config)
    config = HydraConfig(
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        num_heads=heads,
        num_layers=layers,
        prefix=shape if prefix else None,
        own_heads=own_heads,
    )
    return Hydra(config, rotary_of(shape) if prefix else None, parts)


@seeded
def glide(target: CausalLM, **block: Any) -> Glide:
    shape = block_like(target.config, **block)
    return Glide(GlideConfig(block=shape, layer=target.layers - 1), rotary_of(shape), target.parts())


HEADS: specs.Heads = {
    "eagle": eagle,
    "eagle3": eagle3,
    "medusa": medusa,
    "hydra": hydra,
    "hydra++": functools.partial(hydra, prefix=True),
    "blockwise": blockwise,
    "glide": glide,
}
"""A head of each kind; the names stand for paths in specs."""
PART, COPY = "[draft_model:target,num_assistant_tokens=3]", "[max_gram,num_assistant_tokens=2]"
HEAD = "[eagle3:eagle3,nodes=4,depth=2,top_k=2]"
SMALL = {
    "draft model": "draft_model:target,num_assistant_tokens=3",
    "eagle3": "eagle3:eagle3,nodes=4,depth=2,top_k=2",
    "medusa": "medusa:medusa,nodes=4",
    "relay": f"relay:{PART}+{COPY}",
    "cascade": f"cascade:target+{PART}",
    "triforce": f"triforce:{PART},gamma=3,budget=32,chunk=4,room=8",
    "bandit": f"bandit:{HEAD}+{PART},hold=2",
    "universal": "universal:target",
    "hybrid": f"hybrid:{HEAD}",
    "online": f"online:{PART},interval=1000000",
    "online eagle3": f"online:{HEAD},interval=1000000",
}


def small_drafter(kind: str, target: CausalLM) -> Drafter | None:
    """A drafter of ``SMALL``, with random heads or the target as its own draft; None for plain decoding."""
    return None if kind == "none" else specs.build(SMALL[kind], target, heads=HEADS)


READERS = ("draft model", "eagle3", "relay", "cascade", "triforce", "bandit", "online", "universal")
"""Kinds that read prompts into a cache of their own."""


def own_reads(monkeypatch: pytest.MonkeyPatch, target_cache: SlotCache) -> list[int]:
    """The tokens of each forward from now on that writes to the cache of a draft model or head, not to this one."""
    widths: list[int] = []
    write = SlotCache.write

    def noted(cache: SlotCache, layer: int, key: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if layer == 0 and cache is not target_cache:
            widths.append(key.shape[2])
        return write(cache, layer, key, *rest)

    monkeypatch.setattr(SlotCache, "write", noted)
    return widths
