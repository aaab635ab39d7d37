"""Quantise a model once and save it, so that it loads in seconds."""

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path

from foredraft.core.errors import ModelError, OptionError
from foredraft.files.write import atomic_folder, check_writable_folder
from foredraft.model.loading.load import load_model
from foredraft.model.loading.quantised import source_for
from foredraft.model.native.saved import save_weights
from foredraft.model.native.weights import PRECISIONS


def quantize(
    model: str | PathLike[str],
    out: str | PathLike[str],
    weights: str = "int4",
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Quantise a model for the native CPU engine and save it, with config and tokenizer; ``load`` reads the folder.

    Args:
        model: a folder, a hub name or a GGUF file.
        out: the folder to write.
        weights: "int4" or "int8".
        progress: called with the name of each weight that is done.

    Raises:
        UsageError: the native engine cannot run the model, or the folder cannot be written.
    """
    if weights not in PRECISIONS:
        raise OptionError(f"weights must be int4 or int8, not {weights!r}.")
    if Path(out).expanduser().resolve() == Path(model).expanduser().resolve():
        raise OptionError("The folder to write is that of the model itself: choose another one.")
    check_writable_folder(fspath(out))
    loaded = load_model(fspath(model), device="cpu", weights=weights)
    source = source_for(loaded.model, weights, loaded.file)
    try:
        with atomic_folder(Path(out)) as folder:
            loaded.model.config.save_pretrained(folder)
            if loaded.model.generation_config is not None:
                loaded.model.generation_config.save_pretrained(folder)
            if loaded.tokenizer is not None:
                loaded.tokenizer.save(folder)
            save_weights(folder, loaded.model, source, weights, progress)
    except OSError as error:
        raise ModelError(f"Cannot write to {fspath(out)!r}: {error.strerror or error}.") from None
