"""Models from folders, the hub or the package itself, with one clear sentence when that fails."""

import copy
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from foredraft.core.errors import ModelError, OptionError, kind_of
from foredraft.model.memory import available_bytes, readable
from foredraft.model.support import check_generates
from foredraft.model.tokenizer import Tokenizer

BUNDLED = {
    "sample": "sample-16m",
    "sample-draft": "draft-4m",
    "sample-eagle": "sample-eagle",
    "sample-eagle3": "sample-eagle3",
    "sample-medusa": "sample-medusa",
}
"""Models that ship with the package, by the names that they go by."""

_log = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer (None where there is none) and the ids that end its texts."""

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


def resolve(name: str) -> str:
    """A folder or hub name; the names of bundled models become their folders."""
    if name in BUNDLED:
        return str(Path(__file__).parent.parent / "models" / BUNDLED[name])
    return name


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    options: Mapping[str, Any] | None = None,
) -> Loaded:
    """Load a causal LM and its tokenizer.

    Args:
        name: a folder, a hub name, or one of ``BUNDLED``.
        dtype: such as "bfloat16" or ``torch.bfloat16``; by default float32 on a CPU, elsewhere what the weights have.
        device: such as "cpu" or "cuda:0"; by default a GPU if there is one.
        options: passed on to ``from_pretrained`` (quantization_config, revision, device_map, ...).

    Raises:
        ModelError: nothing there, no weights there, or nothing that transformers can load as a causal LM.
    """
    path = resolve(name)
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given = dict(options or {})
    given.setdefault("dtype", _dtype(dtype, device))
    if "device_map" not in given and device != "cpu":
        given["device_map"] = as_device(device)
    _check_folder(path)
    _log.debug("Loading %s from %s for %s.", name, path, device)
    with quiet():
        try:
            hub = {key: given[key] for key in ("revision", "trust_remote_code", "token", "cache_dir") if key in given}
            config = AutoConfig.from_pretrained(path, **hub)
            if config.is_encoder_decoder:
                raise ModelError(f"{name} is an encoder-decoder; foredraft verifies drafts of decoder-only causal LMs.")
            _check_fits(name, config, given, device)
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **given)
            model, info = loaded
            _check_complete(name, model, info["missing_keys"])
        except ModelError:
            raise
        except Exception as error:  # transformers raises many kinds; each becomes one sentence
            raise ModelError(f"Cannot load a causal LM from {name!r}: {_first_sentence(error)}") from error
        tokenizer = _tokenizer(path, hub)
    if tokenizer is None:
        _log.info("%s has no tokenizer that can be loaded: prompts must be token ids.", name)
    return Loaded(model, tokenizer, eos_token_ids(model, tokenizer))


def as_loaded(model: Any, tokenizer: Any = None) -> Loaded:
    """A model that the caller has loaded, with the tokenizer that goes with it; see ``unwrapped``, ``as_tokenizer``."""
    plain, own = unwrapped(model), as_tokenizer(tokenizer)
    check_generates(plain)
    return Loaded(plain, own, eos_token_ids(plain, own))


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model itself, which ``torch.compile`` or PEFT may have wrapped.

    A compiled model is taken before compilation. A PEFT model is the model with its active adapters.

    Raises:
        ModelError: it is no transformers model, or one with a learned prompt, which lies outside of it.
    """
    if isinstance(model, PreTrainedModel):
        return model
    wrapped: Any = model  # by what may not be installed
    if isinstance(model, nn.Module) and "_orig_mod" in dict(model.named_children()):
        return unwrapped(wrapped._orig_mod)
    if any(each.__name__ == "PeftModel" for each in model.__class__.__mro__):
        if wrapped.active_peft_config.is_prompt_learning:
            raise ModelError(
                "A prompt that PEFT has learned is outside of the model, so its drafts cannot be verified."
            )
        return unwrapped(wrapped.get_base_model())
    raise ModelError(f"A model must be a folder, a hub name or a transformers model, not {kind_of(model)}.")


def as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """A tokenizer by its folder or hub name, or one that is loaded already.

    Raises:
        ModelError: there is none, or it is something else.
    """
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, (str, PathLike)):
        with quiet():
            try:
                return Tokenizer(AutoTokenizer.from_pretrained(resolve(str(tokenizer))))
            except Exception as error:  # transformers raises many kinds; each becomes one sentence
                raise ModelError(
                    f"Cannot load a tokenizer from {str(tokenizer)!r}: {_first_sentence(error)}"
                ) from error
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return Tokenizer(tokenizer)
    raise ModelError(f"A tokenizer must be a folder, a hub name or a transformers tokenizer, not {kind_of(tokenizer)}.")


def eos_token_ids(model: PreTrainedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """All ids that end a text: the generation config's, else the model config's, else the tokenizer's."""
    for source in (model.generation_config, model.config.get_text_config(), tokenizer and tokenizer.inner):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    return ()


def _check_folder(path: str) -> None:
    """Say what is missing in a local folder before transformers says it in ten lines."""
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ModelError(f"There is no model folder {path!r}.")
        return
    if not folder.is_dir():
        raise ModelError(f"{path!r} is a file; a model is a folder with config.json and weights.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"The folder {path!r} has no config.json, so it is not a transformers model.")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise ModelError(f"The folder {path!r} has no weights (neither .safetensors nor .bin).")


def _check_fits(name: str, config: PreTrainedConfig, given: Mapping[str, Any], device: str) -> None:
    """Refuse weights that the device has no room for before they are read. Nobody knows what quantisation leaves of
    them, or where a ``device_map`` puts them."""
    free = available_bytes(torch.device(device))
    quantised = getattr(config, "quantization_config", None) is not None or "quantization_config" in given
    if free is None or quantised or not isinstance(given.get("device_map", torch.device(device)), torch.device):
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=bool(given.get("trust_remote_code", False))
        )
    own: Any = config.dtype
    dtype = given["dtype"] if isinstance(given["dtype"], torch.dtype) else own or torch.float32
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    if size > free:
        kind = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"The weights of {name!r} take {readable(size)} in {kind}, and {readable(free)} are free on {device}: free "
            "some, load them in a smaller dtype or quantised, or take another device."
        )


def _check_complete(name: str, model: PreTrainedModel, missing: Collection[str]) -> None:
    """transformers fills gaps with random numbers and a warning; quantised models may list what they need not have."""
    if missing and getattr(model.config, "quantization_config", None) is None:
        raise ModelError(
            f"The weights of {name!r} are incomplete: {min(missing)} and {len(missing) - 1} more are not there."
        )


def _tokenizer(path: str, hub: Mapping[str, Any]) -> Tokenizer | None:
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(path, **hub))
    except Exception:  # a model without one can still be run on token ids
        return None


def _dtype(name: str | torch.dtype | None, device: str) -> torch.dtype | str:
    if name is None:
        return torch.float32 if device == "cpu" else "auto"
    return name if name == "auto" else as_dtype(name)


def as_dtype(name: str | torch.dtype) -> torch.dtype:
    """A floating-point type by its name, or itself.

    Raises:
        OptionError: there is none; the sentence lists those that there are.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(f"Unknown dtype {name!r}. Known: auto, bfloat16, float16, float32, float64.")
    return dtype


def as_device(name: str | torch.device) -> torch.device:
    """A device by its name, or itself.

    Raises:
        OptionError: there is none of this name here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise OptionError(f"Cannot use the device {str(name)!r}: {_first_sentence(error)}") from error
    return device


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else error.__class__.__name__


class quiet:
    """transformers says nothing and draws no bars while a model is read or written: what matters is raised."""

    def __enter__(self) -> None:
        self._level = hf_logging.get_verbosity()
        self._bars = hf_logging.is_progress_bar_enabled()
        hf_logging.set_verbosity(logging.ERROR)
        hf_logging.disable_progress_bar()

    def __exit__(self, *error: object) -> None:
        hf_logging.set_verbosity(self._level)
        if self._bars:
            hf_logging.enable_progress_bar()
