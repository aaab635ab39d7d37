"""Medusa heads: Medusa-1 in both versions and Medusa-2 (FasterDecoding/Medusa; Cai et al., arXiv:2401.10774).

A head is a Sequential of L residual blocks (one module, repeated) and an output layer.
"""

import re
from collections import defaultdict
from typing import Any

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.files import Checkpoint
from foredraft.heads.formats.info import Contents, ExportOptions, Overrides, Reading, TargetNeeds
from foredraft.heads.formats.native import accuracies_of
from foredraft.heads.nets.medusa import Medusa, MedusaConfig
from foredraft.model.base import TargetModel
from foredraft.model.hf.hub import TRANSFORMERS

FIRST, SECOND_VERSION, SECOND = "Medusa-1", "Medusa-1 version 2", "Medusa-2"
_PREFIX = "medusa_head."
_BLOCK = re.compile(r"^(medusa_head\.)?(\d+)\.(\d+)\.linear\.weight$")
_TENSOR = re.compile(r"^(medusa_head\.)?\d+\.\d+\.(linear\.)?(weight|bias)$")


def matches(checkpoint: Checkpoint) -> bool:
    """Whether there are numbered residual blocks."""
    return any(_BLOCK.match(name) for name in checkpoint.weights.shapes)


def read(checkpoint: Checkpoint, target: TargetModel | None, overrides: Overrides) -> Reading:
    """Heads and layers are counted by tensor names, since published configs are often wrong.

    Raises:
        DrafterError: the heads are not numbered 0, 1, ... or differ in depth.
    """
    if overrides.rope_theta is not None or overrides.taps is not None:
        raise DrafterError(f"Medusa heads such as {checkpoint.name!r} have no rotary embedding and take no taps.")
    fields, shapes = checkpoint.fields(), checkpoint.weights.shapes
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in shapes) else ""
    blocks = _blocks(checkpoint)
    heads, layers = len(blocks), len(blocks[0])
    own = f"{prefix}0.{layers}.weight" in shapes
    whole = any(not _TENSOR.match(name) for name in shapes) and prefix != ""
    width = shapes[f"{prefix}0.0.linear.weight"][0]
    notes = []
    if "medusa_num_heads" in fields and fields.integer("medusa_num_heads") != heads:
        notes.append(
            f"It has {heads} heads according to its tensors, but its config says {fields.integer('medusa_num_heads')}."
        )
    if whole:
        notes.append(
            "Its target is the model in the same folder, fine-tuned with the heads (Medusa-2): lossless "
            "relative to the tuned model, not to the original one."
        )
    if not own:
        notes.append("Its heads share the target's output layer.")
    vocab = fields.integer("vocab_size") if "vocab_size" in fields else None
    if own:
        vocab = shapes[f"{prefix}0.{layers}.weight"][0]
    known = vocab or 0
    if target is not None and vocab is None:
        known = target.config.vocab_size
    return Reading(
        method="medusa",
        format=SECOND if whole else FIRST if own else SECOND_VERSION,
        config=MedusaConfig(
            hidden_size=width,
            vocab_size=known,
            num_heads=heads,
            num_layers=layers,
            own_heads=own,
            accuracies=accuracies_of(fields),
        ),
        names=names(heads, layers, own, prefix),
        ignored=frozenset(name for name in shapes if not _TENSOR.match(name)) if whole else frozenset(),
        target=TargetNeeds(hidden_size=width, vocab_size=vocab, name=fields.optional_text("base_model_name_or_path")),
        notes=tuple(notes),
    )


def names(heads: int, layers: int, own: bool, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Tensor names in the file, by parameter of the net."""
    found: dict[str, tuple[str, ...]] = {}
    for i in range(heads):
        for kind in ("weight", "bias"):
            aliases = tuple(f"{prefix}{i}.{layer}.linear.{kind}" for layer in range(layers))
            found[f"blocks.{i}.linear.{kind}"] = aliases
        if own:
            found[f"heads.{i}.weight"] = (f"{prefix}{i}.{layers}.weight",)
    return found


def _blocks(checkpoint: Checkpoint) -> dict[int, set[int]]:
    """Layers by head."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for name in checkpoint.weights.shapes:
        if match := _BLOCK.match(name):
            found[int(match[2])].add(int(match[3]))
    alike = all(layers == set(range(len(found[min(found)]))) for layers in found.values())
    if sorted(found) != list(range(len(found))) or not alike:
        raise DrafterError(
            f"The Medusa heads of {checkpoint.name!r} are not numbered consecutively or differ in depth: "
            f"{', '.join(f'{head} with {len(found[head])} blocks' for head in sorted(found))}."
        )
    return dict(found)


def write(net: Medusa, options: ExportOptions) -> Contents:
    """config.json and tensors; heads that share the target's output layer are version 2."""
    config = net.config
    entries, tensors = _entries(net, "")
    entries |= {
        "base_model_name_or_path": options.name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "transformers_version": TRANSFORMERS,
    }
    if not config.own_heads:
        entries["version"] = "2"
    return entries, tensors


def write_second(net: Medusa) -> Contents:
    """The additions of Medusa-2 to the config.json and tensors of its target."""
    return _entries(net, _PREFIX)


def _entries(net: Medusa, prefix: str) -> Contents:
    config, state = net.config, net.state_dict()
    entries: dict[str, Any] = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
    if config.accuracies is not None:
        entries["accuracies"] = config.accuracies
    stored = names(config.num_heads, config.num_layers, config.own_heads, prefix)
    return entries, {alias: state[parameter] for parameter, aliases in stored.items() for alias in aliases}
