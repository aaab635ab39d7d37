"""What is new of an output. Apart from the service, because the processes that write answers have no engine."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foredraft.engine.request import Piece, TokenLogprobs
from foredraft.engine.results import Result
from foredraft.engine.trace import StepTrace


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of output ``index``: text that is final and its tokens; at the end its ``result``.

    ``steps``: those since the last update, if the request records them.
    """

    index: int
    pieces: list[Piece]
    logprobs: list[TokenLogprobs]
    result: Result | None = None
    steps: Seq[StepTrace] = ()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]
