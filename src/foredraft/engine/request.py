"""One request in flight: its tokens, text and statistics, on the host."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.best import best_of
from foredraft.core.choices import Choices
from foredraft.core.errors import ForedraftError, NumericsError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.processors import RequestProcessors
from foredraft.core.sampling.stop import Cut, FinishReason, StopRules
from foredraft.core.stats import DecodeStats
from foredraft.engine.detokenizer import Decode, IncrementalDetokenizer, text_after
from foredraft.engine.tail import RowStep
from foredraft.engine.trace import StepTrace
from foredraft.model.text.grammar import CompiledGrammar, Matcher


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of a step: text that is final, its tokens, and whether they were drafted.

    ``copied``: they were copied from the request's prediction, not drafted by the drafter. Text may lag behind the
    tokens by an incomplete character or a possible start of a stop string.
    """

    text: str
    tokens: list[int]
    drafted: bool
    copied: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON types: its text, who drafted it, and its number of tokens."""
        by = "prediction" if self.copied else "drafter" if self.drafted else "target"
        return {"text": self.text, "by": by, "tokens": len(self.tokens)}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of an emitted token under the unwarped model law, and of the likeliest alternatives."""

    token: int
    logprob: float
    top: dict[int, float]


def token_logprobs(laws: Float[Tensor, "N V"], tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of one row's new tokens, and of the ``count`` likeliest tokens at each."""
    chosen = laws.gather(1, torch.tensor(tokens, dtype=torch.long, device=laws.device)[:, None])
    top = best_of(laws, count)
    table = zip(tokens, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(token, own[0], dict(zip(ids, values, strict=True))) for token, own, ids, values in table]


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. ``shown``: special tokens that are part of the text."""

    prompt: tuple[int, ...]
    params: SamplingParams
    rules: StopRules
    grammar: CompiledGrammar | None = None
    shown: frozenset[int] = frozenset()


@dataclass(slots=True)
class RequestStats:
    """Running totals of one request.

    Updated in place: with many rows, adding frozen records would cost more than the step itself.
    """

    admitted_at: float = 0.0  # by ``time.perf_counter``; 0 while it waits
    first_at: float = 0.0  # end of the first step
    prefill_seconds: float = 0.0
    cached_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0  # of ``drafted``, from the prediction
    copies_accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    depths: dict[int, int] = field(default_factory=dict)  # number of drafts by depth
    reached: dict[int, int] = field(default_factory=dict)  # number of accepted paths by length
    last: tuple[int, int, bool] = (0, 0, False)  # of the last step: tokens, accepted ones, of a copy

    def add(self, row: RowStep, kept: int, draft_seconds: float, verify_seconds: float, seconds: float) -> None:
        """Add a step of which the output has ``kept`` tokens. Times are of the whole step."""
        if not self.forwards:
            self.first_at = time.perf_counter()
        accepted = min(row.accepted, kept)  # what was accepted behind the end is no output
        self.tokens += kept
        self.forwards += 1
        self.drafted += row.drafted
        self.accepted += accepted
        if row.copied:
            self.copied += row.drafted
            self.copies_accepted += accepted
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        self.seconds += seconds
        self.depths[row.depth] = self.depths.get(row.depth, 0) + 1
        self.reached[accepted] = self.reached.get(accepted, 0) + 1
        self.last = kept, accepted, row.copied

    def cut(self, removed: int) -> None:
        """Take back the last tokens, all of which are of the last step."""
        kept, before, copied = self.last
        accepted = min(before, kept - removed)
        self.tokens -= removed
        self.accepted -= before - accepted
        self.copies_accepted -= before - accepted if copied else 0
        self.reached[before] -= 1
        self.reached[accepted] = self.reached.get(accepted, 0) + 1
        self.last = kept - removed, accepted, copied

    def stats(self, prompt_tokens: int, method: str = "", lossless: bool = True) -> DecodeStats:
        return DecodeStats(
            method=method,
            lossless=lossless,
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached_tokens,
            tokens=self.tokens,
            target_forwards=self.forwards,
            drafted=self.drafted,
            accepted=self.accepted,
            accepted_prediction_tokens=self.copies_accepted,
            rejected_prediction_tokens=self.copied - self.copies_accepted,
            drafted_by_depth=_at_least(self.depths),
            accepted_by_depth=_at_least(self.reached),
            seconds=self.prefill_seconds + self.seconds,
            prefill_seconds=self.prefill_seconds,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
        )


def _at_least(counts: dict[int, int]) -> tuple[int, ...]:
    """Turn counts by size into the numbers of entries with size at least 1, 2, ..."""
    longest = max((size for size, n in counts.items() if n), default=0)
    return tuple(sum(n for size, n in counts.items() if size >= least) for least in range(1, longest + 1))


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its output so far. The engine fills every field after ``member``.

    ``seed`` reproduces the output. ``stream`` seeds the row's random numbers: equal to ``seed``, or unique to the
    request; see ``Engine``. Requests with a lower ``priority`` are admitted first. Those of one ``tenant`` may share
    the keys and values of a prompt that begins alike. ``choices``: choose the tokens of all requests of the engine
    together, of which this is number ``member``. ``arrival``: among the requests of its engine. ``matcher``: where the
    output stands in the request's grammar; None without one.
    """

    request: Request
    decode: Decode
    seed: int
    stream: int
    priority: int = 0
    tenant: str = ""
    choices: Choices | None = None
    member: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: ForedraftError | None = None
    counters: RequestStats = field(default_factory=RequestStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pieces: deque[Piece] = field(default_factory=deque)
    steps: list[StepTrace] = field(default_factory=list)  # if the request asks for them
    arrival: int = field(init=False, default=-1)
    matcher: Matcher | None = field(init=False, default=None)
    _detokenizer: IncrementalDetokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = IncrementalDetokenizer(self.decode, self.params.stop_strings, self.prompt)
        if self.request.grammar is not None:
            self.matcher = self.request.grammar.matcher(sorted(self.rules.eos_token_ids))

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
    def processors_error(self) -> Exception | None:
        """The error in the logits processors, which ends the request."""
        errors = (each.error for each in self.params.logits_processor if isinstance(each, RequestProcessors))
        return next(errors, None)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the request."""
        return self._detokenizer.stopped_by

    @property
    def stats(self) -> DecodeStats:
        """Statistics so far."""
        return self.counters.stats(len(self.prompt))

    @property
    def committed(self) -> tuple[int, ...]:
        """The prompt and the output so far."""
        return (*self.prompt, *self.tokens) if self.tokens else self.prompt

    @property
    def length(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    def draft_limit(self, context: int, unknown: int = 0) -> int:
        """The most draft tokens that the next step can use; the last token is always the bonus.

        Args:
            context: the most tokens that the model reads.
            unknown: the most tokens that the last step has appended, if it was not read back yet.
        """
        if not self.params.speculate:
            return 0
        left = self.rules.max_new_tokens - len(self.tokens)
        most = min(left - 1, context - self.length) - unknown
        if self.params.num_assistant_tokens is not None:
            most = min(most, self.params.num_assistant_tokens)
        return max(0, most)

    @property
    def drafts(self) -> bool:
        """Whether any step of the request may draft."""
        return self.params.speculate and self.params.num_assistant_tokens != 0 and self.rules.max_new_tokens > 1

    def extend(
        self,
        block: Tokens[int],
        drafted: int,
        *,
        copied: bool = False,
        trace: Callable[[int], StepTrace] | None = None,
    ) -> int:
        """Append a block of new tokens, the first ``drafted`` of which were drafted.

        Args:
            copied: these are of a copy.
            trace: that of the step that has emitted the block, by the number of tokens kept.

        Returns:
            the number of tokens kept; fewer than all if the request ended inside the block.
        """
        cut = self.rules.cut(len(self.tokens), block)
        refused = None
        if self.matcher is not None:
            legal = self.matcher.advance(block[: cut.kept])
            if legal < cut.kept and not self.matcher.ended:
                refused = block[legal]
            if legal < cut.kept or self.matcher.ended:
                cut = Cut(legal, "stop")
        pieces, stopped = list[Piece](), False
        for part, was_drafted in ((block[: min(drafted, cut.kept)], True), (block[drafted : cut.kept], False)):
            if not part or stopped or self.finished:
                continue
            pushed = self._detokenizer.push(list(part))
            pieces.append(Piece(pushed.text, list(part[: pushed.tokens_kept]), was_drafted, was_drafted and copied))
            stopped = pushed.stopped
        kept = sum(len(piece.tokens) for piece in pieces)
        if trace is not None:
            self.steps.append(trace(kept))  # before its pieces, which a stream may take at once
        for piece in pieces:
            self._emit(piece)
        if stopped:
            self.finish_reason = "stop"
        if refused is not None and not self.finished:
            self.fail(OptionError(f"A logits processor allowed token {refused}, which the grammar forbids here."))
        if cut.reason is not None and not self.finished:
            self.finish(cut.reason)
        return kept

    def finish(self, reason: FinishReason) -> None:
        """End the request and emit the text held back. If that cannot be decoded, the request ends with an error."""
        self.finish_reason = reason
        try:
            rest = self._detokenizer.finish()
        except Exception as error:
            self.error = self.error or failure(error)
            return
        if rest.text:
            self._emit(Piece(rest.text, [], False))

    def cut(self, count: int) -> None:
        """End the request after its first ``count`` tokens and cut its text to match; its last step has the others."""
        if count < len(self.tokens):
            self.counters.cut(len(self.tokens) - count)
            del self.tokens[count:]
            del self.logprobs[count:]
            self.text = text_after(self.decode, self.prompt, self.tokens)
        if not self.finished:
            self.finish_reason = "stop"

    def fail(self, error: ForedraftError) -> None:
        """End the request with an error; the output so far stays."""
        self.error = error  # first, so that a thread that sees the end sees the error too
        self.finish("cancelled")

    def add_logprobs(self, logits: Float[Tensor, "D V"], tokens: list[int]) -> None:
        """Keep what was requested of a step's logits at these new tokens."""
        if self.params.logprobs is not None:
            laws = logits[: len(tokens)].float().log_softmax(-1)
            self.logprobs += token_logprobs(laws, tokens, self.params.logprobs)

    def fail_without_token(self) -> None:
        """End the request with an error, since no next token can be chosen."""
        self.fail(
            NumericsError(
                "No next token can be chosen: the model returned NaN or +inf logits, or bans, processors and the "
                f"grammar left no token ({len(self.tokens)} tokens were generated before)."
            )
        )

    def _emit(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.pieces.append(piece)


def failure(error: Exception) -> ForedraftError:
    """The error of a request that another error ended; the request's own fault stays as it is."""
    if isinstance(error, OptionError):
        return error
    failed = ForedraftError(f"This request failed: {error}")
    failed.__cause__ = error
    return failed


def fail_all(sequences: Iterable[Sequence], reason: str) -> None:
    """End those that have not ended yet with an error."""
    for sequence in sequences:
        if not sequence.finished:
            sequence.fail(ForedraftError(reason))
