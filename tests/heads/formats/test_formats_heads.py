"""EAGLE-1, Medusa, Hydra and our own files: what is read, and what is written for whom."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import head_files as hf
import pytest
import torch
from head_files import EAGLE1, LLAMA, H, V, refused

import random_heads as heads
from foredraft.core.errors import DrafterError
from foredraft.core.target_parts import FINAL
from foredraft.heads.formats import default_format, inspect_head, load_head
from foredraft.heads.nets.eagle import Eagle
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.model.hf.causal_lm import CausalLM


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return hf.target()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle1(tmp_path: Path, lm: CausalLM, file: str):
    own = hf.filled(EAGLE1)
    path = hf.put(tmp_path / "a", LLAMA, own | {"embed_tokens.weight": hf.table(lm).half()}, file)
    head = load_head(path, lm)
    net = head.net
    assert isinstance(net, Eagle) and net.taps == (FINAL,) and net.vocabulary is None
    assert (head.info.method, head.info.format) == ("eagle", "SafeAILab EAGLE-1/2")
    assert head.info.config.fc_bias, "a bias that is not spoken of is there"
    hf.same(net.state_dict(), own)
    assert head.info.parameters == sum(tensor.numel() for tensor in own.values())
    assert inspect_head(path).config == head.info.config
    old = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(V, H)}
    hf.same(load_head(hf.put(tmp_path / "b", LLAMA, own | old, file), lm).net.state_dict(), own)


def test_eagle1_with_other_biases(tmp_path: Path, lm: CausalLM):
    shapes = {name: shape for name, shape in EAGLE1.items() if name != "fc.bias"}
    biases = {f"layers.0.self_attn.{n}_proj.bias": (s,) for n, s in (("q", H), ("k", 16), ("v", 16))}
    path = hf.put(tmp_path / "a", {**LLAMA, "bias": False, "qkv_bias": True}, hf.filled(shapes | biases))
    head = load_head(path, lm)
    assert not head.info.config.fc_bias and head.info.config.block.attention_bias
    hf.again(head.net, tmp_path / "b", "eagle", lm, embed=False)
    hf.same(hf.stored(tmp_path / "b"), hf.stored(tmp_path / "a"))
    path = hf.put(tmp_path / "c", LLAMA, hf.filled(shapes | biases))
    refused(path, lm, "EAGLE-1/2 as its config.json describes it: fc.bias is missing; layers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eagle1_round_trip(tmp_path: Path, lm: CausalLM, dtype: torch.dtype):
    own = {name: tensor.to(dtype) for name, tensor in hf.filled(EAGLE1).items()}
    config = {**LLAMA, "rope_theta": 500000.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    head = load_head(hf.put(tmp_path / "a", config, own), lm)
    assert default_format(head.net) == "eagle"
    hf.again(head.net, tmp_path / "b", "eagle", lm, dtype)
    found = hf.stored(tmp_path / "b")
    table = hf.table(lm).to(dtype)
    hf.same(found, own | {"embed_tokens.weight": table})
    words = hf.config_of(tmp_path / "b")
    kept = {key: words[key] for key in config if key not in ("architectures", "torch_dtype")}
    wanted = {
        **config,
        **{key: lm.model.config.to_dict()[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    assert kept == {key: wanted[key] for key in kept}
    assert words["bias"] is True and words["torch_dtype"] == str(dtype)[6:]


def test_eagle1_of_another_target(tmp_path: Path, lm: CausalLM):
    other = hf.filled({"embed_tokens.weight": (V, H)}, seed=3)
    path = hf.put(tmp_path, LLAMA, hf.filled(EAGLE1) | other)
    refused(path, lm, "The embedding in the head .* is not this target's")
    assert inspect_head(path).method == "eagle"


def medusa(layers: int = 1, prefix: str = "", own: bool = True) -> dict[str, torch.Tensor]:
    tensors = hf.filled(hf.medusa_shapes(3, layers, prefix, own))
    pairs = {
        f"{prefix}{i}.{layer}.linear.{kind}": f"{prefix}{i}.0.linear.{kind}"
        for i in range(3)
        for layer in range(1, layers)
        for kind in ("weight", "bias")
    }
    return hf.tied(tensors, pairs)


MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


@pytest.mark.parametrize("layers", [1, 3])
def test_medusa1(tmp_path: Path, lm: CausalLM, layers: int):
    """The config says two heads, the tensors three."""
    tensors = medusa(layers)
    path = hf.put(tmp_path / "a", MEDUSA, tensors, "medusa_lm_head.pt")
    head = load_head(path, lm)
    net = head.net
    assert (
        isinstance(net, Medusa)
        and net.config.num_heads == 3
        and net.config.num_layers == layers
        and net.config.own_heads
    )
    assert (head.info.method, head.info.format) == ("medusa", "Medusa-1")
    assert "It has 3 heads according to its tensors, but its config says 2." in head.info.notes
    assert head.info.target.name == "lmsys/vicuna-7b-v1.3" and head.info.target.vocab_size == V
    for i in range(3):
        assert torch.equal(net.blocks[i].linear.weight, tensors[f"{i}.0.linear.weight"])
        assert torch.equal(net.blocks[i].linear.bias, tensors[f"{i}.0.linear.bias"])
        assert torch.equal(net.heads[i].weight, tensors[f"{i}.{layers}.weight"])
    hf.again(net, tmp_path / "b", "medusa", lm)
    hf.same(hf.stored(tmp_path / "b", "medusa_lm_head.safetensors"), tensors)
    hf.same(torch.load(tmp_path / "b" / "medusa_lm_head.pt", weights_only=True), tensors)
    words = hf.config_of(tmp_path / "b")
    assert (words["medusa_num_heads"], words["medusa_num_layers"]) == (3, layers) and "version" not in words
    assert words["base_model_name_or_path"] == "someone/target"
    assert default_format(net) == "medusa"


def test_medusa1_version_2_shares_the_targets_output_layer(tmp_path: Path, lm: CausalLM):
    tensors = medusa(own=False)
    path = hf.put(tmp_path / "a", {**MEDUSA, "version": "2"}, tensors, "medusa_lm_head.safetensors")
    assert inspect_head(path).target.vocab_size is None
    head = load_head(path, lm)
    assert head.info.format == "Medusa-1 version 2" and not head.net.config.own_heads
    assert head.net.config.vocab_size == V
    hf.again(head.net, tmp_path / "b", "medusa", lm)
    hf.same(hf.stored(tmp_path / "b", "medusa_lm_head.safetensors"), tensors)
    assert hf.config_of(tmp_path / "b")["version"] == "2"
    assert not (tmp_path / "b" / "medusa_lm_head.pt").exists()


def test_medusa2_is_a_whole_model(tmp_path: Path, lm: CausalLM):
    base = {"model.embed_tokens.weight": hf.table(lm), "model.norm.weight": torch.ones(H)}
    tensors = medusa(prefix="medusa_head.")
    config = {**LLAMA, "medusa_num_heads": 3, "medusa_num_layers": 1}
    path = hf.put(tmp_path / "a", config, base | tensors)
    head = load_head(path, lm)
    assert head.info.format == "Medusa-2" and any("relative to the tuned model" in note for note in head.info.notes)
    assert torch.equal(head.net.heads[2].weight, tensors["medusa_head.2.1.weight"])
    assert head.info.parameters == sum(tensor.numel() for tensor in tensors.values())


def test_medusa_heads_that_are_no_row(tmp_path: Path, lm: CausalLM):
    tensors = medusa()
    gap = {name: tensor for name, tensor in tensors.items() if not name.startswith("1.")}
    path = hf.put(tmp_path / "a", MEDUSA, gap, "medusa_lm_head.pt")
    refused(path, lm, "not numbered consecutively or differ in depth: 0 with 1 blocks, 2 with 1 blocks")
    loose = hf.filled(hf.medusa_shapes(3, 2))
    path = hf.put(tmp_path / "b", MEDUSA, loose, "medusa_lm_head.pt")
    refused(path, lm, "0.0.linear.weight and 0.1.linear.weight .* differ; they must be equal")
    less = {name: tensor for name, tensor in tensors.items() if name != "2.1.weight"}
    refused(hf.put(tmp_path / "c", MEDUSA, less, "medusa_lm_head.pt"), lm, "2.1.weight is missing")
    refused(hf.put(tmp_path / "d", MEDUSA, tensors, "medusa_lm_head.pt"), lm, "no rotary embedding", rope_theta=5.0)


HYDRA = {
    "hydra_num_heads": 2,
    "hydra_num_layers": 1,
    "hydra_head_arch": "mlp",
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "grounded_heads": True,
    "hidden_state_offset": 0,
}
PLUS = {**HYDRA, "hydra_num_layers": 4, "hydra_head_arch": "prefix-mlp"}


def hydra_plus() -> dict[str, torch.Tensor]:
    tensors = hf.filled(hf.hydra_plus_shapes())
    pairs = {
        f"hydra_mlp.{i}.{place}.linear.{kind}": f"hydra_mlp.{i}.3.linear.{kind}"
        for i in range(2)
        for place in (5, 7)
        for kind in ("weight", "bias")
    }
    return hf.tied(tensors, pairs)


def test_hydra(tmp_path: Path, lm: CausalLM):
    tensors = hf.filled(hf.hydra_shapes())
    table = {"input_embed_fn.weight": hf.table(lm).half()}
    head = load_head(hf.put(tmp_path / "a", HYDRA, tensors | table, "hydra_lm_head.pt"), lm)
    net = head.net
    assert isinstance(net, Hydra) and (head.info.method, head.info.format) == ("hydra", "Hydra")
    assert net.config.num_heads == 2 and net.config.num_layers == 1 and net.prefix is None
    for i in range(2):
        for part in ("linear", "res_connection"):
            for kind in ("weight", "bias"):
                stored = tensors[f"hydra_mlp.{i}.0.{part}.{kind}"]
                assert torch.equal(getattr(getattr(net.mlps[i], part), kind), stored)
        assert torch.equal(net.heads[i].bias, tensors[f"hydra_lm_head.{i}.bias"])
    hf.save(net, tmp_path / "b", "hydra", lm)
    hf.same(torch.load(tmp_path / "b" / "hydra_lm_head.pt", weights_only=True), tensors)
    hf.same(hf.stored(tmp_path / "b", "hydra_lm_head.safetensors"), tensors)
    words = hf.config_of(tmp_path / "b")
    assert {key: words[key] for key in HYDRA} == {**HYDRA, "base_model_name_or_path": "someone/target"}
    hf.save(net, tmp_path / "c", "hydra", lm, embed=True)
    assert torch.equal(hf.stored(tmp_path / "c", "hydra_lm_head.safetensors")["input_embed_fn.weight"], hf.table(lm))
    other = hf.filled({"input_embed_fn.weight": (V, H)}, seed=3)
    refused(hf.put(tmp_path / "d", HYDRA, tensors | other, "hydra_lm_head.pt"), lm, "is not this target's")


def test_hydra_plus(tmp_path: Path, lm: CausalLM):
    tensors = hydra_plus()
    path = hf.put(tmp_path / "a", PLUS, tensors, "hydra_lm_head.pt")
    head = load_head(path, lm)
    net, block = head.net, head.info.config.prefix
    assert isinstance(net, Hydra) and head.info.format == "Hydra++" and net.config.num_layers == 4
    assert net.prefix is not None and block is not None
    assert (block.num_attention_heads, block.num_key_value_heads, block.head_dim) == (4, 2, 8), "the target's"
    layer = {
        name.removeprefix("prefix_embeding_layer.layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith("prefix_embeding_layer.layers.0.")
    }
    hf.same(net.prefix.layer.state_dict(), layer)
    assert torch.equal(net.prefix.norm.weight, tensors["prefix_embeding_layer.norm.weight"])
    for i in range(2):
        assert torch.equal(net.mlps[i].res_connection.weight, tensors[f"hydra_mlp.{i}.1.res_connection.weight"])
        assert net.mlps[i].block is not None
        assert torch.equal(net.mlps[i].block.weight, tensors[f"hydra_mlp.{i}.3.linear.weight"])
        assert torch.equal(net.heads[i].weight, tensors[f"hydra_lm_head.{i}.1.weight"])
    again = hf.again(net, tmp_path / "b", "hydra", lm)
    own = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    hf.same(torch.load(tmp_path / "b" / "hydra_lm_head.pt", weights_only=True), own)
    assert again.info.config == head.info.config == inspect_head(str(tmp_path / "b")).config
    assert any("are a guess" in note for note in inspect_head(path).notes)
    assert load_head(path, lm, rope_theta=5.0).info.config.prefix.rope_theta == 5.0


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hydra_head_arch": "cross-attn"}, "architecture 'cross-attn'; mlp and prefix-mlp are supported"),
        ({"hydra_head_arch": "eagle-attn"}, "architecture 'eagle-attn'"),
        ({"grounded_heads": False}, "does not read drafted tokens"),
        ({"hidden_state_offset": 1}, "reads another hidden layer than the last"),
    ],
)
def test_hydra_of_other_kinds(tmp_path: Path, lm: CausalLM, changes: dict[str, Any], part: str):
    path = hf.put(tmp_path, {**HYDRA, **changes}, hf.filled(hf.hydra_shapes()), "hydra_lm_head.pt")
    for call in (lambda: inspect_head(path), lambda: load_head(path, lm)):
        with pytest.raises(DrafterError, match=part):
            call()


def test_hydra_that_is_not_grounded_by_its_tensors(tmp_path: Path, lm: CausalLM):
    shapes = {
        "hydra_mlp.0.0.linear.weight": (H, H),
        "hydra_mlp.0.0.linear.bias": (H,),
        "hydra_lm_head.0.weight": (V, H),
    }
    refused(hf.put(tmp_path / "a", HYDRA, hf.filled(shapes)), lm, "not grounded")
    for name in ("hydra_lm_head.0.weight", "hydra_mlp.0.0.linear.weight"):
        less = hf.filled({key: shape for key, shape in hf.hydra_shapes().items() if key != name})
        refused(hf.put(tmp_path / "b", HYDRA, less), lm, f"lacks {name}")


def nets(lm: CausalLM) -> dict[str, Any]:
    ids = torch.arange(3, 90, 2)
    return {
        "eagle": heads.eagle(lm, num_layers=2, fc_bias=False, sliding_window=16),
        "eagle3": heads.eagle3(lm, vocabulary=ids, norm_carried=True, fc_norm=True, num_layers=2),
        "medusa": heads.medusa(lm, layers=2),
        "medusa shared": heads.medusa(lm, own_heads=False),
        "hydra": heads.hydra(lm),
        "blockwise": heads.blockwise(lm),
        "glide": heads.glide(lm),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "medusa shared", "hydra", "blockwise", "glide"])
def test_our_own_files_hold_every_net(tmp_path: Path, lm: CausalLM, name: str, dtype: torch.dtype):
    net = nets(lm)[name].to(dtype).float()
    head = hf.again(net, tmp_path / "a", "foredraft", lm, dtype)
    info = inspect_head(str(tmp_path / "a"))
    assert (info.method, info.format) == (name.split()[0], f"foredraft {name.split()[0]}") and info.dtype == dtype
    assert head.info == info and info.target.name == "someone/target"
    assert (info.target.hidden_size, info.target.vocab_size) == (H, V)
    if name == "eagle3":
        assert torch.equal(head.net.vocabulary, net.vocabulary)


def test_blockwise_has_our_format_only(tmp_path: Path, lm: CausalLM):
    net = nets(lm)["blockwise"]
    assert isinstance(net, Blockwise) and default_format(net) == "foredraft"
    with pytest.raises(DrafterError, match="A head of the kind Blockwise cannot be written in the format 'medusa'"):
        hf.save(net, tmp_path / "a", "medusa", lm)
    with pytest.raises(DrafterError, match="Unknown format 'onnx'. Known: eagle, sglang, speculators"):
        hf.save(net, tmp_path / "a", "onnx", lm)
    with pytest.raises(DrafterError, match="Linear is not a draft head"):
        default_format(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (
            ("foredraft_head",),
            "magic",
            "of the unknown kind 'magic'. Known: eagle, eagle3, medusa, hydra, blockwise, glide",
        ),
        (("foredraft_version",), 2, "written by a later version of foredraft"),
        (("head", "more"), 1, "has unknown or missing keys: more"),
        (("head", "inner_size"), "8", "inner_size .* cannot be '8'"),
        (("head", "inner_size"), -8, "inner_size .* cannot be -8"),
        (("head", "inner_size"), 9, "inner.0.weight .* has the shape"),
    ],
)
def test_our_own_configs_that_are_broken(tmp_path: Path, lm: CausalLM, path: tuple[str, ...], value: Any, part: str):
    hf.save(nets(lm)["blockwise"], tmp_path, "foredraft", lm)
    words = hf.config_of(tmp_path)
    place = words
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    hf.put(tmp_path, words, {}, "")
    with pytest.raises(DrafterError, match=part):
        load_head(str(tmp_path), lm)


@pytest.mark.parametrize("name", ["medusa", "medusa shared", "hydra"])
def test_measured_accuracies_go_with_the_head(tmp_path: Path, lm: CausalLM, name: str):
    net = nets(lm)[name]
    net.config = replace(net.config, accuracies=((0.5, 0.25), (0.125, 0.0), (1.0,)))
    for to in (name.split()[0], "foredraft"):
        hf.again(net, tmp_path / to, to, lm)
        words = hf.config_of(tmp_path / to)
        words.get("head", words)["accuracies"] = [[0.5, 2.0]]
        hf.put(tmp_path / to, words, {}, "")
        refused(str(tmp_path / to), lm, "accuracies in the config.json")
