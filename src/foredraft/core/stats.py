"""What decoding did, in numbers of the host: one record a step, one sum a request, sums of sums."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step of a batch. The tuples have one entry for each of ``rows``, in their order.

    ``depths`` is how deep each row's draft went and ``drafted`` how many tokens it had (equal for a chain; 0
    where nothing was drafted). ``accepted`` is what the verifier granted, ``emitted`` what the text got: the
    bonus added, whatever lies behind a stop taken off. Times are seconds of the whole step.
    """

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds

    def of(self, index: int) -> "DecodeStats":
        """The step as the request at ``rows[index]`` saw it; it waited for the whole of it."""
        return DecodeStats(
            tokens=self.emitted[index],
            target_forwards=1,
            drafted=self.drafted[index],
            accepted=self.accepted[index],
            drafted_by_depth=(1,) * self.depths[index],
            accepted_by_depth=(1,) * self.accepted[index],
            seconds=self.seconds,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """What the decoding of one request, or of several, took and gave; ``DecodeStats()`` is nothing at all.

    Records add up: ``a + b`` is a followed by b, so the steps of a request, or requests one after another,
    are summed. Requests that shared a batch go through ``together``, which counts no second twice.
    """

    method: str = ""
    """Name of the drafter; "mixed" once records of several are added."""
    lossless: bool = True
    """False as soon as one part was not."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Emitted tokens."""
    target_forwards: int = 0
    """Forwards of the target after prefill, counted for each row: one of three rows is three."""
    drafted: int = 0
    """Drafted tokens that the target was shown (every node of a tree)."""
    accepted: int = 0
    """Drafted tokens that the verifier accepted."""
    drafted_by_depth: tuple[int, ...] = ()
    """In how many steps the draft reached depth 1, 2, ..."""
    accepted_by_depth: tuple[int, ...] = ()
    """In how many steps the accepted path reached depth 1, 2, ..."""
    seconds: float = 0.0
    """Wall time, prefill included."""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        values = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return DecodeStats(
            method=_common(self.method, other.method),
            lossless=self.lossless and other.lossless,
            drafted_by_depth=_add(self.drafted_by_depth, other.drafted_by_depth),
            accepted_by_depth=_add(self.accepted_by_depth, other.accepted_by_depth),
            **values,
        )

    @staticmethod
    def together(parts: Iterable["DecodeStats"]) -> "DecodeStats":
        """Requests that ran side by side: counts add up, each time is the longest of its kind."""
        parts = list(parts)
        longest = {name: max((getattr(part, name) for part in parts), default=0.0) for name in _TIMES}
        return replace(sum(parts, DecodeStats()), **longest)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per forward of the target after prefill; the bonus counts.

        1 for plain decoding; 0 when there was no such forward.
        """
        return _ratio(self.tokens, self.target_forwards)

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that was accepted; 0 when none was drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Of the steps whose draft reached depth 1, 2, ..., the share whose accepted path did, too."""
        pairs = zip_longest(self.accepted_by_depth, self.drafted_by_depth, fillvalue=0)
        return tuple(_ratio(accepted, drafted) for accepted, drafted in pairs)

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding: tokens after prefill over seconds after prefill; 0 when there were none."""
        return _ratio(self.tokens, self.seconds - self.prefill_seconds)

    @property
    def other_seconds(self) -> float:
        """Time that went neither into prefill nor into drafting nor into the target's forwards."""
        rest = self.seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds
        return max(0.0, rest)

    def as_dict(self) -> dict[str, Any]:
        """Everything, derived numbers too, in types that JSON knows."""
        names = [field.name for field in fields(self)] + list(_DERIVED)
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_TIMES = ("seconds", "prefill_seconds", "draft_seconds", "verify_seconds")
_COUNTS = ("prompt_tokens", "tokens", "target_forwards", "drafted", "accepted")
_SUMS = _COUNTS + _TIMES
_DERIVED = (
    "acceptance_length",
    "acceptance_rate",
    "acceptance_by_depth",
    "tokens_per_second",
    "other_seconds",
)
_MIXED = "mixed"


def _ratio(part: int | float, whole: int | float) -> float:
    return part / whole if whole > 0 else 0.0


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def _common(a: str, b: str) -> str:
    """The name that both records carry; an empty one gives way."""
    return a if a == b or not b else b if not a else _MIXED
