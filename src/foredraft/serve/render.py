"""From results and updates to answers."""

import math
import time
from collections.abc import Iterable, Sequence as Seq
from typing import Any

from foredraft.core.stats import DecodeStats
from foredraft.engine.detokenizer import IncrementalText
from foredraft.engine.recording import RecordedStep
from foredraft.engine.request import Piece, TokenLogprobs
from foredraft.engine.results import Result
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    Delta,
    DraftedPiece,
    Message,
    Metrics,
    PromptDetails,
    Speculation,
    Step,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from foredraft.serve.job import Job
from foredraft.serve.service import Update
from foredraft.serve.tools import ToolParser, parse

_LEAST = -9999.0
"""In place of an infinite log-probability, which JSON lacks; as in vLLM."""


class Renderer:
    """Makes the answers of one request.

    Args:
        number: the request's id, as in "chatcmpl-17".
        return_token_ids: choices carry their token ids.
    """

    def __init__(
        self, number: str, model: str, job: Job, tokenizer: Tokenizer | None, *, return_token_ids: bool = False
    ) -> None:
        self._common: dict[str, Any] = {"id": number, "created": int(time.time()), "model": model}
        self._job = job
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids
        self._parsers: dict[int, ToolParser] = {}
        self._offsets: dict[int, int] = {}  # characters sent, by choice
        self._scored: list[CompletionLogprobs] = []  # by prompt

    def chat(self, results: Seq[Result]) -> ChatCompletion:
        """The answer of a chat."""
        choices = []
        for index, result in enumerate(results):
            message, called = self._message(result.text)
            logprobs = self._chat_logprobs(result.logprobs)
            ended = self._ended(result, called=called) | self._ids(result.tokens)
            ended |= self._steps(result.pieces, result.steps)
            choices.append(ChatChoice(index=index, message=message, logprobs=logprobs, **ended))
        prompt = {"prompt_token_ids": self._job.prompts[0]} if self._return_token_ids else {}
        return ChatCompletion(
            **self._common, object="chat.completion", choices=choices, **prompt, **self.usage(results)
        )

    def first_chunks(self) -> Iterable[ChatChunk]:
        """The chunks that open the choices of a chat."""
        for index in range(self._job.count):
            yield self._chat_chunk(index, Delta(role="assistant", content=""), None, {"finish_reason": None})

    def _message(self, text: str) -> tuple[Message, bool]:
        """The message of an output, and whether it calls tools."""
        if self._job.tools_of is None:
            return Message(role="assistant", content=text), False
        found = parse(text, self._job.tools_of)
        if not found.calls:
            return Message(role="assistant", content=text), False
        return Message(role="assistant", content=found.content or None, tool_calls=found.calls), True

    def chat_chunk(self, update: Update) -> ChatChunk:
        """An update of a chat's choice."""
        text, calls = update.text, []
        if self._job.tools_of is not None:
            parser = self._parsers.setdefault(update.index, ToolParser(self._job.tools_of))
            text = parser.push(text)
            if update.result is not None:
                rest, calls = parser.finish()
                text += rest
        delta: dict[str, Any] = {"content": text} if text or (update.result is None and not calls) else {}
        if calls:
            delta["tool_calls"] = [call.model_copy(update={"index": i}) for i, call in enumerate(calls)]
        ended = self._ended(update.result, called=bool(calls)) | self._ids(update.tokens)
        ended |= self._steps(update.pieces, update.steps)
        return self._chat_chunk(update.index, Delta(**delta), self._chat_logprobs(update.logprobs), ended)

    def _chat_chunk(self, index: int, delta: Delta, logprobs: ChatLogprobs | None, rest: dict[str, Any]) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, **rest)
        return ChatChunk(**self._common, object="chat.completion.chunk", choices=[choice])

    def completion(self, results: Seq[Result]) -> Completion:
        """The answer of a completion; without results if it only repeats its prompts."""
        choices = [choice for chunk in self.echo_chunks() for choice in chunk.choices]
        for index, result in enumerate(results):
            steps = self._steps(result.pieces, result.steps)
            choices.append(self._choice(index, result.text, result.tokens, result.logprobs, result, steps))
        return Completion(**self._common, object="text_completion", choices=choices, **self.usage(results))

    def scored(self, scores: Seq[Seq[TokenLogprobs | None]]) -> None:
        """Have answers begin with the log-probabilities of the prompts' tokens."""
        self._scored = [
            self._listed(prompt, found, self._offsets_of(prompt, len(echo)))
            for prompt, echo, found in zip(self._job.prompts, self._job.echo, scores, strict=True)
        ]

    def echo_chunks(self) -> list[Completion]:
        """The chunks of a completion that only repeats its prompts, one for each choice; none of any other."""
        count = 0 if self._job.generates else len(self._job.prompts) * self._job.count
        ended = {"finish_reason": "length"}
        choices = [self._choice(index, "", [], [], None, ended) for index in range(count)]
        return [Completion(**self._common, object="text_completion", choices=[choice]) for choice in choices]

    def completion_chunk(self, update: Update) -> Completion:
        """An update of a completion's choice."""
        steps = self._steps(update.pieces, update.steps)
        choice = self._choice(update.index, update.text, update.tokens, update.logprobs, update.result, steps)
        return Completion(**self._common, object="text_completion", choices=[choice])

    def _choice(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs],
        result: Result | None,
        more: dict[str, Any],
    ) -> CompletionChoice:
        rest = self._ended(result) | self._ids(tokens) | more
        prompt = index // self._job.count
        first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        if first and self._job.echo:
            text, offset = self._job.echo[prompt] + text, len(self._job.echo[prompt])
        if first and self._return_token_ids:
            rest["prompt_token_ids"] = self._job.prompts[prompt]
        found = self._completion_logprobs(logprobs, offset)
        if first and self._scored and found is not None:
            found = _joined(self._scored[prompt], found)
        self._offsets[index] += len(text)
        return CompletionChoice(index=index, text=text, logprobs=found, **rest)

    def usage_chunk(self, results: Seq[Result], kind: type[ChatChunk] | type[Completion]) -> ChatChunk | Completion:
        """The last chunk of a stream that includes usage."""
        name: Any = kind.model_fields["object"].default
        return kind(**self._common, object=name, choices=[], **self.usage(results))

    def usage(self, results: Seq[Result]) -> dict[str, Any]:
        """Usage, metrics and whether the law was the target's; a prompt counts once."""
        prompt = sum(len(ids) for ids in self._job.prompts)
        new = sum(len(result.tokens) for result in results)
        total = DecodeStats.together(result.stats for result in results)
        details = CompletionDetails(
            accepted_prediction_tokens=total.accepted_prediction_tokens,
            rejected_prediction_tokens=total.rejected_prediction_tokens,
        )
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=new,
            total_tokens=prompt + new,
            prompt_tokens_details=PromptDetails(cached_tokens=min(total.cached_tokens, prompt)),
            completion_tokens_details=details,
        )
        metrics = Metrics(speculative_decoding=_speculation(total))
        return {"usage": usage, "metrics": metrics, "lossless": total.lossless}

    def _ended(self, result: Result | None, called: bool = False) -> dict[str, Any]:
        if result is None:
            return {"finish_reason": None}
        reason = "length" if result.finish_reason == "length" else "tool_calls" if called else "stop"
        return {"finish_reason": reason, "stop_reason": self._stop_reason(result)}

    def _stop_reason(self, result: Result) -> str | int | None:
        """The stop string or the id of the request's own that ended the output; None for the model's own end."""
        if result.finish_reason != "stop" or not result.tokens:
            return None
        if result.tokens[-1] in self._job.stop_token_ids:
            return result.tokens[-1]
        if not self._job.params.stop_strings or self._tokenizer is None:
            return None
        rest = self._tokenizer.decode(result.tokens)[len(result.text) :]
        return max((stop for stop in self._job.params.stop_strings if rest.startswith(stop)), key=len, default=None)

    def _ids(self, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self._return_token_ids else {}

    def _steps(self, pieces: Seq[Piece], steps: Seq[RecordedStep]) -> dict[str, Any]:
        if not self._job.params.record_steps:
            return {}
        return {
            "pieces": [DraftedPiece(**piece.as_dict()) for piece in pieces],
            "steps": [Step(**step.as_dict(self._text)) for step in steps],
        }

    def _text(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode([token])

    def _top(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    def _chat_logprobs(self, found: list[TokenLogprobs]) -> ChatLogprobs | None:
        if self._job.params.logprobs is None:
            return None
        content = []
        for each in found:
            top = [TopLogprob(**self._top(token, value)) for token, value in each.top.items()]
            content.append(TokenLogprob(**self._top(each.token, each.logprob), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _completion_logprobs(self, found: list[TokenLogprobs], offset: int) -> CompletionLogprobs | None:
        if self._job.params.logprobs is None:
            return None
        offsets = []
        for each in found:
            offsets.append(offset)
            offset += len(self._text(each.token))
        return self._listed([each.token for each in found], found, offsets)

    def _listed(self, tokens: Seq[int], found: Seq[TokenLogprobs | None], offsets: list[int]) -> CompletionLogprobs:
        """Log-probabilities in lists by token; None for the first of a prompt."""
        return CompletionLogprobs(
            tokens=[self._text(token) for token in tokens],
            token_logprobs=[each and _finite(each.logprob) for each in found],
            top_logprobs=[
                each and {self._text(token): _finite(value) for token, value in each.top.items()} for each in found
            ],
            text_offset=offsets,
        )

    def _offsets_of(self, prompt: Seq[int], size: int) -> list[int]:
        """Where each token of a prompt begins in its text of ``size`` characters."""
        text = IncrementalText(self._tokenizer.decode if self._tokenizer is not None else lambda tokens: "")
        offsets, offset = [], 0
        for token in prompt:
            offsets.append(min(offset, size))
            offset += len(text.push([token]))
        return offsets


def _joined(first: CompletionLogprobs, rest: CompletionLogprobs) -> CompletionLogprobs:
    lists = {name: getattr(first, name) + getattr(rest, name) for name in CompletionLogprobs.model_fields}
    return CompletionLogprobs(**lists)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def _speculation(stats: DecodeStats) -> Speculation:
    """Acceptance in vLLM's shape."""
    reached = [stats.target_forwards, *stats.accepted_by_depth]
    histogram = [count - more for count, more in zip(reached, [*reached[1:], 0], strict=True)]
    return Speculation(
        mean_acceptance_length=stats.acceptance_length,
        draft_acceptance_rate=stats.acceptance_rate,
        acceptance_histogram=histogram,
        acceptance_rate_by_position=list(stats.acceptance_by_depth),
        num_spec_steps=stats.target_forwards,
        num_accepted_draft_tokens=stats.accepted,
        num_draft_tokens=stats.drafted,
        method=stats.method,
        lossless=stats.lossless,
    )
