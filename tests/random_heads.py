"""Heads with random weights for tiny targets: what a drafter says then is nonsense, and must still be lossless."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from dialects import strangers
from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter
from foredraft.drafters.bandit import Arm, Bandit, Options as BanditOptions
from foredraft.drafters.cascade import Cascade, Options as CascadeOptions
from foredraft.drafters.common.build_context import NestedDrafter
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.eagle3 import Eagle3Drafter, Options as Eagle3Options
from foredraft.drafters.max_gram import MaxGram, Options as MaxGramOptions
from foredraft.drafters.medusa import MedusaDrafter, Options as MedusaOptions
from foredraft.drafters.online.method import Online
from foredraft.drafters.online.trainer import Options as OnlineOptions
from foredraft.drafters.relay import Options as RelayOptions, Relay
from foredraft.drafters.triforce import Options as TriForceOptions, TriForce
from foredraft.drafters.universal import Options as UniversalOptions, Universal
from foredraft.heads.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.heads.nets.hydra import Hydra, HydraConfig
from foredraft.heads.nets.medusa import Blockwise, BlockwiseConfig, Medusa, MedusaConfig
from foredraft.model.cache import SlotCache
from foredraft.model.head_parts import block_like, parts_of, rotary_of
from foredraft.model.hf import CausalLM
from foredraft.model.vocab_mapping import VocabMapping


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
    shape = block_like(target.model, **block)
    config = EagleConfig(block=shape, num_layers=num_layers, fc_bias=fc_bias)
    return Eagle(config, rotary_of(shape), parts_of(target.model))


@seeded
def eagle3(
    target: CausalLM,
    *,
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
    return net


@seeded
def medusa(target: CausalLM, *, heads: int = 3, layers: int = 1, own_heads: bool = True, **more: Any) -> Medusa:
    parts = parts_of(target.model)
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
    parts = parts_of(target.model)
    config = BlockwiseConfig(hidden_size=parts.hidden_size, vocab_size=parts.vocab_size, num_heads=heads, inner_size=24)
    return Blockwise(config, parts)


@seeded
def hydra(target: CausalLM, *, heads: int = 3, layers: int = 1, prefix: bool = False, own_heads: bool = True) -> Hydra:
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
    return Hydra(config, rotary_of(shape) if prefix else None, parts)


def small_drafter(kind: str, target: CausalLM) -> Drafter | None:
    """A drafter of one of these kinds, with random heads or the target as its own draft; None for plain decoding."""
    size = target.vocab_size

    def draft_model() -> DraftModel:
        return tiny.draft_model(target, target, 3)[0]

    def head() -> Eagle3Drafter:
        return Eagle3Drafter(Eagle3Options(nodes=4, depth=2, top_k=2), eagle3(target))

    def part() -> NestedDrafter:
        return NestedDrafter(draft_model(), draws=True)

    def lookup() -> NestedDrafter:
        return NestedDrafter(MaxGram(MaxGramOptions(num_assistant_tokens=2), size), draws=False)

    triforce = TriForceOptions(gamma=3, budget=32, chunk=4, room=8)
    drafters: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "draft model": draft_model,
        "eagle3": head,
        "medusa": lambda: MedusaDrafter(MedusaOptions(nodes=4), medusa(target)),
        "relay": lambda: Relay(RelayOptions(), [part(), lookup()], size),
        "cascade": lambda: Cascade(CascadeOptions(), target, part(), target.new_cache(), size),
        "triforce": lambda: TriForce(triforce, target, target.new_cache(), part(), size),
        "bandit": lambda: Bandit(BanditOptions(hold=2), [Arm(head()), Arm(draft_model(), law=Law.CHAIN)]),
        "universal": lambda: Universal(UniversalOptions(), target, VocabMapping(*strangers(size), size, size)),
        "online": lambda: Online(OnlineOptions(interval=10**6), draft_model()),
        "online eagle3": lambda: Online(OnlineOptions(interval=10**6), head()),
    }
    return drafters[kind]()


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
