"""Which parts of a model a draft does without, as a small JSON file: ``foredraft skip`` writes it, ``layer_skip`` reads
it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError, OptionError


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
    try:
        Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None


def read_skips(path: str | Path) -> Skips:
    """Read it.

    Raises:
        DrafterError: it is not there, or it is something else.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DrafterError(f"Cannot read the layers to skip, {path}: {error.strerror}.") from None
    except ValueError as error:
        raise DrafterError(f"{path} is not JSON: {error}.") from None
    found = record if isinstance(record, dict) else {}
    layers, lists = found.get("layers"), [found.get("skip_attention"), found.get("skip_mlp")]
    if not isinstance(layers, int) or not all(isinstance(each, list) for each in lists):
        raise DrafterError(
            f"{path} is not what foredraft skip writes: layers, skip_attention and skip_mlp must be there."
        )
    attention, mlp = (tuple(each) for each in lists if each is not None)
    if not all(isinstance(number, int) and 0 <= number < layers for number in (*attention, *mlp)):
        raise DrafterError(f"{path}: skip_attention and skip_mlp must be numbers of layers, from 0 on, below {layers}.")
    return Skips(str(found.get("model", "")), layers, attention, mlp, found.get("facts") or {})
