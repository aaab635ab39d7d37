"""Generation on the native engine, from ``load`` and the command line, with the unchanged loop."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

import foredraft
from foredraft.core.errors import DrafterError, ModelError, OptionError
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading import quantised
from foredraft.model.native import build as native_build, library as native_library
from foredraft.model.native.model import NativeLM
from native import needs_compiler, on_native
from slots import whole
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


def test_weights_are_packed_in_one_thread(model, monkeypatch: pytest.MonkeyPatch):
    """OpenMP's threads wait for each other after every small operator where other programs use the cores."""
    counts, read = [], quantised.source_of

    def watched(model):
        source = read(model)
        return lambda name: (counts.append(torch.get_num_threads()), source(name))[1]

    monkeypatch.setattr(quantised, "source_of", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        foredraft.load(model, "none", weights="int4")
        assert len(counts) > 10 and set(counts) == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.parametrize("method", ["eagle3", "eagle2", "medusa"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_heads_draft_for_a_quantised_target(method, weights):
    prompt = "def fibonacci(n):\n    "
    plain = foredraft.load("sample", "none", weights=weights)
    drafting = foredraft.load(plain, method, policy=Constant(4))
    for temperature in (0.0, 0.8):
        result = drafting.generate(prompt, max_new_tokens=40, temperature=temperature, seed=3)
        if not temperature:
            assert result.tokens == plain.generate(prompt, max_new_tokens=40).tokens
        assert result.stats.accepted > 5


@torch.inference_mode()
def test_hidden_states_and_parts_for_heads_are_those_of_the_stock_model(model):
    engine, stock = on_native(model, "int8"), CausalLM(model, fast=False)
    ids = torch.tensor(prompts((20,)))
    for each in (engine, stock):
        each.tap([1])
    states = [each.forward(*whole(each, ids.tolist())).hidden[1] for each in (engine, stock)]
    assert (states[0] - states[1]).std() < 0.05 * states[1].std()
    ours, theirs = engine.parts(), stock.parts()
    assert (ours.embed(ids) - theirs.embed(ids)).std() < 0.01 * theirs.embed(ids).std()
    logits = [parts.head(states[1]) for parts in (ours, theirs)]
    assert logits[0].shape == logits[1].shape
    assert (logits[0] - logits[1]).std() < 0.03 * logits[1].std()
    assert (engine.embedding() - stock.embedding()).std() < 0.01 * stock.embedding().std()


def test_a_folder_is_read_without_a_float_model(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    expected = foredraft.load(model, "none", weights="int4").generate([1, 2, 3], max_new_tokens=20).tokens
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # would read all of it
    for name in ("one", "several"):
        generator = foredraft.load(tmp_path / name, "none", weights="int4")
        assert generator.generate([1, 2, 3], max_new_tokens=20).tokens == expected
    generator = foredraft.load(tmp_path / "one", f"draft_model:{tmp_path / 'one'}", weights="int4", policy=Constant(3))
    result = generator.generate([1, 2, 3], max_new_tokens=20)
    assert result.tokens == expected and result.stats.acceptance_length >= 2  # its best token is always right


def test_a_damaged_folder_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="is damaged"):
        foredraft.load(tmp_path, "none", weights="int4")


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
    with pytest.raises(ModelError, match="gives other states on the native engine than by itself"):
        foredraft.load(model, "none", weights="int8")


def test_invalid_choices_are_refused(model):
    with pytest.raises(OptionError, match="Unknown weights 'int3'. Known: int4, int8, auto."):
        foredraft.load(model, "none", weights="int3")
    with pytest.raises(OptionError, match="sets the precision: leave dtype out"):
        foredraft.load("sample", "none", weights="int8", dtype="bfloat16")
    with pytest.raises(OptionError, match="run on CPUs"):
        foredraft.load("sample", "none", weights="int8", device="cuda")
    plain = foredraft.load(model, "none", weights="int8")
    with pytest.raises(OptionError, match="loaded already, in int8: leave weights out"):
        foredraft.load(plain, "none", weights="int4")


def test_methods_that_read_a_part_of_the_cache_are_refused(model):
    plain = foredraft.load(model, "none", weights="int4")
    with pytest.raises(DrafterError, match="which the native engine does not: load it without weights"):
        foredraft.load(plain, "partial")


def test_the_engine_has_states_of_whole_texts_but_no_module_to_train():
    from native import native

    target, ids = native(), torch.tensor([[1, 2, 3, 4]])
    states = target.read(ids, (0, 2))
    assert torch.equal(states[0], target.parts().embed(ids)) and states[2].shape == states[0].shape
    with pytest.raises(ModelError, match="does not run on transformers, as this needs: load it without weights"):
        _ = target.module


def test_a_context_beyond_the_first_rotary_table():
    from native import native

    model = native("llama", "int8", seed=2, max_position_embeddings=5000)
    ids = torch.arange(2100)[None] % 90
    logits = model.stock_logits(ids)
    assert torch.isfinite(logits).all()
    again = on_native(build("llama", seed=2, max_position_embeddings=5000), "int8")
    assert torch.equal(again.stock_logits(ids[:, :50]), logits[:, :50])


def test_the_command_line_takes_weights(capsys):
    from foredraft.cli import main

    assert (
        main(["generate", "--weights", "int8", "-d", "prompt_lookup", "--max-new-tokens", "8", "--json", "def f("]) == 0
    )
    assert 0 < len(json.loads(capsys.readouterr().out)["tokens"]) <= 8
