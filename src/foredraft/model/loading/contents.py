"""What a model in a folder or a file is, whatever its name."""

from pathlib import Path

from foredraft.core.errors import ModelError
from foredraft.model.gguf.config import config_of
from foredraft.model.gguf.file import GgufFile
from foredraft.model.gguf.load import is_gguf
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf.contents import contents_from
from foredraft.model.hf.hub import local_path, quiet
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.load import model_config
from foredraft.model.native.decoder import floats_of
from foredraft.model.native.files import folder_source
from foredraft.model.native.outline import Outline
from foredraft.model.native.saved import saved_weights


def contents_of_files(name: str) -> str | None:
    """``contents_from`` the model of a name, without loading it.

    Returns:
        None if it is not on this machine, or cannot be read: whoever loads it says why.
    """
    try:
        path = resolve(name)
        if is_gguf(path):
            if not Path(path).expanduser().is_file():
                return None
            file = GgufFile(path)
            outline = Outline.of_config(config_of(file))
            return contents_from(outline.shapes, GgufWeights(file, outline).tensor)
        folder = local_path(path)
        if folder is None or not folder.is_dir():
            return None
        saved = saved_weights(folder)
        source = saved.source if saved is not None else folder_source(str(folder))
        if source is None:
            return None
        with quiet():
            return contents_from(Outline.of_config(model_config(name)).shapes, floats_of(source))
    except (ModelError, KeyError, OSError):
        return None
