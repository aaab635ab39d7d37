"""Converts transformers' logits processors to ``SamplingParams``.

``generate`` passes a finished list of processors. Those that the warp implements are converted to parameters, so they
run vectorised over all nodes and on rows without padding. Others are called unchanged.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from transformers.generation import logits_process as stock

from foredraft.core.errors import OptionError


def _is_convertible(processor: Any) -> bool:
    """Whether its options can all be expressed as our parameters. (A tensor ``prompt_ignore_length`` is padding.)"""
    ignored = getattr(processor, "prompt_ignore_length", None)
    fill, least = getattr(processor, "filter_value", -math.inf), getattr(processor, "min_tokens_to_keep", 1)
    return not isinstance(ignored, int) and fill == -math.inf and least == 1


_STATEFUL = (stock.UnbatchedClassifierFreeGuidanceLogitsProcessor, stock.SynthIDTextWatermarkLogitsProcessor)


class Translated(NamedTuple):
    """Fields of ``SamplingParams``, and the processors that are not part of transformers."""

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
    """Raise an ``OptionError`` for stateful processors: drafting calls them for nodes that may be rejected."""
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            name = processor.__class__.__name__
            raise OptionError(f"{name} is not available while drafting: its result depends on its earlier calls.")


def for_row(processors: Iterable[Callable], row: int) -> stock.LogitsProcessorList:
    """The processors of one row of a batch; ``prefix_allowed_tokens_fn`` is called with the row's number.

    Without this, transformers would pass the index within a call, whose rows are nodes of one request.
    """
    own = stock.LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, stock.PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            processor = stock.PrefixConstrainedLogitsProcessor(lambda _, ids, ask=allowed: ask(row, ids), 1)
        own.append(processor)
    return own


def translate(processors: Iterable[Callable], prompt_length: int) -> Translated | None:
    """Convert a list of processors; None if it has a transformers processor that the warp does not implement.

    Args:
        prompt_length: tokens of a row of ``input_ids``, padding included; ``min_length`` includes them.
    """
    fields: dict[str, Any] = {}
    others: list[Callable] = []
    for processor in processors:
        reader = _READERS.get(processor.__class__)
        if reader is not None and _is_convertible(processor):
            for name, value in reader(processor, prompt_length).items():
                fields[name] = max(value, fields[name]) if name == "min_new_tokens" and name in fields else value
        elif processor.__class__.__module__.startswith("transformers."):
            return None
        else:
            others.append(processor)
    return Translated(fields, tuple(others))
