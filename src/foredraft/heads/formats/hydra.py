"""Hydra and Hydra++ heads (Ankner et al., arXiv:2402.05109): the grounded architectures mlp and prefix-mlp."""

import re
from dataclasses import asdict
from typing import Any

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.assemble import check_embedding, parameter_names
from foredraft.heads.formats.block import block_like, override_theta
from foredraft.heads.formats.eagle1 import target_table
from foredraft.heads.formats.files import Checkpoint, Fields
from foredraft.heads.formats.info import Contents, ExportOptions, Overrides, Reading, TargetNeeds
from foredraft.heads.formats.native import accuracies_of, block_from
from foredraft.heads.nets.blocks import BlockConfig
from foredraft.heads.nets.hydra import Hydra, HydraConfig
from foredraft.model.base import TargetModel
from foredraft.model.hf.hub import TRANSFORMERS

PLAIN, PLUS = "Hydra", "Hydra++"
_PREFIX = "prefix_embeding_layer."  # sic
_TABLE = "input_embed_fn.weight"
_OWN = "prefix_block"
"""foredraft's own key in config.json: the prefix layer's config, which published files take from the target."""


def matches(checkpoint: Checkpoint) -> bool:
    """Whether there are Hydra's modules or config keys."""
    named = any(name.startswith(("hydra_mlp.", "hydra_lm_head.")) for name in checkpoint.weights.shapes)
    return named or "hydra_head_arch" in checkpoint.config


def read(checkpoint: Checkpoint, target: TargetModel | None, overrides: Overrides) -> Reading:
    """``target`` determines the shape of Hydra++'s prefix layer, which is that of the target's layers.

    Raises:
        DrafterError: the heads' architecture is not supported, or the embedding is another target's.
    """
    fields, shapes = checkpoint.fields(), checkpoint.weights.shapes
    if overrides.taps is not None:
        raise DrafterError(f"Hydra heads such as {checkpoint.name!r} take no taps.")
    _check_kind(checkpoint, fields)
    plus = f"{_PREFIX}norm.weight" in shapes
    heads, first = _count(checkpoint, r"^hydra_mlp\.(\d+)\."), "1" if plus else "0"
    linear = f"hydra_mlp.0.{first}.linear.weight"
    if not heads or linear not in shapes:
        raise DrafterError(f"The Hydra head {checkpoint.name!r} lacks {linear}.")
    width, inputs = shapes[linear]
    if inputs != 2 * width:
        raise DrafterError(f"The Hydra head {checkpoint.name!r} does not read drafted tokens (it is not grounded).")
    notes = ["It reads the target's embedding."]
    if "hydra_num_heads" in fields and fields.integer("hydra_num_heads") != heads:
        notes.append(
            f"It has {heads} heads according to its tensors, but its config says {fields.integer('hydra_num_heads')}."
        )
    layers = _count(checkpoint, r"^hydra_mlp\.0\.(\d+)\.linear\.weight$")
    output = "hydra_lm_head.0.1.weight" if plus else "hydra_lm_head.0.weight"
    if output not in shapes:
        raise DrafterError(f"The Hydra head {checkpoint.name!r} lacks {output}.")
    check_embedding(checkpoint, _TABLE, target)
    config = HydraConfig(
        hidden_size=width,
        vocab_size=shapes[output][0],
        num_heads=heads,
        num_layers=layers,
        prefix=_prefix(checkpoint, fields, target, overrides, notes) if plus else None,
        dropout=min(fields.number("dropout_rate"), 1.0) if fields.values.get("dropout_rate") else 0.0,
        accuracies=accuracies_of(fields),
    )
    if overrides.rope_theta is not None and not plus:
        raise DrafterError(f"The Hydra head {checkpoint.name!r} has no rotary embedding.")
    return Reading(
        method="hydra",
        format=PLUS if plus else PLAIN,
        config=config,
        names=names(config),
        ignored=frozenset({_TABLE, f"{_PREFIX}embed_tokens.weight"}),
        target=TargetNeeds(
            hidden_size=width, vocab_size=config.vocab_size, name=fields.optional_text("base_model_name_or_path")
        ),
        notes=tuple(notes),
    )


def names(config: HydraConfig) -> dict[str, tuple[str, ...]]:
    """Tensor names in the file, by parameter of the net; Hydra++ has a Dropout before each linear layer."""
    found: dict[str, tuple[str, ...]] = {}
    plus = config.prefix is not None
    step, first = (2, 1) if plus else (1, 0)
    for i in range(config.num_heads):
        for kind in ("weight", "bias"):
            for part in ("linear", "res_connection"):
                found[f"mlps.{i}.{part}.{kind}"] = (f"hydra_mlp.{i}.{first}.{part}.{kind}",)
            if config.num_layers > 1:
                places = range(first + step, first + step * config.num_layers, step)
                found[f"mlps.{i}.block.{kind}"] = tuple(f"hydra_mlp.{i}.{place}.linear.{kind}" for place in places)
            found[f"heads.{i}.{kind}"] = (f"hydra_lm_head.{i}.{'1.' if plus else ''}{kind}",)
    for name in parameter_names(config):
        if name.startswith("prefix."):
            found[name] = (_PREFIX + name.removeprefix("prefix.").replace("layer.", "layers.0.", 1),)
    return found


def _check_kind(checkpoint: Checkpoint, fields: Fields) -> None:
    name, kind = checkpoint.name, fields.text("hydra_head_arch", "mlp")
    if kind not in ("mlp", "prefix-mlp"):
        raise DrafterError(f"The Hydra head {name!r} has the architecture {kind!r}; mlp and prefix-mlp are supported.")
    if not fields.flag("grounded_heads", True):
        raise DrafterError(f"The Hydra head {name!r} does not read drafted tokens (it is not grounded).")
    if fields.values.get("hidden_state_offset"):
        raise DrafterError(f"The Hydra head {name!r} reads another hidden layer than the last (hidden_state_offset).")


def _count(checkpoint: Checkpoint, pattern: str) -> int:
    """How many different numbers the pattern matches in tensor names."""
    found = (re.match(pattern, name) for name in checkpoint.weights.shapes)
    return len({match[1] for match in found if match})


def _prefix(
    checkpoint: Checkpoint, fields: Fields, target: TargetModel | None, overrides: Overrides, notes: list[str]
) -> BlockConfig:
    """The prefix layer's config: from our own key, else that of the target's layers, else a guess."""
    shapes, layer = checkpoint.weights.shapes, f"{_PREFIX}layers.0."
    try:
        inner, width = shapes[f"{layer}mlp.gate_proj.weight"]
        queries, keys = (shapes[f"{layer}self_attn.{name}_proj.weight"][0] for name in "qk")
    except (KeyError, ValueError) as error:
        raise DrafterError(f"The prefix layer of the Hydra head {checkpoint.name!r} is incomplete.") from error
    found = {
        "intermediate_size": inner,
        "attention_bias": f"{layer}self_attn.q_proj.bias" in shapes,
        "output_bias": f"{layer}self_attn.o_proj.bias" in shapes,
        "mlp_bias": f"{layer}mlp.gate_proj.bias" in shapes,
        "qk_norm": f"{layer}self_attn.q_norm.weight" in shapes,
    }
    if _OWN in fields:
        block = block_from(fields.part(_OWN).values, checkpoint.name)
    elif target is not None:
        block = block_like(target.config, **found)
    else:
        size = next((size for size in (128, 64) if queries % size == 0 and keys % size == 0), keys)
        notes.append(f"Its prefix layer has the target's attention shape; attention heads of width {size} are a guess.")
        block = BlockConfig(
            hidden_size=width,
            num_attention_heads=queries // size,
            num_key_value_heads=keys // size,
            head_dim=size,
            **found,
        )
    if overrides.rope_theta is None:
        return block
    return override_theta(block, overrides.rope_theta, notes)


def unsupported(net: Hydra, layers: int | None) -> list[str]:
    """Config fields of this head that the published code does not support."""
    return [] if net.config.own_heads else ["own_heads=False"]


def write(net: Hydra, options: ExportOptions) -> Contents:
    """config.json and tensors, with the target's embedding if requested."""
    config, state = net.config, net.state_dict()
    entries: dict[str, Any] = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "prefix-mlp" if config.prefix else "mlp",
        "base_model_name_or_path": options.name,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "dropout_rate": config.dropout,
        "transformers_version": TRANSFORMERS,
    }
    if config.accuracies is not None:
        entries["accuracies"] = config.accuracies
    if config.prefix is not None:
        entries[_OWN] = asdict(config.prefix)
    tensors = {alias: state[parameter] for parameter, aliases in names(config).items() for alias in aliases}
    return entries, {**tensors, _TABLE: target_table(net)} if options.embed else tensors
