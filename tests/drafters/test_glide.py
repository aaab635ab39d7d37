"""GLIDE: what it drafts is what its network says of the whole text, token by token, given the target's keys."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import random_heads as heads
import specs
import tiny
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import DrafterError
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.trees.candidates import SHARPEST
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.heads.glide_model import GlideLM
from foredraft.heads.nets.glide import Glide
from foredraft.model.hf.causal_lm import CausalLM

SPECS = {
    "glide": "glide:glide,nodes=9,depth=3,top_k=3",
    "chain": "glide:glide,nodes=4,depth=4,top_k=1",
    "cape": "cape:glide,num_assistant_tokens=3,widths=4x2x1",
}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny.build("llama"))


def target_keys(target: CausalLM, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The keys and values [groups, T, E] of the last layer, of a stock forward of these tokens alone."""
    cache = DynamicCache()
    target.model(input_ids=torch.tensor([text]), past_key_values=cache, use_cache=True)
    return cache.layers[-1].keys[0], cache.layers[-1].values[0]


def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of one query [heads, E] over keys [groups, T, E]: [heads * E]."""
    share = len(query) // len(keys)
    found = []
    for head, each in enumerate(query):
        scores = keys[head // share] @ each / math.sqrt(len(each))
        found.append(scores.softmax(-1) @ values[head // share])
    return torch.cat(found)


def turned(x: Tensor, position: int, net: Glide) -> Tensor:
    """Llama's rotation of [n, E] at a position."""
    angles = position * net.rotary.frequencies
    left, right = x.chunk(2, -1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


@torch.inference_mode()
def slow_logits(net: Glide, target: CausalLM, text: Sequence[int], root: int) -> Tensor:
    """Logits after the last token of a text whose tokens after ``root`` are drafted, by a loop over positions."""
    block, embedded = net.config.block, target.model.get_input_embeddings()(torch.tensor(list(text)))
    groups = block.num_key_value_heads
    keys, values = [], []
    for position, each in enumerate(embedded):
        x = net.input_layernorm(each)
        keys.append(turned(net.self_attn.k_proj(x).view(groups, -1), position, net))
        values.append(net.self_attn.v_proj(x).view(groups, -1))
    here, x = len(text) - 1, embedded[-1]
    query = turned(net.self_attn.q_proj(net.input_layernorm(x)).view(-1, block.head_dim), here, net)
    x = x + net.self_attn.o_proj(attended(query, torch.stack(keys, 1), torch.stack(values, 1)))
    if root:
        query = turned(net.cross_attn.q_proj(net.cross_layernorm(x)).view(-1, block.head_dim), here, net)
        x = x + net.cross_attn.o_proj(attended(query, *target_keys(target, text[:root])))
    x = x + net.mlp(net.post_attention_layernorm(x))
    return target.model.get_output_embeddings()(net.norm(x))


def watched(spec: str, target: CausalLM, **options: Any) -> tuple[Generator, list[tuple[list[int], Draft, int]]]:
    """A generator that notes each draft with the row's tokens and number; the plan's depth is the drafter's."""
    cache = target.new_cache()
    drafter = specs.build(spec, target, heads={"glide": heads.glide}, cache=cache)
    notes: list[tuple[list[int], Draft, int]] = []
    propose = drafter.propose

    def noted(view: View, plan: Plan) -> Draft:
        draft = propose(view, plan)
        for row, length in enumerate(view.host_lengths):
            notes.append((view.history[row, :length].tolist(), draft, row))
        return draft

    drafter.propose = noted  # type: ignore[method-assign]
    return tiny.generator(target, drafter, Constant(drafter.needs.longest), cache=cache, **options), notes


@pytest.mark.parametrize("name", SPECS)
def test_every_draft_is_what_the_network_says_of_the_whole_text(name: str, target: CausalLM):
    """While rows come and go, accepted tokens move in both caches, and prompts share a prefix."""
    g, notes = watched(SPECS[name], target, max_rows=2)
    net, shared = heads.glide(target), tiny.prompts((40,), seed=4)[0]
    prompts = [*tiny.prompts((1, 2, 9)), shared, [*shared, 5], [*shared[:33], 7, 8]]
    for prompt, new in zip(prompts, (9, 5, 12, 6, 7, 8), strict=True):
        g.submit([prompt], SamplingParams(max_new_tokens=new))
    while tiny.pending(g):
        g.engine.step()
    assert len(notes) > 20 and {len(text) for text, _, _ in notes} > {1, 2, 3}
    for text, draft, row in notes:
        scores = draft.scores
        assert scores is not None
        for node, path in tiny.paths(draft.tree, row).items():
            if not path:
                continue
            law = (slow_logits(net, target, [*text, *path[:-1]], len(text) - 1) / SHARPEST).log_softmax(-1)
            above = float(scores[row, int(draft.tree.parents[row, node])]) if len(path) > 1 else 0.0
            assert float(scores[row, node]) == pytest.approx(above + float(law[path[-1]]), abs=2e-3)
            if node == 1:
                assert path[0] == int(law.argmax())


def planted(target: CausalLM) -> Glide:
    """The network of a target whose next token depends on the last one alone."""
    net = heads.glide(target)
    with torch.no_grad():
        for matrix in (net.self_attn.o_proj, net.cross_attn.o_proj, net.mlp.down_proj):
            matrix.weight.zero_()
        net.norm.weight.copy_(target.model.model.norm.weight)
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return net


@pytest.mark.parametrize(("temperature", "forwards", "drafts"), [(0.0, 5, 5), (1.0, 9, 8)])
def test_a_network_that_says_what_the_target_says_is_always_right(temperature: float, forwards: int, drafts: int):
    """In chains of four each step gives five tokens. The four nodes of sampled rows are a chain with siblings, whose
    first guesses are right, since the noise is shared; their last step has one token left, and drafts nothing."""
    target = CausalLM(tiny.build("llama"), fast=False)
    net = planted(target)
    cache = target.new_cache()
    drafter = specs.build(SPECS["chain"], target, heads={"glide": lambda of: net}, cache=cache)
    g = tiny.generator(target, drafter, Constant(4), cache=cache)
    params = SamplingParams(max_new_tokens=25, min_new_tokens=25, temperature=temperature, seed=3)
    for result in g.generate(tiny.prompts((1, 6)), params):
        assert (result.stats.target_forwards, result.stats.tokens) == (forwards, 25)
        assert result.stats.accepted_by_depth[0] == drafts


def test_the_targets_keys_change_what_is_drafted(target: CausalLM):
    net = heads.glide(target)
    text = tiny.prompts((12,))[0]
    first = slow_logits(net, target, text, 11)
    assert not torch.allclose(first, slow_logits(net, target, text, 10), atol=1e-2)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("mistral", r"attends to 8 tokens at most: use eagle3\."),
        ("deepseek_v3", r"stores others: use eagle3\."),
    ],
)
def test_targets_whose_keys_cannot_be_read(model: str, says: str):
    target = CausalLM(tiny.build(model))
    with pytest.raises(DrafterError, match=says):
        GlideLM(heads.glide(CausalLM(tiny.build("llama"))), target, target.new_cache())


def test_on_another_engine_it_is_refused():
    context = specs.InMemory("glide", "", "head", None, None, None, 9, {}, {"head": heads.glide}, False)
    with pytest.raises(DrafterError, match="glide reads .* the target's KV cache, which the native engine does not"):
        context.glide()


@pytest.mark.parametrize("last", ["full_attention", "sliding_attention"])
def test_of_a_target_with_windows_the_layer_that_is_read_decides(last: str):
    kinds = ["sliding_attention", "full_attention"] if last == "full_attention" else ["full_attention", last]
    target = CausalLM(tiny.build("gemma2", layer_types=kinds))
    if last == "full_attention":
        assert GlideLM(heads.glide(target), target, target.new_cache()).vocab_size == tiny.VOCAB
    else:
        with pytest.raises(DrafterError, match="layer 1 of .* attends to 8 tokens at most"):
            GlideLM(heads.glide(target), target, target.new_cache())
