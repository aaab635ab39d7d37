"""Converts transformers' logits processors to ``SamplingParams``.

``generate`` passes a finished list of processors. Where the warp implements them all, they run over all nodes of a
draft at once. Otherwise they are called as transformers calls them, see ``sample_loop``, and drafts follow those that
the warp implements.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from transformers.generation import logits_process as stock

from foredraft.core.errors import OptionError


class Prepared(NamedTuple):
    """A ``generate`` call, as transformers has prepared it.

    ``starts``: the number of padding tokens before each row's first, if all of its padding is there; else None.
    ``ends``: the end-of-sequence ids.
    """

    width: int
    vocab_size: int
    starts: tuple[int, ...] | None
    ends: frozenset[int]
    do_sample: bool

    @property
    def padded(self) -> bool:
        """Whether processors see tokens that the model does not."""
        return self.starts is None or any(self.starts)


class Translated(NamedTuple):
    """Fields of ``SamplingParams``, and whether they are all that the processors do."""

    fields: dict[str, Any]
    complete: bool


_Reader = Callable[[Any, Prepared], dict[str, Any] | None]


def _repetition(p: Any, call: Prepared) -> dict[str, Any] | None:
    ignored = p.prompt_ignore_length
    ignores_padding = isinstance(ignored, Tensor) and call.starts == tuple(ignored.tolist())
    return {"repetition_penalty": p.penalty} if ignores_padding or (ignored is None and not call.padded) else None


def _ngrams(p: Any, call: Prepared) -> dict[str, Any] | None:
    return None if call.padded else {"no_repeat_ngram_size": p.ngram_size}


def _bias(p: Any, call: Prepared) -> dict[str, Any] | None:
    single = all(len(sequence) == 1 for sequence in p.sequence_bias)
    return {"logit_bias": {ids[0]: bias for ids, bias in p.sequence_bias.items()}} if single else None


def _bad_words(p: Any, call: Prepared) -> dict[str, Any] | None:
    words = tuple(p.sequence_bias)
    return None if call.padded and any(len(word) > 1 for word in words) else {"bad_words_ids": words}


def _suppressed(p: Any, call: Prepared) -> dict[str, Any] | None:
    return {"logit_bias": {token: -math.inf for token in p.suppress_tokens.tolist() if 0 <= token < call.vocab_size}}


def _least(p: Any, call: Prepared) -> dict[str, Any] | None:
    least = p.min_new_tokens if isinstance(p, stock.MinNewTokensLengthLogitsProcessor) else p.min_length - call.width
    return {"min_new_tokens": max(0, least)} if call.ends == set(p.eos_token_id.tolist()) else None


def _warper(name: str, attribute: str, kind: type = float) -> _Reader:
    def read(p: Any, call: Prepared) -> dict[str, Any] | None:
        fill, least = getattr(p, "filter_value", -math.inf), getattr(p, "min_tokens_to_keep", 1)
        keeps_best = call.do_sample or not isinstance(p, stock.TypicalLogitsWarper)
        return {name: kind(getattr(p, attribute))} if (fill, least) == (-math.inf, 1) and keeps_best else None

    return read


_STAGES: dict[type, tuple[int, _Reader]] = {
    stock.SequenceBiasLogitsProcessor: (0, _bias),
    stock.RepetitionPenaltyLogitsProcessor: (1, _repetition),
    stock.NoRepeatNGramLogitsProcessor: (2, _ngrams),
    stock.NoBadWordsLogitsProcessor: (3, _bad_words),
    stock.MinLengthLogitsProcessor: (4, _least),
    stock.MinNewTokensLengthLogitsProcessor: (5, _least),
    stock.SuppressTokensLogitsProcessor: (6, _suppressed),
    stock.TemperatureLogitsWarper: (7, _warper("temperature", "temperature")),
    stock.TopKLogitsWarper: (8, _warper("top_k", "top_k", int)),
    stock.TopPLogitsWarper: (9, _warper("top_p", "top_p")),
    stock.MinPLogitsWarper: (10, _warper("min_p", "min_p")),
    stock.TypicalLogitsWarper: (11, _warper("typical_p", "mass")),
    stock.EpsilonLogitsWarper: (12, _warper("epsilon_cutoff", "epsilon")),
    stock.EtaLogitsWarper: (13, _warper("eta_cutoff", "epsilon")),
    stock.LogitNormalization: (14, lambda p, call: {}),
}
"""The processors that the warp implements, with their places in its order; bans may stand anywhere."""


def check_processors(processors: Iterable[Callable]) -> None:
    """Raise an ``OptionError`` for a processor of transformers that runs the model."""
    if any(isinstance(each, stock.UnbatchedClassifierFreeGuidanceLogitsProcessor) for each in processors):
        raise OptionError(
            "UnbatchedClassifierFreeGuidanceLogitsProcessor is not available while drafting: classifier-free guidance "
            "runs the model between two steps."
        )


def translate(processors: Iterable[Callable], call: Prepared) -> Translated:
    """Convert a list of processors. It is complete if all are transformers' own, each does here what the warp does, and
    they are in the warp's order."""
    fields: dict[str, Any] = {}
    complete, last = True, -1
    for processor in processors:
        place, read = _STAGES.get(processor.__class__, (last, lambda p, call: None))
        found = read(processor, call)
        complete &= found is not None and place > last
        last = place
        for name, value in (found or {}).items():
            if name == "min_new_tokens":
                value = max(value, fields.get(name, 0))
            fields[name] = {**fields.get(name, {}), **value} if name == "logit_bias" else value
    return Translated(fields, complete)
