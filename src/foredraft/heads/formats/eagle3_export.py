"""Writes EAGLE-3 heads in the formats of SafeAILab's code, SGLang and vLLM (heads.md 1.2 to 1.4)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.formats.block import old_scaling, unsupported_by_block, write_block
from foredraft.heads.formats.eagle1 import target_table
from foredraft.heads.formats.eagle3 import TABLE
from foredraft.heads.formats.layers import KEY, default_taps
from foredraft.heads.nets.eagle import Eagle3
from foredraft.heads.nets.target_parts import member_mask, offsets_of

SPECULATIVE_TOKENS = 5
"""The default draft length that a speculators file gives vLLM; users can override it."""


def unsupported_by_safeailab(net: Eagle3, layers: int | None) -> list[str]:
    """Config fields that SafeAILab's code does not support. ``layers``: the target's depth; None skips that check."""
    config = net.config
    found = unsupported_by_block(config.block) + _flags(
        net, "norm_before_residual", "norm_before_fc", "fc_norm", "fc_bias"
    )
    found += _flags(net, "norm_carried") + _common(net)
    if not config.norm_logits:
        found.append("norm_logits=False")
    if config.num_layers > 1:
        found.append("num_layers")
    if config.own_embedding != (config.target_hidden_size != config.block.hidden_size):
        found.append("own_embedding")
    if layers is not None and tuple(config.taps) != default_taps(layers):
        found.append(f"taps {config.taps} other than {default_taps(layers)}")
    return found


def unsupported_by_sglang(net: Eagle3) -> list[str]:
    """Config fields that SGLang does not support. Its additional layers omit the residual, so they differ from ours."""
    config = net.config
    found = unsupported_by_block(config.block, ("head_dim", "attention_bias", "output_bias"))
    found += _flags(net, "norm_before_residual", "norm_before_fc", "norm_carried")
    if config.num_layers > 1:
        found.append("num_layers")
    if config.block.output_bias and not config.block.attention_bias:
        found.append("output_bias without attention_bias")
    if config.own_embedding != (config.target_hidden_size != config.block.hidden_size):
        found.append("own_embedding")
    if min(config.taps) < 1:
        found.append("the embedding as a tap")
    if not config.own_head and config.draft_vocab_size != config.vocab_size:
        found.append("own_head=False")
    return found


def unsupported_by_speculators(net: Eagle3) -> list[str]:
    """Config fields that vLLM does not support."""
    config = net.config
    allowed = ("head_dim", "attention_bias", "output_bias", "mlp_bias", "qk_norm", "sliding_window")
    found = unsupported_by_block(config.block, allowed) + _flags(net, "fc_bias") + _common(net)
    if config.block.output_bias and not config.block.attention_bias:
        found.append("output_bias without attention_bias")
    if not config.norm_logits:
        found.append("norm_logits=False")
    if config.target_hidden_size != config.block.hidden_size and not config.own_embedding:
        found.append("own_embedding=False with another target_hidden_size")
    return found


def write_safeailab(
    net: Eagle3, target: Mapping[str, Any], *, dtype: torch.dtype, embed: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for SafeAILab's inference code, which loads the target's embedding itself."""
    entries = {
        "architectures": ["LlamaForCausalLM"],
        **_llama(net, target),
        "rope_scaling": old_scaling(net.config.block),
        "draft_vocab_size": net.config.draft_vocab_size,
        **_width(net),
        "torch_dtype": _name(dtype),
    }
    return entries, _tensors(net, embed=embed, maps=net.vocabulary is not None)


def write_sglang(
    net: Eagle3, target: Mapping[str, Any], *, dtype: torch.dtype, embed: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for SGLang. ``target_hidden_size`` must be absent unless it differs."""
    config, block = net.config, net.config.block
    entries = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama(net, target),
        "head_dim": block.head_dim,
        "attention_bias": block.attention_bias,
        "bias": config.fc_bias,
        "draft_vocab_size": config.draft_vocab_size if config.own_head else None,
        **_width(net),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_logits,
        "eagle_config": {"use_aux_hidden_state": True, KEY: [tap - 1 for tap in config.taps]},
        "torch_dtype": _name(dtype),
    }
    return entries, _tensors(net, embed=embed, maps=config.own_head)


def write_speculators(
    net: Eagle3, target: Mapping[str, Any], *, dtype: torch.dtype, embed: bool, name: str, version: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for vLLM. ``name``: the target's. ``version``: of transformers."""
    config, block = net.config, net.config.block
    layer = {
        "architectures": ["LlamaForCausalLM"],
        **_llama(net, target),
        "head_dim": block.head_dim,
        "attention_bias": block.attention_bias,
        "mlp_bias": block.mlp_bias,
        "torch_dtype": _name(dtype),
    }
    if block.qk_norm:
        layer |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if block.sliding_window is not None:
        kinds = ["sliding_attention"] * config.num_layers
        layer |= {"sliding_window": block.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    entries = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": _width(net).get("target_hidden_size"),
        KEY: list(config.taps),
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_carried,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": list(target.get("architectures") or [])},
        },
        "transformer_layer_config": layer,
        "torch_dtype": _name(dtype),
        "transformers_version": version,
    }
    return entries, _renumbered(_tensors(net, embed=embed, maps=net.vocabulary is not None))


def _renumbered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with speculators' names, in which the first layer is ``layers.0``."""
    found = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if head == "midlayer":
            name = f"layers.0.{rest}"
        elif head == "layers":
            number, _, rest = rest.partition(".")
            name = f"layers.{int(number) + 1}.{rest}"
        found[name] = tensor
    return found


def _llama(net: Eagle3, target: Mapping[str, Any]) -> dict[str, Any]:
    config = net.config
    return write_block(config.block, target, vocab_size=config.vocab_size, layers=config.num_layers)


def _tensors(net: Eagle3, *, embed: bool, maps: bool) -> dict[str, Tensor]:
    """The net's own tensors, with the target's embedding and the vocabulary maps if requested."""
    tensors, config = dict(net.state_dict()), net.config
    if embed and not config.own_embedding:
        tensors[TABLE] = target_table(net)
    if maps:
        ids = torch.arange(config.draft_vocab_size) if net.vocabulary is None else net.vocabulary.cpu()
        tensors |= {"d2t": offsets_of(ids), "t2d": member_mask(ids, config.vocab_size)}
    return tensors


def _width(net: Eagle3) -> dict[str, int]:
    """The target's width, if it differs from the head's."""
    config = net.config
    other = config.target_hidden_size != config.block.hidden_size
    return {"target_hidden_size": config.target_hidden_size} if other else {}


def _flags(net: Eagle3, *names: str) -> list[str]:
    return [name for name in names if getattr(net.config, name)]


def _common(net: Eagle3) -> list[str]:
    return [] if net.config.own_head else ["own_head=False"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
