"""Writes EAGLE-3 heads in the formats of SafeAILab's code, SGLang and vLLM."""

from typing import Any

import torch
from torch import Tensor

from foredraft.heads.formats.block import old_scaling, unsupported_by_block, write_block
from foredraft.heads.formats.eagle1 import target_table
from foredraft.heads.formats.eagle3 import TABLE
from foredraft.heads.formats.info import Contents, ExportOptions
from foredraft.heads.formats.layers import KEY, default_taps
from foredraft.heads.formats.vocabulary import member_mask, offsets_of
from foredraft.heads.nets.eagle import Eagle3
from foredraft.model.hf.hub import TRANSFORMERS

SPECULATIVE_TOKENS = 5
"""The default draft length that a speculators file gives vLLM; users can override it."""


_UNSUPPORTED = {
    "eagle": (
        *("head_dim", "attention_bias", "output_bias", "mlp_bias", "qk_norm", "sliding_window"),
        *("norm_before_residual", "norm_before_fc", "fc_norm", "fc_bias", "norm_carried", "num_layers"),
        *("own_embedding", "own_head=False"),
    ),
    "sglang": (
        *("mlp_bias", "qk_norm", "sliding_window", "output_bias without attention_bias"),
        *("norm_before_residual", "norm_before_fc", "num_layers"),
        *("own_embedding", "own_head=False with a smaller vocabulary", "the embedding as a tap"),
    ),
    "speculators": (
        *("output_bias without attention_bias", "fc_bias", "own_head=False"),
        "own_embedding=False with another target_hidden_size",
    ),
}
"""The features that SafeAILab's code, SGLang and vLLM do not support. SGLang's additional layers omit the residual, so
they differ from ours."""


def unsupported(to: str, net: Eagle3, layers: int | None) -> list[str]:
    """Features of this head that a format does not support. ``layers``: the target's depth; None skips that check."""
    config, block = net.config, net.config.block
    smaller, wider = config.draft_vocab_size != config.vocab_size, bool(_width(net))
    features = dict.fromkeys(unsupported_by_block(block), True)
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "fc_bias", "norm_carried"):
        features[name] = getattr(config, name)
    features |= {
        "num_layers": config.num_layers > 1,
        "own_embedding": config.own_embedding != wider,
        "own_embedding=False with another target_hidden_size": wider and not config.own_embedding,
        "own_head=False": not config.own_head,
        "own_head=False with a smaller vocabulary": smaller and not config.own_head,
        "output_bias without attention_bias": block.output_bias and not block.attention_bias,
        "the embedding as a tap": min(config.taps) < 1,
    }
    found = [name for name in _UNSUPPORTED[to] if features.get(name)]
    if to == "eagle" and layers is not None and tuple(config.taps) != default_taps(layers):
        found.append(f"taps {config.taps} other than {default_taps(layers)}")
    return found


def write_safeailab(net: Eagle3, options: ExportOptions) -> Contents:
    """config.json and tensors for SafeAILab's inference code, which loads the target's embedding itself."""
    entries = {
        "architectures": ["LlamaForCausalLM"],
        **_llama(net, options),
        "rope_scaling": old_scaling(net.config.block),
        "draft_vocab_size": net.config.draft_vocab_size,
        **_width(net),
        "torch_dtype": options.dtype_name,
    }
    return entries, _tensors(net, embed=options.embed, maps=net.vocabulary is not None)


def write_sglang(net: Eagle3, options: ExportOptions) -> Contents:
    """config.json and tensors for SGLang. ``target_hidden_size`` must be absent unless it differs."""
    config, block = net.config, net.config.block
    entries = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama(net, options),
        "head_dim": block.head_dim,
        "attention_bias": block.attention_bias,
        "bias": config.fc_bias,
        "draft_vocab_size": config.draft_vocab_size if config.own_head else None,
        **_width(net),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_carried,
        "eagle_config": {"use_aux_hidden_state": True, KEY: [tap - 1 for tap in config.taps]},
        "torch_dtype": options.dtype_name,
    }
    return entries, _tensors(net, embed=options.embed, maps=config.own_head)


def write_speculators(net: Eagle3, options: ExportOptions) -> Contents:
    """config.json and tensors for vLLM."""
    config, block = net.config, net.config.block
    layer = {
        "architectures": ["LlamaForCausalLM"],
        **_llama(net, options),
        "head_dim": block.head_dim,
        "attention_bias": block.attention_bias,
        "mlp_bias": block.mlp_bias,
        "torch_dtype": options.dtype_name,
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
    architectures = list(options.target.get("architectures") or [])
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
            "verifier": {"name_or_path": options.name, "architectures": architectures},
        },
        "transformer_layer_config": layer,
        "torch_dtype": options.dtype_name,
        "transformers_version": TRANSFORMERS,
    }
    return entries, _renumbered(_tensors(net, embed=options.embed, maps=net.vocabulary is not None))


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


def _llama(net: Eagle3, options: ExportOptions) -> dict[str, Any]:
    config = net.config
    return write_block(config.block, options.target, vocab_size=config.vocab_size, layers=config.num_layers)


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
