"""Files that are broken, unsafe, or for another target: one clear sentence each."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_files as hf
import pytest
import torch
from head_files import EAGLE1, LLAMA, SPECFORGE, VD, V, refused
from torch import Tensor

import tiny
from foredraft.core.errors import DrafterError, ModelError, OptionError
from foredraft.heads.formats import inspect_head, load_head
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.hub import fetch


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return hf.target()


def tensors() -> dict[str, Tensor]:
    return hf.filled(hf.eagle3_shapes()) | hf.maps()


def test_what_is_not_there(tmp_path: Path, lm: CausalLM):
    refused(str(tmp_path / "nothing"), lm, "There is no folder", ModelError)
    (tmp_path / "file").write_text("")
    refused(str(tmp_path / "file"), lm, "is a file; expected a folder", ModelError)
    (tmp_path / "empty").mkdir()
    refused(str(tmp_path / "empty"), lm, "Cannot read the config.json of the head .*: No such file or directory")
    refused(hf.put(tmp_path / "a", LLAMA, {}, ""), lm, "has no weights")


@pytest.mark.parametrize(
    ("text", "part"),
    [("{", "is not JSON: "), ("[]", "is not a JSON object"), ("\udcff", "is not JSON"), ("{}", "has no hidden_size")],
)
def test_configs_that_are_none(tmp_path: Path, lm: CausalLM, text: str, part: str):
    path = hf.put(tmp_path, None, tensors())
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(path, lm, part)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "text for a number": ({"hidden_size": "32"}, "hidden_size .* is '32', not a positive integer"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads .* is 0, not a positive"),
    "layers without end": ({"num_hidden_layers": 10**9}, "num_hidden_layers .* is 1000000000, not at most 1024"),
    "kinds of layers that are lists": ({"layer_types": [[1]]}, "only all full or all sliding"),
    "truth for a number": ({"num_hidden_layers": True}, "is True, not a positive integer"),
    "number for a truth": ({"attention_bias": 1}, "attention_bias .* is 1, not true or false"),
    "negative base": ({"rope_theta": -1.0}, "rope_theta .* is -1.0, not a positive number"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "which do not fit together"),
    "activation": ({"hidden_act": "gelu_new"}, "unknown activation 'gelu_new'. Known: silu"),
    "scheme": ({"rope_scaling": {"rope_type": "spiral"}}, "cannot be used: Unknown rope type 'spiral'"),
    "scheme without numbers": ({"rope_scaling": {"rope_type": "llama3"}}, "cannot be used: rope_scaling"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "a part of each attention head"),
    "rope is no object": ({"rope_scaling": 2}, "rope_scaling .* is 2, not an object"),
    "mixed layers": (
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
        "only all full or all sliding",
    ),
    "ids are no list": (
        {"eagle_aux_hidden_state_layer_ids": 3, "eagle_config": None},
        "is 3, not a list of integers",
    ),
    "draft vocabulary too large": ({"draft_vocab_size": V + 1}, "draft vocabulary of 97, more than the target's 96"),
    "both norms": ({"fc_norm": True, "norm_before_fc": True}, "both norm_before_fc and fc_norm"),
    "tied to another size": ({"tie_word_embeddings": True}, "ties its output layer to an embedding of another size"),
    "another width": ({"hidden_size": 64, "head_dim": 8}, "no multiple of the target's width|has the shape"),
    "another inner size": ({"intermediate_size": 47}, r"mlp.\w+.weight .* has the shape \[\d+, \d+\], but its"),
}


@pytest.mark.parametrize("case", BAD)
def test_configs_that_make_no_head(tmp_path: Path, lm: CausalLM, case: str):
    changes, part = BAD[case]
    drop = ("lm_head.weight",) if case.startswith("tied") else ()
    path = hf.put(tmp_path, {**SPECFORGE, **changes}, {k: v for k, v in tensors().items() if k not in drop})
    refused(path, lm, part)
    with pytest.raises(DrafterError, match=part):
        inspect_head(path)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path, lm: CausalLM):
    found = tensors()
    del found["norm.weight"]
    found["midlayer.self_attn.q_norm.bias"] = torch.ones(8)
    path = hf.put(tmp_path / "a", SPECFORGE, found)
    refused(path, lm, "describes it: norm.weight is missing; midlayer.self_attn.q_norm.bias is not expected")
    none = hf.put(tmp_path / "b", SPECFORGE, {k: v for k, v in tensors().items() if "mlp" not in k and "norm" not in k})
    refused(none, lm, "mlp.down_proj.weight and 3 more are missing|and [0-9]+ more are missing")


def test_other_things_than_heads(tmp_path: Path, lm: CausalLM):
    lm.model.save_pretrained(tmp_path / "model")
    refused(str(tmp_path / "model"), lm, "is a whole model, not a draft head; use it as draft_model:PATH")
    refused(hf.put(tmp_path / "b", {}, {"x.weight": torch.ones(2)}), lm, "match no known draft head: x.weight")
    other = hf.speculators(speculators_model_type="eagle")
    refused(hf.put(tmp_path / "c", other, hf.filled(EAGLE1)), lm, "speculators type 'eagle'; only eagle3 is supported")


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda d2t: d2t + V, "ids outside the target's vocabulary of 96"),
        (lambda d2t: d2t - 50, "ids outside the target's vocabulary"),
        (lambda d2t: d2t.flip(0), "are not ascending|ids outside"),
        (lambda d2t: -torch.arange(VD), "gives target ids that are not ascending; it must hold the offsets"),
        (lambda d2t: d2t[:-1], r"d2t .* has the shape \[39\], but .* requires \[40\]"),
        (lambda d2t: d2t.float(), "holds torch.float32, not integers"),
        (lambda d2t: torch.zeros_like(d2t), "d2t and t2d .* are inconsistent"),
    ],
)
def test_maps_that_are_none(tmp_path: Path, lm: CausalLM, make: Callable[[Tensor], Tensor], part: str):
    found = tensors()
    refused(hf.put(tmp_path, SPECFORGE, found | {"d2t": make(found["d2t"])}), lm, part)


def test_maps_that_are_missing_or_zero(tmp_path: Path, lm: CausalLM):
    found = tensors()
    less = {name: tensor for name, tensor in found.items() if name != "d2t"}
    refused(hf.put(tmp_path / "a", SPECFORGE, less), lm, "draft vocabulary of 40 out of 96 and no tensor d2t")
    refused(
        hf.put(tmp_path / "b", SPECFORGE, found | {"t2d": torch.ones(V - 1, dtype=torch.bool)}), lm, "t2d .* the shape"
    )
    zeros = {name: tensor for name, tensor in found.items() if name != "t2d"} | {
        "d2t": torch.zeros(VD, dtype=torch.long)
    }
    head = load_head(hf.put(tmp_path / "c", SPECFORGE, zeros), lm)
    assert torch.equal(head.net.vocabulary, torch.arange(VD)) and any("all zeros" in note for note in head.info.notes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(tmp_path: Path, lm: CausalLM, value: float):
    found = tensors()
    found["midlayer.mlp.up_proj.weight"][3, 4] = value
    refused(hf.put(tmp_path, SPECFORGE, found), lm, "midlayer.mlp.up_proj.weight contains NaN or infinity")


def test_numbers_too_large_for_the_target(tmp_path: Path):
    half = CausalLM(tiny.build("llama", num_hidden_layers=8).half(), verify=False)
    found = tensors()
    found["norm.weight"][0] = 1e6
    refused(hf.put(tmp_path, SPECFORGE, found), half, "norm.weight of .* does not fit into torch.float16")


def test_quantised_weights(tmp_path: Path, lm: CausalLM):
    found = tensors()
    found["fc.weight"] = found["fc.weight"].to(torch.int8)
    refused(hf.put(tmp_path / "a", SPECFORGE, found), lm, "are torch.int8: quantised heads are not supported")
    found["fc.weight"] = tensors()["fc.weight"].to(torch.float8_e4m3fn)
    refused(hf.put(tmp_path / "b", SPECFORGE, found), lm, "fc.weight of .* has the unsupported type F8_E4M3")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_files_that_are_cut_short(tmp_path: Path, lm: CausalLM, file: str, keep: int):
    path = hf.put(tmp_path, SPECFORGE, tensors(), file)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[:keep])
    refused(path, lm, "is truncated or not a ")


class Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_would_run_code(tmp_path: Path, lm: CausalLM, zipped: bool):
    path = hf.put(tmp_path / "a", SPECFORGE, {}, "")
    evil: Any = {"fc.weight": Evil(tmp_path / "owned")}
    torch.save(evil, tmp_path / "a" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(path, lm, "a pickle with other objects than tensors, which could run code; it was not loaded")
    assert not (tmp_path / "owned").exists()


def test_pickles_that_are_no_state_dict(tmp_path: Path, lm: CausalLM):
    path = hf.put(tmp_path, SPECFORGE, {}, "")
    for content, part in (([torch.ones(1)], "is not a state dict"), ({"epoch": 3}, "'epoch' is not a tensor")):
        torch.save(content, tmp_path / "pytorch_model.bin")
        refused(path, lm, part)


def test_files_of_old_torch(tmp_path: Path, lm: CausalLM):
    path = hf.put(tmp_path, SPECFORGE, {}, "")
    torch.save(tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_head(path, lm).net.fc.weight, tensors()["fc.weight"])


def test_shards(tmp_path: Path, lm: CausalLM):
    found = tensors()
    names = sorted(found)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, keys in parts.items():
        hf.put(tmp_path, SPECFORGE, {key: found[key] for key in keys}, file)
    refused(str(tmp_path), lm, "several weight files and no index: model-1.safetensors, model-2.safetensors")
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_head(str(tmp_path), lm).net.fc.weight, found["fc.weight"])
    (tmp_path / "model-2.safetensors").unlink()
    refused(str(tmp_path), lm, "lacks model-2.safetensors, which its model.safetensors.index.json lists")
    index["weight_map"]["fc.weight"] = "../outside.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(str(tmp_path), lm, "lacks outside.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(str(tmp_path), lm, "has no weight_map")


def test_heads_of_another_target(tmp_path: Path, lm: CausalLM):
    path = hf.put(tmp_path, SPECFORGE, tensors())
    wide = hf.target(hidden_size=64, head_dim=16)
    refused(path, wide, "is for a target with hidden states of width 32; this target's have 64")
    many = hf.target(vocab_size=200)
    refused(path, many, "is for a target with a vocabulary of 96; this target has 200")
    few = hf.target(vocab_size=int(tensors()["d2t"][-1]) + VD - 1)
    refused(path, few, "drafts tokens up to id .* this target has .* so the head is for another model")
    narrow = hf.put(tmp_path / "m", {}, hf.filled(hf.medusa_shapes()), "medusa_lm_head.pt")
    refused(narrow, wide, "hidden states of width 32")
    eagle = hf.put(tmp_path / "e", LLAMA, hf.filled(EAGLE1))
    refused(eagle, lm, "leave out taps and norm_output", taps=(1,))
    refused(eagle, lm, "leave out taps and norm_output", norm_output=True)


def test_folders_that_hold_other_weights(tmp_path: Path, lm: CausalLM):
    net = load_head(hf.put(tmp_path / "a", SPECFORGE, tensors()), lm).net
    hf.put(tmp_path / "b", None, {"x": torch.ones(1)}, "pytorch_model.bin")
    with pytest.raises(OptionError, match="holds something that foredraft export did not write"):
        hf.save(net, tmp_path / "b", "sglang", lm)
    (tmp_path / "file").write_text("")
    with pytest.raises(DrafterError, match="Cannot write to the folder"):
        hf.save(net, tmp_path / "file", "sglang", lm)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, lm: CausalLM, monkeypatch: pytest.MonkeyPatch):
    from foredraft.heads.formats import save

    net = load_head(hf.put(tmp_path / "a", SPECFORGE, tensors()), lm).net
    hf.save(net, tmp_path / "b", "sglang", lm)
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}

    def fails(tensors: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(save._WEIGHTS, ".safetensors", fails)
    with pytest.raises(DrafterError, match=r"^Cannot write to the folder '.*/b': No space left on device\.$"):
        hf.save(net, tmp_path / "b", "sglang", lm)
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before
    monkeypatch.undo()
    hf.save(net, tmp_path / "b", "sglang", lm)
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before


def test_a_loaded_head_does_not_follow_its_file(tmp_path: Path, lm: CausalLM):
    """Tensors mapped from a file would change with it."""
    path = hf.put(tmp_path, SPECFORGE, tensors(), "pytorch_model.bin")
    net = load_head(path, lm).net
    with (tmp_path / "pytorch_model.bin").open("r+b") as file:
        file.write(b"\0" * (tmp_path / "pytorch_model.bin").stat().st_size)
    assert torch.equal(net.fc.weight, tensors()["fc.weight"])


@pytest.mark.parametrize("name", ["", "./nothing", "/nowhere/at/all", "a/b/c"])
def test_names_that_are_no_hub_names_are_not_looked_for_there(name: str):
    with pytest.raises(ModelError, match="There is no folder"):
        fetch(name)


def test_a_folder_is_fetched_from_where_it_is():
    assert fetch(".") == Path(".")
