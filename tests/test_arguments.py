"""Targets, drafters and tokenizers by every name and object that users have for them."""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import foredraft
import gguf_files
import tiny
from foredraft.cli.choices import ASKED_MODEL, MODEL
from foredraft.compose.arguments import as_spec, drafting_spec, settled
from foredraft.compose.options import LoadKeywords, LoadOptions, SharedKeywords, SharedOptions
from foredraft.compose.spec import Spec
from foredraft.core.errors import DrafterError, ModelError, OptionError, UsageError
from foredraft.core.options import describe_options
from foredraft.drafters import BUNDLED_CONTENTS, BUNDLED_DRAFTS, METHODS, bundled_drafts
from foredraft.heads.formats import inspect_head
from foredraft.heads.formats.tuned import Tuned, write_tuned
from foredraft.model.hf.contents import contents_of
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.contents import contents_of_files
from foredraft.model.loading.load import unwrapped
from foredraft.model.loading.placement import as_device
from foredraft.model.loading.tokenizers import as_tokenizer

PROMPT = tiny.prompts((9,))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model, a draft"), "~", seed=5)


@pytest.fixture(scope="module")
def plain() -> Iterator[foredraft.Generator]:
    made = foredraft.load(tiny.build(), None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def wanted(plain: foredraft.Generator) -> list[int]:
    return plain.generate(PROMPT, max_new_tokens=12).tokens


class Lora(nn.Module):
    """A layer as PEFT's: the frozen one and a low-rank update, of which it reads the weights."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class PeftModel(nn.Module):
    """As PEFT's: around a model, and no transformers model itself."""

    def __init__(self, inner: PreTrainedModel, prompts: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.active_peft_config = type("Config", (), {"is_prompt_learning": prompts})

    def get_base_model(self) -> nn.Module:
        return self.inner


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def adapted() -> PreTrainedModel:
    model = tiny.build()
    for layer in model.model.layers:  # pyright: ignore[reportGeneralTypeIssues]
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    return model


def test_a_bundled_head_is_found_by_the_name_of_its_target(tmp_path: Path):
    """Hub names, folders and files of one model, but no other model and no tuned one."""
    files = ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct-IQ4_XS.gguf", "smollm2-135m-instruct-f16.gguf")
    names = ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.gguf", *(f"some/{file}" for file in files))
    for name in names:
        assert bundled_drafts(name) == {"eagle3": "smollm2-eagle3"}
        named, spec = as_spec(name, "eagle3"), as_spec(name, "auto")
        assert isinstance(named, Spec) and (named.name, named.path) == ("eagle3", "smollm2-eagle3")
        assert isinstance(spec, Spec) and spec.name == "hybrid" and drafting_spec(name, spec) == named
    others = ("SmolLM2-135M-Instruct-mine", "SmolLM2-135M-Instruct-mine.Q4_1.gguf", str(tmp_path / "sample"), "")
    for name in ("HuggingFaceTB/SmolLM2-360M-Instruct", *others):
        assert bundled_drafts(name) == {}
        spec = as_spec(name, "auto")
        assert isinstance(spec, Spec) and (spec.name, spec.path) == ("prompt_lookup", None)


def test_a_bundled_head_is_found_by_the_contents_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Renamed, quantised or loaded: the head fits; another model of the same name has none."""
    known = next(name for name in BUNDLED_DRAFTS if name != "sample")
    model, other = tiny.build(intermediate_size=64), tiny.build(intermediate_size=64, seed=8)
    contents, others = contents_of(model), contents_of(other)
    assert contents is not None and others not in (contents, None)
    assert contents_of(copy.deepcopy(model).bfloat16()) == contents, "whatever the precision"
    monkeypatch.setitem(BUNDLED_CONTENTS, contents, known)
    folder, file, named = tmp_path / "renamed", tmp_path / "renamed.bin", tmp_path / known
    model.save_pretrained(folder)
    gguf_files.writer().write(file, model, kind="Q8_0")
    foredraft.quantize(folder, tmp_path / "int4", "int4")
    other.save_pretrained(named)
    found = {}
    for source in (folder, file, tmp_path / "int4", named):
        kinds = {"from files": contents_of_files(str(source))}
        for weights in (None, "int8") if source in (folder, named) else (None,):
            with foredraft.load(source, "none", weights=weights) as plain:
                spec = settled(str(source), plain.engine.target, "auto", as_spec(str(source), "auto"))
                assert isinstance(spec, Spec)
                found[source.name, weights] = spec.name
                kinds[str(weights)] = plain.engine.target.contents()
        assert set(kinds.values()) == {others if source == named else contents}, source
    wanted = {("renamed", None), ("renamed", "int8"), ("renamed.bin", None), ("int4", None)}
    assert found == {**dict.fromkeys(wanted, "hybrid"), **{(known, w): "prompt_lookup" for w in (None, "int8")}}
    assert f"{known} has other weights than the model of this name" in caplog.text
    spec = as_spec(model, "eagle3")
    assert isinstance(spec, Spec) and spec.path == BUNDLED_DRAFTS[known]["eagle3"], "a model that is loaded already"


def test_the_contents_of_the_bundled_target():
    wanted = next(contents for contents, name in BUNDLED_CONTENTS.items() if name == "sample")
    assert contents_of_files("sample") == wanted
    for weights in (None, "int4"):
        with foredraft.load("sample", weights=weights) as g:
            assert g.engine.target.contents() == wanted and g.kind.method == "hybrid"


@pytest.mark.parametrize("name", ["nowhere", "some/hub-name", "nowhere.gguf"])
def test_contents_of_what_is_not_here_are_unknown(name: str):
    assert contents_of_files(name) is None


def test_the_bundled_head_fits_its_target():
    head = inspect_head(resolve("smollm2-eagle3"))
    assert head.target.name in {f"HuggingFaceTB/{name}" for name in BUNDLED_DRAFTS}


def test_shared_bundled_target_keeps_its_bundled_drafts():
    with (
        foredraft.load("sample", "none") as plain,
        foredraft.load(plain) as chosen,
        foredraft.load(plain, "medusa") as m,
    ):
        assert (chosen.kind.method, m.kind.method) == ("hybrid", "medusa")


def test_a_target_is_a_path_a_model_wrapped_or_not_or_a_generator(
    folder: Path, plain: foredraft.Generator, wanted: list[int]
):
    with pytest.raises(ModelError, match="no model folder"):
        foredraft.load(folder / "nothing")
    g = foredraft.load(folder, "none", dtype=torch.float64, device=torch.device("cpu"))
    assert g.engine.target.dtype == torch.float64 and g.tokenizer is not None
    g.close()
    for wrap in (compiled, PeftModel, lambda model: compiled(PeftModel(model))):
        model = tiny.build()
        g = foredraft.load(wrap(model), "prompt_lookup", dtype="float32")
        assert g.engine.target.model is model
        assert g.generate(PROMPT, max_new_tokens=12).tokens == wanted
        g.close()
    other = foredraft.load(plain, "prompt_lookup")
    assert other.engine.target is plain.engine.target
    other.close()
    assert plain.generate(PROMPT, max_new_tokens=12).tokens == wanted


def test_a_generator_brings_its_tokenizer_along(folder: Path):
    with pytest.raises(ModelError, match="There is no tokenizer folder '.*nothing'"):
        foredraft.load(tiny.build(), tokenizer=folder / "nothing")
    (folder / "empty").mkdir()
    with pytest.raises(ModelError, match="Cannot load a tokenizer from"):
        foredraft.load(tiny.build(), tokenizer=folder / "empty")
    g = foredraft.load(tiny.build(), tokenizer=folder)
    assert g.tokenizer is not None and foredraft.load(g).tokenizer is g.tokenizer
    assert g.generate("AB", max_new_tokens=2).text
    g.close()
    assert as_tokenizer(str(folder)) is not None


@pytest.mark.parametrize("target", [None, 3, nn.Linear(2, 2), {"model": 1}, PeftModel(nn.Linear(2, 2))])  # pyright: ignore[reportArgumentType]
def test_no_target(target: Any):
    with pytest.raises(ModelError, match="a folder, a hub name or a transformers model, not a"):
        foredraft.load(target)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_context_that_is_shorter_than_the_models(folder: Path, weights: str | None):
    with foredraft.load(str(folder), "prompt_lookup", device="cpu", weights=weights, max_model_len=24) as g:
        result = g.generate(tiny.prompts((9,))[0], max_new_tokens=50, eos_token_id=())
        assert len(result.tokens) == 24 - 9 and result.finish_reason == "length"
        with pytest.raises(UsageError, match="context of 24"):
            g.generate(tiny.prompts((24,))[0])
        for source in (g, g.engine.target.model) if weights is None else (g,):
            with pytest.raises(OptionError, match="loaded already, with its context: leave max_model_len out"):
                foredraft.load(source, "none", max_model_len=20)
        assert g.engine.target.max_length == 24
    with pytest.raises(OptionError, match="max_model_len is 9999; the model's context is [0-9]+ tokens"):
        foredraft.load(str(folder), "none", device="cpu", weights=weights, max_model_len=9999)


def test_what_a_loaded_model_cannot_become(plain: foredraft.Generator):
    with pytest.raises(OptionError, match="loaded already, in torch.float32: leave dtype out, or load it in bfloat16"):
        foredraft.load(plain, dtype="bfloat16")
    with pytest.raises(OptionError, match="Unknown dtype torch.int8"):
        foredraft.load("sample", None, dtype=torch.int8)
    with pytest.raises(ModelError, match="PEFT's learned prompts are not part of the model"):
        unwrapped(PeftModel(tiny.build(), prompts=True))
    with pytest.raises(ModelError, match="A tokenizer must be a folder, a hub name or a transformers tokenizer"):
        foredraft.load(tiny.build(), tokenizer=3)
    with pytest.raises(ModelError, match="LlamaModel has no language-model head"):
        foredraft.load(tiny.build().model)


PLACED: dict[str, tuple[dict[str, Any], str]] = {
    "no device": ({"device": "nonsense"}, "Cannot use the device 'nonsense'"),
    "another device": ({"device": "meta"}, "loaded already, on cpu: leave device out, or move it to meta"),
    "options": ({"model_options": {"revision": "v2"}}, "loaded already: leave model_options out"),
    "no draft": (
        {"draft_options": {"revision": "v2"}},
        "draft_options apply only to a draft model loaded by its name",
    ),
}


@pytest.mark.parametrize("kind", PLACED)
def test_options_that_a_loaded_model_would_ignore_are_refused(kind: str, plain: foredraft.Generator):
    options, said = PLACED[kind]
    for target in (plain, plain.engine.target.model):
        with pytest.raises(OptionError, match=said):
            foredraft.load(target, "none", **options)
        with pytest.raises(OptionError, match=said):
            foredraft.load_many(target, ["none", tiny.build(seed=5)], **options)
    foredraft.load(plain, "none", device="cpu", model_options={}, draft_options={}).close()


def test_a_dtype_may_have_its_full_name(plain: foredraft.Generator):
    foredraft.load(plain, "none", dtype="torch.float32").close()


def test_a_generator_that_nobody_else_has_is_shared_until_it_is_loaded(wanted: list[int]):
    g = foredraft.load(foredraft.load(tiny.build(), "none"), "prompt_lookup")
    several = foredraft.load_many(foredraft.load(g, "none"), ["none", "prompt_lookup"])
    del g
    for each in several:
        assert each.generate(PROMPT, max_new_tokens=12).tokens == wanted
        each.close()


@pytest.mark.parametrize("name", ["max_batch_size", "kv_cache_memory_bytes", "max_prefill_tokens", "tensor_parallel"])
@pytest.mark.parametrize("value", ["3", 0, 2.0, True])
def test_sizes_are_whole_numbers(name: str, value: Any, plain: foredraft.Generator):
    with pytest.raises(OptionError, match=f"{name} must be a whole number, 1 or more, not "):
        foredraft.load(plain, "none", **{name: value})
    with pytest.raises(OptionError, match=f"{name} must be a whole number of 64 bits, not 9223372036854775808"):
        foredraft.load(plain, "none", **{name: 2**63})


@pytest.mark.parametrize("name", ["fast", "exact", "compile", "cuda_graphs", "prefix_cache"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_are_true_or_false(name: str, value: Any, plain: foredraft.Generator):
    with pytest.raises(OptionError, match=f"{name} must be True or False, not {value!r}"):
        foredraft.load(plain, "none", **{name: value})


@pytest.mark.parametrize("name", ["model_options", "draft_options"])
@pytest.mark.parametrize("value", [7, "revision", ["revision"]])
def test_options_of_from_pretrained_are_mappings(name: str, value: Any, plain: foredraft.Generator):
    with pytest.raises(
        OptionError, match=f"{name} must be a mapping such as .*revision.*, not {value!r}".replace("[", r"\[")
    ):
        foredraft.load(plain, "none", **{name: value})


def test_a_policy_is_an_object(plain: foredraft.Generator):
    with pytest.raises(OptionError, match="policy must be an object of a class derived from Policy, not 'constant'"):
        foredraft.load(plain, "none", policy="constant")  # type: ignore[arg-type]


def test_a_reason_of_torch_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def fails(*args: Any, **given: Any) -> None:
        raise NotImplementedError("Could not run 'aten::empty'. This could be because ... 'aten::empty' is available")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(OptionError) as error:
        as_device("mps")
    assert str(error.value) == "Cannot use the device 'mps': Could not run 'aten::empty'."


def test_the_layers_of_an_adapter_are_not_packed():
    """They are read and written from outside; packing them would lose a merge, or unpack them at every forward."""
    model = adapted()
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=12)[0, len(PROMPT) :].tolist()
    before = [module for module in model.modules() if isinstance(module, Lora)]
    inside = [set(layer.modules()) for layer in before]
    g = foredraft.load(PeftModel(model), "prompt_lookup")
    assert 0 < g.engine.target.packed_layers
    assert [set(layer.modules()) for layer in before] == inside
    assert g.generate(PROMPT, max_new_tokens=12).tokens == wanted
    with torch.no_grad():  # as merging does
        before[0].base_layer.weight += 0.5
    changed = g.generate(PROMPT, max_new_tokens=12).tokens
    g.close()
    assert changed == model.generate(torch.tensor([PROMPT]), max_new_tokens=12)[0, len(PROMPT) :].tolist() != wanted


SMALL = [name for name, method in METHODS.items() if "small model" in method.needs]


@pytest.mark.parametrize("name", ["", *SMALL])
def test_a_loaded_model_drafts_and_is_left_as_it_was(name: str, plain: foredraft.Generator, wanted: list[int]):
    draft = tiny.build(seed=5)
    attention, head = draft.config._attn_implementation, draft.lm_head
    if name == "universal":
        with pytest.raises(DrafterError, match="universal reads the text, and the target has no tokenizer"):
            foredraft.load(plain, (name, draft))
    else:
        g = foredraft.load(plain, (name, draft) if name else draft)
        result = g.generate(PROMPT, max_new_tokens=12)
        g.close()
        assert result.tokens == wanted and result.stats.drafted > 0
        assert result.stats.method == (name or "draft_model")
    assert draft.config._attn_implementation == attention and draft.lm_head is head


def test_options_stand_beside_a_model_or_a_path(folder: Path, plain: foredraft.Generator, wanted: list[int]):
    options = "draft_model,num_assistant_tokens=2,num_assistant_tokens_schedule=constant"
    for given in (tiny.build(seed=5), compiled(tiny.build(seed=5)), folder, str(folder)):
        g = foredraft.load(plain, (options, given))
        result = g.generate(PROMPT, max_new_tokens=12)
        g.close()
        assert result.tokens == wanted and len(result.stats.drafted_by_depth) == 2


def test_a_path_may_have_commas(folder: Path, tmp_path: Path):
    """As it is if it exists, and in brackets."""
    inner = Spec.parse("draft_model,num_assistant_tokens=3")
    for text in (str(folder), f"[{folder}]"):
        assert as_spec("elsewhere", f"draft_model:{text},num_assistant_tokens=3") == replace(inner, path=str(folder))
        assert Spec.parse(f"hybrid:[draft_model:{text},num_assistant_tokens=3]").drafting.path == str(folder)
    odd = tmp_path / "a,b=c,d"
    odd.mkdir()
    assert Spec.parse(f"eagle3:{odd},depth=2").path == str(odd)
    assert Spec.parse("eagle3:[no/such,folder],depth=2").path == "no/such,folder"
    named = tmp_path / "[brackets]"
    named.mkdir()
    assert Spec.parse(f"eagle3:{named}").path == str(named)
    assert Spec.parse("specinfer:[a,b]+[c,d]").path == "[a,b]+[c,d]"
    with pytest.raises(OptionError, match="The option 'folder' is not of the form option=value"):
        Spec.parse("eagle3:no/such,folder")
    with foredraft.load(tiny.build(), f"draft_model:{folder},num_assistant_tokens_schedule=constant") as g:
        assert g.generate(PROMPT, max_new_tokens=4).stats.drafted > 0


def test_a_path_says_what_is_there(folder: Path, tmp_path: Path):
    assert as_spec("elsewhere", folder) == replace(Spec.parse("draft_model"), path=str(folder))
    for bundled, name in (("sample-eagle3", "eagle3"), ("sample-eagle", "eagle2"), ("sample-medusa", "medusa")):
        found = as_spec("elsewhere", Path(resolve(bundled)))
        assert isinstance(found, Spec) and (found.name, found.path) == (name, resolve(bundled))
    write_tuned(tmp_path / "tuned.json", Tuned("sample", "prompt_lookup", off_from=8))
    found = as_spec("elsewhere", tmp_path / "tuned.json")
    assert isinstance(found, Spec) and (found.name, found.off_from) == ("prompt_lookup", 8)


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (3, "A drafter is a spec such as .* not an int"),
        (foredraft.Drafter, "A drafter is a spec such as .* not the class Drafter"),
        (("draft_model",), "A drafter is a spec such as .* not a tuple"),
        (nn.Linear(2, 2), "The object cannot be used as a draft model: A model must be .* not a Linear"),
        (("eagle3", tiny.build(seed=5)), "eagle3 needs an EAGLE-3 head: it takes no model object"),
        (("online", tiny.build(seed=5)), "online needs a draft model or a trained head inside"),
        (("draft_model:there", tiny.build(seed=5)), "draft_model already has the path 'there'"),
        (("nothing", tiny.build(seed=5)), "Unknown drafter 'nothing'"),
        (tiny.build(seed=5).to("meta"), "The draft model 'LlamaForCausalLM' is on meta and the target on cpu"),
        (Path("no/such/folder"), "no/such/folder"),
    ],
)
def test_no_drafter(drafter: Any, said: str, plain: foredraft.Generator):
    with pytest.raises(UsageError, match=said) as caught:
        foredraft.load(plain, drafter)
    assert "\n" not in str(caught.value)


def test_a_model_may_draft_for_itself(wanted: list[int]):
    model = tiny.build()
    head = model.lm_head
    with foredraft.load(model, model) as g:
        result = g.generate(PROMPT, max_new_tokens=12)
    assert result.tokens == wanted and result.stats.accepted == result.stats.drafted > 0
    assert model.lm_head is head


HINTS = {
    "torch_dtype": "Did you mean dtype?",
    "device_map": "Pass device, or model_options={'device_map': ...}.",
    "drafer": "Did you mean drafter?",
    "assistant_model": "Did you mean drafter?",
    "revision": "Pass model_options={'revision': ...}.",
    "max_new_tokens": "Sampling options belong to generate.",
}


@pytest.mark.parametrize("name", HINTS)
def test_an_unknown_argument_of_load_is_an_error_with_a_hint(name: str):
    with pytest.raises(OptionError) as caught:
        foredraft.load("sample", **{name: None})  # type: ignore[arg-type]
    said = str(caught.value)
    assert said.startswith(f"Unknown argument of load {name!r}. {HINTS[name]} Known: ") and "drafter" in said
    with pytest.raises(OptionError, match=f"Unknown argument of load {name!r}"):
        foredraft.load_many("sample", ["none"], **{name: None})  # type: ignore[arg-type]


def test_all_interfaces_have_the_same_options():
    options = {each.name: each.default for each in fields(LoadOptions)}
    assert set(LoadKeywords.__annotations__) == options.keys()
    shared = {each.name for each in fields(SharedOptions)}
    assert shared == {*SharedKeywords.__annotations__, "fast"}
    assert inspect.signature(foredraft.speculative).parameters["fast"].default is False
    flags = {parameter.name: parameter.default for parameter in ASKED_MODEL.parameters()}
    assert flags.keys() - {each.name for each in MODEL.parameters()} == {"generation_config"}
    assert flags.keys() - options.keys() == {"model", "drafter", "threads", "model_option", "draft_option"}
    assert options.keys() - flags.keys() == {"tokenizer", "fast", "prefix_cache", "model_options", "draft_options"}
    assert all(flags[name] == options[name] for name in flags.keys() & options.keys())
    assert all(each.meaning for each in describe_options(LoadOptions))


def test_an_unknown_argument_of_speculative_is_an_error_with_a_hint():
    with pytest.raises(OptionError, match="Unknown argument of speculative 'verifer'. Did you mean verifier?"):
        foredraft.speculative("auto", verifer="block")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="max_batch_size must be a whole number, 1 or more, not 0"):
        foredraft.speculative("auto", max_batch_size=0)


CALLS = {
    "num_beams": "Use beam_search(prompt, num_beams=...).",
    "streamer": "Use stream(prompt)",
    "max_tokens": "Did you mean max_new_tokens?",
    "stop": "Did you mean stop_strings?",
    "assistant_model": "The drafter is an argument of load.",
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_another_call_is_pointed_there(name: str, plain: foredraft.Generator):
    for call in (plain.generate, plain.stream, plain.batch):
        with pytest.raises(OptionError) as caught:
            call(PROMPT, **{name: 1})  # type: ignore[arg-type]
        assert f"Unknown generation option {name!r}. {CALLS[name]}" in str(caught.value)


def test_the_length_of_a_lookup_has_the_name_of_any_chains():
    spec = Spec.parse("prompt_lookup,num_assistant_tokens=8")
    assert spec == Spec.parse("prompt_lookup,prompt_lookup_num_tokens=8")
    assert spec != Spec.parse("prompt_lookup")
    with pytest.raises(OptionError, match="are the same option of prompt_lookup: give one of them"):
        Spec.parse("prompt_lookup,num_assistant_tokens=8,prompt_lookup_num_tokens=8")
    with pytest.raises(OptionError, match="prompt_lookup_num_tokens must be a whole number"):
        Spec.parse("prompt_lookup,num_assistant_tokens=many")
