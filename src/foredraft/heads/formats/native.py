"""foredraft's own format: any net with its full config, and the only format of blockwise and GLIDE heads.

config.json: {"foredraft_head": method, "foredraft_version": 1, "base_model_name_or_path": ..., "head": the config}.
model.safetensors: the net's state dict, and ``d2t`` if the draft vocabulary is a subset of the target's.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields as fields_of, replace
from typing import Any

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.assemble import block_of, own_names
from foredraft.heads.formats.block import override_theta
from foredraft.heads.formats.files import MOST, Checkpoint, Fields
from foredraft.heads.formats.info import Contents, ExportOptions, NetConfig, Overrides, Reading, TargetNeeds
from foredraft.heads.formats.vocabulary import offsets_of, read_vocabulary
from foredraft.heads.nets.blocks import ACTIVATIONS, BlockConfig
from foredraft.heads.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.heads.nets.glide import Glide, GlideConfig
from foredraft.heads.nets.hydra import Hydra, HydraConfig
from foredraft.heads.nets.medusa import Blockwise, BlockwiseConfig, Medusa, MedusaConfig
from foredraft.model.base import TargetModel

VERSION = 1
_COUNTS = ("num_heads", "num_layers")
CONFIGS: dict[str, type] = {
    "eagle": EagleConfig,
    "eagle3": Eagle3Config,
    "medusa": MedusaConfig,
    "hydra": HydraConfig,
    "blockwise": BlockwiseConfig,
    "glide": GlideConfig,
}


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config has foredraft's key."""
    return "foredraft_head" in checkpoint.config


def read(checkpoint: Checkpoint, target: TargetModel | None, overrides: Overrides) -> Reading:
    """Raises:
    DrafterError: the config is invalid, or from a later version of foredraft.
    """
    fields, name = checkpoint.fields(), checkpoint.name
    method = fields.text("foredraft_head", "")
    if method not in CONFIGS:
        raise DrafterError(f"The head {name!r} is of the unknown kind {method!r}. Known: {', '.join(CONFIGS)}.")
    if fields.integer("foredraft_version", VERSION) > VERSION:
        raise DrafterError(f"The head {name!r} was written by a later version of foredraft; upgrade foredraft.")
    values = dict(fields.part("head").values)
    if method == "eagle3" and values.pop("norm_logits", True) is not True:  # a field until version 0.1
        raise DrafterError(f"The head {name!r} has no norm before its output layer, which is not supported any more.")
    config = _config(CONFIGS[method], values, name)
    notes: list[str] = []
    config = _overridden(config, overrides, name, notes)
    vocab = fields.integer("vocab_size") if "vocab_size" in fields else None
    vocabulary, layers, ignored = None, None, frozenset()
    if isinstance(config, Eagle3Config):
        vocabulary, ignored = read_vocabulary(checkpoint, config.draft_vocab_size, config.vocab_size, notes), {"d2t"}
        layers = max(config.taps)
    if isinstance(config, GlideConfig):
        layers = config.layer + 1
    return Reading(
        method=method,
        format=f"foredraft {method}",
        config=config,
        names=own_names(config),
        ignored=frozenset(ignored),
        vocabulary=vocabulary,
        target=TargetNeeds(
            hidden_size=_target_width(config),
            vocab_size=vocab if isinstance(config, (EagleConfig, GlideConfig)) else config.vocab_size,
            layers=layers,
            name=fields.optional_text("base_model_name_or_path"),
        ),
        notes=tuple(notes),
    )


def write(net: Eagle | Eagle3 | Medusa | Hydra | Blockwise | Glide, options: ExportOptions) -> Contents:
    """config.json and tensors."""
    config = net.config
    method = next(method for method, kind in CONFIGS.items() if isinstance(config, kind))
    entries = {
        "foredraft_head": method,
        "foredraft_version": VERSION,
        "base_model_name_or_path": options.name,
        "vocab_size": net.target.vocab_size if isinstance(net, (Eagle, Glide)) else net.config.vocab_size,
        "head": asdict(config),
    }
    tensors = dict(net.state_dict())
    if isinstance(net, Eagle3) and net.vocabulary is not None:
        tensors["d2t"] = offsets_of(net.vocabulary)
    return entries, tensors


def block_from(values: Mapping[str, Any], name: str) -> BlockConfig:
    """A ``BlockConfig`` from our own JSON."""
    return _config(BlockConfig, values, name)


def _config(kind: type, values: Mapping[str, Any], name: str) -> Any:
    """A config dataclass from JSON. Unknown or missing keys and wrong types raise a ``DrafterError``."""
    known = {each.name: each for each in fields_of(kind)}
    unknown = [key for key in values if key not in known]
    missing = [key for key, each in known.items() if each.default is MISSING and key not in values]
    if unknown or missing:
        raise DrafterError(
            f"The config.json of the head {name!r} has unknown or missing keys: {', '.join(unknown + missing)}."
        )
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and known[key].type in (BlockConfig, BlockConfig | None):
            value = block_from(value, name)
        if not _fits(value, known[key].type) or (key in _COUNTS and not _whole(value, 1, MOST)):
            raise DrafterError(f"{key} in the config.json of the head {name!r} cannot be {value!r}.")
        found[key] = _tuples(value)
    if found.get("hidden_act", "silu") not in ACTIVATIONS:
        raise DrafterError(f"hidden_act in the config.json of the head {name!r} cannot be {found['hidden_act']!r}.")
    return kind(**found)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has a field's type; sizes must be positive."""
    if hint == tuple[int, ...]:
        return isinstance(value, list) and len(value) > 0 and all(_whole(tap, 0) for tap in value)
    if hint in (int, int | None):
        return _whole(value, 1) or (value is None and hint is not int)
    if hint is float:
        return (_whole(value, 0) or isinstance(value, float)) and 0 <= value < float("inf")
    if hint == tuple[tuple[float, ...], ...] | None:
        return value is None or is_table(value)
    return isinstance(value, hint)


def is_table(value: Any) -> bool:
    """Whether a JSON value is a list of lists of numbers from 0 to 1."""
    rows = value if isinstance(value, list) else [None]
    return all(
        isinstance(row, list) and all(type(each) in (int, float) and 0 <= each <= 1 for each in row) for row in rows
    )


def accuracies_of(fields: Fields) -> tuple[tuple[float, ...], ...] | None:
    """The heads' measured accuracies by rank, from our own key in a published format's config.json.

    Raises:
        DrafterError: it is not a list of lists of numbers from 0 to 1.
    """
    value = fields.values.get("accuracies")
    if value is None:
        return None
    if not is_table(value):
        raise DrafterError(
            f"accuracies in the config.json of the head {fields.name!r} must be lists of numbers from 0 to 1."
        )
    return _tuples(value)


def _tuples(value: Any) -> Any:
    """JSON lists converted to tuples, recursively."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _whole(value: Any, least: int, most: int = 1 << 62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _overridden(config: NetConfig, overrides: Overrides, name: str, notes: list[str]) -> NetConfig:
    if overrides.taps is not None:
        if not isinstance(config, Eagle3Config) or len(overrides.taps) != len(config.taps):
            raise DrafterError(f"The head {name!r} does not take the taps {overrides.taps}.")
        config = replace(config, taps=tuple(sorted(overrides.taps)))
    if overrides.norm_output is not None:
        if not isinstance(config, Eagle3Config):
            raise DrafterError(f"The head {name!r} does not take norm_output.")
        config = replace(config, norm_carried=overrides.norm_output)
    if overrides.rope_theta is None:
        return config
    block = block_of(config)
    if block is None:
        raise DrafterError(f"The head {name!r} has no rotary embedding.")
    block = override_theta(block, overrides.rope_theta, notes)
    if isinstance(config, HydraConfig):
        return replace(config, prefix=block)
    assert isinstance(config, (EagleConfig, Eagle3Config, GlideConfig))
    return replace(config, block=block)


def _target_width(config: NetConfig) -> int:
    if isinstance(config, Eagle3Config):
        return config.target_hidden_size
    return config.block.hidden_size if isinstance(config, (EagleConfig, GlideConfig)) else config.hidden_size
