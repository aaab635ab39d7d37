"""transformers' own logits processors, told in our parameters.

``generate`` hands over a finished list of processors. Those whose meaning the warp knows are read back into
numbers: they then run vectorised over all nodes, and on rows without padding. Anything else is called as it is.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from transformers.generation import logits_process as stock

from foredraft.core.errors import OptionError


def _usual(processor: Any) -> bool:
    """Not built with options that our parameters lack. (A tensor of prompts to ignore is how padding is left out.)"""
    ignored = getattr(processor, "prompt_ignore_length", None)
    fill, least = getattr(processor, "filter_value", -math.inf), getattr(processor, "min_tokens_to_keep", 1)
    return not isinstance(ignored, int) and fill == -math.inf and least == 1


_REMEMBERS = (stock.UnbatchedClassifierFreeGuidanceLogitsProcessor, stock.SynthIDTextWatermarkLogitsProcessor)


class Translated(NamedTuple):
    """Fields of ``SamplingParams``, and the processors that are none of transformers'."""

    fields: dict[str, Any]
    others: tuple[Callable, ...]


_READERS: dict[type, Callable[[Any, int], dict[str, Any]]] = {
    stock.TemperatureLogitsWarper: lambda p, _: {"temperature": p.temperature},
    stock.TopKLogitsWarper: lambda p, _: {"top_k": p.top_k},
    stock.TopPLogitsWarper: lambda p, _: {"top_p": p.top_p},
    stock.MinPLogitsWarper: lambda p, _: {"min_p": p.min_p},
    stock.TypicalLogitsWarper: lambda p, _: {"typical_p": p.mass},
    stock.EpsilonLogitsWarper: lambda p, _: {"epsilon_cutoff": p.epsilon},
    stock.EtaLogitsWarper: lambda p, _: {"eta_cutoff": float(p.epsilon)},
    stock.RepetitionPenaltyLogitsProcessor: lambda p, _: {"repetition_penalty": p.penalty},
    stock.NoRepeatNGramLogitsProcessor: lambda p, _: {"no_repeat_ngram_size": p.ngram_size},
    stock.MinLengthLogitsProcessor: lambda p, prompt: {"min_new_tokens": max(0, p.min_length - prompt)},
    stock.MinNewTokensLengthLogitsProcessor: lambda p, _: {"min_new_tokens": p.min_new_tokens},
    stock.LogitNormalization: lambda p, _: {},
}


def check_processors(processors: Iterable[Callable]) -> None:
    """Refuse processors that remember earlier calls: several calls score the nodes of a draft, and some are undone."""
    for processor in processors:
        if isinstance(processor, _REMEMBERS):
            name = processor.__class__.__name__
            raise OptionError(f"{name} is not available while drafting: what it does depends on its earlier calls.")


def for_row(processors: Iterable[Callable], row: int) -> stock.LogitsProcessorList:
    """The list for one row of a batch, where ``prefix_allowed_tokens_fn`` is to hear the number of the row.

    The rows of a call are nodes of one request; transformers would number these.
    """
    own = stock.LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, stock.PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            processor = stock.PrefixConstrainedLogitsProcessor(lambda _, ids, ask=allowed: ask(row, ids), 1)
        own.append(processor)
    return own


def translate(processors: Iterable[Callable], prompt_length: int) -> Translated | None:
    """Read a list of processors; None if transformers has put one in that the warp does not know.

    Args:
        prompt_length: tokens of a row of ``input_ids``, padding included: ``min_length`` counts from there.
    """
    fields: dict[str, Any] = {}
    others: list[Callable] = []
    for processor in processors:
        reader = _READERS.get(processor.__class__)
        if reader is not None and _usual(processor):
            for name, value in reader(processor, prompt_length).items():
                fields[name] = max(value, fields[name]) if name == "min_new_tokens" and name in fields else value
        elif processor.__class__.__module__.startswith("transformers."):
            return None
        else:
            others.append(processor)
    return Translated(fields, tuple(others))
