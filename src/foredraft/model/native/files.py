"""Reads weights from files, one at a time, so that a model is quantised in the memory of one of its layers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from foredraft.core.errors import ModelError, first_line
from foredraft.model.native.decoder import Source

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def folder_source(folder: str) -> Source | None:
    """The weights of a folder's safetensors files, by name; None if it has none.

    Raises:
        ModelError: a file is damaged.
    """
    path = Path(folder)
    try:
        if (path / _INDEX).is_file():
            places: Mapping[str, str] = json.loads((path / _INDEX).read_text("utf-8"))["weight_map"]
        elif (path / _SINGLE).is_file():
            with safe_open(path / _SINGLE, "pt") as file:
                places = dict.fromkeys(file.keys(), _SINGLE)
        else:
            return None
        for name in sorted(set(places.values())):
            safe_open(path / name, "pt")
    except Exception as error:  # safetensors raises several types
        raise ModelError(f"The weights in {folder!r} cannot be read: {first_line(error)}") from error
    return lambda name: read_tensor(path / places[name], name) if name in places else None


def read_tensor(path: Path, name: str) -> Tensor:
    """A tensor of a safetensors file, which is mapped only as long as the tensor lives."""
    file: Any = safe_open(path, "pt")
    return file.get_tensor(name)
