"""Tiny targets with drafts that have something to learn, and a stream of prompts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import random_heads as heads
import specs
import tiny
from foredraft.core.drafter import Drafter
from foredraft.drafters.online.method import Online, Options
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM

SMALL = {"vocab_size": 32, "spread": 1.2}
NEW = 12


def target() -> CausalLM:
    return CausalLM(tiny.build("llama", **SMALL))


def draft(strangeness: float = 0.25, name: str = "llama", fast: bool = True) -> CausalLM:
    """The target, shaken so much that it is often wrong."""
    model = tiny.build(name, **SMALL)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source) * strangeness * parameter.std())
    return CausalLM(model, fast=fast)


INNER = {
    "draft_model": "draft_model:draft,num_assistant_tokens=4",
    "eagle1": "eagle1:eagle,tree=2x1x1",
    "eagle3": "eagle3:eagle3,nodes=4,depth=4,top_k=1",
    "medusa": "medusa:medusa,tree=1x1x1",
    "hydra++": "hydra:hydra++,tree=1x1x1",
}
KINDS = tuple(INNER)


def inner(name: str, served: CausalLM) -> Drafter:
    """A drafter of each kind that can learn."""
    models = {"draft": draft()} if name == "draft_model" else {}
    return specs.build(INNER[name], served, models, heads.HEADS)


def generator(name: str | Drafter, served: CausalLM | None = None, **options: Any) -> tuple[Generator, Online]:
    """A generator that learns at once, unless told otherwise, and its drafter."""
    served = served or target()
    given = {"interval": 8, "background": False, "lr": 3e-3, "batch": 8, "passes": 8, "top_laws": 16, **options}
    online = Online(Options(**given), inner(name, served) if isinstance(name, str) else name)
    served.tap(online.needs.hidden_layers)
    return tiny.generator(served, online, Constant(online.needs.longest)), online


def stream(count: int, seed: int = 5) -> list[list[int]]:
    """Prompts of one kind: few tokens, much repeated."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(8, (6,), generator=source).tolist() for _ in range(count)]


def acceptance(results: list[Any]) -> float:
    """Tokens per forward of the target."""
    return sum(len(r.tokens) for r in results) / sum(r.stats.target_forwards for r in results)


def serve(g: Generator, requests: range, **options: Any) -> list[float]:
    """Serve these requests of the stream, ``requests.step`` at a time; the acceptance of each call."""
    prompts, options = stream(requests.stop), {"max_new_tokens": NEW, **options}
    calls = (g.generate(prompts[b : b + requests.step], seed=b, **options) for b in requests)
    return [acceptance(results) for results in calls]


def weights(online: Online) -> dict[str, Tensor]:
    """Weights of the trained copy."""
    return {name: weight.detach().clone() for name, weight in online._adapter.shadow.named_parameters()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)
