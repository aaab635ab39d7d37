"""What ``load`` is given, in one form each: targets and drafters, by whatever name or object users have for them."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike, fspath
from typing import Any, NamedTuple

import torch
from torch import nn

from foredraft.compose.spec import Spec
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError, ModelError, OptionError, kind_of
from foredraft.drafters import METHODS
from foredraft.engine.generator import Generator
from foredraft.heads.formats import inspect_head
from foredraft.heads.formats.tuned import SUFFIX, read_tuned
from foredraft.model.hf import CausalLM
from foredraft.model.load import as_device, as_dtype, unwrapped

_log = logging.getLogger(__name__)

AnyDrafter = str | PathLike[str] | Drafter | nn.Module | tuple[str, Any] | None
"""A spec, a path, a ``Drafter``, a transformers model that drafts as ``draft_model``, or a spec without its path and
the model (or the path) that belongs there, as in ``("sequoia,acceptance=0.6/0.2", model)``."""

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
"""What ships for the bundled targets, by method."""


class Target(NamedTuple):
    """A folder or hub name, a transformers model or a ``CausalLM`` that is shared; and its tokenizer, if given."""

    source: Any
    tokenizer: Any


def as_target(
    target: Any,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    model_options: Mapping[str, Any] | None,
) -> Target:
    """A target of any kind; a generator shares the one that it has.

    Raises:
        ModelError: it is no model.
        OptionError: it is loaded, and in another dtype, on another device, or with options given for loading it.
    """
    if isinstance(target, (str, PathLike)):
        return Target(fspath(target), tokenizer)
    if isinstance(target, Generator):
        target, tokenizer = target.engine.target, target.tokenizer if tokenizer is None else tokenizer
    source = target if isinstance(target, CausalLM) else unwrapped(target)
    if dtype not in (None, "auto") and as_dtype(dtype) != source.dtype:
        raise OptionError(f"The model is loaded already, in {source.dtype}: leave dtype out, or load it in {dtype}.")
    if device is not None:
        wanted, found = as_device(device), source.device
        if wanted.type != found.type or wanted.index not in (None, found.index):
            raise OptionError(f"The model is loaded already, on {found}: leave device out, or move it to {wanted}.")
    if model_options:
        raise OptionError("The model is loaded already: leave model_options out, or give them to its from_pretrained.")
    return Target(source, tokenizer)


def as_spec(source: Any, drafter: AnyDrafter) -> Spec | Drafter:
    """A drafter of any kind for this target.

    Raises:
        OptionError: an unknown method or option.
        DrafterError: it is no drafter, or there is none.
    """
    if isinstance(drafter, Drafter):
        return drafter
    if drafter == "auto":
        drafter = "eagle3" if isinstance(source, str) and source in BUNDLED_DRAFTS else "prompt_lookup"
        _log.info("The automatic choice of a drafter is %s.", drafter)
    if drafter is None or isinstance(drafter, str):
        return _spelled(source, drafter or "none")
    if isinstance(drafter, tuple) and len(drafter) == 2 and isinstance(drafter[0], str):
        return _with_object(Spec.parse(drafter[0]), drafter[1])
    if isinstance(drafter, PathLike):
        return _found(fspath(drafter))
    if isinstance(drafter, nn.Module):
        return _with_object(Spec.parse("draft_model"), drafter)
    given = f"the class {drafter.__name__}" if isinstance(drafter, type) else kind_of(drafter)
    raise DrafterError(
        "A drafter is a spec such as prompt_lookup or draft_model:PATH, a path, a transformers model, or an object of "
        f"a class derived from foredraft.Drafter, not {given}."
    )


def names_draft(spec: Spec | Drafter) -> bool:
    """Whether a draft model may be loaded by a name that the spec has; a trained head is no model."""
    return isinstance(spec, Spec) and spec.path is not None and spec.model is None and not METHODS[spec.name].heads


def check_device(draft: nn.Module, target: CausalLM) -> None:
    """Refuse a draft model that was loaded on another device than its target."""
    if (found := next(draft.parameters()).device) != target.device:
        raise DrafterError(f"The draft model is on {found} and the target on {target.device}; put them on one device.")


def _spelled(source: Any, text: str) -> Spec:
    """A spec, or the name of a file that ``foredraft tune`` wrote."""
    if text.endswith(SUFFIX) and text.partition(":")[0] not in METHODS:
        tuned = read_tuned(text)
        spec = replace(Spec.parse(tuned.drafter), off_from=tuned.off_from, learned=tuned.learned)
    else:
        spec = Spec.parse(text)
    bundled = BUNDLED_DRAFTS.get(source, {}) if isinstance(source, str) else {}
    if spec.path is None and spec.name in bundled:
        return replace(spec, path=bundled[spec.name])
    return spec


def _found(path: str) -> Spec:
    """What is at this path: a tuned drafter, a trained head or a draft model."""
    if path.endswith(SUFFIX):
        return _spelled(None, path)
    try:
        kind = inspect_head(path).method
        name = kind if kind in METHODS else "eagle2"
    except DrafterError:  # no head
        name = "draft_model"
    return replace(Spec.parse(name), path=path)


def _with_object(spec: Spec, given: Any) -> Spec:
    """The spec with what stands behind its colon."""
    if spec.path is not None:
        raise DrafterError(f"{spec.name} has a path already, {spec.path!r}; leave it out, or leave the object out.")
    if isinstance(given, (str, PathLike)):
        return replace(spec, path=fspath(given))
    if "small model" not in METHODS[spec.name].needs:
        raise DrafterError(f"{spec.name} needs {METHODS[spec.name].needs}; a model object cannot be that.")
    try:
        model = unwrapped(given)
    except ModelError as error:
        raise DrafterError(f"No draft model: {error}") from error
    return replace(spec, path=model.__class__.__name__, model=model)
