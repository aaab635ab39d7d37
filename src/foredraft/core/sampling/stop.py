"""When a request ends: end-of-sequence ids and length. For stop strings see ``engine/detokenizer.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled"]


class Cut(NamedTuple):
    """How many tokens of a block are kept, and why the request ends there (None: it continues)."""

    kept: int
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StopRules:
    """Ends a request after the first end-of-sequence id, which is kept, or after ``max_new_tokens``."""

    max_new_tokens: int
    eos_token_ids: frozenset[int]

    def cut(self, before: int, block: Sequence[int]) -> Cut:
        """Where to cut a block of new tokens when ``before`` tokens were generated earlier."""
        remaining = self.max_new_tokens - before
        for index, token in enumerate(block[:remaining]):
            if token in self.eos_token_ids:
                return Cut(index + 1, "stop")
        return Cut(remaining, "length") if len(block) >= remaining else Cut(len(block), None)
