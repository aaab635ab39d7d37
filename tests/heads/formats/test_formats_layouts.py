"""EAGLE-3 heads as five projects write them: the same tensors under other names, each flag in each place, and for
targets with added or padded tokens. All draft the same tokens."""

import json
from pathlib import Path
from typing import Any

import head_files as hf
import pytest
import torch
from head_files import LLAMA, VD, H, V
from torch import Tensor

from foredraft import load
from foredraft.core.errors import OptionError
from foredraft.heads.formats import inspect_head, load_head
from foredraft.model.hf.causal_lm import CausalLM

SPEC = "nodes=9,depth=3,top_k=3,num_assistant_tokens_schedule=constant"
PROMPT = list(range(3, 23))
INPUTS, OUTPUTS = [2, 3, 6], [1, 2, 5]
"""Layer ids that count inputs, and the same layers by their outputs; not the default ones."""
KEY = "eagle_aux_hidden_state_layer_ids"
NESTED = {"use_aux_hidden_state": True, KEY: OUTPUTS}
SPECFORGE = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD}
WIDE_NORM = hf.filled({"input_norm.weight": (3 * H,)}, seed=7)
NORMS = list(hf.filled({str(i): (H,) for i in range(3)}, seed=8).values())


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return hf.target()


def tensors(prefix: str = "midlayer.", outer: str = "", **more: Tensor) -> dict[str, Tensor]:
    """A head's tensors; ``outer`` stands before all names but those of the output layer and the maps."""
    plain = hf.filled(hf.eagle3_shapes())
    named = {outer + name.replace("midlayer.", prefix): tensor for name, tensor in plain.items()}
    named |= {outer + name: tensor for name, tensor in more.items()}
    if outer:
        named["lm_head.weight"] = named.pop(f"{outer}lm_head.weight")
    return named | hf.maps()


def drafts(folder: str, lm: CausalLM, options: str = "") -> list[list[int]]:
    """The tokens of the first drafts for a prompt; the output is plain decoding's."""
    with load(lm, f"eagle3:{folder},{SPEC}{options}") as drafting, load(lm, "none") as plain:
        result = drafting.generate(PROMPT, max_new_tokens=12, record_steps=True)
        assert result.tokens == plain.generate(PROMPT, max_new_tokens=12).tokens
    return [list(step.tokens) for step in result.steps[:4]]


PROJECTS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "SpecForge": ({**SPECFORGE, "eagle_config": NESTED, "norm_output": False}, tensors()),
    "SGLang, new names": ({**SPECFORGE, "eagle_config": NESTED}, tensors("layers.0.", "model.")),
    "speculators": (
        hf.speculators(norm_before_residual=False, eagle_aux_hidden_state_layer_ids=INPUTS),
        tensors("layers.0."),
    ),
    "vLLM, without speculators": (
        {**SPECFORGE, "architectures": ["Eagle3LlamaForCausalLM"], KEY: INPUTS},
        tensors("layers.0."),
    ),
    "NVIDIA ModelOpt": (
        {**SPECFORGE, "eagle_config": {**NESTED, "use_last_layernorm": True, "use_mtp_layernorm": False}},
        tensors(),
    ),
    "NVIDIA NeMo": (
        {**SPECFORGE, "architectures": ["LlamaEagle3DraftModel"], "eagle_config": NESTED, "num_aux_hidden_states": 3},
        tensors("layers.0.", "model.", **{"embed_tokens.weight": hf.table(hf.target())}),
    ),
    "AngelSlim": (
        {**SPECFORGE, "architectures": ["Eagle3LlamaForCausalLM"], "aux_hidden_states_layer_ids": OUTPUTS},
        tensors(),
    ),
    "SafeAILab, with layers": ({**LLAMA, "draft_vocab_size": VD, "aux_hidden_state_layer_ids": OUTPUTS}, tensors()),
}
"""Configs and tensors of one head. Each project's own keys are in them, for the same layers."""


@pytest.fixture(scope="module")
def wanted(lm: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return drafts(hf.put(tmp_path_factory.mktemp("wanted"), *PROJECTS["SpecForge"]), lm)


@pytest.mark.parametrize("project", PROJECTS)
def test_projects(tmp_path: Path, lm: CausalLM, project: str, wanted: list[list[int]]):
    folder = hf.put(tmp_path, *PROJECTS[project])
    assert load_head(folder, lm).net.taps == (2, 3, 6)
    assert drafts(folder, lm) == wanted


FLAGS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "norm_before_fc": ({"norm_before_fc": True}, WIDE_NORM),
    "fc_norm": ({"fc_norm": True}, {f"fc_norm.{i}.weight": norm for i, norm in enumerate(NORMS)}),
    "use_aux_norm": (
        {"use_aux_norm": True},
        dict(zip(("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"), NORMS, strict=True)),
    ),
    "norm_output": ({"norm_output": True}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_in_each_place(tmp_path: Path, lm: CausalLM, flag: str, wanted: list[list[int]]):
    words, extra = FLAGS[flag]
    nested = {**SPECFORGE, "eagle_config": {**NESTED, **words}}
    places = {
        "top": ({**SPECFORGE, "eagle_config": NESTED, **words}, tensors(**extra)),
        "nested": (nested, tensors(**extra)),
        "both": ({**nested, **dict.fromkeys(words, None)}, tensors(**extra)),
        "prefixed": (nested, tensors("layers.0.", "model.", **extra)),
        "speculators": (
            hf.speculators(**{"norm_before_residual": False, KEY: INPUTS, **words}),
            tensors("layers.0.", **extra),
        ),
    }
    found = {place: drafts(hf.put(tmp_path / place, *files), lm) for place, files in places.items()}
    assert found == dict.fromkeys(places, found["top"])
    assert found["top"] != wanted, "the flag changes the drafts"


def test_older_norms_of_layers_are_the_same(tmp_path: Path, lm: CausalLM):
    found = [
        drafts(
            hf.put(tmp_path / flag, {**SPECFORGE, "eagle_config": NESTED, **FLAGS[flag][0]}, tensors(**FLAGS[flag][1])),
            lm,
        )
        for flag in ("fc_norm", "use_aux_norm")
    ]
    assert found[0] == found[1]


def test_norm_output_is_of_the_next_draft_step_alone(tmp_path: Path, lm: CausalLM):
    """True: the next step reads the normed state. The first level of a draft, which no draft precedes, stays."""
    folders = {
        value: hf.put(tmp_path / str(value), {**SPECFORGE, "eagle_config": NESTED, "norm_output": value}, tensors())
        for value in (None, False, True)
    }
    nets = {value: load_head(folder, lm).net for value, folder in folders.items()}
    state = torch.randn(1, 2, H, generator=torch.Generator().manual_seed(3))
    normed = torch.nn.functional.rms_norm(state, (H,), nets[None].norm.weight, 1e-5)
    for value, net in nets.items():
        assert torch.allclose(net.logits(state), normed @ net.lm_head.weight.T, atol=1e-5)
        assert torch.equal(net.carry(state), state) == (value is not True)
    assert torch.allclose(nets[True].carry(state), normed, atol=1e-5)
    notes = {value: [n for n in inspect_head(folder).notes if "EAGLE-3.1" in n] for value, folder in folders.items()}
    assert not notes[None] and not notes[False] and "norm_output=no" in notes[True][0]


def test_norm_output_by_hand(tmp_path: Path, lm: CausalLM, wanted: list[list[int]]):
    """A head that SpecForge wrote with an explicit true when that meant an ordinary head."""
    old = hf.put(tmp_path / "a", {**SPECFORGE, "eagle_config": NESTED, "norm_output": True}, tensors())
    assert drafts(old, lm) != wanted
    assert drafts(old, lm, ",norm_output=no") == wanted
    assert drafts(hf.put(tmp_path / "b", *PROJECTS["SpecForge"]), lm, ",norm_output=yes") == drafts(old, lm)
    head = load_head(old, lm, norm_output=False)
    assert "norm_output is set to false; its files have true." in head.info.notes
    hf.again(head.net, tmp_path / "c", "sglang", lm)
    assert hf.config_of(tmp_path / "c")["norm_output"] is False
    assert drafts(hf.again_at(load_head(old, lm).net, tmp_path / "d", "sglang", lm), lm) == drafts(old, lm)
    own = hf.again_at(load_head(old, lm).net, tmp_path / "e", "foredraft", lm)
    assert drafts(own, lm, ",norm_output=no") == wanted
    with pytest.raises(OptionError, match="norm_output"):
        load(lm, f"eagle3:{old},norm_output=maybe")


@pytest.mark.parametrize("ids", [[2, 4, 5], [3, 4, 8]], ids=["the default", "the last state"])
def test_lists_in_eagle_config_that_can_only_be_of_inputs(tmp_path: Path, lm: CausalLM, ids: list[int]):
    nested = {**SPECFORGE, "eagle_config": {KEY: ids}}
    head = load_head(hf.put(tmp_path, nested, tensors()), lm)
    assert head.net.taps == tuple(ids) and any("are of inputs" in note for note in head.info.notes)


def test_an_empty_list_is_none(tmp_path: Path, lm: CausalLM):
    nested = {**SPECFORGE, "eagle_config": {KEY: []}}
    assert load_head(hf.put(tmp_path, nested, tensors()), lm).net.taps == (2, 4, 5)


def resized(lm: CausalLM, size: int) -> CausalLM:
    """The same target with this many tokens; added ones have random rows."""
    model = hf.target().model
    model.load_state_dict(lm.model.state_dict())
    torch.manual_seed(5)
    model.resize_token_embeddings(size, mean_resizing=False)
    return CausalLM(model, verify=False)


OWN = hf.filled({"embed_tokens.weight": (V, H)}, seed=4)
VOCABULARIES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "a draft vocabulary": ({**SPECFORGE, "eagle_config": NESTED}, tensors()),
    "the whole vocabulary": (
        {**SPECFORGE, "eagle_config": NESTED, "draft_vocab_size": V},
        {**hf.filled(hf.eagle3_shapes(draft=V))},
    ),
    "an own embedding": (
        hf.speculators(norm_before_residual=False, eagle_aux_hidden_state_layer_ids=INPUTS),
        tensors("layers.0.", **OWN),
    ),
    "the target's output": (
        {**SPECFORGE, "eagle_config": NESTED, "draft_vocab_size": None},
        {name: tensor for name, tensor in hf.filled(hf.eagle3_shapes(draft=V)).items() if name != "lm_head.weight"},
    ),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_targets_with_added_tokens(tmp_path: Path, lm: CausalLM, case: str):
    folder = hf.put(tmp_path / "a", *VOCABULARIES[case])
    more = resized(lm, V + 8)
    if case != "the target's output":  # which may draft an added token
        assert drafts(folder, more) == drafts(folder, lm)
    assert any("only tokens of both" in note for note in load_head(folder, more).info.notes)
    hf.again(load_head(folder, more).net, tmp_path / "b", "foredraft", more)
    with load(more, f"eagle3:{folder},{SPEC}") as drafting, load(more, "none") as plain:
        prompt = [*PROMPT, V + 2, V + 7, 5]
        assert drafting.generate(prompt, max_new_tokens=8).tokens == plain.generate(prompt, max_new_tokens=8).tokens


@pytest.mark.parametrize("case", VOCABULARIES)
def test_heads_with_rows_of_padding(tmp_path: Path, lm: CausalLM, case: str):
    config, held = VOCABULARIES[case]
    config = {**config, "vocab_size": V + 4}
    if "transformer_layer_config" in config:
        config["transformer_layer_config"] = {**config["transformer_layer_config"], "vocab_size": V + 4}
    if config["draft_vocab_size"] == V:
        config["draft_vocab_size"] = V + 4
    padded = {}
    for name, tensor in held.items():
        rows = tensor.shape[0] == V
        padded[name] = torch.cat([tensor, torch.zeros(4, *tensor.shape[1:], dtype=tensor.dtype)]) if rows else tensor
    folder = hf.put(tmp_path / "padded", config, padded)
    assert drafts(folder, lm) == drafts(hf.put(tmp_path / "plain", *VOCABULARIES[case]), lm)
    hf.again(load_head(folder, lm).net, tmp_path / "again", "foredraft", lm)


def test_a_head_of_another_model_says_so(tmp_path: Path, lm: CausalLM, caplog: pytest.LogCaptureFixture):
    """By the contents of its target, which training records."""
    for name, contents, warned in (("own", lm.contents(), 0), ("other", "0" * 16, 1), ("unknown", None, 0)):
        caplog.clear()
        folder = hf.put(tmp_path / name, *PROJECTS["SpecForge"])
        (Path(folder) / "provenance.json").write_text(json.dumps({"target_contents": contents}))
        drafts(folder, lm)
        assert caplog.text.count("was trained for another model: few of its drafts may be accepted") == warned
