"""Generation on the native engine, from ``load`` and the command line, with the unchanged loop."""

import json
import logging

import pytest
import torch

import foredraft
from foredraft.core.errors import DrafterError, ModelError, OptionError
from foredraft.engine.policy import Constant
from foredraft.model.hf import CausalLM
from foredraft.model.native import build as native_build, library as native_library, load as native_load
from foredraft.model.native.model import NativeLM
from native import needs_compiler
from tiny import build, prompts

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def model():
    return build("llama", seed=3)


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_give_the_output_of_plain_decoding(model, weights, temperature):
    asked = [prompt * 2 for prompt in prompts((5, 17, 30))]
    plain = foredraft.load(model, "none", weights=weights)
    assert isinstance(plain.engine.target, NativeLM)
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    expected = [result.tokens for result in plain.generate(asked, **options)]
    alone = [plain.generate(prompt, **options).tokens for prompt in asked]
    for drafter in ("prompt_lookup", "prompt_lookup,continuations=3"):
        found = foredraft.load(plain, drafter, policy=Constant(6))
        assert [result.tokens for result in found.generate(asked, **options)] == expected
        assert [found.generate(prompt, **options).tokens for prompt in asked] == alone


@pytest.mark.parametrize("spec", ["draft_model", "draft_model,branching=2x2"])
def test_a_draft_model_is_quantised_with_its_target(model, spec):
    draft = build("llama", seed=3, num_hidden_layers=1)
    plain = foredraft.load(model, "none", weights="int4")
    drafting = foredraft.load(plain, (spec, draft), policy=Constant(4))
    assert isinstance(drafting.engine.drafter.network, NativeLM)
    for prompt in prompts((5, 20)):
        result = drafting.generate(prompt, max_new_tokens=30)
        assert result.tokens == plain.generate(prompt, max_new_tokens=30).tokens
        assert result.stats.drafted > 0


def test_a_row_that_takes_anothers_place_has_its_own_output(model):
    plain = foredraft.load(model, "none", weights="int4", max_batch_size=2)
    asked = prompts((3, 9, 14, 20, 31))
    together = [result.tokens for result in plain.generate(asked, max_new_tokens=12)]
    assert together == [plain.generate(prompt, max_new_tokens=12).tokens for prompt in asked]


def test_the_choice_is_named_and_shared(model):
    plain = foredraft.load(model, "none", weights="int8")
    assert "dtype=int8" in repr(plain)
    shared = foredraft.load(plain, "prompt_lookup")
    assert shared.engine.target is plain.engine.target
    plain.close()
    assert shared.generate([1, 2, 3], max_new_tokens=4).tokens
    shared.close()
    with pytest.raises(ModelError, match="released or closed"):
        shared.engine.target.check_ready()


def test_auto_is_int8_where_the_engine_runs():
    assert foredraft.load(build("qwen3"), "none", weights="auto").engine.target.weights == "int8"
    other = foredraft.load(build("gpt2"), "none", weights="auto").engine.target
    assert isinstance(other, CausalLM) and other.weights is None


def test_another_model_runs_its_linear_layers_in_int8(caplog):
    with caplog.at_level(logging.WARNING):
        target = foredraft.load(build("gpt2"), "none", weights="int4").engine.target
    assert isinstance(target, CausalLM) and target.weights == "int8"
    assert "no kernels for the type gpt2" in caplog.text and "torch's own products" in caplog.text


@pytest.fixture
def without_compiler(monkeypatch):
    """No library is built, and there is no compiler."""
    monkeypatch.setattr(native_build, "compiler", lambda: None)
    monkeypatch.setattr(native_build, "BUILT", native_build.SOURCES)
    native_library.library.cache_clear()
    yield
    native_library.library.cache_clear()


def test_without_a_compiler_one_line_says_what_is_missed(without_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        generator = foredraft.load(build("llama"), "none", weights="int8")
    assert isinstance(generator.engine.target, CausalLM)
    assert generator.generate([1, 2, 3], max_new_tokens=4).tokens
    (line,) = [record.message for record in caplog.records]
    assert "a C compiler builds once: install gcc or clang" in line


def test_a_model_that_computes_something_else_is_refused(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    with pytest.raises(ModelError, match="gives other logits on the native engine than by itself"):
        foredraft.load(model, "none", weights="int8")


def test_invalid_choices_are_refused(model):
    with pytest.raises(OptionError, match="Unknown weights 'int3'. Known: int4, int8, auto."):
        foredraft.load(model, "none", weights="int3")
    with pytest.raises(OptionError, match="run on CPUs"):
        foredraft.load("sample", "none", weights="int8", device="cuda")
    plain = foredraft.load(model, "none", weights="int8")
    with pytest.raises(OptionError, match="loaded already, in int8: leave weights out"):
        foredraft.load(plain, "none", weights="int4")


@pytest.mark.parametrize("method", ["early_exit,assistant_early_exit=1", "partial"])
def test_methods_that_run_parts_of_the_target_are_refused(model, method):
    plain = foredraft.load(model, "none", weights="int8")
    with pytest.raises(DrafterError, match="which the native engine does not have: load it without weights"):
        foredraft.load(plain, method)


def test_a_context_beyond_the_first_rotary_table():
    from native import native

    model = native("llama", "int8", seed=2, max_position_embeddings=5000)
    ids = torch.arange(2100)[None] % 90
    logits = model.stock_logits(ids)
    assert torch.isfinite(logits).all()
    again = native_load.native_model(build("llama", seed=2, max_position_embeddings=5000), "int8")
    assert torch.equal(again.stock_logits(ids[:, :50]), logits[:, :50])


def test_the_command_line_takes_weights(capsys):
    from foredraft.cli import main

    assert (
        main(["generate", "--weights", "int8", "-d", "prompt_lookup", "--max-new-tokens", "8", "--json", "def f("]) == 0
    )
    assert 0 < len(json.loads(capsys.readouterr().out)["tokens"]) <= 8
