"""What requests come to, and how it is shown in a terminal and in a notebook."""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from foredraft.core.errors import ForedraftError
from foredraft.core.sampling.stop import FinishReason
from foredraft.core.stats import DecodeStats
from foredraft.engine.request import Piece, Sequence, TokenLogprobs

_SHOWN = 60
"""Characters of an output in a ``repr``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the results are marked with: the drafter's name, and whether its rule keeps the target's law."""

    method: str
    lossless: bool


@dataclass(frozen=True, slots=True)
class Result:
    """One finished text. ``text`` and ``tokens`` are the new ones only; an end-of-sequence id counts as a token.

    ``seed`` gives this output again wherever the engine is ``reproducible``, also if the call had several outputs or no
    seed. ``pieces`` are the
    same, step by step, as a stream hands them out.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: DecodeStats
    logprobs: list[TokenLogprobs]
    seed: int
    pieces: list[Piece] = field(default_factory=list)

    @classmethod
    def of(cls, sequence: Sequence, kind: Kind, taken: Seq[Piece] = ()) -> "Result":
        """The result of a request that has ended, of which a stream has ``taken`` pieces already.

        Raises:
            ForedraftError: the request ended with it.
        """
        if sequence.error is not None:
            raise sequence.error
        stats = sequence.tally.stats(len(sequence.prompt), kind.method, kind.lossless)
        assert sequence.finish_reason is not None
        pieces = [*taken, *sequence.pieces]
        return cls(
            sequence.text, sequence.tokens, sequence.finish_reason, stats, sequence.logprobs, sequence.seed, pieces
        )

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 3] + "..."
        facts = [repr(shown), f"tokens={len(self.tokens)}", f"finish_reason={self.finish_reason!r}"]
        facts.append(f"acceptance_length={self.stats.acceptance_length:.2f}")
        facts.append(f"tokens_per_second={self.stats.tokens_per_second:.1f}")
        return f"Result({', '.join(facts)}{'' if self.stats.lossless else ', lossless=False'})"

    def _repr_html_(self) -> str:
        """For notebooks: the text with accepted drafts marked, and one line of figures."""
        facts = [
            f"{len(self.tokens)} token{'s' if len(self.tokens) != 1 else ''}",
            str(self.finish_reason),
            f"{self.stats.acceptance_length:.2f} tokens a target forward",
            f"{self.stats.tokens_per_second:.1f} tokens/s",
        ]
        if self.stats.method:
            facts.append(f"<mark style='{_MARK}'>drafted by {escape(self.stats.method)}</mark>")
        if not self.stats.lossless:
            facts.append("NOT lossless")
        return (
            f"<div><div style='white-space: pre-wrap; font-family: monospace'>{self._marked()}</div>"
            f"<div style='opacity: 0.7'>{' · '.join(facts)}</div></div>"
        )

    def _marked(self) -> str:
        """The text, or the token ids where there is no tokenizer, with drafted ones in ``<mark>``."""
        if "".join(piece.text for piece in self.pieces) != self.text:
            return escape(self.text)
        parts = []
        for drafted, group in groupby(self.pieces, key=lambda piece: piece.drafted):
            run = list(group)
            part = "".join(piece.text for piece in run)
            if not self.text:
                part = " ".join(str(token) for piece in run for token in piece.tokens) + " "
            parts.append(f"<mark style='{_MARK}'>{escape(part)}</mark>" if drafted else escape(part))
        return "".join(parts)


_MARK = "background: rgba(46, 160, 67, 0.3); color: inherit"


@dataclass(frozen=True, slots=True)
class Call:
    """The requests of one call, those of each prompt side by side; ``single``: one result is wanted, not a list."""

    sequences: list[Sequence]
    prompts: int
    single: bool

    def results(self, kind: Kind) -> list[Result]:
        """Results of all, which have ended.

        Raises:
            ForedraftError: the first that failed; of several prompts the sentence says at which.
        """
        for number, sequence in enumerate(self.sequences):
            if sequence.error is not None and self.prompts > 1:
                raise named(sequence.error, number * self.prompts // len(self.sequences))
        return [Result.of(sequence, kind) for sequence in self.sequences]

    def answer(self, kind: Kind) -> Result | list[Result]:
        """One result or a list, as the call wants."""
        results = self.results(kind)
        return results[0] if self.single else results


@dataclass(frozen=True, slots=True)
class Completed:
    """One prompt of a bulk run that is done: ``index`` counts the prompts from 0 in the order in which they came."""

    index: int
    outcome: Result | ForedraftError

    @property
    def error(self) -> ForedraftError | None:
        """What went wrong with this prompt; None if nothing did."""
        return self.outcome if isinstance(self.outcome, ForedraftError) else None

    @property
    def result(self) -> Result:
        """The result.

        Raises:
            ForedraftError: what went wrong with this prompt.
        """
        if isinstance(self.outcome, ForedraftError):
            raise self.outcome
        return self.outcome


def named(error: ForedraftError, index: int) -> ForedraftError:
    """The same error, with a sentence that says at which prompt of a call."""
    found = error.__class__(f"Prompt {index}: {error}")
    found.__cause__ = error
    return found


def table_html(title: str, facts: Mapping[str, str]) -> str:
    """A small table for notebooks."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
