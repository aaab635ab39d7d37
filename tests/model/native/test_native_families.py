"""Every family of the native engine against transformers, with float weights: nothing but the order of sums differs."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.core.errors import ModelError
from foredraft.core.target_parts import FINAL
from foredraft.core.tree import TokenTree
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.native.families import FAMILIES, shape_of, why_not_native
from foredraft.model.native.outline import Outline
from native import needs_compiler, on_native
from slots import bases, read
from tiny import build, prompts

pytestmark = needs_compiler

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, wide": ("llama", {"head_dim": 40, "hidden_size": 72, "intermediate_size": 100, "vocab_size": 101}),
    "llama, five heads share": ("llama", {"num_attention_heads": 10, "num_key_value_heads": 2, "hidden_size": 40}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "phi3, partial rotary": ("phi3", {"partial_rotary_factor": 0.5}),
    "gemma2, caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3, two bases": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "granite, factors": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
}


def _model(case: str) -> Any:
    name, changes = CASES[case]
    return build(name, seed=1, **changes)


_BIASES = {"attention_bias": True, "mlp_bias": True}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [1.5, 2.0, 2.5, 3.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    **CASES,
    **{f"{name}, all biases": (name, _BIASES) for name in FAMILIES},
    **{f"{name}, tied": (name, {"tie_word_embeddings": True}) for name in FAMILIES},
    **{f"{name}, untied": (name, {"tie_word_embeddings": False}) for name in FAMILIES},
    "phi3, longrope": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64}),
    "llama, llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, half of a head": ("llama", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "qwen3, half of a head": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_weights_and_rotary_frequencies_are_those_of_the_modelling_code(case):
    name, changes = TABLE[case]
    model = build(name, seed=1, **changes)
    ours, theirs = Outline.of_config(model.config), Outline.of(model)
    assert ours.shapes == theirs.shapes and ours.name == theirs.name
    rotary = next(module for path, module in model.named_modules() if path.endswith("rotary_emb"))
    kinds = [f"{kind}_" for kind in rotary.rope_type] if isinstance(rotary.rope_type, dict) else [""]
    found = shape_of(model.config).frequencies
    assert len(found) == len(kinds)
    for each, kind in zip(found, kinds, strict=True):
        assert torch.equal(each.inverse, getattr(rotary, f"{kind}inv_freq"))
        assert each.factor == getattr(rotary, f"{kind}attention_scaling")


@pytest.mark.parametrize("case", CASES)
def test_logits_and_hidden_states_equal_those_of_transformers(case):
    model = _model(case)
    engine = on_native(model, "float32", "float32")
    engine.tap([0, 1, 2, FINAL])
    ids = torch.tensor(prompts((30,) * 3, vocab=96))
    stock = model.double()(ids, output_hidden_states=True)
    step = engine.address(TokenTree.chain(ids), torch.zeros(3, dtype=torch.long), (0, 1, 2), 30)
    cache = engine.new_cache()
    cache.reserve(range(3), 30)
    out = engine.forward(step, cache)
    torch.testing.assert_close(out.logits.double(), stock.logits, atol=2e-4, rtol=1e-4)
    for layer in (0, 1):
        torch.testing.assert_close(out.hidden[layer].double(), stock.hidden_states[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.hidden[FINAL].double(), stock.hidden_states[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_tree_over_a_ragged_batch_equals_the_stock_model_over_slots(case):
    model = _model(case)
    engine, stock = on_native(model, "float32", "float32"), CausalLM(model, fast=False)
    texts = prompts((3, 21))
    tree = TokenTree(torch.tensor([[t[-1], 5, 6, 7, 8, 9, 10] for t in texts]), _parents().expand(2, -1), depth=3)
    logits = []
    for each in (engine, stock):
        cache = read(each, texts, (0, 1))
        step = each.address(tree, bases(texts), (0, 1), 32)
        logits.append(each.forward(step, cache).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=2e-4, rtol=1e-4)


def _parents() -> torch.Tensor:
    return torch.tensor([-1, 0, 0, 1, 2, 3, 3])


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "cohere2"])
def test_other_families_are_refused_with_the_known_ones(name):
    model = build(name, seed=0)
    with pytest.raises(ModelError, match=f"no kernels for the type {name} .it knows llama, "):
        on_native(model, "int8")


def test_a_rotary_embedding_that_changes_with_the_length_is_refused():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "changes as a text grows" in str(why_not_native(build("llama", seed=0, rope_parameters=dynamic).config))


def test_a_weight_that_no_kernel_reads_is_refused():
    model = build("llama", seed=0)
    model.model.layers[1].self_attn.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    with pytest.raises(ModelError, match=r"no use for the weight model.layers.1.self_attn.sinks"):
        on_native(model, "int8")


def test_a_weight_of_another_shape_than_the_config_says_is_refused():
    model = build("llama", seed=0)
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(32, 64))
    with pytest.raises(ModelError, match=r"mlp.down_proj.weight has the shape \(32, 64\); the config says \(32, 48\)"):
        on_native(model, "int8")


def test_a_weight_without_data_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build("llama").config)
    with pytest.raises(ModelError, match="has no data"):
        on_native(model, "int8")
