"""Normalise the arguments of ``load``: targets and drafters given by name, path or object."""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike, fspath
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from foredraft.compose.spec import Spec
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError, ModelError, OptionError, kind_of
from foredraft.core.sampling.params import check_count, check_known
from foredraft.drafters import METHODS
from foredraft.engine.generator import Generator
from foredraft.heads.formats import inspect_head
from foredraft.heads.formats.tuned import SUFFIX, read_tuned
from foredraft.model.base import TargetModel
from foredraft.model.gguf.load import is_gguf
from foredraft.model.loading.load import resolve, unwrapped
from foredraft.model.loading.placement import as_device, as_dtype
from foredraft.model.loading.quantised import check_weights

_log = logging.getLogger(__name__)

AnyDrafter = str | PathLike[str] | Drafter | nn.Module | tuple[str, Any] | None
"""A spec, a path, a ``Drafter``, a transformers model (used as ``draft_model``), or a spec without a path together with
the model or path that belongs there, as in ``("sequoia,acceptance=0.6/0.2", model)``."""

BUNDLED_DRAFTS = {
    "sample": {
        "draft_model": "sample-draft",
        "sequoia": "sample-draft",
        "opt_tree": "sample-draft",
        "eagle1": "sample-eagle",
        "eagle2": "sample-eagle",
        "eagle3": "sample-eagle3",
        "medusa": "sample-medusa",
        "triforce": "sample-draft",
    }
}
"""Bundled drafts for the bundled targets, by method."""


_P = ParamSpec("_P")
_R = TypeVar("_R")
_MODEL_OPTIONS = (
    *("attn_implementation", "cache_dir", "code_revision", "force_download", "gguf_file", "load_in_4bit"),
    *("load_in_8bit", "local_files_only", "low_cpu_mem_usage", "max_memory", "offload_folder", "proxies"),
    *("quantization_config", "revision", "state_dict", "subfolder", "token", "tp_plan", "trust_remote_code"),
    *("use_safetensors", "variant"),
)
_ELSEWHERE = {
    "torch_dtype": "Did you mean dtype?",
    "device_map": "Pass device, or model_options={'device_map': ...}.",
    **{name: f"Pass model_options={{{name!r}: ...}}." for name in _MODEL_OPTIONS},
    **dict.fromkeys(("assistant_model", "draft_model", "draft", "speculative_model"), "Did you mean drafter?"),
    **dict.fromkeys(("model", "pretrained_model_name_or_path"), "Did you mean target?"),
    "num_assistant_tokens": "It belongs to the drafter, as in 'prompt_lookup,num_assistant_tokens=8'.",
    "temperature": "Sampling options belong to generate.",
    "max_new_tokens": "Sampling options belong to generate.",
}
"""Hints for arguments that users of transformers try in ``load``."""


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, with an ``OptionError`` for an unknown keyword."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **given: _P.kwargs) -> _R:
        check_known("argument of load", given, known, _ELSEWHERE)
        return function(*args, **given)

    return call


class Target(NamedTuple):
    """``source``: a folder, a hub name, a transformers model or a shared ``TargetModel``; the others as in ``load``."""

    source: Any
    tokenizer: Any
    dtype: str | torch.dtype | None
    device: str | torch.device | None
    options: Mapping[str, Any] | None


def as_target(
    target: Any,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    options: Mapping[str, Any] | None,
    weights: str | None = None,
) -> Target:
    """Normalise a target; a generator shares its own target.

    Raises:
        ModelError: ``target`` is not a model.
        OptionError: the model is already loaded and has another dtype, device or weights, or ``options`` were given; or
            ``weights`` are unknown or cannot be on the device.
    """
    if isinstance(target, (str, PathLike)):
        check_weights(weights, device)
        if weights in ("int4", "int8") and dtype not in (None, "auto"):
            raise OptionError(f"weights={weights!r} sets the precision: leave dtype out.")
        return Target(fspath(target), tokenizer, dtype, "cpu" if weights in ("int4", "int8") else device, options)
    if isinstance(target, Generator):
        target, tokenizer = target.engine.target, target.tokenizer if tokenizer is None else tokenizer
    source = target if isinstance(target, TargetModel) else unwrapped(target)
    check_weights(weights, source.device)
    if dtype not in (None, "auto") and as_dtype(dtype) != source.dtype:
        raise OptionError(f"The model is loaded already, in {source.dtype}: leave dtype out, or load it in {dtype}.")
    if device is not None:
        expected, found = as_device(device), source.device
        if expected.type != found.type or expected.index not in (None, found.index):
            raise OptionError(f"The model is loaded already, on {found}: leave device out, or move it to {expected}.")
    if isinstance(source, TargetModel) and weights not in (None, "auto", source.weights):
        raise OptionError(f"The model is loaded already, in {source.weights or source.dtype}: leave weights out.")
    if options:
        raise OptionError("The model is loaded already: leave model_options out, or give them to its from_pretrained.")
    return Target(source, tokenizer, dtype, device, options)


def in_parts(options: Mapping[str, Any] | None, tensor_parallel: int) -> Mapping[str, Any] | None:
    """The options of ``from_pretrained`` for a target of which each of these processes loads a part.

    Raises:
        OptionError: this is not one of so many processes.
    """
    check_count("tensor_parallel", tensor_parallel)
    if tensor_parallel == 1:
        return options
    started = os.environ.get("WORLD_SIZE", "1")
    if started != str(tensor_parallel):
        raise OptionError(
            f"tensor_parallel={tensor_parallel} needs as many processes, and WORLD_SIZE is {started!r}: start the "
            f"command as torchrun --nproc-per-node {tensor_parallel} -m foredraft ..."
        )
    return {**(options or {}), "tp_plan": "auto"}


def as_spec(source: Any, drafter: AnyDrafter) -> Spec | Drafter:
    """Normalise a drafter for this target.

    Raises:
        OptionError: an unknown method or option.
        DrafterError: ``drafter`` is not a drafter, or its path holds none.
    """
    if isinstance(drafter, Drafter):
        return drafter
    if drafter == "auto":
        drafter = "eagle3" if _bundled_drafts(source) else "prompt_lookup"
        _log.info("The automatic choice of a drafter is %s.", drafter)
    if drafter is None or isinstance(drafter, str):
        return _from_text(source, drafter or "none")
    if isinstance(drafter, tuple) and len(drafter) == 2 and isinstance(drafter[0], str):
        return _with_object(Spec.parse(drafter[0]), drafter[1])
    if isinstance(drafter, PathLike):
        return _from_path(source, fspath(drafter))
    if isinstance(drafter, nn.Module):
        return _with_object(Spec.parse("draft_model"), drafter)
    given = f"the class {drafter.__name__}" if isinstance(drafter, type) else kind_of(drafter)
    raise DrafterError(
        "A drafter is a spec such as prompt_lookup or draft_model:PATH, a path, a transformers model, or an object of "
        f"a class derived from foredraft.Drafter, not {given}."
    )


def names_draft(spec: Spec | Drafter) -> bool:
    """True if building the spec loads a draft model by its path; trained heads do not count."""
    return isinstance(spec, Spec) and spec.path is not None and spec.model is None and not METHODS[spec.name].heads


def _from_text(source: Any, text: str) -> Spec:
    """Parse a spec, or read a file written by ``foredraft tune``."""
    if text.endswith(SUFFIX) and text.partition(":")[0] not in METHODS:
        tuned = read_tuned(text)
        spec = replace(Spec.parse(tuned.drafter), off_from=tuned.off_from, learned=tuned.learned)
    else:
        spec = Spec.parse(text)
    bundled = _bundled_drafts(source)
    if spec.path is None and spec.name in bundled:
        return replace(spec, path=bundled[spec.name])
    return spec


def _bundled_drafts(source: Any) -> Mapping[str, str]:
    """The drafts bundled for a target, by method; it is given by its name, or was loaded by that."""
    if not isinstance(source, str):
        folder = source.origin if isinstance(source, TargetModel) else source.config.name_or_path
        source = next((name for name in BUNDLED_DRAFTS if resolve(name) == folder), "")
    return BUNDLED_DRAFTS.get(source, {})


def _from_path(source: Any, path: str) -> Spec:
    """The spec for a path: a tuned drafter, a trained head or a draft model."""
    if path.endswith(SUFFIX):
        return _from_text(source, path)
    if is_gguf(path):
        return replace(Spec.parse("draft_model"), path=path)
    try:
        kind = inspect_head(path).method
        name = kind if kind in METHODS else "eagle2"
    except DrafterError:  # not a head
        name = "draft_model"
    return replace(Spec.parse(name), path=path)


def _with_object(spec: Spec, given: Any) -> Spec:
    """The spec with this path or model object."""
    if spec.path is not None:
        raise DrafterError(f"{spec.name} already has the path {spec.path!r}: leave out the path or the object.")
    if isinstance(given, (str, PathLike)):
        return replace(spec, path=fspath(given))
    if "small model" not in METHODS[spec.name].needs:
        raise DrafterError(f"{spec.name} needs {METHODS[spec.name].needs}: it takes no model object.")
    try:
        model = unwrapped(given)
    except ModelError as error:
        raise DrafterError(f"The object cannot be used as a draft model: {error}") from error
    return replace(spec, path=model.__class__.__name__, model=model)
