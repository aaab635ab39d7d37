"""Files of every format by hand: names and shapes as heads.md lists them, written out here and nowhere taken from."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from foredraft.core.errors import DrafterError, ForedraftError
from foredraft.heads.formats import Head, load_head, save_head
from foredraft.model.hf.causal_lm import CausalLM

H, V, VD, INNER, HEADS, KV, LAYERS = 32, 96, 40, 48, 4, 16, 8
"""Hidden size, vocabulary, draft vocabulary, inner size, attention heads, width of keys, layers of the target."""


def target(**changes: Any) -> CausalLM:
    """A tiny target of 8 layers; 32 wide, 96 tokens."""
    return CausalLM(tiny.build("llama", **{"num_hidden_layers": LAYERS, **changes}), verify=False)


def table(lm: CausalLM) -> Tensor:
    """The target's embedding."""
    return lm.model.get_input_embeddings().weight.detach().clone()


def filled(shapes: Mapping[str, tuple[int, ...]], seed: int = 1) -> dict[str, Tensor]:
    """Random float32 tensors of these shapes."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) * 0.2 for name, shape in shapes.items()}


def maps(size: int = VD, full: int = V, seed: int = 5) -> dict[str, Tensor]:
    """d2t (offsets) and t2d (members) of a random draft vocabulary."""
    ids = torch.randperm(full, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    members = torch.zeros(full, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": members}


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def layer_shapes(prefix: str, reads: int = H) -> dict[str, tuple[int, ...]]:
    """A Llama layer without its input norm, whose attention reads vectors of this width."""
    return {
        f"{prefix}self_attn.q_proj.weight": (H, reads),
        f"{prefix}self_attn.k_proj.weight": (KV, reads),
        f"{prefix}self_attn.v_proj.weight": (KV, reads),
        f"{prefix}self_attn.o_proj.weight": (H, H),
        f"{prefix}mlp.gate_proj.weight": (INNER, H),
        f"{prefix}mlp.up_proj.weight": (INNER, H),
        f"{prefix}mlp.down_proj.weight": (H, INNER),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }


EAGLE1: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), "fc.bias": (H,), **layer_shapes("layers.0.")}


def eagle3_shapes(
    prefix: str = "midlayer.", *, taps: int = 3, width: int = H, draft: int = VD
) -> dict[str, tuple[int, ...]]:
    """The tensors of section 1.2; ``width`` is the target's, ``taps`` the number of its layers."""
    return {
        "fc.weight": (H, taps * width),
        f"{prefix}input_layernorm.weight": (H,),
        f"{prefix}hidden_norm.weight": (H,),
        **layer_shapes(prefix, 2 * H),
        "norm.weight": (H,),
        "lm_head.weight": (draft, H),
    }


SPECFORGE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "head_dim": 8,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "draft_vocab_size": VD,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
}


def speculators(layer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config of section 1.4; ``layer`` are changes to its transformer_layer_config."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": VD,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**LLAMA, "head_dim": 8, "rope_theta": 500000.0, **(layer or {})},
        **changes,
    }


def medusa_shapes(heads: int = 3, layers: int = 1, prefix: str = "", own: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of section 1.5."""
    found: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for layer in range(layers):
            found |= {f"{prefix}{i}.{layer}.linear.weight": (H, H), f"{prefix}{i}.{layer}.linear.bias": (H,)}
        if own:
            found[f"{prefix}{i}.{layers}.weight"] = (V, H)
    return found


def hydra_shapes(
    heads: int = 2, first: int = 0, later: Sequence[int] = (), output: str = ""
) -> dict[str, tuple[int, ...]]:
    """Section 1.6, mlp, one layer; with others' indices, more layers."""
    found: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for part in ("linear", "res_connection"):
            found |= {
                f"hydra_mlp.{i}.{first}.{part}.weight": (H, (i + 2) * H),
                f"hydra_mlp.{i}.{first}.{part}.bias": (H,),
            }
        for place in later:
            found |= {f"hydra_mlp.{i}.{place}.linear.weight": (H, H), f"hydra_mlp.{i}.{place}.linear.bias": (H,)}
        found |= {f"hydra_lm_head.{i}.{output}weight": (V, H), f"hydra_lm_head.{i}.{output}bias": (V,)}
    return found


def hydra_plus_shapes(heads: int = 2) -> dict[str, tuple[int, ...]]:
    """Section 1.6, prefix-mlp, four layers: index 0 is a Dropout, the further blocks stand at 3, 5 and 7."""
    return {
        "prefix_embeding_layer.embed_tokens.weight": (V, H),
        **layer_shapes("prefix_embeding_layer.layers.0."),
        "prefix_embeding_layer.layers.0.input_layernorm.weight": (H,),
        "prefix_embeding_layer.norm.weight": (H,),
        **hydra_shapes(heads, 1, (3, 5, 7), "1."),
    }


def tied(tensors: dict[str, Tensor], pairs: Mapping[str, str]) -> dict[str, Tensor]:
    """Each key's tensor is the value's, as where one module stands in several places."""
    return tensors | {name: tensors[source] for name, source in pairs.items()}


def put(
    folder: Path, config: Mapping[str, Any] | str | None, tensors: Mapping[str, Tensor], file: str = "model.safetensors"
) -> str:
    """Write a folder and return its name."""
    folder.mkdir(exist_ok=True, parents=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text, encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    elif file:
        torch.save(dict(tensors), folder / file)
    return str(folder)


def save(net: Any, folder: Path, to: str, lm: CausalLM, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    """Write a head for this target."""
    save_head(
        net, folder, to=to, target_name="someone/target", target_config=lm.model.config.to_dict(), dtype=dtype, **more
    )


def again(net: Any, folder: Path, to: str, lm: CausalLM, dtype: torch.dtype = torch.float32, **more: Any) -> Head:
    """The head that is read back from what was written: it has the same config and the same bits."""
    save(net, folder, to, lm, dtype, **more)
    head = load_head(str(folder), lm)
    assert head.info.config == net.config
    same(head.net.state_dict(), net.state_dict())
    return head


def again_at(net: Any, folder: Path, to: str, lm: CausalLM) -> str:
    """The folder with what was written."""
    save(net, folder, to, lm)
    return str(folder)


def refused(path: str, lm: CausalLM, match: str, kind: type[ForedraftError] = DrafterError, **options: Any) -> None:
    """Loading it is an error of one sentence, which names the folder or a tensor."""
    with pytest.raises(kind, match=match) as caught:
        load_head(path, lm, **options)
    sentence = str(caught.value)
    assert ("\n" not in sentence and sentence.endswith(".") and path in sentence) or "tensor" in sentence.lower()


def stored(folder: Path, file: str = "model.safetensors") -> dict[str, Tensor]:
    """What stands in a file."""
    return load_file(folder / file)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text("utf-8"))


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """The same names, types and bits."""
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
