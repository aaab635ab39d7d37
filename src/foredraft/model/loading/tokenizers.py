"""Tokenizers of models, and their end-of-sequence ids."""

import logging
from collections.abc import Mapping
from os import PathLike
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from foredraft.core.errors import ModelError, first_line, kind_of
from foredraft.files.read import check_model_files
from foredraft.model.gguf.file import GgufFile
from foredraft.model.gguf.load import is_gguf
from foredraft.model.gguf.tokenizer import tokenizer_of
from foredraft.model.hf.hub import ACCESS, cached_only, fetch_file, is_hub_name, local_path, quiet
from foredraft.model.loading.bundled import resolve
from foredraft.model.native.outline import Outline
from foredraft.model.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """A tokenizer from a folder, a hub name, a GGUF file or a loaded transformers tokenizer.

    Raises:
        ModelError: it cannot be loaded, or is none of these.
    """
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, (str, PathLike)):
        with quiet():
            if is_gguf(path := resolve(str(tokenizer))):
                return Tokenizer(tokenizer_of(GgufFile(fetch_file(path))))
            if local_path(path) is None and not is_hub_name(path):
                raise ModelError(f"There is no tokenizer folder {path!r}.")
            try:
                if (folder := local_path(path)) is not None and folder.is_dir():
                    check_model_files(folder)
                return Tokenizer(AutoTokenizer.from_pretrained(path, **cached_only(path, {})))
            except ModelError:
                raise
            except Exception as error:  # transformers raises many types
                raise ModelError(f"Cannot load a tokenizer from {str(tokenizer)!r}: {first_line(error)}") from error
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return Tokenizer(tokenizer)
    raise ModelError(f"A tokenizer must be a folder, a hub name or a transformers tokenizer, not {kind_of(tokenizer)}.")


def eos_token_ids(model: Outline, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """All end-of-sequence ids: the generation config's, else the model config's, else the tokenizer's.

    Those beyond the vocabulary are left out, with a warning: transformers takes them, but no text can end with them.

    Raises:
        ModelError: they are no numbers.
    """
    config = model.config.get_text_config()
    for source in (model.generation_config, config, tokenizer and tokenizer.inner):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found = tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
            if not all(isinstance(each, int) for each in found):
                raise ModelError(f"The model's eos_token_id is {ids!r}, not a token id or a list of them.")
            size = config.vocab_size
            if beyond := [each for each in found if not 0 <= each < size]:
                _log.warning("No text ends with the model's eos_token_id %s: it has %d token ids.", beyond, size)
            return tuple(each for each in found if each not in beyond)
    return ()


def tokenizer_for(tokenizer: Any, name: str, path: str, given: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that the caller has given, see ``as_tokenizer``, or else the model's own; None if it has none.

    Args:
        name: the model, for messages.
        path: its folder or repository.
        given: the options of ``from_pretrained`` that say which files are read.

    Raises:
        ModelError: it cannot be loaded.
    """
    if tokenizer is not None:
        return as_tokenizer(tokenizer)
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(path, **given))
    except Exception as error:  # transformers raises many types
        found = _TOKENIZER_FILES if "gguf_file" not in given else ()
        if any(_has_file(path, file, given) for file in found):
            raise ModelError(
                f"Cannot load the tokenizer of {name!r}: {first_line(error).rstrip('.:')}; repair its files, or pass "
                "tokenizer=... to load."
            ) from error
        _log.warning("%s has no tokenizer (%s): prompts must be token ids.", name, first_line(error).rstrip(".:"))
        return None


def _has_file(path: str, file: str, given: Mapping[str, Any]) -> bool:
    """Whether a model has this file, in its folder or in its repository."""
    access = {key: given[key] for key in (*ACCESS, "revision", "subfolder") if key in given}
    try:
        return cached_file(path, file, _raise_exceptions_for_missing_entries=False, **access) is not None
    except Exception:  # it cannot be read, so it is no reason
        return False
