"""foredraft's own files: any net with its config as it is, and the only format of blockwise heads.

config.json: {"foredraft_head": method, "foredraft_version": 1, "base_model_name_or_path": ..., "head": the config}.
model.safetensors: the net's state dict, and ``d2t`` where the draft vocabulary is a part of the target's.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields as fields_of, replace
from typing import Any

from torch import Tensor, nn

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.assemble import block_of, parameter_names, straight
from foredraft.heads.formats.files import MOST, Checkpoint, Fields
from foredraft.heads.formats.info import NetConfig, Overrides, Reading, TargetNeeds
from foredraft.heads.formats.vocabulary import read_vocabulary
from foredraft.heads.nets.blocks import ACTIVATIONS, BlockConfig
from foredraft.heads.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.heads.nets.hydra import HydraConfig
from foredraft.heads.nets.medusa import BlockwiseConfig, MedusaConfig
from foredraft.heads.nets.target_parts import offsets_of
from foredraft.model.hf import CausalLM

VERSION = 1
_COUNTS = ("num_heads", "num_layers")
CONFIGS: dict[str, type] = {
    "eagle": EagleConfig,
    "eagle3": Eagle3Config,
    "medusa": MedusaConfig,
    "hydra": HydraConfig,
    "blockwise": BlockwiseConfig,
}


def matches(checkpoint: Checkpoint) -> bool:
    """The config says so."""
    return "foredraft_head" in checkpoint.config


def read(checkpoint: Checkpoint, target: CausalLM | None, wish: Overrides) -> Reading:
    """Raises:
    DrafterError: a config that foredraft has not written, or a later version of it has.
    """
    fields, name = checkpoint.fields(), checkpoint.name
    method = fields.text("foredraft_head", "")
    if method not in CONFIGS:
        raise DrafterError(f"The head {name!r} is of the kind {method!r}; known are {', '.join(CONFIGS)}.")
    if fields.integer("foredraft_version", VERSION) > VERSION:
        raise DrafterError(f"The head {name!r} was written by a later foredraft.")
    config = _config(CONFIGS[method], fields.part("head").values, name)
    notes: list[str] = []
    config = _wished(config, wish, name, notes)
    vocab = fields.integer("vocab_size") if "vocab_size" in fields else None
    vocabulary, layers, ignored = None, None, frozenset()
    if isinstance(config, Eagle3Config):
        vocabulary, ignored = read_vocabulary(checkpoint, config.draft_vocab_size, config.vocab_size, notes), {"d2t"}
        layers = max(config.taps)
    return Reading(
        method=method,
        format=f"foredraft {method}",
        config=config,
        names=straight(parameter_names(config)),
        ignored=frozenset(ignored),
        vocabulary=vocabulary,
        target=TargetNeeds(
            hidden_size=_target_width(config),
            vocab_size=vocab if isinstance(config, EagleConfig) else config.vocab_size,
            layers=layers,
            name=fields.words("base_model_name_or_path"),
        ),
        notes=tuple(notes),
    )


def write(net: nn.Module, config: NetConfig, *, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors."""
    method = next(method for method, kind in CONFIGS.items() if isinstance(config, kind))
    words = {
        "foredraft_head": method,
        "foredraft_version": VERSION,
        "base_model_name_or_path": name,
        "vocab_size": _vocab(net, config),
        "head": asdict(config),
    }
    tensors = dict(net.state_dict())
    if isinstance(net, Eagle3) and net.vocabulary is not None:
        tensors["d2t"] = offsets_of(net.vocabulary)
    return words, tensors


def _vocab(net: nn.Module, config: NetConfig) -> int:
    if isinstance(net, Eagle):
        return net.target.vocab_size
    assert not isinstance(config, EagleConfig)
    return config.vocab_size


def block_from(values: Mapping[str, Any], name: str) -> BlockConfig:
    """A block of a config of ours."""
    return _config(BlockConfig, values, name)


def _config(kind: type, values: Mapping[str, Any], name: str) -> Any:
    """A config dataclass from JSON: every key known, none missing, each of its type."""
    known = {each.name: each for each in fields_of(kind)}
    odd = [key for key in values if key not in known]
    missing = [key for key, each in known.items() if each.default is MISSING and key not in values]
    if odd or missing:
        raise DrafterError(
            f"The config.json of the head {name!r} has not the keys of foredraft: {', '.join(odd + missing)}."
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
    """Whether a value from JSON is of a field's type; sizes are positive."""
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
    """Whether a value from JSON is a list of lists of shares."""
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and all(_share(each) for each in row) for row in rows)


def accuracies_of(fields: Fields) -> tuple[tuple[float, ...], ...] | None:
    """How often the heads were right by rank, from a key of ours in a published format's config.json.

    Raises:
        DrafterError: it is no list of lists of shares.
    """
    value = fields.values.get("accuracies")
    if value is None:
        return None
    if not is_table(value):
        raise DrafterError(f"accuracies in the config.json of the head {fields.name!r} are no lists of shares.")
    return _tuples(value)


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _tuples(value: Any) -> Any:
    """Lists from JSON as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _whole(value: Any, least: int, most: int = 1 << 62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _wished(config: NetConfig, wish: Overrides, name: str, notes: list[str]) -> NetConfig:
    if wish.taps is not None:
        if not isinstance(config, Eagle3Config) or len(wish.taps) != len(config.taps):
            raise DrafterError(f"The head {name!r} does not take the taps {wish.taps}.")
        config = replace(config, taps=tuple(sorted(wish.taps)))
    if wish.rope_theta is None:
        return config
    block = block_of(config)
    if block is None:
        raise DrafterError(f"The head {name!r} has no rotary positions.")
    notes.append(f"rope_theta is {wish.rope_theta:g} as asked, not {block.rope_theta:g}.")
    turned = replace(block, rope_theta=wish.rope_theta)
    if isinstance(config, HydraConfig):
        return replace(config, prefix=turned)
    assert isinstance(config, (EagleConfig, Eagle3Config))
    return replace(config, block=turned)


def _target_width(config: NetConfig) -> int:
    if isinstance(config, Eagle3Config):
        return config.target_hidden_size
    return config.block.hidden_size if isinstance(config, EagleConfig) else config.hidden_size
