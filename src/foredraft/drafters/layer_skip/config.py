"""The JSON file with the layers that a draft skips: written by ``foredraft skip``, read by ``layer_skip``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError
from foredraft.files.outputs import written_by
from foredraft.files.read import read_json
from foredraft.files.write import write_json


@dataclass(frozen=True, slots=True)
class SkipConfig:
    """Layers to skip, numbered from 0. ``layers``: the model's number of layers. ``facts``: how they were found, for
    information."""

    model: str
    layers: int
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def write_skip_config(path: str | Path, skips: SkipConfig) -> None:
    """Write the file; raises a ``UsageError`` if it cannot be written."""
    record = {
        **written_by("skip"),
        "model": skips.model,
        "layers": skips.layers,
        "skip_attention": skips.attention,
        "skip_mlp": skips.mlp,
        "facts": skips.facts,
    }
    write_json(path, record)


def read_skip_config(path: str | Path) -> SkipConfig:
    """Read the file.

    Raises:
        DrafterError: it is missing or has other contents.
    """
    found = read_json(path, remedy="run foredraft skip again")
    layers, lists = found.get("layers"), [found.get("skip_attention"), found.get("skip_mlp")]
    if not isinstance(layers, int) or not all(isinstance(each, list) for each in lists):
        raise DrafterError(f"{path} is not a file of foredraft skip: it must have layers, skip_attention and skip_mlp.")
    attention, mlp = (tuple(each) for each in lists if each is not None)
    if not all(isinstance(number, int) and 0 <= number < layers for number in (*attention, *mlp)):
        raise DrafterError(f"{path}: skip_attention and skip_mlp must be layer numbers from 0 to {layers - 1}.")
    return SkipConfig(str(found.get("model", "")), layers, attention, mlp, found.get("facts") or {})
