"""Traces of single steps, for requests that ask for them: the draft tree, the accepted path, what was emitted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one request.

    ``tokens``, ``parents``: the nodes of its draft tree; node 0 is the root, with parent -1. ``path``: the accepted
    nodes after the root. ``emitted``: their tokens and the bonus token. ``copied``: the draft was copied from the
    request's prediction. ``seconds``: of the whole batch of ``rows`` requests.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    emitted: list[int]
    copied: bool
    draft_seconds: float
    seconds: float
    rows: int

    def as_dict(self, text: Callable[[int], str]) -> dict[str, Any]:
        """JSON types, with the text of each token."""
        return {
            "tokens": self.tokens,
            "texts": [text(token) for token in self.tokens],
            "parents": self.parents,
            "path": self.path,
            "emitted": self.emitted,
            "emitted_texts": [text(token) for token in self.emitted],
            "by": "prediction" if self.copied else "drafter",
            "draft_seconds": self.draft_seconds,
            "seconds": self.seconds,
            "rows": self.rows,
        }
