"""From the addresses of a draft to its compaction a step is one graph: nothing in between waits for the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.rng import HashedRng, Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree
from foredraft.core.verify import verify
from foredraft.model.cache import SlotCache, SlotView
from foredraft.model.hf import CausalLM
from foredraft.model.prefill import prefill

pytestmark = pytest.mark.slow

ROWS = (3, 1, 2)
PARENTS = [-1, 0, 0, 1, 1, 2, 4, -2]


def step_of(model: CausalLM, cache: SlotCache, params: SamplingParams) -> Callable[..., Any]:
    """The step after the draft as a function of tensors."""
    warp = tiny.warp([params] * len(ROWS), tiny.VOCAB, [9] * len(ROWS))

    def step(tokens: Tensor, parents: Tensor, history: Tensor, lengths: Tensor, seeds: Tensor) -> Any:
        tree = TokenTree(tokens, parents, depth=3)
        at = model.address(tree, lengths - 1, ROWS, 40)
        view = SlotView.of(cache, at)
        mask = next(iter(at.masks(model.dtype).values()))
        out = model.model(
            input_ids=at.tokens,
            position_ids=at.positions,
            attention_mask=mask,  # type: ignore[arg-type]
            past_key_values=view,
            use_cache=True,
        )
        law = warp(out.logits, Paths(history, lengths, tree))
        rng = HashedRng(Noise(seeds, lengths), plain=~tree.valid[:, 1:].any(1))
        verdict = verify(law, Draft(tree, Law.FIXED), rng)
        cache.compact(ROWS, lengths - 1, verdict.path)
        return verdict.emitted(tree), verdict.accepted(), law.sound

    return step


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_without_its_draft_is_one_graph(temperature: float):
    model = CausalLM(tiny.build("llama"), fast=False)
    texts = tiny.prompts((9, 9, 9), seed=4)
    torch.manual_seed(0)
    tokens = torch.randint(tiny.VOCAB, (3, len(PARENTS)))
    tokens[:, 0] = torch.tensor([text[-1] for text in texts])
    parents, seeds = torch.tensor([PARENTS] * 3), torch.tensor([5, 6, 7])
    history, lengths = torch.nn.functional.pad(torch.tensor(texts), (0, 20)), torch.full((3,), 9)
    found: list[Any] = []
    for compiled in (False, True):
        cache = model.new_cache()
        cache.reserve(4, 64)
        cache.arrange(ROWS)
        prefill(model, cache, ROWS, torch.tensor(texts)[:, :-1], [0] * 3)
        step = step_of(model, cache, SamplingParams(temperature=temperature))
        if compiled:
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        with torch.no_grad(), model._attention:
            out = step(tokens, parents, history, lengths, seeds)
        found.append([*out, *(each.clone() for layer in range(model.layers) for each in cache.stored(layer))])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))
