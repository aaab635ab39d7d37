"""One request in flight: its tokens, its text, its numbers. Lives on the host."""

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from foredraft.core.errors import ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.core.stop import FinishReason, StopRules
from foredraft.engine.text import Decode, TextStream


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step has added: text that is safe to show, its tokens, and whether a drafter had proposed them.

    Text may lag behind its tokens, by half a character or by what could still become a stop string.
    """

    text: str
    tokens: list[int]
    drafted: bool


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of an emitted token under the model's own law, and of the likeliest alternatives."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, already checked."""

    prompt: tuple[int, ...]
    params: SamplingParams
    rules: StopRules


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and what has become of it so far. The engine fills everything below ``seed``."""

    request: Request
    decode: Decode
    seed: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: ForedraftError | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pieces: deque[Piece] = field(default_factory=deque)
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.decode, self.params.stop_strings)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def rules(self) -> StopRules:
        return self.request.rules

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def length(self) -> int:
        """Committed tokens, the prompt included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        """New tokens that may still come."""
        return self.rules.max_new_tokens - len(self.tokens)

    def extend(self, block: Tokens[int], drafted: int) -> int:
        """Take a block of new tokens, of which the first ``drafted`` were proposed by a drafter.

        Returns:
            how many of them were kept; fewer than all when the request ended inside the block.
        """
        cut = self.rules.cut(len(self.tokens), block)
        kept = 0
        for part, was_drafted in ((block[: min(drafted, cut.kept)], True), (block[drafted : cut.kept], False)):
            if not part or self.finished:
                continue
            pushed = self._stream.push(list(part))
            taken = list(part[: pushed.tokens_kept])
            kept += len(taken)
            self._emit(pushed.text, taken, was_drafted)
            if pushed.stopped:
                self.finish_reason = "stop"
        if cut.reason is not None and not self.finished:
            self.finish(cut.reason)
        return kept

    def finish(self, reason: FinishReason) -> None:
        """End the request and hand out the text that was held back."""
        self.finish_reason = reason
        rest = self._stream.finish()
        if rest.text:
            self._emit(rest.text, [], False)

    def cut(self, count: int) -> None:
        """End the request after its first ``count`` tokens; the text is that of these."""
        if count < len(self.tokens):
            del self.tokens[count:]
            del self.logprobs[count:]
            self.text = self.decode(self.tokens)
        if not self.finished:
            self.finish_reason = "stop"

    def fail(self, error: ForedraftError) -> None:
        """End the request with an error; what was generated stays."""
        self.finish("cancelled")
        self.error = error

    def _emit(self, text: str, tokens: list[int], drafted: bool) -> None:
        self.text += text
        self.tokens.extend(tokens)
        self.pieces.append(Piece(text, tokens, drafted))
