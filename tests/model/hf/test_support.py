"""Which models are taken, and the one sentence that turns the others away."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaModel, PreTrainedModel

import tiny
from foredraft.core.errors import ModelError
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.support import layout_of
from foredraft.model.kv.masks import Layout
from foredraft.model.loading.load import load_model

SMALL = {key: value for key, value in tiny.BASE.items() if key != "head_dim"}
RECURRENT = {
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 4},
    "qwen3_next": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "head_dim": 8,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
    "rwkv": {"attention_hidden_size": 32},
}


def refused(model: PreTrainedModel, match: str) -> str:
    """The one sentence with which a model is turned away; its attention stays as it was."""
    attention = model.config._attn_implementation
    with pytest.raises(ModelError, match=match) as caught:
        CausalLM(model)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".") and len(text) < 400, text
    assert model.config._attn_implementation == attention
    return text


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_that_cannot_be_rolled_back_is_refused(name: str):
    config = AutoConfig.for_model(name, **{**SMALL, **RECURRENT[name]})
    model = AutoModelForCausalLM.from_config(config)
    assert model.__class__.__name__ in refused(model, "cannot be rolled back")


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders_are_refused(name: str):
    sizes = {"d_kv": 8, "d_ff": 16, "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1}
    config = AutoConfig.for_model(name, vocab_size=96, d_model=32, **sizes, decoder_start_token_id=0)
    refused(AutoModelForSeq2SeqLM.from_config(config), "is an encoder-decoder")


def test_a_model_without_a_head_is_refused():
    refused(LlamaModel(tiny.config("llama")), "no language-model head")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "gpt_neo",
            {"num_layers": 2, "num_heads": 4, "attention_types": [[["local"], 2]], "window_size": 3},
        ),  # by slots
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}),  # no cache at all
    ],
)
def test_the_probe_refuses_what_does_not_follow_masks_and_positions(name: str, changes: dict):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SMALL, **changes})).eval()
    tiny.shake(model, 1.5)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    said = refused(model, "cannot run over foredraft's slot cache|gives other logits for a draft tree")
    assert model.__class__.__name__ in said
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bloom", {"n_head": 4}),  # made from a mask of two dimensions
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),  # by slots, not by positions
        ("falcon", {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_a_bias_by_distance_is_refused_by_its_name(name: str, changes: dict):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SMALL, **changes})).eval()
    tiny.shake(model, 1.5)
    said = refused(model, r"\(ALiBi\), not from positions: .* so its drafts cannot be verified")
    assert model.__class__.__name__ in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_tells_a_wrong_bias_from_rounding(dtype: torch.dtype):
    """What half a precision loses is not what another attention would give."""
    changes = {"d_model": 64, "n_heads": 4, "n_layers": 6}
    alibi = AutoModelForCausalLM.from_config(AutoConfig.for_model("mpt", vocab_size=2000, **changes)).to(dtype)
    tiny.shake(alibi, 1.2)
    refused(alibi, "ALiBi")
    for name in ("llama", "gemma2", "gpt2"):
        CausalLM(tiny.build(name, vocab_size=2000, num_hidden_layers=6, layer_types=None).to(dtype))


def test_the_bundled_model_runs_in_half_precision():
    for dtype in ("bfloat16", "float16"):
        assert CausalLM(load_model("sample", dtype=dtype).model).dtype == getattr(torch, dtype)


def test_a_model_with_a_layer_on_disk_is_refused_as_offloaded():
    model = tiny.build("llama")
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    refused(model, r"offloaded \(cpu, offloaded\)")


def test_a_model_that_is_broken_is_left_as_it_was():
    model = tiny.build("llama")
    model.lm_head = torch.nn.Linear(3, 4)
    model.train()
    refused(model, "cannot run a plain forward")
    assert model.training


def test_a_probe_that_gives_nan_is_refused():
    model = tiny.build("llama")
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError):
        CausalLM(model)
    assert CausalLM(model, verify=False).vocab_size == tiny.VOCAB


@pytest.mark.parametrize(
    ("name", "kinds", "by_type"),
    [
        ("llama", {"full_attention": None}, False),
        ("mistral", {"sliding_attention": 8}, False),
        ("gemma2", {"full_attention": None, "sliding_attention": 8}, True),
        ("llama4_text", {"full_attention": None, "chunked_attention": 8}, True),
        ("qwen2", {"full_attention": None}, False),
    ],
)
def test_layouts(name: str, kinds: dict, by_type: bool):
    layout = layout_of(tiny.build(name).config)
    assert layout == Layout(kinds, by_type, layout.chunked)
    assert layout.chunked == {kind for kind in kinds if kind == "chunked_attention"}


def test_how_far_positions_go():
    """To the last position that was trained; where its rotary factors change with the length, to that border."""
    assert CausalLM(tiny.build("llama")).max_length == 256
    assert CausalLM(tiny.build("gpt2")).max_length == 256
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = tiny.build("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert CausalLM(long).max_length == 64
    llama4 = tiny.build(
        "llama4_text", floor_scale=32, attn_scale=0.1, attn_temperature_tuning=True, no_rope_layers=[1, 0]
    )
    assert CausalLM(llama4).max_length == 31
