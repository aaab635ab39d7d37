"""Quantise a model once and save it, so that it loads in seconds."""

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path

from foredraft.core.errors import ModelError, OptionError
from foredraft.files.outputs import output_folder, replaced_folder
from foredraft.files.provenance import two_parts
from foredraft.model.loading.load import load_model
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
        UsageError: the native engine cannot run the model, or the folder cannot be written: it holds something else
            than an earlier result from the same model.
    """
    if weights not in PRECISIONS:
        raise OptionError(f"weights must be int4 or int8, not {weights!r}.")
    if Path(out).expanduser().resolve() == Path(model).expanduser().resolve():
        raise OptionError("The folder to write is that of the model itself: choose another one.")
    place, about = Path(out).expanduser(), {"model": two_parts(fspath(model)), "weights": weights}
    with output_folder(place, "quantize", about):
        loaded = load_model(fspath(model), device="cpu", weights=weights)
        source, outline = loaded.native_source(weights), loaded.outline
        try:
            with replaced_folder(place, "quantize", about) as folder:
                outline.config.save_pretrained(folder)
                if outline.generation_config is not None:
                    outline.generation_config.save_pretrained(folder)
                if loaded.tokenizer is not None:
                    loaded.tokenizer.save(folder)
                save_weights(folder, outline, source, weights, progress)
        except OSError as error:
            raise ModelError(f"Cannot write to {fspath(out)!r}: {error.strerror or error}.") from None
