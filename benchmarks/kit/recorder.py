"""Records which drafted nodes were accepted, by node number and by confidence."""

import math
from typing import Any, final

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, StepOut, View
from foredraft.drafters.common.wrapper import DrafterWrapper


@final
class Recorder(DrafterWrapper):
    """Counts [judged, accepted] of nodes whose parent was accepted.

    By node number, and by the draft's probability given the parent, in hundredths.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._places: dict[int, list[int]] = {}
        self._confidence: dict[int, list[int]] = {}

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        super().commit(view, draft, verdict, out)
        parents = draft.tree.parents.tolist()
        scores = None if draft.scores is None else draft.scores.tolist()
        for row, path in enumerate(verdict.path.tolist()):
            accepted = set(path)
            for node, parent in enumerate(parents[row]):
                if node and parent in accepted:
                    hit = int(node in accepted)
                    _add(self._places, node, hit)
                    if scores is not None:
                        _add(self._confidence, _hundredths(scores[row][node] - scores[row][parent]), hit)

    def take(self) -> dict[str, Any]:
        """The counts since the last call."""
        seen = {"places": self._places, "confidence": self._confidence}
        self._places, self._confidence = {}, {}
        return seen


def _add(table: dict[int, list[int]], key: int, hit: int) -> None:
    entry = table.setdefault(key, [0, 0])
    entry[0] += 1
    entry[1] += hit


def _hundredths(log_probability: float) -> int:
    return min(99, int(100 * math.exp(log_probability)))
