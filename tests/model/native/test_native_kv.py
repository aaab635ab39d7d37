"""Keys and values in 8 bits on the native engine: what is stored, what attention makes of it, and the option."""

import logging

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft.core.errors import ModelError, OptionError
from foredraft.engine.policy import Constant
from foredraft.model.native.model import NativeLM
from native import needs_compiler, on_native
from slots import whole
from tiny import build, prompts

pytestmark = needs_compiler

SHAPES = {
    "one group": {"head_dim": 32},
    "half a group": {"head_dim": 8},
    "two groups": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "three groups, each head its own": {"head_dim": 88, "num_attention_heads": 2, "num_key_value_heads": 2},
    "caps and norms": {"name": "gemma2", "head_dim": 24},
    "more heads than are read together": {
        "hidden_size": 54,
        "head_dim": 16,
        "num_attention_heads": 27,
        "num_key_value_heads": 1,
    },
}


def pair(shape: str, *, layers: int) -> tuple[NativeLM, NativeLM]:
    """Weights in float32, with keys and values in float32 and in 8 bits."""
    changes = {"name": "llama", "num_hidden_layers": layers, "seed": 4, **SHAPES[shape]}
    model = build(changes.pop("name"), **changes)
    return on_native(model, "float32", "float32"), on_native(model, "float32", "int8")


def codes_and_scales(stored: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Bytes of slots as signed codes and what is behind them."""
    width = -(-dim // 32) * 32
    return stored[..., :width], stored[..., width:].contiguous()


def dequantised_keys(stored: Tensor, dim: int) -> Tensor:
    codes, rest = codes_and_scales(stored, dim)
    scales = rest.view(torch.float16)[..., : codes.shape[-1] // 32].double()
    return ((codes.double() - 128).unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2)[..., :dim]


def dequantised_values(stored: Tensor, dim: int) -> Tensor:
    codes, rest = codes_and_scales(stored, dim)
    return (codes.view(torch.int8).double() * rest.view(torch.float32)[..., :1])[..., :dim]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_stored_is_within_half_a_step(shape):
    exact, rounded = pair(shape, layers=1)
    dim, texts = exact.decoder.shape.head_dim, prompts((70, 33))
    stored = []
    for engine in (exact, rounded):
        step, cache = whole(engine, texts)
        engine.forward(step, cache)
        stored.append([part[:, :, :70] for part in cache.stored(0)])
    keys, values = stored[1]
    pairs = ((stored[0][0], dequantised_keys(keys, dim)), (stored[0][1], dequantised_values(values, dim)))
    for floats, found in pairs:
        wanted = floats[..., :dim].double()
        largest = wanted.abs().amax(-1, keepdim=True)
        assert ((found - wanted).abs() <= largest / 127 * 0.5 * 1.002 + 1e-7).all()
        assert (largest > 0.1).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_close_to_those_of_floats(shape):
    exact, rounded = pair(shape, layers=2)
    ids = torch.tensor(prompts((90, 90)))
    wanted, found = exact.stock_logits(ids), rounded.stock_logits(ids)
    error = (found - wanted).std() / wanted.std()
    assert 0 < error < 0.03, error


def test_a_token_takes_a_byte_for_each_number_and_its_scales():
    model = build("llama", head_dim=64)
    sizes = {kind: on_native(model, "int8", kind).token_bytes for kind in ("float32", "float16", "int8")}
    shape = on_native(model, "int8").decoder.shape
    numbers = 2 * shape.layers * shape.kv_heads
    assert sizes == {"float32": numbers * 256, "float16": numbers * 128, "int8": numbers * 68}
    engine = on_native(model, "int8", "int8")
    step, cache = whole(engine, prompts((5,) * 3))
    engine.forward(step, cache)
    assert cache.nbytes == 3 * 64 * sizes["int8"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_drafts_give_the_output_of_plain_decoding(weights, temperature):
    model = build("llama", seed=3)
    asked = [prompt * 2 for prompt in prompts((5, 40, 30))]
    plain = foredraft.load(model, "none", weights=weights, kv_cache_dtype="int8")
    assert plain.engine.target.kv_cache_dtype == "int8"
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    expected = [result.tokens for result in plain.generate(asked, **options)]
    assert plain.generate(asked[0], **options).tokens == expected[0]
    draft = build("llama", seed=3, num_hidden_layers=1)
    for drafter in ("prompt_lookup", ("draft_model,branching=2x2", draft)):
        found = foredraft.load(plain, drafter, policy=Constant(6))
        assert [result.tokens for result in found.generate(asked, **options)] == expected
    assert found.engine.drafter.network.kv_cache_dtype == "int8"


@pytest.mark.parametrize(
    ("weights", "asked", "kept"),
    [("int8", None, "float16"), ("int8", "float16", "float16"), ("int4", None, "int8"), ("int4", "float16", "float16")],
)
def test_8_bits_are_the_default_beside_weights_of_4(weights: str, asked: str | None, kept: str):
    target = foredraft.load(build("llama"), "none", weights=weights, kv_cache_dtype=asked).engine.target
    assert target.kv_cache_dtype == kept


def test_a_target_on_transformers_refuses_the_option(caplog: pytest.LogCaptureFixture):
    with pytest.raises(ModelError, match="runs on transformers: leave it out, or choose weights int4 or int8"):
        foredraft.load(build("llama"), "none", kv_cache_dtype="int8")
    with caplog.at_level(logging.ERROR), pytest.raises(ModelError, match="runs on transformers"):
        foredraft.load(build("gpt2"), "none", weights="int8", kv_cache_dtype="int8")


def test_wrong_values_are_refused():
    with pytest.raises(OptionError, match=r"Unknown kv_cache_dtype 'fp8'. Known: float16, int8."):
        foredraft.load("sample", "none", weights="int8", kv_cache_dtype="fp8")
    loaded = foredraft.load(build("llama"), "none", weights="int8")
    assert foredraft.load(loaded, "none", kv_cache_dtype="float16").engine.target is loaded.engine.target
    with pytest.raises(OptionError, match="loaded already, and so is its KV cache: leave kv_cache_dtype out"):
        foredraft.load(loaded, "none", kv_cache_dtype="int8")
