"""Loads models from folders, the hub or the package."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from foredraft.core.errors import ModelError, first_line, kind_of
from foredraft.model.base import TargetModel
from foredraft.model.gguf.config import config_of
from foredraft.model.gguf.file import GgufFile
from foredraft.model.gguf.load import is_gguf, is_quantised_file, load_float, own_dtype
from foredraft.model.gguf.tokenizer import UnknownTokenizer, tokenizer_of
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf.hub import ACCESS, cached_only, fetch_file, is_hub_name, local_path, quiet
from foredraft.model.hf.support import check_decoder, check_generates, is_quantised
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.model_files import check_folder, check_sizes
from foredraft.model.loading.placement import PLACEMENT, as_device, as_dtype, check_fits
from foredraft.model.loading.quantised import (
    engine_for,
    native_model,
    open_folder,
    outline_of_folder,
    rounded_file,
    rounded_model,
    source_for,
    with_weights,
)
from foredraft.model.loading.tokenizers import as_tokenizer, eos_token_ids, tokenizer_for
from foredraft.model.native.decoder import Source, source_of
from foredraft.model.native.outline import Outline
from foredraft.model.native.saved import SavedWeights, saved_weights
from foredraft.model.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_HUB = (*ACCESS, "revision", "trust_remote_code")
"""Options of ``from_pretrained`` about access to the hub."""

_FILES = {
    *_HUB,
    *("subfolder", "gguf_file", "code_revision", "force_download", "proxies"),
}
"""Options of ``from_pretrained`` that say which files are read, also for configs and tokenizers."""

_UNKNOWN_OPTION = re.compile(r".*__init__\(\) got an unexpected keyword argument '(\w+)'")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer (None if it has none) and its end-of-sequence ids.

    ``file``: the weights of a model without a module, because the native engine reads them from there.
    ``weights``: what a saved model was quantised to, or is to be by the native engine ("auto" for a GGUF file that
    stays as it is); None for any other.
    """

    outline: Outline
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    module: PreTrainedModel | None = None
    file: GgufWeights | Source | None = None
    weights: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Tokenizer | None) -> "Loaded":
        """A transformers model."""
        outline = Outline.of(model)
        return cls(outline, tokenizer, eos_token_ids(outline, tokenizer), model)

    @classmethod
    def of_file(
        cls, outline: Outline, file: GgufWeights | Source, tokenizer: Tokenizer | None, weights: str | None = None
    ) -> "Loaded":
        """A model for the native engine."""
        return cls(outline, tokenizer, eos_token_ids(outline, tokenizer), file=file, weights=weights)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model.

        Raises:
            ModelError: there is none, since the native engine reads the weights from a file.
        """
        if self.module is None:
            raise ModelError(f"{self.outline.name} is loaded for the native engine alone.")
        return self.module

    def quantised_to(self, weights: str | None) -> str | None:
        """The weights that the model runs with if these are asked for; None if it keeps those of its checkpoint."""
        found = self.weights or weights
        return found if self.file is not None or self.model.device.type == "cpu" else None

    def with_weights(self, weights: str, *, owned: bool = False, kv_cache_dtype: str | None = None) -> TargetModel:
        """See ``quantised.with_weights``."""
        if self.file is not None:
            return native_model(self.outline, self.file, weights, kv_cache_dtype)
        return with_weights(self.model, weights, owned=owned, kv_cache_dtype=kv_cache_dtype)

    def rounded(self, weights: str) -> PreTrainedModel:
        """See ``quantised.rounded_model``."""
        if self.file is not None:
            return rounded_file(self.outline, self.file, weights)
        return rounded_model(self.model, weights)

    def native_source(self, weights: str) -> Source:
        """The weights for the native engine, as floats or as codes that stay.

        Raises:
            ModelError: the engine cannot run the model.
        """
        if self.file is not None:
            return source_for(self.file, weights)
        choice = engine_for(self.outline.config, weights)
        if choice.name != "native":
            raise ModelError(choice.why)
        return source_of(self.model)


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    options: Mapping[str, Any] | None = None,
    weights: str | None = None,
    tokenizer: Any = None,
    native: bool = False,
) -> Loaded:
    """Load a causal LM and its tokenizer.

    Args:
        name: a folder, a hub name, one of ``BUNDLED``, or a GGUF file (on the hub: owner/name/file.gguf).
        dtype: such as "bfloat16" or ``torch.bfloat16``; by default float32 on a CPU, else the weights' dtype.
        device: such as "cpu" or "cuda:0"; by default a GPU if available.
        options: passed to ``from_pretrained`` (quantization_config, revision, device_map, ...).
        weights: what the model will be quantised to; see ``Loaded.file``. A GGUF file of quantised weights stays as it
            is by default if ``native``, and no ``dtype`` is asked for.
        tokenizer: in place of the model's own; see ``as_tokenizer``.
        native: the caller can run weights of ``foredraft quantize``; see ``Loaded.weights``.

    Raises:
        ModelError: the model or its weights are missing or damaged, transformers cannot load it as a causal LM, or it
            has a tokenizer that cannot be loaded.
    """
    if saved := _saved(name, device, native):
        return _load_saved(name, saved, tokenizer)
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given: dict[str, Any] = {"dtype": _dtype(dtype, device), **(options or {})}
    if device != "cpu" and not PLACEMENT & given.keys():
        given["device_map"] = as_device(device)
    if is_gguf(path := resolve(name)):
        with quiet():
            file = GgufFile(fetch_file(path, {key: given[key] for key in _HUB if key in given}))
            free = dtype is None and weights is None and given.keys() <= {"dtype", *_HUB}
            if native and free and is_quantised_file(file):
                weights = "auto"
            return _load_gguf(name, file, given, device, weights, tokenizer)
    return _load_named(name, given, device, weights if device == "cpu" and not options else None, tokenizer)


def _load_named(name: str, given: dict[str, Any], device: str, weights: str | None, tokenizer: Any) -> Loaded:
    """A model in a folder or on the hub."""
    path, given = _located(name, given)
    with quiet():
        try:
            config = _config(path, given)
            check_decoder(config, name)
            if not given.get("gguf_file") and (folder := local_path(path)) is not None:
                check_sizes(folder / (given.get("subfolder") or ""))
            if weights is not None and (found := open_folder(path, config, weights)):
                own = tokenizer_for(tokenizer, name, path, _about_files(given))
                return Loaded.of_file(found.outline, found.source, own)
            _begin(name, config, given, device)
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **given)
            model, info = loaded
            _check_complete(name, model, info["missing_keys"])
            if extra := sorted(info["unexpected_keys"]):
                _log.warning("%d tensors of %s are not used, such as %s.", len(extra), name, extra[0])
        except ModelError:
            raise
        except Exception as error:  # transformers raises many types
            raise ModelError(_explained(name, path, given, error)) from error
        own = tokenizer_for(tokenizer, name, path, _about_files(given))
    return Loaded.of(model, own)


def model_config(name: str) -> PreTrainedConfig:
    """The config of a causal LM by name, as in ``load_model``.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    if is_gguf(path := resolve(name)):
        return config_of(GgufFile(fetch_file(path)))
    path, given = _located(name, {}, weights=False)
    with quiet():
        try:
            return _config(path, given)
        except Exception as error:  # transformers raises many types
            raise ModelError(_explained(name, path, given, error)) from error


def _config(path: str, options: Mapping[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, **_about_files(options))
    return config


def _about_files(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in _FILES}


def _load_gguf(
    name: str, file: GgufFile, given: dict[str, Any], device: str, weights: str | None, tokenizer: Any
) -> Loaded:
    """A model of the dequantised weights in a GGUF file, or one without data if the native engine reads the file."""
    config = config_of(file)
    config.name_or_path = name
    others = {key: value for key, value in given.items() if key not in _HUB}
    if others["dtype"] == "auto":
        others["dtype"] = own_dtype(file)
    try:
        own = as_tokenizer(tokenizer) if tokenizer is not None else Tokenizer(tokenizer_of(file))
    except UnknownTokenizer as error:
        _log.warning("%s Prompts must be token ids, or pass the original tokenizer.", error)
        own = None
    if weights is not None and device == "cpu" and engine_for(config, weights).name == "native":
        outline = Outline.of_config(config)
        return Loaded.of_file(outline, GgufWeights(file, outline), own, weights)
    _begin(name, config, others, device)
    model = load_float(file, config, others)
    model.config.name_or_path = name  # transformers has emptied it
    return Loaded.of(model, own)


def _begin(name: str, config: PreTrainedConfig, given: Mapping[str, Any], device: str) -> None:
    """Check that weights in floats fit, and log what is loaded."""
    check_fits(name, config, given, device)
    _log.info("Loading %s for %s in %s.", name, device, str(given["dtype"]).removeprefix("torch."))


def _saved(name: str, device: str | torch.device | None, native: bool) -> SavedWeights | None:
    """The weights in a local folder of ``foredraft quantize``; None for any other model."""
    folder = local_path(resolve(name))
    saved = None if folder is None else saved_weights(folder)
    if saved is not None and not (native and str(device or "cpu") == "cpu"):
        raise ModelError(
            f"{name!r} holds weights of foredraft quantize, which only the CPU engine runs: use the original model."
        )
    return saved


def _load_saved(name: str, saved: SavedWeights, tokenizer: Any) -> Loaded:
    """A model without data, whose weights the native engine reads."""
    path, given = _located(name, {})
    with quiet():
        config = _config(path, given)
        check_decoder(config, name)
        check_sizes(Path(path))
        outline = outline_of_folder(path, config)
    own = tokenizer_for(tokenizer, name, path, _about_files(given))
    return Loaded.of_file(outline, saved.source, own, saved.weights)


def _located(name: str, options: Mapping[str, Any], *, weights: bool = True) -> tuple[str, dict[str, Any]]:
    """The folder or repository of a model, and the options of ``from_pretrained`` that find it there.

    Raises:
        ModelError: it does not exist, is incomplete or damaged.
    """
    path, given = resolve(name), {"trust_remote_code": False, **options}  # by default, transformers would ask
    if given.get("gguf_file") and find_spec("gguf") is None:
        raise ModelError("A GGUF file needs the package gguf: pip install 'foredraft[gguf]'.")
    folder = local_path(path)
    if folder is not None:
        _check_local(folder, given, weights)
        return str(folder), given
    if not is_hub_name(path):
        raise ModelError(f"There is no model folder {path!r}.")
    return path, given | cached_only(path, given)


def _check_local(folder: Path, given: Mapping[str, Any], weights: bool) -> None:
    """Check a local folder, or its subfolder or GGUF file; see ``check_folder``."""
    if not folder.is_dir():
        raise ModelError(
            f"{str(folder)!r} is a file; a model is a folder with config.json and weights, or a GGUF file."
        )
    folder = folder / (given.get("subfolder") or "")
    file = given.get("gguf_file")
    if file and not (folder / file).is_file():
        raise ModelError(f"The folder {str(folder)!r} has no file {file!r}.")
    if not file:
        check_folder(folder, weights=weights and "state_dict" not in given)


def _explained(name: str, path: str, given: Mapping[str, Any], error: Exception) -> str:
    """Why transformers could not load a model, in one sentence."""
    reason = first_line(error).rstrip(".:")
    if local_path(path) is None:
        return f"There is no folder {name!r}, and downloading it from the hub failed: {reason}."
    if "ignore_mismatched_sizes" in reason:  # its table of shapes went to the log
        reason = "its weights do not have the shapes that its config.json requires"
    elif isinstance(error, StrictDataclassError) and error.__cause__ is not None:  # the validator's name is no reason
        reason = first_line(error.__cause__).rstrip(".:")
    elif (option := _UNKNOWN_OPTION.fullmatch(reason)) and option[1] in given:
        reason = f"from_pretrained has no option {option[1]!r} for this model"
    elif not isinstance(error, (OSError, ValueError, ImportError, StrictDataclassError)):  # not written for users
        kind = error.__class__.__name__
        reason = f"transformers failed with {reason if reason.startswith(kind) else f'{kind}: {reason}'}"
    return f"Cannot load a causal LM from {name!r}: {reason}."


def as_loaded(model: Any, tokenizer: Any = None) -> Loaded:
    """A model that the caller has loaded, with its tokenizer; see ``unwrapped`` and ``as_tokenizer`` for errors."""
    plain, own = unwrapped(model), as_tokenizer(tokenizer)
    check_generates(plain)
    return Loaded.of(plain, own)


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside a ``torch.compile`` or PEFT wrapper.

    A compiled model is unwrapped to the model before compilation, a PEFT model to the model with its active adapters.

    Raises:
        ModelError: it is not a transformers model, or PEFT has learned a prompt for it.
    """
    from transformers import PreTrainedModel as model_type

    if isinstance(model, model_type):
        return model
    wrapped: Any = model  # PEFT may not be installed
    if isinstance(model, nn.Module) and "_orig_mod" in dict(model.named_children()):
        return unwrapped(wrapped._orig_mod)
    if any(each.__name__ == "PeftModel" for each in model.__class__.__mro__):
        if wrapped.active_peft_config.is_prompt_learning:
            raise ModelError(
                "PEFT's learned prompts are not part of the model, so drafts for this model cannot be verified."
            )
        return unwrapped(wrapped.get_base_model())
    raise ModelError(f"A model must be a folder, a hub name or a transformers model, not {kind_of(model)}.")


def _check_complete(name: str, model: PreTrainedModel, missing: Collection[str]) -> None:
    """Raise a ``ModelError`` for missing weights, which transformers would initialise randomly. Quantised models are
    not checked; they may list weights that they do not need."""
    if missing and not is_quantised(model.config):
        raise ModelError(
            f"The weights of {name!r} are incomplete: {min(missing)} and {len(missing) - 1} more are missing."
        )


def _dtype(name: str | torch.dtype | None, device: str) -> torch.dtype | str:
    if name is None:
        return torch.float32 if device == "cpu" else "auto"
    return name if name == "auto" else as_dtype(name)
