"""From results and updates to answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence as Seq
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar, final

from foredraft.core.stats import DecodeStats
from foredraft.engine.request import TokenLogprobs
from foredraft.engine.results import Result
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.serve.answers import (
    Answer,
    CalledFunction,
    CalledTool,
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
    PromptDetails,
    RequestMetrics,
    Speculation,
    StepDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from foredraft.serve.errors import ApiError
from foredraft.serve.job import Job
from foredraft.serve.reasoning import ReasoningParser, count_tokens, split
from foredraft.serve.token_texts import TokenTexts, finite
from foredraft.serve.tools import Parsed, ToolParser, parse
from foredraft.serve.updates import Update

R = TypeVar("R", bound="Renderer")


@dataclass
class Renderer(ABC):
    """Makes the answers of one request.

    ``number``: with ``prefix`` the request's id, as in "chatcmpl-17". ``created``: time of the answers, in seconds.
    ``return_token_ids``: choices carry their token ids. ``wants_usage``: a stream's last chunk says what was used.
    ``scores``: log-probabilities of the tokens of each prompt, if the answer begins with them.
    """

    prefix: ClassVar[str]
    number: str
    model: str
    job: Job
    tokenizer: Tokenizer | None
    created: int
    return_token_ids: bool = False
    wants_usage: bool = False
    scores: Seq[Seq[TokenLogprobs | None]] = field(default=(), init=False)
    _texts: dict[int, TokenTexts] = field(default_factory=dict, init=False)  # by choice

    def portable(self: R) -> R:
        """This renderer, without scores, for a process that has the tokenizer; the grammar has done its work."""
        found = copy(self)
        found.tokenizer, found.job, found.scores = None, replace(self.job, grammar=None), ()
        return found

    def values(self, results: Seq[Result]) -> int:
        """Tokens that the whole answer shows one by one."""
        each = 1 + (self.job.params.logprobs or 0)
        shown = sum(map(len, self.scores)) * each + sum(map(len, self.job.prompts)) * self.return_token_ids
        return shown * self.job.count + sum(
            len(result.logprobs) * each + sum(len(step.tokens) + len(step.emitted) for step in result.steps)
            for result in results
        )

    @property
    def common(self) -> dict[str, Any]:
        """What all answers have."""
        return {"id": f"{self.prefix}-{self.number}", "created": self.created, "model": self.model}

    @abstractmethod
    def whole(self, results: Seq[Result]) -> Answer:
        """The answer in one piece; without results if it only repeats its prompts."""

    @abstractmethod
    def opening(self) -> Iterable[Answer]:
        """The chunks of a stream before its first update."""

    @abstractmethod
    def chunks(self, update: Update) -> Iterable[Answer]:
        """An update of a choice."""

    @abstractmethod
    def closing(self, results: Seq[Result]) -> Iterable[Answer]:
        """The chunks of a stream after its last update."""

    def event(self, chunk: Answer) -> str:
        """A chunk as a server-sent event."""
        return f"data: {chunk.json_text()}\n\n"

    def ending(self, error: ApiError | None) -> str:
        """How a stream ends, with or without an error."""
        return "data: [DONE]\n\n" if error is None else error.ending().decode()

    def _usage(self, results: Seq[Result]) -> dict[str, Any]:
        """Usage, metrics and whether the law was the target's; a prompt counts once."""
        prompt = sum(len(ids) for ids in self.job.prompts)
        new = sum(len(result.tokens) for result in results)
        total = DecodeStats.together(result.stats for result in results)
        details = CompletionDetails(
            accepted_prediction_tokens=total.accepted_prediction_tokens,
            rejected_prediction_tokens=total.rejected_prediction_tokens,
            **self._details(results),
        )
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=new,
            total_tokens=prompt + new,
            prompt_tokens_details=PromptDetails(cached_tokens=min(total.cached_tokens, prompt)),
            completion_tokens_details=details,
        )
        metrics = RequestMetrics(speculative_decoding=_speculation(total))
        return {"usage": usage, "metrics": metrics, "lossless": total.lossless}

    def _details(self, results: Seq[Result]) -> dict[str, Any]:
        """Further counts of output tokens."""
        return {}

    def _choice_fields(self, new: Result | Update, result: Result | None, called: bool = False) -> dict[str, Any]:
        """What choices of all kinds have: how the output ended, if it has a ``result``, new ids, pieces and steps."""
        fields: dict[str, Any] = {"finish_reason": None}
        if result is not None:
            reason = "length" if result.finish_reason == "length" else "tool_calls" if called else "stop"
            fields = {"finish_reason": reason, "stop_reason": self._stop_reason(result)}
        if self.return_token_ids:
            fields["token_ids"] = new.tokens
        if self.job.params.record_steps:
            fields["pieces"] = [DraftedPiece(**piece.as_dict()) for piece in new.pieces]
            fields["steps"] = [StepDetails(**step.as_dict(self._text)) for step in new.steps]
        return fields

    def _stop_reason(self, result: Result) -> str | int | None:
        """The stop string or the id of the request's own that ended the output; None for the model's own end."""
        if result.finish_reason != "stop" or not result.tokens:
            return None
        if result.tokens[-1] in self.job.stop_token_ids:
            return result.tokens[-1]
        return result.stop_string

    def _text(self, token: int) -> str:
        """The text of a token by itself."""
        return "" if self.tokenizer is None else self.tokenizer.text_of(token)

    def _token_texts(self, choice: int, offset: int = 0) -> TokenTexts:
        """The tokens of a choice; ``offset``: where its output begins in its text."""
        if choice not in self._texts:
            prompt = self.job.prompts[choice // self.job.count]
            self._texts[choice] = TokenTexts(self.tokenizer, prompt, offset)
        return self._texts[choice]


class Turn(NamedTuple):
    """What is new of the assistant's turn: reasoning, text for the reader, and calls."""

    reasoning: str
    content: str
    calls: list[CalledFunction]


@dataclass
class TurnRenderer(Renderer):
    """What renderers of the assistant's turns have in common: reasoning, calls, and log-probabilities by token."""

    _thoughts: dict[int, ReasoningParser] = field(default_factory=dict, init=False)  # by choice
    _parsers: dict[int, ToolParser] = field(default_factory=dict, init=False)  # by choice

    def _read(self, text: str) -> Turn:
        """All of an output."""
        reasoning, content = split(text, self.job.thinks)
        return Turn(reasoning, *self._parsed(content))

    def _parsed(self, content: str) -> Parsed:
        return Parsed(content, []) if self.job.tools_of is None else parse(content, self.job.tools_of)

    def _read_more(self, update: Update) -> Turn:
        """What is final after an update; calls come with the last one."""
        thoughts = self._thoughts.setdefault(update.index, ReasoningParser(self.job.thinks))
        reasoning, content = thoughts.push(update.text)
        if update.result is not None:
            rest = thoughts.finish()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        if self.job.tools_of is None:
            return Turn(reasoning, content, [])
        parser = self._parsers.setdefault(update.index, ToolParser(self.job.tools_of))
        content = parser.push(content)
        if update.result is None:
            return Turn(reasoning, content, [])
        last = parser.finish()
        return Turn(reasoning, content + last.content, last.calls)

    def _details(self, results: Seq[Result]) -> dict[str, Any]:
        if self.tokenizer is None:
            return {}
        decode = partial(self.tokenizer.decode, shown=self.job.shown)
        return {"reasoning_tokens": sum(count_tokens(decode, result, self.job.thinks) for result in results)}

    def _call_id(self, choice: int, place: int) -> str:
        """It follows from the request's id, so that a batch that is resumed has the same."""
        return f"call-{self.number}-{choice}-{place}"

    def _logprobs(self, choice: int, found: list[TokenLogprobs]) -> list[TokenLogprob]:
        texts = self._token_texts(choice)

        def fields(token: int, logprob: float) -> dict[str, Any]:
            shown = texts.show(token)
            return {"token": shown.text, "logprob": finite(logprob), "bytes": list(shown.raw)}

        content = []
        for each in found:
            top = [TopLogprob(**fields(token, value)) for token, value in each.top.items()]
            content.append(TokenLogprob(**fields(each.token, each.logprob), top_logprobs=top))
            texts.skip(each.token)
        return content


@final
@dataclass
class ChatRenderer(TurnRenderer):
    """Answers of chats."""

    prefix = "chatcmpl"

    def whole(self, results: Seq[Result]) -> ChatCompletion:
        choices = []
        for index, result in enumerate(results):
            reasoning, content, calls = self._read(result.text)
            more: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
            if calls:
                more["tool_calls"] = self._calls(index, calls)
            message = Message(role="assistant", content=content or None if calls else content, **more)
            fields = self._choice_fields(result, result, called=bool(calls))
            logprobs = self._chat_logprobs(index, result.logprobs)
            choices.append(ChatChoice(index=index, message=message, logprobs=logprobs, **fields))
        prompt = {"prompt_token_ids": self.job.prompts[0]} if self.return_token_ids else {}
        return ChatCompletion(
            **self.common, object="chat.completion", choices=choices, **prompt, **self._usage(results)
        )

    def opening(self) -> Iterable[ChatChunk]:
        for index in range(self.job.count):
            delta = Delta(role="assistant", content="")
            yield self._chunk([ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

    def chunks(self, update: Update) -> Iterable[ChatChunk]:
        reasoning, text, calls = self._read_more(update)
        delta: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if text or (update.result is None and not reasoning):
            delta["content"] = text
        if calls:
            tool_calls = self._calls(update.index, calls)
            delta["tool_calls"] = [call.model_copy(update={"index": i}) for i, call in enumerate(tool_calls)]
        fields = self._choice_fields(update, update.result, called=bool(calls))
        logprobs = self._chat_logprobs(update.index, update.logprobs)
        choice = ChatChunkChoice(index=update.index, delta=Delta(**delta), logprobs=logprobs, **fields)
        yield self._chunk([choice])

    def closing(self, results: Seq[Result]) -> Iterable[ChatChunk]:
        if self.wants_usage:
            yield self._chunk([], **self._usage(results))

    def _chunk(self, choices: list[ChatChunkChoice], **usage: Any) -> ChatChunk:
        return ChatChunk(**self.common, object="chat.completion.chunk", choices=choices, **usage)

    def _calls(self, choice: int, functions: Seq[CalledFunction]) -> list[CalledTool]:
        return [
            CalledTool(id=self._call_id(choice, place), type="function", function=function)
            for place, function in enumerate(functions)
        ]

    def _chat_logprobs(self, choice: int, found: list[TokenLogprobs]) -> ChatLogprobs | None:
        return None if self.job.params.logprobs is None else ChatLogprobs(content=self._logprobs(choice, found))


@final
@dataclass
class CompletionRenderer(Renderer):
    """Answers of completions."""

    prefix = "cmpl"
    _begun: set[int] = field(default_factory=set, init=False)  # choices

    def whole(self, results: Seq[Result]) -> Completion:
        choices = [choice for chunk in self.opening() for choice in chunk.choices]
        for index, result in enumerate(results):
            fields = self._choice_fields(result, result)
            choices.append(self._choice(index, result.text, result.logprobs, fields))
        return self._answer(choices, **self._usage(results))

    def opening(self) -> Iterable[Completion]:
        """The chunks of a completion that only repeats its prompts, one for each choice; none of any other."""
        count = 0 if self.job.generates else len(self.job.prompts) * self.job.count
        for index in range(count):
            ids: dict[str, Any] = {"token_ids": []} if self.return_token_ids else {}
            yield self._answer([self._choice(index, "", [], {"finish_reason": "length", **ids})])

    def chunks(self, update: Update) -> Iterable[Completion]:
        fields = self._choice_fields(update, update.result)
        yield self._answer([self._choice(update.index, update.text, update.logprobs, fields)])

    def closing(self, results: Seq[Result]) -> Iterable[Completion]:
        if self.wants_usage:
            yield self._answer([], **self._usage(results))

    def _answer(self, choices: list[CompletionChoice], **usage: Any) -> Completion:
        return Completion(**self.common, object="text_completion", choices=choices, **usage)

    def _choice(self, index: int, text: str, logprobs: list[TokenLogprobs], fields: dict[str, Any]) -> CompletionChoice:
        """The choice, or what is new of it; the first time with its prompt, if that was asked for."""
        prompt = index // self.job.count
        echo = self.job.echo[prompt] if self.job.echo else ""
        first = index not in self._begun
        self._begun.add(index)
        if first:
            text = echo + text
        if first and self.return_token_ids:
            fields["prompt_token_ids"] = self.job.prompts[prompt]
        found = None
        if self.job.params.logprobs is not None:
            texts = self._token_texts(index, len(echo))
            found = self._listed(texts, [each.token for each in logprobs], logprobs)
            if first and self.scores:
                found = _joined(self._scored(prompt), found)
        return CompletionChoice(index=index, text=text, logprobs=found, **fields)

    def _scored(self, prompt: int) -> CompletionLogprobs:
        """The scores of a prompt."""
        size = len(self.job.echo[prompt])
        return self._listed(TokenTexts(self.tokenizer), self.job.prompts[prompt], self.scores[prompt], size)

    def _listed(
        self, texts: TokenTexts, tokens: Seq[int], found: Seq[TokenLogprobs | None], size: int | None = None
    ) -> CompletionLogprobs:
        """Log-probabilities in lists by token; None for the first of a prompt.

        Args:
            size: of the text in characters; None if it is not known yet.
        """
        lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, each in zip(tokens, found, strict=True):
            names = texts.names(each or TokenLogprobs(token, 0.0, {}))
            begin = texts.take(token)
            lists.tokens.append(names[token])
            lists.token_logprobs.append(each and finite(each.logprob))
            lists.top_logprobs.append(each and {names[other]: finite(value) for other, value in each.top.items()})
            lists.text_offset.append(begin if size is None else min(begin, size))
        return lists


def _joined(first: CompletionLogprobs, rest: CompletionLogprobs) -> CompletionLogprobs:
    lists = {name: getattr(first, name) + getattr(rest, name) for name in CompletionLogprobs.model_fields}
    return CompletionLogprobs(**lists)


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
