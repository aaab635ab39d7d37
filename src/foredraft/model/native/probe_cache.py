"""Remembers the models that ``probe`` has compared, so that the next start imports and runs no modelling code.

An empty file for each, in the user's cache. Its name is a hash of all that the comparison depends on: the model's norms
and config, how its weights, keys and values are stored, and the code of both sides.
"""

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foredraft.files.write import user_cache
from foredraft.model.native.model import NativeLM
from foredraft.model.native.weights import PackedMatrix


def folder() -> Path:
    """Where the files lie."""
    return user_cache() / "compared"


def was_compared(engine: NativeLM) -> bool:
    """Whether this model was compared before, with the same code and settings."""
    name = _name(engine)
    return name is not None and (folder() / name).is_file()


def remember(engine: NativeLM) -> None:
    """Remember that this model was compared, if the cache can be written to."""
    name = _name(engine)
    if name is not None:
        with suppress(OSError):
            folder().mkdir(parents=True, exist_ok=True)
            (folder() / name).touch()


def _name(engine: NativeLM) -> str | None:
    """The name of a model's file; None if nothing identifies the model."""
    if engine.contents() is None:
        return None
    config: dict[str, Any] = engine.outline.config.to_dict()
    decoder = engine.decoder
    matrices = [decoder.embedding, decoder.head]
    matrices += [each for layer in decoder.layers for each in (*layer.attention, *layer.mlp)]
    about = {
        "contents": engine.contents(),
        "config": {key: value for key, value in config.items() if key != "_name_or_path"},
        "class": engine.name,
        "weights": [_forms(each) for each in matrices],
        "kv_cache_dtype": engine.kv_cache_dtype,
        "code": _digest_of_code(),
        "kernels": engine.isa,
        "packages": {name: version(name) for name in ("torch", "transformers")},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _forms(matrix: PackedMatrix) -> list[tuple[int, ...]]:
    rest = [] if matrix.next is None else _forms(matrix.next)
    return [(*matrix.form, matrix.outputs, matrix.inputs), *rest]


def _digest_of_code() -> str:
    """A hash of foredraft's code that runs a native model: this package's, and that of the KV cache."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    sources = [*here.glob("*.py"), *here.glob("kernels/*"), *here.parent.glob("kv/*.py")]
    for path in sorted(sources):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
