"""Normalise user input: prompts to token ids, parameters to ``SamplingParams``."""

from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import replace
from numbers import Integral, Number
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from foredraft.core.errors import OptionError, PromptError, kind_of
from foredraft.core.sampling.params import SamplingParams, check_options, with_defaults
from foredraft.model.hf.generation import GenerationConfig, sampling_params
from foredraft.model.text.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    Prompt = str | Tensor | np.ndarray | Seq[int] | Seq[Message] | Mapping[str, Any]
    """A string, token ids (a list, an array or a tensor), chat messages ``{"role": ..., "content": ...}`` or one such
    message, or a tokenizer's output for one prompt (``input_ids`` and optionally ``attention_mask``)."""
    Several = Seq[Prompt] | Tensor | np.ndarray | Mapping[str, Any]
    """A list of prompts, ids [B, T], or a tokenizer's output for a batch."""
    Prompts = Iterable[Prompt]
    Params = SamplingParams | GenerationConfig
else:  # at run time users get foredraft's errors, not those of a type checker
    Prompt = Several = Prompts = Params = Any

_ENCODED = {"input_ids", "attention_mask", "token_type_ids"}


class Listed(NamedTuple):
    """Prompts as a list, and whether a single prompt was given. A prompt is a string, ids or messages."""

    prompts: list[Any]
    single: bool


def listed(prompt: object) -> Listed:
    """List the prompts in ``prompt``, which holds one or several.

    Several prompts are a list of prompts of any kind, a tensor or an array [B, T], or a tokenizer's batch output.

    Raises:
        PromptError: the type is not supported; the message lists those that are.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        return _listed_ids(prompt.tolist())
    if isinstance(prompt, Mapping):
        return _listed_ids(_unpadded(prompt)) if "input_ids" in prompt else Listed([[_message(prompt)]], True)
    if isinstance(prompt, str):
        return Listed([prompt], True)
    if not isinstance(prompt, Seq) or isinstance(prompt, (bytes, bytearray)):
        raise _unreadable(prompt)
    if not len(prompt) or _is_number(prompt[0]) or _is_message(prompt[0]):
        return Listed([prompt], True)
    return Listed(list(prompt), False)


def encode(prompt: object, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of one prompt of any kind.

    Raises:
        PromptError: not a prompt, several prompts, or one that needs a missing tokenizer.
    """
    prompts, single = listed(prompt)
    if len(prompts) != 1:
        raise PromptError(
            f"Expected one prompt, not {len(prompts)}: generate and batch take several, as one list of prompts, one "
            "array or tensor [B, T], or one tokenizer output."
        )
    if not single:
        return encode(prompts[0], tokenizer)
    one = prompts[0]
    if isinstance(one, str):
        return _required(tokenizer).encode(one)
    if len(one) and _is_message(one[0]):
        return _required(tokenizer).encode_chat(one)
    if not all(_is_id(token) for token in one):
        wrong = next(token for token in one if not _is_id(token))
        raise PromptError(f"Token ids are whole numbers, not {wrong!r}.")
    return [int(token) for token in one]


def continuation(text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a text that follows others, without special tokens.

    Raises:
        PromptError: there is no tokenizer.
    """
    return _required(tokenizer).encode_many([text])[0]


def as_params(
    params: object, options: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Merge ``params`` and options; options override ``params``, and without ``params`` the model's ``defaults``.

    Raises:
        OptionError: an option is unknown, out of range, or cannot be expressed by ``SamplingParams``.
    """
    if params is None:
        return SamplingParams(**with_defaults(defaults, options))
    check_options(options)
    if isinstance(params, GenerationConfig):
        params = sampling_params(params, options)
    if not isinstance(params, SamplingParams):
        raise OptionError(
            f"params must be a foredraft.SamplingParams or a transformers GenerationConfig, not {kind_of(params)}; "
            "give single options by name, as in temperature=0.7."
        )
    return replace(params, **options) if options else params


def _listed_ids(ids: Any) -> Listed:
    """Read nested lists as the ids of one prompt or of several."""
    if not isinstance(ids, list):
        raise PromptError("Token ids must be a list, or an array or a tensor of one or two dimensions.")
    single = not ids or not isinstance(ids[0], list)
    return Listed([ids] if single else ids, single)


def _unpadded(encoding: Mapping[str, Any]) -> Any:
    """The ids in a tokenizer's output as (nested) lists, without those that its attention mask excludes."""
    unknown = sorted(encoding.keys() - _ENCODED)
    if unknown:
        raise PromptError(
            f"A prompt cannot have {unknown[0]}: only text is supported, as input_ids and attention_mask."
        )
    ids, mask = _plain(encoding["input_ids"]), _plain(encoding.get("attention_mask"))
    if mask is None or not isinstance(ids, list) or not ids:
        return ids
    return [_kept(*row) for row in _pairs(ids, mask)] if isinstance(ids[0], list) else _kept(ids, mask)


def _kept(ids: Any, mask: Any) -> list[int]:
    return [token for token, seen in _pairs(ids, mask) if seen]


def _pairs(ids: Any, mask: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise PromptError("input_ids and attention_mask must have the same shape.")
    return zip(ids, mask, strict=True)


def _plain(values: Any) -> Any:
    """Convert tensors and arrays, also inside a list, to lists."""
    if isinstance(values, (Tensor, np.ndarray)):
        return values.tolist()
    return [_plain(value) for value in values] if isinstance(values, (list, tuple)) else values


def _message(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    if not {"role", "content"} <= prompt.keys():
        found = ", ".join(map(str, prompt)) or "nothing"
        raise PromptError(
            f"A mapping given as a prompt needs input_ids, or role and content as a chat message; this one has {found}."
        )
    return prompt


def _is_message(item: object) -> bool:
    """True for any mapping except a tokenizer's output, so a message without a role is reported as a bad message."""
    return isinstance(item, Mapping) and not item.keys() & {"input_ids", "inputs_embeds"}


def _is_number(item: object) -> bool:
    return isinstance(item, Number) or (isinstance(item, (Tensor, np.ndarray)) and item.ndim == 0)


def _is_id(item: object) -> bool:
    if isinstance(item, int):  # first, as nearly all are
        return not isinstance(item, bool)
    value = item.item() if isinstance(item, (Tensor, np.ndarray)) and item.ndim == 0 else item
    return isinstance(value, Integral) and not isinstance(value, bool)


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise PromptError("This model came without a tokenizer: give token ids, or pass tokenizer=... to load.")
    return tokenizer


def _unreadable(prompt: object) -> PromptError:
    return PromptError(
        "A prompt must be a string, a list of token ids, a list of chat messages, a tokenizer's output, or a list of "
        f"these, not {kind_of(prompt)}."
    )
