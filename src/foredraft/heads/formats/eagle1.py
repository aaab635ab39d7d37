"""SafeAILab's EAGLE-1 and EAGLE-2 files (Li et al., arXiv:2401.15077 and 2406.16858).

They are one format, since EAGLE-2 changes only the tree.
"""

from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.assemble import check_embedding, own_names
from foredraft.heads.formats.block import old_scaling, override_theta, read_block, unsupported_by_block, write_block
from foredraft.heads.formats.files import Checkpoint
from foredraft.heads.formats.info import Contents, ExportOptions, Overrides, Reading, TargetNeeds
from foredraft.heads.nets.eagle import Eagle, EagleConfig
from foredraft.model.base import TargetModel

FORMAT = "SafeAILab EAGLE-1/2"
_TABLE = "embed_tokens.weight"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether there are an fc layer and decoder layers; EAGLE-3 has been tested before."""
    shapes = checkpoint.weights.shapes
    return "fc.weight" in shapes and "layers.0.self_attn.q_proj.weight" in shapes


def read(checkpoint: Checkpoint, target: TargetModel | None, overrides: Overrides) -> Reading:
    """``target`` is needed to check whether a stored embedding is the target's.

    Raises:
        DrafterError: the config is invalid, or the embedding is another target's.
    """
    fields = checkpoint.fields()
    notes: list[str] = ["It uses the target's embedding and output layer."]
    if overrides.taps is not None or overrides.norm_output is not None:
        raise DrafterError(
            f"The head {checkpoint.name!r} is of EAGLE-1, which reads the target's last hidden state and has no norms: "
            "leave out taps and norm_output."
        )
    layers, bias = fields.count("num_hidden_layers", 1), fields.flag("qkv_bias", False)
    block = read_block(fields, layers=layers, notes=notes, attention_bias=bias)
    if overrides.rope_theta is not None:
        block = override_theta(block, overrides.rope_theta, notes)
    config = EagleConfig(block=block, num_layers=layers, fc_bias=fields.flag("bias", True))
    vocab = fields.integer("vocab_size")
    if _TABLE in checkpoint.weights:
        checkpoint.check_shape(_TABLE, (vocab, block.hidden_size))
    check_embedding(checkpoint, _TABLE, target)
    return Reading(
        method="eagle",
        format=FORMAT,
        config=config,
        names=own_names(config),
        ignored=frozenset({_TABLE, "lm_head.weight"}),
        target=TargetNeeds(hidden_size=block.hidden_size, vocab_size=vocab, resizable=True),
        notes=tuple(notes),
    )


def unsupported(net: Eagle, layers: int | None) -> list[str]:
    """Config fields of this head that SafeAILab's code does not support."""
    return unsupported_by_block(net.config.block, allowed=("attention_bias",))


def write(net: Eagle, options: ExportOptions) -> Contents:
    """config.json and tensors, with the target's embedding if requested, which the strict loader of v1 requires."""
    block, config = net.config.block, net.config
    entries = {
        "architectures": ["LlamaForCausalLM"],
        **write_block(block, options.target, vocab_size=net.target.vocab_size, layers=config.num_layers),
        "rope_scaling": old_scaling(block),
        "bias": config.fc_bias,
        "qkv_bias": block.attention_bias,
        "torch_dtype": options.dtype_name,
    }
    tensors = dict(net.state_dict())
    if options.embed:
        tensors[_TABLE] = target_table(net)
    return entries, tensors


def target_table(net: Eagle | Any) -> Tensor:
    """The target's embedding [V, H]."""
    device = next(net.parameters()).device
    return net.target.embed(torch.arange(net.target.vocab_size, device=device)).detach()
