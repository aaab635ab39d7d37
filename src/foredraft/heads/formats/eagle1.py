"""EAGLE-1 and EAGLE-2 files of SafeAILab (heads.md 1.1): one format, since EAGLE-2 changes only the tree."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.assemble import parameter_names, same_table, straight
from foredraft.heads.formats.block import block_objections, old_scaling, read_block, write_block
from foredraft.heads.formats.files import Checkpoint
from foredraft.heads.formats.info import Overrides, Reading, TargetNeeds
from foredraft.heads.nets.eagle import Eagle, EagleConfig
from foredraft.model.hf import CausalLM

FORMAT = "SafeAILab EAGLE-1/2"
_TABLE = "embed_tokens.weight"


def matches(checkpoint: Checkpoint) -> bool:
    """A fusing layer and decoder layers, and none of what EAGLE-3 adds."""
    shapes = checkpoint.weights.shapes
    return "fc.weight" in shapes and "layers.0.self_attn.q_proj.weight" in shapes


def read(checkpoint: Checkpoint, target: CausalLM | None, wish: Overrides) -> Reading:
    """``target`` is needed to tell whether a stored embedding is its own.

    Raises:
        DrafterError: a config that makes no head, or an embedding of another target.
    """
    fields, weights = checkpoint.fields(), checkpoint.weights
    notes: list[str] = ["It drafts with the target's embedding and output layer."]
    if wish.taps is not None:
        raise DrafterError(f"The head {checkpoint.name!r} reads the target's last state; it takes no taps.")
    layers, bias = fields.count("num_hidden_layers", 1), fields.flag("qkv_bias", False)
    block = read_block(fields, layers=layers, notes=notes, attention_bias=bias)
    if wish.rope_theta is not None:
        notes.append(f"rope_theta is {wish.rope_theta:g} as asked, not {block.rope_theta:g}.")
        block = replace(block, rope_theta=wish.rope_theta)
    config = EagleConfig(block=block, num_layers=layers, fc_bias=fields.flag("bias", True))
    vocab = fields.integer("vocab_size")
    if _TABLE in weights and weights.shapes[_TABLE] != (vocab, block.hidden_size):
        raise DrafterError(
            f"The tensor {_TABLE} of the head {checkpoint.name!r} has the shape {list(weights.shapes[_TABLE])}, and "
            f"its config.json makes it {[vocab, block.hidden_size]}."
        )
    if _TABLE in weights and target is not None and not same_table(weights.read(_TABLE), target):
        raise DrafterError(
            f"The embedding in the head {checkpoint.name!r} is not this target's, so the head is for another model."
        )
    return Reading(
        method="eagle",
        format=FORMAT,
        config=config,
        names=straight(parameter_names(config)),
        ignored=frozenset({_TABLE, "lm_head.weight"}),
        target=TargetNeeds(hidden_size=block.hidden_size, vocab_size=vocab),
        notes=tuple(notes),
    )


def objections(net: Eagle) -> list[str]:
    """What SafeAILab's code cannot run."""
    return block_objections(net.config.block, allowed=("attention_bias",))


def write(
    net: Eagle, target: Mapping[str, Any], *, dtype: torch.dtype, embed: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors; ``embed`` adds the target's embedding, which the strict loader of v1 wants."""
    block, config = net.config.block, net.config
    words = {
        "architectures": ["LlamaForCausalLM"],
        **write_block(block, target, vocab_size=net.target.vocab_size, layers=config.num_layers),
        "rope_scaling": old_scaling(block),
        "bias": config.fc_bias,
        "qkv_bias": block.attention_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    tensors = dict(net.state_dict())
    if embed:
        tensors[_TABLE] = target_table(net)
    return words, tensors


def target_table(net: Eagle | Any) -> Tensor:
    """The embedding [V, H] that a head borrows."""
    device = next(net.parameters()).device
    return net.target.embed(torch.arange(net.target.vocab_size, device=device)).detach()
