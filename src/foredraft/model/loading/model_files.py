"""What the files of a model folder say, checked before anything is built from them."""

import math
import os
from collections.abc import Mapping
from errno import EACCES
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from foredraft.core.errors import ModelError, first_line
from foredraft.files.read import check_model_files, read_json

_SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
"""Fields of most configs that count something; models with a size for each layer have lists."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
_VALUES_PER_BYTE = 8
"""The most weights that one byte of a quantised file holds."""
_MOST_LAYERS = 10_000


def check_folder(folder: Path, *, weights: bool) -> None:
    """Check that a folder has a config whose sizes are possible, and weights if they are needed.

    Raises:
        ModelError: it has not, or a file cannot be read.
    """
    try:
        if not folder.exists():
            raise ModelError(f"There is no folder {str(folder)!r}.")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        check_model_files(folder)
        if not (folder / "config.json").is_file():
            raise ModelError(f"The folder {str(folder)!r} has no config.json, so it is not a transformers model.")
        if weights and not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
            raise ModelError(f"The folder {str(folder)!r} has no weights (neither .safetensors nor .bin).")
    except OSError as error:
        raise ModelError(f"Cannot read the folder {str(folder)!r}: {error.strerror}.") from None
    for part in _configs(folder):
        _check_types(folder, part)
    if (folder / "generation_config.json").exists():
        read_json(folder / "generation_config.json", ModelError)


def check_sizes(folder: Path) -> None:
    """Check that the sizes in the config of a folder, which ``check_folder`` has passed, fit its safetensors files.

    A model with other sizes would take hours to build, or more memory than there is.

    Raises:
        ModelError: they do not fit, or a file is damaged.
    """
    configs = _configs(folder)
    tensors = _stored(folder, check_types=not any("quantization_config" in config for config in configs))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for config in configs if tensors else ():
        layers = config.get("num_hidden_layers") or 1
        if layers > tensors:
            raise _wrong(folder, "num_hidden_layers", layers, f"and the weights have only {tensors} tensors")
        for keys in (("hidden_size", "vocab_size"), ("hidden_size", "intermediate_size"), ("head_dim",)):
            values = [config[key] for key in keys if isinstance(config.get(key), int)]
            if len(values) == len(keys) and math.prod(values) > size * _VALUES_PER_BYTE:
                largest = max(keys, key=lambda key: config[key])
                raise _wrong(folder, largest, config[largest], f"and the weights have only {size} bytes")


def _configs(folder: Path) -> list[dict[str, Any]]:
    """The config of a folder, and that of its language model if it has one of its own."""
    whole = read_json(folder / "config.json", ModelError)
    return [part for part in (whole, whole.get("text_config")) if isinstance(part, dict)]


def _stored(folder: Path, *, check_types: bool) -> int:
    """How many tensors the safetensors files of a folder have, from their headers.

    Args:
        check_types: refuse weights of other types than floats.
    """
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            file.open("rb").close()  # safetensors would call a file without permission missing
            with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportArgumentType]
                names.update(opened.keys())
                if check_types:
                    _check_floats(file, opened)
        except OSError as error:
            raise ModelError(f"Cannot read {str(file)!r}: {error.strerror or first_line(error)}.") from None
        except SafetensorError as error:
            reason = first_line(error).removeprefix("Error while deserializing header: ").rstrip(".")
            raise ModelError(f"{str(file)!r} is damaged: {reason}.") from error
    return len(names)


def _check_floats(file: Path, opened: Any) -> None:
    """Raise a ``ModelError`` for a weight that is no floats; transformers would convert it."""
    for name in opened.keys():
        kind = opened.get_slice(name).get_dtype()
        if name.endswith((".weight", ".bias")) and not kind.startswith(("F", "BF")):
            raise ModelError(f"The weight {name} in {str(file)!r} is damaged: it has the type {kind}.")


def _check_types(folder: Path, config: Mapping[str, Any]) -> None:
    for key in _SIZES:
        value = config.get(key)
        for each in value if isinstance(value, list) and value and key != "num_hidden_layers" else [value]:
            if each is not None and (isinstance(each, bool) or not isinstance(each, int) or each < 1):
                raise _wrong(folder, key, value, "not a whole number, 1 or more")
    layers = config.get("num_hidden_layers") or 1
    if layers > _MOST_LAYERS:
        raise _wrong(folder, "num_hidden_layers", layers, f"more than {_MOST_LAYERS}")
    ends = config.get("eos_token_id")
    for each in ends if isinstance(ends, list) else [ends]:
        if each is not None and (isinstance(each, bool) or not isinstance(each, int)):
            raise _wrong(folder, "eos_token_id", ends, "not a token id or a list of them")


def _wrong(folder: Path, key: str, value: object, why: str) -> ModelError:
    text = repr(value)
    text = text if len(text) <= 40 else f"{text[:40]}..."
    return ModelError(f"{key} in the config.json of {str(folder)!r} is {text}, {why}.")
