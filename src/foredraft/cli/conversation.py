"""A conversation with a model, and how its answers are shown."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from foredraft.cli.console import WordWrap, errors
from foredraft.core.errors import OptionError, UsageError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats

if TYPE_CHECKING:
    from foredraft.engine.generator import Generator

Messages = list[dict[str, str]]


class Answer(NamedTuple):
    """Statistics of an answer, and why it ended: stop, length, or cancelled by Ctrl-C."""

    stats: DecodeStats
    reason: str | None


@dataclass
class Conversation:
    """Messages so far, and their statistics. Every turn sends all messages that fit in the context to the model.

    ``turns``: all messages but the system message. ``start``: the first of them that the model still reads.
    """

    generator: "Generator"
    model: str
    sampling: SamplingParams
    out: WordWrap
    system: str | None = None
    turns: Messages = field(default_factory=list)
    start: int = 0
    stats: DecodeStats = field(default_factory=DecodeStats)

    def __post_init__(self) -> None:
        kind = self.generator.kind
        self.stats = DecodeStats(method=kind.method, lossless=kind.lossless)

    @property
    def context(self) -> int:
        return self.generator.engine.target.max_length

    @property
    def all_messages(self) -> Messages:
        return self._with_system(self.turns)

    @property
    def messages(self) -> Messages:
        """Those that the model reads."""
        return self._with_system(self.turns[self.start :])

    def _with_system(self, turns: Messages) -> Messages:
        return [{"role": "system", "content": self.system}, *turns] if self.system else turns

    def size(self, messages: Messages) -> int:
        """Tokens in the chat template."""
        return len(self.generator.encode(messages)) if messages else 0

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self.turns, self.start = [], 0

    def replace(self, system: str | None, turns: Messages, start: int = 0) -> None:
        """Take other messages.

        Raises:
            PromptError: the chat template rejects them; the conversation is unchanged.
        """
        before = self.system, self.turns, self.start
        self.system, self.turns, self.start = system, turns, start
        try:
            self.check()
        except UsageError:
            self.system, self.turns, self.start = before
            raise

    def check(self) -> None:
        """Raise ``PromptError`` now, not at the first turn, if the model has no chat template."""
        self.generator.encode([*self.messages, {"role": "user", "content": "?"}])

    def retry(self) -> Answer:
        """Answer the last message again, in place of its answer.

        Raises:
            OptionError: there is none. Other errors as in ``answer``.
        """
        last = max((place for place, each in enumerate(self.turns) if each["role"] == "user"), default=None)
        if last is None:
            raise OptionError("There is no message to answer again.")
        return self._answer(self.turns[: last + 1])

    def answer(self, text: str) -> Answer:
        """Stream the answer to one turn; Ctrl-C stops it and keeps what was generated.

        Raises:
            UsageError: the model cannot take the conversation, which is left unchanged.
            NumericsError: the model's logits were not finite; the answer so far was printed.
        """
        return self._answer([*self.turns, {"role": "user", "content": text}])

    def _answer(self, turns: Messages) -> Answer:
        from foredraft.cli.running import Watcher, run_requests, stats_of

        start = self._fitting(turns)
        sequences = self.generator.submit([self._with_system(turns[start:])], self.sampling)
        if start > self.start:
            errors().print(self._dropped(turns[self.start : start]), style="yellow")
        watcher = Watcher(lambda number: None, lambda piece: self.out(piece.text, piece.drafted))
        outcome = run_requests(self.generator, sequences, watcher)
        self.out("\n")
        if outcome.error is not None:
            raise outcome.error
        text, stats = sequences[0].text, stats_of(self.generator, sequences)
        if text:
            self.turns, self.start = [*turns, {"role": "assistant", "content": text}], start
        self.stats += stats
        return Answer(stats, sequences[0].finish_reason)

    def _fitting(self, turns: Messages) -> int:
        """The first message that the model is to read, so that an answer has room in the context.

        If messages must go, half of the context becomes free, so that not every turn is read anew.
        """
        start, room = self.start, min(self.sampling.max_new_tokens, self.context // 4)
        if self.size(self._with_system(turns[start:])) + room <= self.context:
            return start
        questions = [place for place, each in enumerate(turns) if each["role"] == "user" and place > start]
        for start in questions:
            if self.size(self._with_system(turns[start:])) <= self.context // 2:
                break
        return start

    def _dropped(self, turns: Messages) -> str:
        count = sum(each["role"] == "user" for each in turns)
        oldest = "oldest turn is" if count == 1 else f"{count} oldest turns are"
        return f"The chat outgrows the model's context of {self.context:,} tokens: its {oldest} no longer read."

    def rate(self, stats: DecodeStats) -> str:
        return f"{stats.tokens_per_second:.1f} tokens/s · acceptance length {stats.acceptance_length:.2f}"

    def status(self, answer: Answer) -> str:
        """One line about an answer."""
        stats = answer.stats
        parts = [f"{stats.tokens} token{'s' if stats.tokens != 1 else ''}", self.rate(stats)]
        if not self.sampling.speculate:
            parts.append("drafts off")
        if answer.reason == "cancelled":
            parts.append("interrupted")
        elif answer.reason == "length":
            cut = stats.tokens >= self.sampling.max_new_tokens
            parts.append("cut at max_new_tokens" if cut else "the context is full")
        if not stats.lossless:
            parts.append("NOT lossless")
        return " · ".join(parts)
