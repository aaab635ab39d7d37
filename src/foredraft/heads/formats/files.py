"""Reads configs and tensors from a folder without executing code from pickles."""

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.core.errors import DrafterError, first_line
from foredraft.files.read import read_json
from foredraft.model.hf.hub import fetch

_KNOWN = ("model", "pytorch_model", "medusa_lm_head", "hydra_lm_head")
_ENDINGS = (".safetensors", ".bin", ".pt")
MOST = 1024
"""Most layers or heads of a head; larger values in a config are errors, which would take hours to build."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@final
class Weights:
    """The tensors of several files: listed immediately, read on demand."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._handles: dict[str, Any] = {}
        self._held: dict[str, Tensor] = {}
        for file in files:
            (self._list if file.suffix == ".safetensors" else self._unpickle)(file)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in the file's dtype.

        Raises:
            DrafterError: it contains NaN or infinity.
        """
        tensor = self._held[name] if name in self._held else self._handles[name].get_tensor(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DrafterError(f"The tensor {name} contains NaN or infinity, so the head cannot be used.")
        return tensor

    def _list(self, file: Path) -> None:
        try:
            file.open("rb").close()  # safetensors would call a file without permission missing
            handle = safe_open(file, framework="pt")  # pyright: ignore[reportArgumentType]
            for name in handle.keys():
                view = handle.get_slice(name)
                kind = view.get_dtype()
                if kind not in _DTYPES:
                    raise DrafterError(f"The tensor {name} of {str(file)!r} has the unsupported type {kind}.")
                self._add(file, name, tuple(view.get_shape()), _DTYPES[kind])
                self._handles[name] = handle
        except OSError as error:
            raise DrafterError(f"Cannot read {str(file)!r}: {error.strerror or first_line(error)}.") from None
        except SafetensorError as error:
            raise DrafterError(
                f"{str(file)!r} is truncated or not a safetensors file: {first_line(error).rstrip('.')}."
            ) from error

    def _unpickle(self, file: Path) -> None:
        for name, tensor in load_pickle(file).items():
            self._add(file, name, tuple(tensor.shape), tensor.dtype)
            self._held[name] = tensor

    def _add(self, file: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if name in self.shapes:
            raise DrafterError(f"The tensor {name} is in two files of {str(file.parent)!r}.")
        self.shapes[name], self.dtypes[name] = shape, dtype


def load_pickle(file: Path) -> dict[str, Tensor]:
    """A state dict from ``torch.save``; anything but tensors is rejected without loading it.

    Raises:
        DrafterError: the pickle could run code, is truncated, or is not a state dict.
    """
    try:
        state = _unpickled(file)
    except PermissionError as error:
        raise DrafterError(f"Cannot read {str(file)!r}: {error.strerror}.") from None
    except Exception as error:  # torch raises many types
        if isinstance(error, pickle.UnpicklingError) and any(word in str(error) for word in ("GLOBAL", "Unsupported")):
            raise DrafterError(
                f"{str(file)!r} is a pickle with other objects than tensors, which could run code; it was not loaded."
            ) from error
        raise DrafterError(f"{str(file)!r} is truncated or not a file of torch.save.") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise DrafterError(f"{str(file)!r} is not a state dict.")
    others = [name for name, tensor in state.items() if not isinstance(tensor, Tensor)]
    if others:
        raise DrafterError(f"{str(file)!r} is not a plain state dict: {others[0]!r} is not a tensor.")
    return dict(state)


def _unpickled(file: Path) -> Any:
    with file.open("rb") as stream:
        zipped = stream.read(2) == b"PK"  # files of old torch versions cannot be memory-mapped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about pickles before it rejects them
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with config.json and weights; ``name`` is the path or hub name that the caller gave."""

    name: str
    config: dict[str, Any]
    weights: Weights

    def fields(self) -> "Fields":
        return Fields(self.config, self.name)

    def check_shape(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raise a ``DrafterError`` unless a tensor has this shape, which follows from the config."""
        found = self.weights.shapes[tensor]
        if found != shape:
            raise DrafterError(
                f"The tensor {tensor} of the head {self.name!r} has the shape {list(found)}, but its config.json "
                f"requires {list(shape)}."
            )


def open_checkpoint(name: str, options: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a folder or hub repository and list its tensors, without reading them.

    Args:
        options: about access to the hub; see ``fetch``.

    Raises:
        ModelError: it does not exist.
        DrafterError: it does not contain a head, or its files are broken.
    """
    folder = fetch(name, options)
    config = read_json(folder / "config.json", named=f"the config.json of the head {name!r}")
    return Checkpoint(name, config, Weights(_files(folder, name)))


def _files(folder: Path, name: str) -> list[Path]:
    """The files to read: safetensors take precedence over pickles, an index over single files."""
    for ending in _ENDINGS:
        for index in sorted(folder.glob(f"*{ending}.index.json")):
            return _shards(index, name)
        found = sorted(folder.glob(f"*{ending}"))
        known = [file for stem in _KNOWN for file in found if file.stem == stem]
        if known:
            return known[:1]
        if len(found) > 1:
            raise DrafterError(
                f"The head {name!r} has several weight files and no index: {', '.join(file.name for file in found)}."
            )
        if found:
            return found
    raise DrafterError(f"The head {name!r} has no weights (neither .safetensors nor .bin nor .pt).")


def _shards(index: Path, name: str) -> list[Path]:
    places = read_json(index, named=f"the {index.name} of the head {name!r}").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise DrafterError(f"The {index.name} of the head {name!r} has no weight_map.")
    files = [index.parent / file for file in sorted(set(places.values()))]
    for file in files:
        if file.parent != index.parent or not file.is_file():
            raise DrafterError(f"The head {name!r} lacks {file.name}, which its {index.name} lists.")
    return files


@final
class Fields:
    """Typed access to a config's values. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a positive integer")
        return value

    def count(self, key: str, default: int) -> int:
        """A number of modules, at most ``MOST``."""
        value = self.integer(key, default)
        if value > MOST:
            raise self._wrong(key, f"at most {MOST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string; None if missing or empty."""
        return self.text(key, "") or None

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers; None if missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self._wrong(key, "a list of integers")
        return tuple(value)

    def part(self, key: str) -> "Fields":
        """A nested object; empty if missing."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Fields(value, self.name)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise DrafterError(f"The config.json of the head {self.name!r} has no {key}.")
        return value

    def _wrong(self, key: str, expected: str) -> DrafterError:
        return DrafterError(
            f"{key} in the config.json of the head {self.name!r} is {self.values.get(key)!r}, not {expected}."
        )
