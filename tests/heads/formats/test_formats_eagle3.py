"""EAGLE-3 of three producers: what their flags, layer ids and maps become, and what is written for whom."""

from pathlib import Path
from typing import Any

import head_files as hf
import pytest
import torch
from head_files import LLAMA, SPECFORGE, VD, H, V, refused
from torch import Tensor
from transformers import LlamaConfig

import tiny
from foredraft.core.errors import DrafterError
from foredraft.heads.formats import default_format, inspect_head, load_head
from foredraft.heads.nets.eagle import Eagle3
from foredraft.model.hf.causal_lm import CausalLM


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return hf.target()


def net_of(path: str, lm: CausalLM, **options: Any) -> Eagle3:
    net = load_head(path, lm, **options).net
    assert isinstance(net, Eagle3)
    return net


def write(
    folder: Path, config: dict[str, Any], prefix: str = "midlayer.", drop: tuple[str, ...] = (), **more: Any
) -> str:
    """A head whose tensors are the plain ones with additions."""
    shapes = {k: more.pop(k) for k in list(more) if k in ("taps", "width", "draft")}
    tensors = hf.filled(hf.eagle3_shapes(prefix, **shapes)) | hf.maps() | more.pop("tensors", {})
    return hf.put(
        folder, config, {k: v for k, v in tensors.items() if k not in drop}, more.pop("file", "model.safetensors")
    )


SAFE = {**LLAMA, "draft_vocab_size": VD}


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_safeailab(tmp_path: Path, lm: CausalLM, file: str):
    path = write(tmp_path, SAFE, file=file)
    head = load_head(path, lm)
    net, config = head.net, head.info.config
    assert isinstance(net, Eagle3) and not net.training and not any(p.requires_grad for p in net.parameters())
    assert (head.info.method, head.info.format) == ("eagle3", "SafeAILab EAGLE-3")
    assert net.taps == (2, 4, 5)
    assert config.block.rope_theta == 10000.0 and config.block.rms_norm_eps == 1e-5 and config.block.head_dim == 8
    assert (config.vocab_size, config.draft_vocab_size, config.target_hidden_size) == (V, VD, H)
    off = "norm_before_residual norm_before_fc fc_norm norm_carried own_embedding fc_bias".split()
    assert not any(getattr(config, name) for name in off) and config.own_head
    tensors = hf.filled(hf.eagle3_shapes())
    hf.same(dict(net.state_dict()), tensors)
    assert head.info.parameters == sum(t.numel() for t in tensors.values()) and head.info.dtype == torch.float32
    d2t = hf.maps()["d2t"]
    assert net.vocabulary is not None and torch.equal(net.vocabulary, torch.arange(VD) + d2t)
    assert "rope_theta is missing; 10000 is used." in head.info.notes


def test_inspect_needs_no_target(tmp_path: Path):
    info = inspect_head(write(tmp_path, SAFE))
    assert info.config.taps == () and info.target.layers is None  # type: ignore[union-attr]
    assert (info.target.hidden_size, info.target.vocab_size) == (H, V)
    assert any("target's embedding" in note for note in info.notes)
    listed = inspect_head(write(tmp_path / "b", SPECFORGE))
    assert listed.config.taps == (2, 4, 5) and listed.target.layers == 5  # type: ignore[union-attr]


def test_specforge_ids_count_outputs_and_speculators_ids_inputs(tmp_path: Path, lm: CausalLM):
    head = load_head(write(tmp_path / "a", SPECFORGE), lm)
    assert head.info.format == "SpecForge/SGLang EAGLE-3" and head.net.taps == (2, 4, 5)
    assert head.info.config.block.rope_theta == 1e6
    assert any("rope_theta=10000" in note for note in head.info.notes)
    config = hf.speculators(eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    head = load_head(write(tmp_path / "b", config, "layers.0."), lm)
    assert head.info.format == "vLLM speculators EAGLE-3" and head.net.taps == (1, 3, 4)
    assert head.info.target.name == "someone/target"
    # ids at the top of a file of SafeAILab's kind are vLLM's
    config = {**SAFE, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert net_of(write(tmp_path / "c", config), lm).taps == (1, 3, 4)
    # captured in the order of the layers, whatever the order of the list
    config = {**SAFE, "eagle_aux_hidden_state_layer_ids": [4, 1, 3]}
    assert net_of(write(tmp_path / "d", config), lm).taps == (1, 3, 4)
    assert net_of(str(tmp_path / "d"), lm, taps=(8, 0, 7)).taps == (0, 7, 8)


def test_the_default_layers_follow_the_depth(tmp_path: Path, lm: CausalLM):
    path = write(tmp_path, SAFE)
    assert net_of(path, hf.target(num_hidden_layers=10)).taps == (2, 5, 7)
    assert net_of(path, hf.target(num_hidden_layers=3)).taps == (0, 1, 2)
    for depth in (2, 4, 5, 6):
        shallow = hf.target(num_hidden_layers=depth)
        refused(path, shallow, f"no three different layers in a target of {depth} layers: give them")
    assert net_of(path, hf.target(num_hidden_layers=4), taps=(1, 2, 3)).taps == (1, 2, 3)


def test_five_layers(tmp_path: Path, lm: CausalLM):
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3, 5, 7]}}
    net = net_of(write(tmp_path / "a", {**SPECFORGE, **ids}, taps=5), lm)
    assert net.taps == (1, 3, 4, 6, 8) and net.fc.in_features == 5 * H
    path = write(tmp_path / "b", SAFE, taps=5)
    refused(path, lm, "reads 5 hidden layers and does not list them")
    assert net_of(path, lm, taps=(1, 2, 3, 4, 5)).taps == (1, 2, 3, 4, 5)
    refused(write(tmp_path / "c", {**SPECFORGE, **ids}), lm, r"reads 3 hidden layers .* but 5 are listed")


@pytest.mark.parametrize("ids", [[1, 1, 2], [-2, 1, 2]])
def test_lists_of_layers_that_are_none(tmp_path: Path, lm: CausalLM, ids: list[int]):
    config = {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    refused(write(tmp_path, config), lm, "must be distinct and not negative")


def test_layers_that_the_target_has_not(tmp_path: Path, lm: CausalLM):
    config = {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}}
    refused(write(tmp_path, config), lm, "reads hidden layer 9 of a target with 8 layers")
    off = {**SPECFORGE, "eagle_config": {"use_aux_hidden_state": False}}
    refused(write(tmp_path / "b", off), lm, "use_aux_hidden_state is false")


FLAGS: dict[str, tuple[dict[str, Any], str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "plain": (hf.speculators(), "layers.0.", {}, {"norm_before_residual": False, "norm_carried": False}),
    "residual absent": (hf.speculators(norm_before_residual=None), "layers.0.", {}, {"norm_before_residual": True}),
    "norm output of speculators": (
        hf.speculators(norm_output=True),
        "layers.0.",
        {},
        {"norm_carried": True},
    ),
    "no norm output of SpecForge": ({**SPECFORGE, "norm_output": False}, "midlayer.", {}, {"norm_carried": False}),
    "norm output of SpecForge": ({**SPECFORGE, "norm_output": True}, "midlayer.", {}, {"norm_carried": True}),
    "norm before fc": (
        hf.speculators(norm_before_fc=True),
        "layers.0.",
        {"input_norm.weight": (3 * H,)},
        {"norm_before_fc": True, "fc_norm": False},
    ),
    "fc norm": (
        {**SPECFORGE, "fc_norm": True},
        "midlayer.",
        {f"fc_norm.{i}.weight": (H,) for i in range(3)},
        {"fc_norm": True, "norm_before_fc": False},
    ),
    "fc bias": ({**SPECFORGE, "bias": True}, "midlayer.", {"fc.bias": (H,)}, {"fc_bias": True}),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags(tmp_path: Path, lm: CausalLM, case: str):
    words, prefix, shapes, wanted = FLAGS[case]
    extra = hf.filled(shapes, seed=8)
    path = write(tmp_path, words, prefix, tensors=extra)
    head = load_head(path, lm)
    config = head.info.config
    assert {name: getattr(config, name) for name in wanted} == wanted
    state = head.net.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in extra.items())
    assert inspect_head(path).config.block == config.block  # type: ignore[union-attr]
    absent = "norm_before_residual is absent: true, as in vLLM." in head.info.notes
    assert absent == (case == "residual absent")
    if extra:  # the flag without its tensor is no such head
        refused(write(tmp_path / "less", words, prefix), lm, "missing")
        plain = SPECFORGE if prefix == "midlayer." else hf.speculators()
        refused(write(tmp_path / "more", plain, prefix, tensors=extra), lm, "not expected")


BLOCKS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "rope theta": ({"rope_theta": 123.0}, {}, {"rope_theta": 123.0, "rope_scaling": None}),
    "rope parameters": (
        {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {},
        {"rope_theta": 77.0, "rope_scaling": None},
    ),
    "rope parameters by kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 8.0}}},
        {},
        {"rope_theta": 7.0},
    ),
    "rope scaling, old words": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        {},
        {"rope_theta": 500000.0},
    ),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, {}, {"rope_scaling": None}),
    "attention bias": (
        {"attention_bias": True},
        {f"layers.0.self_attn.{n}_proj.bias": (s,) for n, s in (("q", H), ("k", 16), ("v", 16))},
        {"attention_bias": True, "output_bias": False},
    ),
    "attention bias with the output's": (
        {"attention_bias": True},
        {f"layers.0.self_attn.{n}_proj.bias": (s,) for n, s in (("q", H), ("k", 16), ("v", 16), ("o", H))},
        {"attention_bias": True, "output_bias": True},
    ),
    "qwen3": (
        {"model_type": "qwen3"},
        {f"layers.0.self_attn.{n}_norm.weight": (8,) for n in "qk"},
        {"qk_norm": True},
    ),
    "sliding window": ({"sliding_window": 16}, {}, {"sliding_window": 16}),
    "sliding layers": (
        {"sliding_window": 16, "layer_types": ["sliding_attention"], "model_type": "llama"},
        {},
        {"sliding_window": 16},
    ),
    "full layers": ({"sliding_window": 16, "layer_types": ["full_attention"]}, {}, {"sliding_window": None}),
    "a window that qwen does not use": (
        {"sliding_window": 16, "model_type": "qwen2"},
        {},
        {"sliding_window": None},
    ),
    "wider heads": (
        {"head_dim": 16},
        {
            "layers.0.self_attn.q_proj.weight": (64, 2 * H),
            "layers.0.self_attn.k_proj.weight": (32, 2 * H),
            "layers.0.self_attn.v_proj.weight": (32, 2 * H),
            "layers.0.self_attn.o_proj.weight": (H, 64),
        },
        {"head_dim": 16},
    ),
    "mlp bias": (
        {"mlp_bias": True},
        {f"layers.0.mlp.{n}_proj.bias": (s,) for n, s in (("gate", 48), ("up", 48), ("down", H))},
        {"mlp_bias": True},
    ),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_the_blocks_words_and_back(tmp_path: Path, lm: CausalLM, case: str):
    layer, shapes, wanted = BLOCKS[case]
    path = write(tmp_path / "a", hf.speculators(layer), "layers.0.", tensors=hf.filled(shapes, seed=8))
    head = load_head(path, lm)
    block = head.info.config.block
    assert {name: getattr(block, name) for name in wanted} == wanted
    for to in ("speculators", "foredraft"):
        again = hf.again(head.net, tmp_path / to, to, lm)
        assert torch.equal(again.net.rotary.frequencies, head.net.rotary.frequencies)


def test_further_layers(tmp_path: Path, lm: CausalLM):
    """The first reads two things side by side, the others are ordinary; SGLang numbers those apart."""
    second = hf.filled({**hf.layer_shapes(""), "input_layernorm.weight": (H,)}, seed=9)
    config = hf.speculators({"num_hidden_layers": 2})
    path = write(tmp_path / "a", config, "layers.0.", tensors={f"layers.1.{k}": v for k, v in second.items()})
    net = net_of(path, lm)
    assert net.depth == 2
    hf.same(net.layers[0].state_dict(), second)
    hf.save(net, tmp_path / "again", "speculators", lm)
    hf.same(hf.stored(tmp_path / "again"), hf.stored(tmp_path / "a"))
    apart = {f"additional_layers.0.{k.replace('input_layernorm', 'hidden_norm')}": v for k, v in second.items()}
    other = net_of(write(tmp_path / "b", {**SPECFORGE, "num_hidden_layers": 2}, tensors=apart), lm)
    hf.same(other.layers[0].state_dict(), second)
    assert any("SGLang omitted the residual" in note for note in inspect_head(str(tmp_path / "b")).notes)
    with pytest.raises(DrafterError, match="'sglang' cannot hold this head: num_layers"):
        hf.save(net, tmp_path / "c", "sglang", lm)


@pytest.mark.parametrize("to", ["eagle", "sglang", "speculators", "foredraft"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_are_exact(tmp_path: Path, lm: CausalLM, to: str, dtype: torch.dtype):
    original = hf.filled(hf.eagle3_shapes()) | hf.maps()
    original = {k: v.to(dtype) if v.is_floating_point() else v for k, v in original.items()}
    head = load_head(hf.put(tmp_path / "a", SAFE, original), lm)
    again = hf.again(head.net, tmp_path / "b", to, lm, dtype, provenance={"command": "test"})
    assert (tmp_path / "b" / "provenance.json").exists() and not list((tmp_path / "b").glob(".*"))
    assert again.info.dtype == dtype
    assert torch.equal(again.net.vocabulary, head.net.vocabulary)
    found = hf.stored(tmp_path / "b")
    if to == "eagle" or to == "sglang":
        hf.same(found, original)
    if to == "speculators":
        hf.same(found, {k.replace("midlayer.", "layers.0."): v for k, v in original.items()})
    assert torch.equal(logits(again.net), logits(head.net))


def logits(net: Any) -> Tensor:
    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)

    source = torch.Generator().manual_seed(3)
    hidden = {tap: torch.randn(1, 5, H, generator=source) for tap in net.taps}
    tokens = torch.arange(5)[None]
    return net.logits(net.forward(tokens, net.features(hidden), tokens, attend))


def test_what_sglang_reads(tmp_path: Path, lm: CausalLM):
    net = net_of(write(tmp_path / "a", SAFE), lm)
    hf.save(net, tmp_path / "b", "sglang", lm, torch.bfloat16)
    config = hf.config_of(tmp_path / "b")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert "target_hidden_size" not in config, "SGLang multiplies it by three if it is there, null or not"
    wanted = {
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "draft_vocab_size": VD,
        "vocab_size": V,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "fc_norm": False,
        "norm_output": False,
        "num_hidden_layers": 1,
    }
    assert {name: config[name] for name in wanted} == wanted
    found = hf.stored(tmp_path / "b")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t"} <= found.keys()
    assert "embed_tokens.weight" not in found
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool


def test_what_vllm_reads(tmp_path: Path, lm: CausalLM):
    net = net_of(write(tmp_path / "a", SAFE), lm)
    hf.save(net, tmp_path / "b", "speculators", lm)
    config = hf.config_of(tmp_path / "b")
    keys = """architectures speculators_model_type speculators_version draft_vocab_size norm_before_residual
    target_hidden_size eagle_aux_hidden_state_layer_ids norm_before_fc fc_norm norm_output embed_requires_grad
    speculators_config transformer_layer_config transformers_version""".split()
    assert set(keys) <= config.keys()
    assert config["speculators_model_type"] == "eagle3" and config["architectures"] == ["Eagle3Speculator"]
    assert config["norm_before_residual"] is False and config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal["proposal_type"] == "greedy" and proposal["verifier_accept_k"] == 1
    assert proposal["accept_tolerance"] == 0.0 and isinstance(proposal["speculative_tokens"], int)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    layer = config["transformer_layer_config"]
    assert (layer["vocab_size"], layer["rope_theta"], layer["head_dim"]) == (V, 10000.0, 8)
    assert hf.stored(tmp_path / "b").keys() == {*hf.eagle3_shapes("layers.0."), "d2t", "t2d"}


def test_what_safeailab_reads(tmp_path: Path, lm: CausalLM):
    net = net_of(write(tmp_path / "a", SAFE), lm)
    hf.save(net, tmp_path / "b", "eagle", lm)
    config = hf.config_of(tmp_path / "b")
    assert config["draft_vocab_size"] == VD and config["rope_theta"] == 10000.0
    assert not {"eagle_config", "norm_output", "target_hidden_size"} & config.keys()
    assert hf.stored(tmp_path / "b").keys() == {*hf.eagle3_shapes(), "d2t", "t2d"}
    hf.save(net, tmp_path / "c", "eagle", lm, embed=True)
    assert torch.equal(hf.stored(tmp_path / "c")["embed_tokens.weight"], hf.table(lm))


def test_a_full_vocabulary_has_no_maps(tmp_path: Path, lm: CausalLM):
    tensors = hf.filled(hf.eagle3_shapes(draft=V))
    zeros = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
    config = {**LLAMA, "draft_vocab_size": V}
    for name, more in (("none", {}), ("zeros", zeros)):
        net = net_of(hf.put(tmp_path / name, config, tensors | more), lm)
        assert net.vocabulary is None
    for to, maps in (("eagle", False), ("sglang", True), ("speculators", False)):
        hf.save(net, tmp_path / to, to, lm)
        found = hf.stored(tmp_path / to)
        assert ("d2t" in found, "t2d" in found) == (maps, maps)
    assert not hf.stored(tmp_path / "sglang")["d2t"].any() and hf.stored(tmp_path / "sglang")["t2d"].all()


def test_the_targets_output_layer(tmp_path: Path, lm: CausalLM):
    """draft_vocab_size null: SGLang takes the target's."""
    path = write(tmp_path / "a", {**SPECFORGE, "draft_vocab_size": None}, drop=("lm_head.weight", "d2t", "t2d"))
    net = net_of(path, lm)
    assert net.lm_head is None and net.vocabulary is None and net.logits(torch.zeros(1, 1, H)).shape[-1] == V
    hf.again(net, tmp_path / "b", "sglang", lm)
    assert hf.config_of(tmp_path / "b")["draft_vocab_size"] is None
    with pytest.raises(DrafterError, match="'speculators' cannot hold this head: own_head=False"):
        hf.save(net, tmp_path / "c", "speculators", lm)
    assert default_format(net) == "sglang"
    whole = write(tmp_path / "d", {**SPECFORGE, "draft_vocab_size": V}, drop=("lm_head.weight", "d2t", "t2d"))
    assert net_of(whole, lm).lm_head is None, "the whole vocabulary by its size, as in NVIDIA's files"
    refused(write(tmp_path / "e", SPECFORGE, drop=("lm_head.weight",)), lm, "lm_head.weight is missing")


def test_a_tied_output_layer_is_the_embedding(tmp_path: Path, lm: CausalLM):
    config = {**SPECFORGE, "draft_vocab_size": None, "tie_word_embeddings": True}
    path = write(tmp_path, config, drop=("lm_head.weight", "d2t", "t2d"))
    net = net_of(path, lm)
    assert net.lm_head is not None and torch.equal(net.lm_head.weight, hf.table(lm))
    tied = hf.target(tie_word_embeddings=True)
    assert net_of(path, tied).lm_head is None, "the target's is the embedding already"
    assert inspect_head(path).parameters < sum(p.numel() for p in net.parameters())


def test_another_width_has_an_embedding_of_its_own(tmp_path: Path):
    wide = hf.target(hidden_size=64, head_dim=16)
    own = hf.filled({"embed_tokens.weight": (V, H)}, seed=4)
    config = {**SPECFORGE, "target_hidden_size": 64}
    net = net_of(write(tmp_path / "a", config, width=64, tensors=own), wide)
    assert net.embed_tokens is not None and torch.equal(net.embed_tokens.weight, own["embed_tokens.weight"])
    assert net.fc.in_features == 3 * 64
    for to in ("sglang", "speculators", "eagle"):
        hf.again(net, tmp_path / to, to, wide)
        assert torch.equal(hf.stored(tmp_path / to)["embed_tokens.weight"], own["embed_tokens.weight"])
    refused(write(tmp_path / "b", config, width=64), wide, "embed_tokens.weight is missing")


def test_a_stored_embedding(tmp_path: Path, lm: CausalLM):
    copy = {"embed_tokens.weight": hf.table(lm).half()}
    other = hf.filled({"embed_tokens.weight": (V, H)}, seed=4)
    assert net_of(write(tmp_path / "a", SPECFORGE, tensors=copy), lm).embed_tokens is None
    path = write(tmp_path / "b", SPECFORGE, tensors=other)
    refused(path, lm, "is not this target's, so the head is for another model")
    spec = hf.speculators()
    assert net_of(write(tmp_path / "c", spec, "layers.0.", tensors=copy), lm).embed_tokens is None
    net = net_of(write(tmp_path / "d", spec, "layers.0.", tensors=other), lm)
    assert net.embed_tokens is not None and torch.equal(net.embed_tokens.weight, other["embed_tokens.weight"])
    with pytest.raises(DrafterError, match="'sglang' cannot hold this head: own_embedding"):
        hf.save(net, tmp_path / "e", "sglang", lm)


def test_rope_theta_by_hand(tmp_path: Path, lm: CausalLM):
    head = load_head(write(tmp_path, SPECFORGE), lm, rope_theta=10000.0)
    assert head.info.config.block.rope_theta == 10000.0
    assert "rope_theta is set to 10000; the config has 1e+06." in head.info.notes
    steps = torch.arange(0, 8, 2) / 8
    assert torch.allclose(head.net.rotary.frequencies, 10000.0**-steps)


def test_half_precision_keeps_rotary_frequencies(tmp_path: Path):
    half = CausalLM(tiny.build("llama", num_hidden_layers=8).to(torch.bfloat16), verify=False)
    net = net_of(write(tmp_path, SPECFORGE), half)
    assert net.fc.weight.dtype == torch.bfloat16 and net.rotary.frequencies.dtype == torch.float32


@pytest.mark.parametrize(
    ("to", "changes", "part"),
    [
        ("eagle", {"fc_norm": True}, "fc_norm"),
        ("eagle", {"norm_output": True}, "norm_carried"),
        (
            "eagle",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}},
            r"taps \(1, 4, 5\) other than \(2, 4, 5\)",
        ),
        ("eagle", {"bias": True}, "fc_bias"),
        ("eagle", {"head_dim": 16}, "head_dim"),
        ("speculators", {"bias": True}, "fc_bias"),
    ],
)
def test_what_a_format_cannot_hold(tmp_path: Path, lm: CausalLM, to: str, changes: dict[str, Any], part: str):
    extra: dict[str, tuple[int, ...]] = {}
    if "fc_norm" in changes:
        extra = {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    if "bias" in changes:
        extra = {"fc.bias": (H,)}
    if "head_dim" in changes:
        extra = {f"midlayer.self_attn.{n}_proj.weight": (s, 2 * H) for n, s in (("q", 64), ("k", 32), ("v", 32))}
        extra["midlayer.self_attn.o_proj.weight"] = (H, 64)
    net = net_of(write(tmp_path / "a", {**SPECFORGE, **changes}, tensors=hf.filled(extra)), lm)
    with pytest.raises(DrafterError, match=f"The format '{to}' cannot hold this head: {part}"):
        hf.save(net, tmp_path / "b", to, lm)
    assert not (tmp_path / "b").exists()
    hf.again(net, tmp_path / "c", "foredraft", lm)


@pytest.mark.parametrize("to", ["sglang", "speculators"])
@pytest.mark.parametrize("case", ["rope theta", "rope scaling, old words", "llama3"])
def test_transformers_reads_the_positions_as_we_do(tmp_path: Path, lm: CausalLM, to: str, case: str):
    """vLLM and SGLang take the words through transformers' config classes."""
    path = write(tmp_path / "a", {**SPECFORGE, **BLOCKS[case][0]})
    net = net_of(path, lm)
    hf.save(net, tmp_path / "b", to, lm)
    config = hf.config_of(tmp_path / "b")
    words = config["transformer_layer_config"] if to == "speculators" else config
    rope = LlamaConfig(**words).rope_parameters
    assert rope["rope_theta"] == net.config.block.rope_theta
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "type")}
    assert scaling == (net.config.block.rope_scaling or {"rope_type": "default"})


def test_scalings_that_safeailab_does_not_know(tmp_path: Path, lm: CausalLM):
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    net = net_of(write(tmp_path / "a", {**SAFE, **linear}), lm)
    hf.save(net, tmp_path / "b", "eagle", lm)
    assert hf.config_of(tmp_path / "b")["rope_scaling"] == linear["rope_scaling"]
    net = net_of(write(tmp_path / "c", {**SAFE, **BLOCKS["llama3"][0]}), lm)
    with pytest.raises(DrafterError, match="linear and dynamic rope_scaling only, not 'llama3'"):
        hf.save(net, tmp_path / "d", "eagle", lm)
    assert default_format(net) == "speculators"
