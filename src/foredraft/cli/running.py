"""Run requests for a command, stream their output, and summarise their statistics."""

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from foredraft.cli.choices import ModelChoice
from foredraft.cli.exit_status import CtrlC
from foredraft.core.errors import ForedraftError
from foredraft.core.stats import DecodeStats
from foredraft.engine.generator import Generator, Stream
from foredraft.engine.request import Piece, Sequence, TokenLogprobs
from foredraft.files.outputs import written_by
from foredraft.files.provenance import shortened


class RunOutcome(NamedTuple):
    """The first error among the requests, and whether Ctrl-C interrupted them."""

    error: ForedraftError | None
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Watcher:
    """Callbacks: ``begins`` before a request's output (with its index), ``piece`` for each piece."""

    begins: Callable[[int], None]
    piece: Callable[[Piece], None]


def run_requests(generator: Generator, sequences: Seq[Sequence], watcher: Watcher) -> RunOutcome:
    """Run requests in one batch and pass their pieces to the watcher, one request after the other.

    After an error or Ctrl-C the watcher still gets everything that was generated.
    """
    error: ForedraftError | None = None
    with CtrlC() as ctrl_c:
        for number, sequence in enumerate(sequences):
            watcher.begins(number)
            try:
                for piece in Stream(generator, sequence):
                    watcher.piece(piece)
                    if ctrl_c.pressed:
                        generator.engine.cancel(sequences)
            except ForedraftError as found:
                error = error or found
            except KeyboardInterrupt:  # second Ctrl-C, in mid-step
                generator.engine.cancel(sequences)
                for piece in sequence.pieces:
                    watcher.piece(piece)
                return RunOutcome(error, True)
    return RunOutcome(error, ctrl_c.pressed)


def stats_of(generator: Generator, sequences: Seq[Sequence]) -> DecodeStats:
    """Total statistics of the requests, with the method's name."""
    total = DecodeStats.together(sequence.stats for sequence in sequences)
    return replace(total, method=generator.kind.method, lossless=generator.kind.lossless)


def summary(stats: DecodeStats, reasons: Seq[str | None] = ()) -> str:
    parts = [
        f"{stats.tokens} token{'s' if stats.tokens != 1 else ''} in {stats.seconds:.2f} s",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"{stats.acceptance_length:.2f} per target forward ({stats.method})",
    ]
    ended = ", ".join(sorted({reason for reason in reasons if reason}))
    if ended:
        parts.append(f"finish: {ended}")
    if not stats.lossless:
        parts.append("NOT lossless")
    return " · ".join(parts)


def record(
    generator: Generator, sequence: Sequence, pieces: Seq[Piece], choice: ModelChoice, prompt: str
) -> dict[str, Any]:
    """A request with its steps, as ``foredraft viewer`` reads it."""
    stats = stats_of(generator, [sequence])
    return {
        **written_by("generate"),
        "model": shortened(choice.model),
        "drafter": stats.method,
        "lossless": stats.lossless,
        "prompt": prompt,
        "finish_reason": sequence.finish_reason,
        "stats": stats.as_dict(),
        "pieces": [piece.as_dict() for piece in pieces],
        "steps": [step.as_dict(lambda token: _text(generator, token)) for step in sequence.steps],
    }


def to_json(generator: Generator, sequence: Sequence) -> dict[str, Any]:
    """A request's ``--json`` fields; the command adds the model's name."""
    stats = stats_of(generator, [sequence])
    found: dict[str, Any] = {
        "method": stats.method,
        "lossless": stats.lossless,
        "prompt_tokens": len(sequence.prompt),
        "text": sequence.text,
        "tokens": sequence.tokens,
        "finish_reason": sequence.finish_reason,
        "seed": sequence.seed,
        "stats": stats.as_dict(),
    }
    if sequence.params.logprobs is not None:
        found["logprobs"] = [_logprob(generator, each) for each in sequence.logprobs]
    if sequence.error is not None:
        found["error"] = str(sequence.error)
    return found


def _text(generator: Generator, token: int) -> str:
    """A token by itself; empty without a tokenizer."""
    return "" if generator.tokenizer is None else generator.tokenizer.text_of(token)


def _logprob(generator: Generator, each: TokenLogprobs) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": token, "text": _text(generator, token), "logprob": value if math.isfinite(value) else None}

    top = [entry(token, value) for token, value in each.top.items()]
    return {**entry(each.token, each.logprob), "top": top}
