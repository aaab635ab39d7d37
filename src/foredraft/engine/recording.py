"""Records of single steps, for requests that ask for them: the draft tree, the accepted path, what was emitted."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.core.tree import PAD

if TYPE_CHECKING:
    from foredraft.engine.request import Piece, Sequence
    from foredraft.engine.step import StepDone


@dataclass(frozen=True, slots=True)
class RecordedStep:
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


def record_steps(sequences: "Seq[Sequence]", done: "StepDone") -> None:
    """Add a step to the requests that record theirs; reads their trees back from the device."""
    for index, sequence in enumerate(sequences):
        if not sequence.params.record_steps or done.tree is None or done.path is None:
            continue
        tokens, parents = done.tree.tokens[index].tolist(), done.tree.parents[index].tolist()
        nodes = [node for node, parent in enumerate(parents) if parent != PAD]
        places = {node: place for place, node in enumerate(nodes)}
        result = done.rows[index]
        step = RecordedStep(
            tokens=[tokens[node] for node in nodes],
            parents=[places.get(parents[node], -1) for node in nodes],
            path=[places[node] for node in done.path[index, 1 : 1 + result.accepted].tolist()],
            emitted=result.emitted,
            copied=result.copied,
            draft_seconds=done.draft_seconds,
            seconds=done.draft_seconds + done.verify_seconds,
            rows=len(sequences),
        )
        sequence.steps.append(step)


def piece_dict(piece: "Piece") -> dict[str, Any]:
    """A piece of output in JSON types: its text, who drafted it, and its number of tokens."""
    by = "prediction" if piece.copied else "drafter" if piece.drafted else "target"
    return {"text": piece.text, "by": by, "tokens": len(piece.tokens)}
