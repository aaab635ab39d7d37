"""Which parts of a model a draft does without, as a small JSON file: ``foredraft skip`` writes it, ``layer_skip`` reads
it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError
from foredraft.core.io import read_json, write_json


@dataclass(frozen=True, slots=True)
class Skips:
    """Layers by number, the first being 0. ``layers``: how many the model has. ``facts``: how it was found; for
    people."""

    model: str
    layers: int
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def write_skips(path: str | Path, skips: Skips) -> None:
    """Write it, or fail with a sentence."""
    record = {
        "model": skips.model,
        "layers": skips.layers,
        "skip_attention": skips.attention,
        "skip_mlp": skips.mlp,
        "facts": skips.facts,
    }
    write_json(path, record)


def read_skips(path: str | Path) -> Skips:
    """Read it.

    Raises:
        DrafterError: it is not there, or it is something else.
    """
    found = read_json(path, "the layers to skip,", "run foredraft skip again")
    layers, lists = found.get("layers"), [found.get("skip_attention"), found.get("skip_mlp")]
    if not isinstance(layers, int) or not all(isinstance(each, list) for each in lists):
        raise DrafterError(
            f"{path} is not what foredraft skip writes: layers, skip_attention and skip_mlp must be there."
        )
    attention, mlp = (tuple(each) for each in lists if each is not None)
    if not all(isinstance(number, int) and 0 <= number < layers for number in (*attention, *mlp)):
        raise DrafterError(f"{path}: skip_attention and skip_mlp must be numbers of layers, from 0 on, below {layers}.")
    return Skips(str(found.get("model", "")), layers, attention, mlp, found.get("facts") or {})
