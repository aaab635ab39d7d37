"""Decoding statistics of requests, on the host."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """Statistics of one or several requests; ``DecodeStats()`` is the neutral element of addition.

    ``a + b`` is a followed by b: use it for requests run one after another. For requests that shared a batch use
    ``together``, which counts no time twice.
    """

    method: str = ""
    """Name of the drafter; "mixed" for a sum over different drafters."""
    lossless: bool = True
    """False if any part was not lossless."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not read, since the KV cache held them."""
    tokens: int = 0
    """Emitted tokens."""
    target_forwards: int = 0
    """Target forwards after prefill, counted per row: a forward of three rows counts three."""
    drafted: int = 0
    """Drafted tokens (all nodes of a tree)."""
    accepted: int = 0
    """Accepted draft tokens."""
    accepted_prediction_tokens: int = 0
    """Those of ``accepted`` that were copied from the request's prediction."""
    rejected_prediction_tokens: int = 0
    """Tokens that were copied from the prediction and not accepted."""
    drafted_by_depth: tuple[int, ...] = ()
    """Number of steps whose draft reached depth 1, 2, ..."""
    accepted_by_depth: tuple[int, ...] = ()
    """Number of steps whose accepted path reached depth 1, 2, ..."""
    seconds: float = 0.0
    """Wall time, prefill included."""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        values = {name: getattr(self, name) + getattr(other, name) for name in (*_COUNTS, *_TIMES)}
        return DecodeStats(
            method=_common(self.method, other.method),
            lossless=self.lossless and other.lossless,
            drafted_by_depth=_add(self.drafted_by_depth, other.drafted_by_depth),
            accepted_by_depth=_add(self.accepted_by_depth, other.accepted_by_depth),
            **values,
        )

    @staticmethod
    def together(parts: Iterable["DecodeStats"]) -> "DecodeStats":
        """Combine requests that ran in one batch: counts are summed, each time is the maximum over the parts."""
        parts = list(parts)
        longest = {name: max((getattr(part, name) for part in parts), default=0.0) for name in _TIMES}
        return replace(sum(parts, DecodeStats()), **longest)

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target forward after prefill, bonus included.

        1 for plain decoding; 0 if there was no such forward.
        """
        return _ratio(self.tokens, self.target_forwards)

    @property
    def acceptance_rate(self) -> float:
        """Fraction of drafted tokens that were accepted; 0 if none was drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """For depth 1, 2, ...: of the steps whose draft reached it, the fraction whose accepted path also did."""
        pairs = zip_longest(self.accepted_by_depth, self.drafted_by_depth, fillvalue=0)
        return tuple(_ratio(accepted, drafted) for accepted, drafted in pairs)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens per second after prefill; 0 if there were none."""
        return _ratio(self.tokens, self.seconds - self.prefill_seconds)

    @property
    def other_seconds(self) -> float:
        """Time outside prefill, drafting and target forwards."""
        rest = self.seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds
        return max(0.0, rest)

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived numbers, in JSON types."""
        names = [field.name for field in fields(self)] + list(_DERIVED)
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_TIMES = tuple(each.name for each in fields(DecodeStats) if each.type is float)
_COUNTS = tuple(each.name for each in fields(DecodeStats) if each.type is int)
_DERIVED = ("acceptance_length", "acceptance_rate", "acceptance_by_depth", "tokens_per_second", "other_seconds")
_MIXED = "mixed"


def _ratio(part: int | float, whole: int | float) -> float:
    return part / whole if whole > 0 else 0.0


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def _common(a: str, b: str) -> str:
    """The common name of two records; an empty name matches any other."""
    return a if a == b or not b else b if not a else _MIXED
