"""From bodies of requests to prompts in token ids and ``SamplingParams``."""

import json
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from foredraft.core.errors import PromptError
from foredraft.core.sampling.grammar import Grammar
from foredraft.core.sampling.params import MOST_ENDS, SamplingParams
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.serve.errors import ApiError
from foredraft.serve.grammars import chat_grammar, grammar_of
from foredraft.serve.job import Job
from foredraft.serve.responses.chat import chat_of
from foredraft.serve.responses.schema import ResponsesRequest
from foredraft.serve.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    SpeculativeOptions,
    Templated,
    TokenizeRequest,
    Tool,
)
from foredraft.serve.tool_prompt import TOOL_PROMPT, described

_SAME = (
    *("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "eta_alpha", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "logit_bias", "seed"),
)
_FIELDS = {**{name: name for name in _SAME}, "min_tokens": "min_new_tokens", "stop": "stop_strings"}
"""Fields that are passed on as they are, with their names in ``SamplingParams``."""
_COMPLETION_TOKENS = 16
"""OpenAI's ``max_tokens`` of a completion that gives none."""


@dataclass(frozen=True, slots=True)
class Converter:
    """Makes jobs of bodies, for one model. A value, which also works in a process without the model.

    ``given``: the tokenizer, if the model has one. ``eos``: the model's end-of-sequence ids. ``default_max_tokens``: of
    chats that give no ``max_tokens``. ``tool_prompt``: describe tools in the messages where the chat template has none;
    else they are refused.
    """

    given: Tokenizer | None
    eos: tuple[int, ...]
    vocab_size: int
    default_max_tokens: int
    tool_prompt: bool = True

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            PromptError: the model has none.
        """
        if self.given is None:
            raise PromptError("The model has no tokenizer: send token ids.")
        return self.given

    @property
    def _tool_format(self) -> str:
        """What tells the model of tools, and decides how its calls look.

        Raises:
            ApiError: nothing does.
        """
        if self.tokenizer.has_tools:
            return self.tokenizer.chat_template
        if not self.tool_prompt:
            message = (
                "The model's chat template has no tools, and --no-tool-prompt turns off the server's prompt for them."
            )
            raise ApiError(400, message, param="tools")
        return TOOL_PROMPT

    def completion(self, body: CompletionRequest) -> Job:
        """The job of a completion.

        Raises:
            OptionError, PromptError: an option or a prompt is invalid.
        """
        params = self._params(body, body.max_tokens or _COMPLETION_TOKENS, body.logprobs, grammar_of(body))
        prompts = _listed(body.prompt)
        return replace(
            self._job(body, [self._ids(prompt) for prompt in prompts], params),
            echo=tuple(self._text(prompt) for prompt in prompts) if body.echo else (),
            scored=body.logprobs if body.echo else None,
            generates=body.max_tokens != 0,
        )

    def chat(self, body: ChatRequest) -> Job:
        """The job of a chat.

        Raises:
            OptionError, PromptError: an option is invalid, or the chat template rejects the messages.
        """
        limit = body.max_completion_tokens or body.max_tokens or self.default_max_tokens
        tools_of = self._tool_format if body.called else None
        grammar = chat_grammar(body, tools_of or "")
        params = self._params(body, limit, (body.top_logprobs or 0) if body.logprobs else None, grammar)
        prompt = self._chat_ids(body, body.messages, body.called)
        return replace(self._job(body, [prompt], params), tools_of=tools_of)

    def response(self, body: ResponsesRequest) -> Job:
        """The job of the chat that a response stands for.

        Raises:
            OptionError, PromptError: an option is invalid, or the chat template rejects the messages.
        """
        return self.chat(chat_of(body))

    def tokens(self, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Ids of a text or of a chat, and each as text if the body asks for that.

        Raises:
            PromptError: the text is empty, or the chat template rejects the messages.
        """
        if body.messages is None:
            ids = self.tokenizer.encode(body.prompt or "")
        else:
            ids = self._chat_ids(body, body.messages, body.tools or [])
        return ids, [self.tokenizer.decode([token], special=True) for token in ids] if body.return_token_strs else None

    def text(self, body: DetokenizeRequest) -> str:
        """The text of ids, special tokens included.

        Raises:
            PromptError: an id is outside the vocabulary.
        """
        self._check_ids(body.tokens)
        return self.tokenizer.decode(body.tokens, special=True)

    def _check_ids(self, tokens: Seq[int]) -> None:
        """Check ids before the tokenizer reads them."""
        if any(token >= self.vocab_size for token in tokens):
            raise PromptError(f"There are token ids outside the model's vocabulary of {self.vocab_size}.")

    def _chat_ids(self, body: Templated, given: Seq[ChatMessage], tools: Seq[Tool]) -> list[int]:
        """Ids of a chat; tools that the template cannot write are described in its messages."""
        conversation, functions = messages(given), [tool.model_dump(exclude_none=True) for tool in tools]
        if self.tool_prompt and not self.tokenizer.has_tools:
            conversation, functions = described(conversation, functions), []
        return self.tokenizer.encode_chat(
            conversation,
            tools=functions,
            ending=body.ending,
            as_text=body.split_special_tokens,
            options=body.chat_template_kwargs,
        )

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        self._check_ids(prompt)
        return self.tokenizer.decode(prompt)

    def _job(self, body: Generation, prompts: list[list[int]], params: SamplingParams) -> Job:
        return Job(prompts, params, body.n, tuple(body.stop_token_ids or ()), priority=body.priority)

    def _params(
        self, body: Generation, max_tokens: int, logprobs: int | None, grammar: Grammar | None
    ) -> SamplingParams:
        options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": max_tokens, "logprobs": logprobs}
        options |= {own: value for name, own in _FIELDS.items() if (value := getattr(body, name)) is not None}
        if body.top_k is not None and body.top_k > 0:  # 0 and -1 turn it off
            options["top_k"] = body.top_k
        if body.ignore_eos or body.stop_token_ids:
            own = () if body.ignore_eos else self.eos
            more = body.stop_token_ids or []
            if len(more) > (most := MOST_ENDS - len(own)):
                raise ApiError(400, f"stop_token_ids has {len(more)} ids; the most are {most}.", param="stop_token_ids")
            options["eos_token_id"] = (*own, *more)
        options["record_steps"] = body.return_steps
        if body.prediction is not None:
            options["prediction"] = body.prediction.text
        if isinstance(body.speculative, SpeculativeOptions):
            options["num_assistant_tokens"] = body.speculative.num_assistant_tokens
        else:
            options["speculate"] = body.speculative
        return SamplingParams(grammar=grammar, **options)


def messages(given: Seq[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as a chat template reads them: arguments of calls as objects, developers as the system."""
    found = []
    for message in given:
        plain = {"content": None, **message.model_dump(exclude_none=True)}
        plain["role"] = "system" if message.role == "developer" else message.role
        for call in plain.get("tool_calls", ()):
            with suppress(ValueError, RecursionError):  # it stays a string
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append(plain)
    return found


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a completion, one or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise PromptError("There are no prompts.")
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]
