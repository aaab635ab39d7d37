"""Normalise the arguments of ``load``: targets and drafters given by name, path or object."""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from os import PathLike, fspath
from typing import Any, TypeVar

import torch
from torch import nn

from foredraft.compose.options import LoadOptions
from foredraft.compose.spec import Spec
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError, ModelError, OptionError, kind_of
from foredraft.core.sampling.params import check_known
from foredraft.drafters import AUTO, METHODS, automatic_drafter, bundled_drafts
from foredraft.engine.generator import Generator
from foredraft.heads.formats import inspect_head
from foredraft.heads.formats.tuned import SUFFIX, read_tuned
from foredraft.model.base import TargetModel
from foredraft.model.gguf.load import is_gguf
from foredraft.model.hf.contents import contents_of
from foredraft.model.loading.load import unwrapped
from foredraft.model.loading.placement import as_device, as_dtype

_log = logging.getLogger(__name__)

AnyDrafter = str | PathLike[str] | Drafter | nn.Module | tuple[str, Any] | None
"""A spec, a path, a ``Drafter``, a transformers model (used as ``draft_model``), or a spec without a path together with
the model or path that belongs there, as in ``("sequoia,acceptance=0.6/0.2", model)``."""

_O = TypeVar("_O")
_QUANTISED = ("int4", "int8")
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


def from_keywords(kind: type[_O], caller: str, own: tuple[str, ...], given: Mapping[str, Any]) -> _O:
    """The dataclass of the keywords of ``load`` or ``speculative``.

    Args:
        own: the call's other parameters, for the message.

    Raises:
        OptionError: an unknown keyword, with a hint for what users of transformers try; or an invalid value.
    """
    known = [*own, *(each.name for each in fields(kind))]  # type: ignore[arg-type]
    check_known(f"argument of {caller}", given, known, _ELSEWHERE)
    return kind(**given)


def as_target(target: Any, options: LoadOptions) -> tuple[Any, LoadOptions]:
    """Normalise a target and the options with which it is loaded; a generator shares its own target.

    Returns:
        a folder, a hub name, a transformers model or a shared ``TargetModel``, and the options.

    Raises:
        ModelError: ``target`` is not a model.
        OptionError: the model is already loaded and has another dtype, device or weights, or ``model_options`` were
            given; or the weights cannot be on the device; or this is not one of ``tensor_parallel`` processes.
    """
    options = replace(options, model_options=_in_parts(options.model_options, options.tensor_parallel))
    if isinstance(target, (str, PathLike)):
        quantised = options.weights in _QUANTISED
        _check_on_cpu(options.weights, options.device)
        if quantised and options.dtype not in (None, "auto"):
            raise OptionError(f"weights={options.weights!r} sets the precision: leave dtype out.")
        return fspath(target), replace(options, device="cpu") if quantised else options
    if isinstance(target, Generator):
        if options.tokenizer is None:
            options = replace(options, tokenizer=target.tokenizer)
        target = target.engine.target
    source = target if isinstance(target, TargetModel) else unwrapped(target)
    _check_as_loaded(source, options)
    return source, options


def _check_as_loaded(source: Any, options: LoadOptions) -> None:
    """Raise an ``OptionError`` if a loaded model, a transformers model or a ``TargetModel``, is not as asked for."""
    dtype, device, weights = options.dtype, options.device, options.weights
    _check_on_cpu(weights, source.device)
    if dtype not in (None, "auto") and as_dtype(dtype) != source.dtype:
        raise OptionError(f"The model is loaded already, in {source.dtype}: leave dtype out, or load it in {dtype}.")
    if device is not None:
        expected, found = as_device(device), source.device
        if expected.type != found.type or expected.index not in (None, found.index):
            raise OptionError(f"The model is loaded already, on {found}: leave device out, or move it to {expected}.")
    if isinstance(source, TargetModel) and weights not in (None, "auto", source.weights):
        raise OptionError(f"The model is loaded already, in {source.weights or source.dtype}: leave weights out.")
    if options.max_model_len is not None:
        raise OptionError("The model is loaded already, with its context: leave max_model_len out.")
    if options.model_options:
        raise OptionError("The model is loaded already: leave model_options out, or give them to its from_pretrained.")


def _check_on_cpu(weights: str | None, device: object) -> None:
    """Raise an ``OptionError`` if quantised weights were asked for on another device than a CPU."""
    if weights in _QUANTISED and device is not None and torch.device(str(device)).type != "cpu":
        raise OptionError(f"Weights in {weights} run on CPUs: leave device out, or set it to cpu.")


def _in_parts(options: Mapping[str, Any] | None, tensor_parallel: int) -> Mapping[str, Any] | None:
    """The options of ``from_pretrained`` for a target of which each of these processes loads a part.

    Raises:
        OptionError: ``tensor_parallel`` is not the number of processes.
    """
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
    if drafter == AUTO:
        drafter = automatic_drafter(_bundled_drafts(source))
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


def settled(source: Any, target: TargetModel, drafter: AnyDrafter, spec: Spec | Drafter) -> Spec | Drafter:
    """The spec of a drafter for the loaded target, whose bundled drafts are known by its contents.

    Args:
        source: the target as it was given.
        spec: what ``as_spec`` made of the drafter for ``source``.
    """
    if drafter != AUTO:
        return _with_bundled(target, spec) if isinstance(spec, Spec) else spec
    found, bundled = as_spec(target, drafter), _bundled_drafts(target)
    if "eagle3" in bundled:
        _log.info("The bundled head %s fits this model; the automatic choice is hybrid with it.", bundled["eagle3"])
    else:
        _log.info("The automatic choice of a drafter is prompt_lookup.")
        if "eagle3" in _bundled_drafts(source):
            _log.warning("%s has other weights than the model of this name, so its bundled head is not used.", source)
    return found


def drafting_spec(source: Any, spec: Spec) -> Spec:
    """``Spec.drafting`` for this target, with the path of a bundled draft."""
    return _with_bundled(source, spec.drafting)


def names_draft(spec: Spec | Drafter) -> bool:
    """True if building the spec loads a draft model by its path; trained heads do not count."""
    if not isinstance(spec, Spec) or spec.path is None or spec.model is not None:
        return False
    return not METHODS[spec.name].heads or "small model" in METHODS[spec.name].needs


def _from_text(source: Any, text: str) -> Spec:
    """Parse a spec, or read a file written by ``foredraft tune``."""
    if text.endswith(SUFFIX) and text.partition(":")[0] not in METHODS:
        tuned = read_tuned(text)
        spec = replace(Spec.parse(tuned.drafter), off_from=tuned.off_from, learned=tuned.learned)
    else:
        spec = Spec.parse(text)
    return _with_bundled(source, spec)


def _with_bundled(source: Any, spec: Spec) -> Spec:
    """The spec with the path of the draft that is bundled for the target, where it names none."""
    bundled = _bundled_drafts(source)
    if spec.path is None and spec.name in bundled:
        return replace(spec, path=bundled[spec.name])
    return spec


def _bundled_drafts(source: Any) -> Mapping[str, str]:
    """The drafts bundled for a target, by method; before it is loaded by its name."""
    if isinstance(source, str):
        return bundled_drafts(source)
    if isinstance(source, TargetModel):
        return bundled_drafts(source.origin, source.contents())
    return bundled_drafts(source.config.name_or_path, contents_of(source))


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
