"""Generation parameters of a request: sampling, length, stops. Frozen, and validated once."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict, no_type_check

from foredraft.core.errors import OptionError, shown
from foredraft.core.sampling.grammar import Grammar, GrammarLike, as_grammar

if TYPE_CHECKING:  # the command line imports this module for completion and help, without torch
    from jaxtyping import Float, Int
    from torch import Tensor

    Processor = Callable[[Int[Tensor, "M L"], Float[Tensor, "M V"]], Float[Tensor, "M V"]]
else:
    Processor = Callable
"""A transformers logits processor: (input_ids, scores) to scores."""


class SearchOptions(TypedDict, total=False):
    """The fields of ``SamplingParams`` that apply without sampling, as keywords, in all accepted forms."""

    max_new_tokens: int
    min_new_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: Sequence[Sequence[int]] | None
    logit_bias: Mapping[int, float] | None
    logits_processor: Processor | Sequence[Processor]
    eos_token_id: int | Sequence[int] | None


class SamplingOptions(SearchOptions, total=False):
    """The fields of ``SamplingParams`` as keywords; for type checkers."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    eta_alpha: float | None
    seed: int | None
    stop_strings: str | Sequence[str]
    logprobs: int | None
    grammar: GrammarLike | None
    speculate: bool
    num_assistant_tokens: int | None
    prediction: str | Sequence[int] | None
    record_steps: bool


@no_type_check  # its own checks have readable messages; the type checker in tests would run before them
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The keywords of ``generate``. Names have their transformers meaning, but ``top_k`` is off unless given.

    ``temperature`` 0 is greedy: truncations have no effect, penalties and bans still apply. ``presence_penalty`` and
    ``frequency_penalty`` count generated tokens, as in OpenAI's API; ``repetition_penalty`` also counts the prompt, as
    in transformers.

    ``eta_cutoff`` is Hewitt et al.'s epsilon (arXiv:2210.15191), and ``eta_alpha`` their alpha: tokens below
    min(epsilon, alpha exp(-entropy)) are cut.

    ``prediction`` is a text, or its token ids, that the output may repeat, such as a file to be edited: it is drafted
    from wherever the output follows it, in place of the drafter's drafts. It never changes the output's law.

    Output i of a call uses a seed derived from (``seed``, i); output 0 uses ``seed`` itself.

    Raises:
        OptionError: a value is of the wrong type or out of range.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    eta_alpha: float | None = None  # None: the square root of eta_cutoff
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processor: tuple[Processor, ...] = ()
    seed: int | None = None  # None: fresh entropy for every request
    stop_strings: tuple[str, ...] = ()
    eos_token_id: tuple[int, ...] | None = None  # None: the model's; (): none, generate to the full length
    logprobs: int | None = None  # log-probabilities of emitted tokens, and of this many alternatives for each
    grammar: Grammar | None = None  # what the output must match; also given as a JSON schema or a pydantic class
    speculate: bool = True
    num_assistant_tokens: int | None = None  # the longest draft for this request; None: as the policy decides
    prediction: str | tuple[int, ...] | None = None
    record_steps: bool = False  # results hold every step with its draft tree, read back from the device

    def __post_init__(self) -> None:
        for name in ("stop_strings", "logits_processor"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)) or ())
        ends = self.eos_token_id
        object.__setattr__(self, "eos_token_id", None if ends is None else _token_ids("eos_token_id", _as_tuple(ends)))
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", _token_ids("prediction", self.prediction))
        object.__setattr__(self, "bad_words_ids", _words(self.bad_words_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "grammar", as_grammar(self.grammar))
        for name, (test, range_) in _RANGES.items():
            value = as_number(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, int) and not _fits(value) and test(value):
                range_ = "a whole number of 64 bits"
            if value is None or not _is_number(value) or not test(value):
                raise OptionError(f"{name} must be {range_}, not {shown(value)}.")
        if self.eta_alpha is not None and self.eta_cutoff is None:
            raise OptionError("eta_alpha needs eta_cutoff, which is the most that it can cut at.")
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens ({self.min_new_tokens}) is larger than max_new_tokens ({self.max_new_tokens})."
            )
        if not all(bias == -math.inf or abs(bias) <= _LARGEST for bias in self.logit_bias.values()):
            raise OptionError(f"logit_bias must be numbers from -{_LARGEST:g} to {_LARGEST:g}, or -inf to ban a token.")
        if any(not isinstance(stop, str) or not stop for stop in self.stop_strings):
            raise OptionError("stop_strings must be non-empty strings.")
        check_sizes("stop_strings", self.stop_strings, MOST_STOPS, LONGEST_STOP, "characters")
        check_sizes("bad_words_ids", self.bad_words_ids, MOST_WORDS, LONGEST_WORD, "token ids")
        if (ids := len(self.eos_token_id or ())) > MOST_ENDS:
            raise OptionError(f"eos_token_id has {ids} ids; the most are {MOST_ENDS}.")
        if invalid := [each for each in self.logits_processor if not callable(each)]:
            raise OptionError(f"logits_processor must be functions of (input_ids, scores), not {shown(invalid[0])}.")
        for name in ("speculate", "record_steps"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, not {shown(getattr(self, name))}.")
        if any(not word for word in self.bad_words_ids):
            raise OptionError("bad_words_ids must be non-empty lists of token ids.")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Build from keywords; an unknown one is an ``OptionError``."""
        check_options(options)
        return cls(**options)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def may_ban_all(self) -> bool:
        """Whether its bans, alone or together, may leave no token to choose."""
        bans = self.bad_words_ids, self.no_repeat_ngram_size, self.grammar, self.logits_processor
        ends = self.min_new_tokens > 0 and self.eos_token_id
        return any(bans) or bool(ends) or -math.inf in self.logit_bias.values()


def with_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a request, which has ``given`` some, with the model's ``defaults`` for the others.

    Biases on other tokens stay. A minimum that was not given ends where the maximum does.

    Raises:
        OptionError: an option is unknown.
    """
    check_options(given)
    merged = {**defaults, **given}
    if "logit_bias" in defaults and isinstance(given.get("logit_bias"), Mapping):
        merged["logit_bias"] = {**defaults["logit_bias"], **given["logit_bias"]}
    least, most = merged.get("min_new_tokens", 0), merged.get("max_new_tokens", SamplingParams().max_new_tokens)
    if "min_new_tokens" not in given and isinstance(most, Integral) and least > most:
        merged["min_new_tokens"] = most
    return merged


def check_options(options: Mapping[str, Any]) -> None:
    """Raise an ``OptionError`` for the first name that is not a field of ``SamplingParams``."""
    check_known("generation option", options, [each.name for each in fields(SamplingParams)], _ELSEWHERE)


def check_count(name: str, value: object, most: int = 2**63 - 1) -> None:
    """Raise an ``OptionError`` unless the value is an integer from 1 to ``most``."""
    value = as_number(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        range_ = "a whole number, 1 or more" if most >= 2**63 - 1 else f"a whole number, 1 or more and at most {most}"
        if isinstance(value, int) and value > most >= 2**63 - 1:
            range_ = "a whole number of 64 bits"
        raise OptionError(f"{name} must be {range_}, not {shown(value)}.")


def check_sizes(name: str, values: Sequence[Sequence[Any]], most: int, longest: int, unit: str) -> None:
    """Raise an ``OptionError`` if there are more values than ``most``, or one is longer than ``longest`` units."""
    if len(values) > most:
        raise OptionError(f"{name} has {len(values)} entries; the most are {most}.")
    if (size := max(map(len, values), default=0)) > longest:
        raise OptionError(f"{name} has an entry of {size} {unit}; the most are {longest}.")


def check_known(
    what: str, given: Mapping[str, Any], known: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise an ``OptionError`` for the first name in ``given`` that is not ``known``; it lists the known names.

    Args:
        what: the kind of name, for the error message.
        elsewhere: hints for names that other libraries use, by name.
    """
    for name in given:
        if name not in known:
            hint = f" {elsewhere[name]}" if elsewhere and name in elsewhere else suggestion(name, known)
            raise OptionError(f"Unknown {what} {shown(name)}.{hint} Known: {', '.join(sorted(known))}.")


def suggestion(name: str, known: Iterable[str]) -> str:
    """A question with the names that are like this one, after a space; empty if none is."""
    close = closest(name, known)
    return f" Did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}?" if close else ""


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that are like this one: at most three that have all of its words, else the most similar.

    Words are what stands between dashes, underscores and the like: batch is one of max_batch_size.
    """
    if len(name) > _LONGEST_NAME:
        return []
    names, words = list(known), _words_in(name)
    for alike in (1.0, _ALIKE):
        found = [each for each in names if words and all(_has_word(each, word, alike) for word in words)]
        if found:
            best = difflib.get_close_matches(name, found, n=1, cutoff=_ALIKE)
            return best or difflib.get_close_matches(name, found, n=3, cutoff=0)
    return difflib.get_close_matches(name, names, n=1)


def _words_in(name: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]+", name.lower())


def _has_word(name: str, word: str, alike: float) -> bool:
    """Whether a word of the name begins with this one, or is so much like it."""
    words = _words_in(name)
    begun = len(word) > 2 and any(each.startswith(word) for each in words)
    return begun or bool(difflib.get_close_matches(word, words, n=1, cutoff=alike))


def _as_tuple(value: Any) -> Any:
    if value is None or isinstance(value, tuple):
        return value
    if isinstance(value, str) or callable(value):
        return (value,)
    try:
        return tuple(value)
    except TypeError:  # a single value
        return (value,)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    try:
        ids = tuple(operator.index(value) for value in values)
    except TypeError:
        raise OptionError(f"{name} must be token ids, not {shown(values)}.") from None
    if not all(map(_fits, ids)):
        raise OptionError(f"{name} must be token ids, which have 64 bits at most.")
    return ids


def _words(words: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(words, (Sequence, type(None))):
        raise OptionError(f"bad_words_ids must be lists of token ids, not {shown(words)}.")
    return tuple(_token_ids("bad_words_ids", word) for word in words or ())


def _biases(biases: Any) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in dict(biases or {}).items()}
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"logit_bias must be numbers by token id, as in {{7: -1.5}}, not {shown(biases)}.") from None


def as_number(value: Any) -> Any:
    """A number of another library, such as numpy's, as one of Python; anything else as it is."""
    if isinstance(value, (int, float)):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def _is_number(value: Any) -> bool:
    """Whether it is a finite number, and of 64 bits if it is whole."""
    if isinstance(value, int):
        return not isinstance(value, bool) and _fits(value)
    return isinstance(value, float) and math.isfinite(value)


def _fits(value: int) -> bool:
    """Whether a tensor of int64 can hold it."""
    return -(2**63) <= value < 2**63


def _whole(value: int | float) -> bool:
    return isinstance(value, int)


MOST_STOPS, LONGEST_STOP = 256, 1024
"""Stop strings of a request, and characters of one. Each new piece of text is compared with all of them."""
MOST_WORDS, LONGEST_WORD = 4096, 16
"""Bad words of a request, and tokens of one. Each node of a draft tree is compared with all of them."""
MOST_ENDS = 1024
"""End-of-sequence ids of a request."""
_ALIKE = 0.8
"""Similarity of names, and of their words, that are meant to be the same."""
_LONGEST_NAME = 64
"""Characters of a name for which others like it are looked up."""
_LARGEST = 1e30
"""Larger numbers would overflow float32 together with logits."""
_ELSEWHERE = {
    "stop": "Did you mean stop_strings?",
    "do_sample": "A temperature above 0 samples; 0 is greedy.",
    "generation_config": "Pass it as params: generate(prompt, generation_config).",
    "max_length": "It counts the prompt; pass max_new_tokens instead.",
    "n": "Did you mean num_return_sequences?",
    "max_tokens": "Did you mean max_new_tokens?",
    **dict.fromkeys(("num_beams", "length_penalty", "early_stopping"), "Use beam_search(prompt, num_beams=...)."),
    "streamer": "Use stream(prompt), which yields the text as it comes.",
    "stopping_criteria": "Use stop_strings or eos_token_id, or leave a stream when you have enough.",
    **dict.fromkeys(("assistant_model", "custom_generate"), "The drafter is an argument of load."),
}
_OPTIONAL = (
    *("seed", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "eta_alpha", "logprobs"),
    "num_assistant_tokens",
)
_PROBABILITY = (lambda x: 0.0 < x <= 1.0, "greater than 0 and at most 1")
_OPEN = (lambda x: 0.0 < x < 1.0, "between 0 and 1, both excluded")
_COUNT = (lambda x: _whole(x) and x >= 0, "a whole number, 0 or more")
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda x: _whole(x) and x >= 1, "a whole number, 1 or more"),
    "min_new_tokens": _COUNT,
    "temperature": (lambda x: 0.0 <= x <= _LARGEST, f"0 (greedy) or more, and at most {_LARGEST:g}"),
    "top_k": (lambda x: _whole(x) and x >= 1, "a whole number, 1 or more (leave it out to turn it off)"),
    "top_p": _PROBABILITY,
    "min_p": (lambda x: 0.0 <= x <= 1.0, "between 0 and 1"),
    "typical_p": _PROBABILITY,
    "epsilon_cutoff": _OPEN,
    "eta_cutoff": _OPEN,
    "eta_alpha": (lambda x: 0.0 < x <= _LARGEST, f"greater than 0 and at most {_LARGEST:g}"),
    "repetition_penalty": (lambda x: 1e-9 <= x <= 1e9, "from 1e-09 to 1e+09"),
    "presence_penalty": (lambda x: abs(x) <= 1e6, "a number from -1e+06 to 1e+06"),
    "frequency_penalty": (lambda x: abs(x) <= 1e6, "a number from -1e+06 to 1e+06"),
    "no_repeat_ngram_size": (lambda x: _whole(x) and 0 <= x <= 100, "a whole number from 0 to 100"),
    "seed": (_whole, "a whole number of 64 bits"),
    "logprobs": (lambda x: _whole(x) and 0 <= x <= 20, "a whole number from 0 to 20"),
    "num_assistant_tokens": _COUNT,
}
