"""Results of requests, and how they are shown in a terminal and in a notebook."""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from foredraft.core.errors import ForedraftError
from foredraft.core.sampling.stop import FinishReason
from foredraft.core.stats import DecodeStats
from foredraft.engine.request import Piece, Sequence, TokenLogprobs
from foredraft.engine.trace import StepTrace

_SHOWN = 60
"""Characters of the output shown in a ``repr``."""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The drafter's name, and whether the verification rule keeps the target's law; part of every result."""

    method: str
    lossless: bool


@dataclass(frozen=True, slots=True)
class Result:
    """A finished output. ``text`` and ``tokens`` exclude the prompt; an end-of-sequence id counts as a token.

    ``text`` is what the tokens add to the prompt's text, so that the two may be joined: with SentencePiece it begins
    with the space of its first word.
    ``stop_string``: the one that ended the output, if one did.
    ``seed`` reproduces this output, also if the call had several outputs; not with a verification rule that needs drawn
    drafts.
    ``pieces`` is the output step by step, as a stream yields it. ``steps``: with ``record_steps``, every step with its
    draft tree.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: DecodeStats
    logprobs: list[TokenLogprobs]
    seed: int
    pieces: list[Piece] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    stop_string: str | None = None

    @classmethod
    def of(cls, sequence: Sequence, kind: DrafterInfo, taken: Seq[Piece] = ()) -> "Result":
        """The result of an ended request from which a stream has already ``taken`` pieces.

        Raises:
            ForedraftError: the error that ended the request.
        """
        if sequence.error is not None:
            raise sequence.error
        stats = sequence.counters.stats(len(sequence.prompt), kind.method, kind.lossless)
        assert sequence.finish_reason is not None
        pieces = [*taken, *sequence.pieces]
        return cls(
            text=sequence.text,
            tokens=sequence.tokens,
            finish_reason=sequence.finish_reason,
            stats=stats,
            logprobs=sequence.logprobs,
            seed=sequence.seed,
            pieces=pieces,
            steps=sequence.steps,
            stop_string=sequence.stop_string,
        )

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 3] + "..."
        facts = [repr(shown), f"tokens={len(self.tokens)}", f"finish_reason={self.finish_reason!r}"]
        facts.append(f"acceptance_length={self.stats.acceptance_length:.2f}")
        facts.append(f"tokens_per_second={self.stats.tokens_per_second:.1f}")
        return f"Result({', '.join(facts)}{'' if self.stats.lossless else ', lossless=False'})"

    def _repr_html_(self) -> str:
        """For notebooks: the text with accepted drafts marked, and one line of statistics."""
        facts = [
            f"{len(self.tokens)} token{'s' if len(self.tokens) != 1 else ''}",
            str(self.finish_reason),
            f"{self.stats.acceptance_length:.2f} tokens per target forward",
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
        """The text (token ids without a tokenizer), with drafted parts in ``<mark>``."""
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
class GenerateCall:
    """The sequences of one call, grouped by prompt; ``single``: the call returns one result, not a list."""

    sequences: list[Sequence]
    prompts: int
    single: bool

    def results(self, kind: DrafterInfo) -> list[Result]:
        """The results; all sequences must have ended.

        Raises:
            ForedraftError: the first error; the message names the prompt if there are several.
        """
        for number, sequence in enumerate(self.sequences):
            if sequence.error is not None and self.prompts > 1:
                raise named(sequence.error, number * self.prompts // len(self.sequences))
        return [Result.of(sequence, kind) for sequence in self.sequences]

    def answer(self, kind: DrafterInfo) -> Result | list[Result]:
        """One result if ``single``, else a list."""
        results = self.results(kind)
        return results[0] if self.single else results


@dataclass(frozen=True, slots=True)
class Completed:
    """A completed prompt of a bulk run; ``index`` numbers the prompts from 0 in input order."""

    index: int
    outcome: Result | ForedraftError

    @property
    def error(self) -> ForedraftError | None:
        """The error of this prompt; None if it succeeded."""
        return self.outcome if isinstance(self.outcome, ForedraftError) else None

    @property
    def result(self) -> Result:
        """The result.

        Raises:
            ForedraftError: the error of this prompt.
        """
        if isinstance(self.outcome, ForedraftError):
            raise self.outcome
        return self.outcome


def named(error: ForedraftError, index: int) -> ForedraftError:
    """The same error with the prompt's index in its message."""
    renamed = error.__class__(f"Prompt {index}: {error}")
    renamed.__cause__ = error
    return renamed


def table_html(title: str, facts: Mapping[str, str]) -> str:
    """A small table for notebooks."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
