"""From bodies of requests to prompts in token ids and ``SamplingParams``."""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.core.errors import PromptError
from foredraft.core.sampling.grammar import Grammar
from foredraft.core.sampling.params import MOST_ENDS, SamplingParams, with_defaults
from foredraft.core.sampling.warp import check_token_ids
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.serve.errors import ApiError
from foredraft.serve.grammars import chat_grammar, grammar_of
from foredraft.serve.job import Job
from foredraft.serve.reasoning import TAGS, begins
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
from foredraft.serve.tools import MARKS, as_arguments

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

    ``given``: the tokenizer, if the model has one. ``eos``: the model's end-of-sequence ids. ``max_length``: its
    context. ``default_max_tokens``: of chats that give no ``max_tokens``. ``tool_prompt``: describe tools in the
    messages where the chat template has none; else they are refused. ``most_outputs``: of one request.
    ``defaults``: options of ``SamplingParams`` for requests that do not give them.
    """

    given: Tokenizer | None
    eos: tuple[int, ...]
    vocab_size: int
    max_length: int
    default_max_tokens: int
    tool_prompt: bool = True
    most_outputs: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def _most(self, otherwise: int) -> int:
        """The most tokens of an output whose request does not say."""
        return self.defaults.get("max_new_tokens", otherwise)

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
        params = self._params(body, body.max_tokens or self._most(_COMPLETION_TOKENS), body.logprobs, grammar_of(body))
        prompts = _listed(body.prompt)
        self._check_count(len(prompts) * body.n)
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
        limit = body.max_completion_tokens or body.max_tokens or self._most(self.default_max_tokens)
        tools_of = self._tool_format if body.called else None
        grammar = chat_grammar(body, tools_of or "")
        params = self._params(body, limit, (body.top_logprobs or 0) if body.logprobs else None, grammar)
        prompt = self._chat_ids(body, body.messages, body.called)
        free = grammar is None or (not body.must_call and any(tool.function.strict for tool in body.called))
        return replace(
            self._job(body, [prompt], params),
            tools_of=tools_of,
            thinks=free and begins(self.tokenizer, prompt),
            shown=self._shown(TAGS if tools_of is None else (*TAGS, *MARKS)),
        )

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
        return ids, [self.tokenizer.text_of(token) for token in ids] if body.return_token_strs else None

    def text(self, body: DetokenizeRequest) -> str:
        """The text of ids, special tokens included.

        Raises:
            PromptError: an id is outside the vocabulary.
        """
        self._check_ids(body.tokens)
        return self.tokenizer.decode(body.tokens, special=True)

    def _shown(self, marks: Seq[str]) -> frozenset[int]:
        """Special tokens among these marks, which the parsers of outputs have to see."""
        names = self.tokenizer.token_bytes.names
        return frozenset(token for token, name in names.items() if name in marks)

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

    def _check_count(self, wanted: int) -> None:
        """Check the number of outputs; a body has room for a million prompts, which would all be read first."""
        if self.most_outputs is not None and wanted > self.most_outputs:
            raise ApiError(400, f"{wanted} outputs are more than the {self.most_outputs} that the server can hold.")

    def _job(self, body: Generation, prompts: list[list[int]], params: SamplingParams) -> Job:
        self._check_count(len(prompts) * body.n)
        check_token_ids(params, self.vocab_size)
        longest = max(map(len, prompts))
        if longest > self.max_length:
            raise PromptError(f"The prompt has {longest} tokens; the model's context is {self.max_length}.")
        return Job(prompts, params, body.n, tuple(body.stop_token_ids or ()), priority=body.priority)

    def _params(
        self, body: Generation, max_tokens: int, logprobs: int | None, grammar: Grammar | None
    ) -> SamplingParams:
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "logprobs": logprobs}
        options |= {own: value for name, own in _FIELDS.items() if (value := getattr(body, name)) is not None}
        if body.top_k is not None:  # 0 and -1 turn it off
            options["top_k"] = body.top_k if body.top_k > 0 else None
        if body.ignore_eos or body.stop_token_ids:
            own = () if body.ignore_eos else self.eos
            more = body.stop_token_ids or []
            if len(more) > (most := MOST_ENDS - len(own)):
                raise ApiError(400, f"stop_token_ids has {len(more)} ids; the most are {most}.", param="stop_token_ids")
            options["eos_token_id"] = (*own, *more)
        options["record_steps"] = body.return_steps
        if body.prediction is not None:
            expected = self.tokenizer.encode_many([body.prediction.text])[0]
            options["prediction"] = expected[: self.max_length]  # no output is longer
        if isinstance(body.speculative, SpeculativeOptions):
            options["num_assistant_tokens"] = body.speculative.num_assistant_tokens
        else:
            options["speculate"] = body.speculative
        return SamplingParams(grammar=grammar, **with_defaults(self.defaults, options))


def messages(given: Seq[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as a chat template reads them: arguments of calls as objects, developers as the system."""
    found = []
    for message in given:
        plain = {"content": None, **message.model_dump(exclude_none=True)}
        plain["role"] = "system" if message.role == "developer" else message.role
        if (reasoning := plain.pop("reasoning", None)) is not None:
            plain.setdefault("reasoning_content", reasoning)
        if "reasoning_content" in plain and plain["content"] is None and "tool_calls" not in plain:
            plain["content"] = ""  # it was cut before it said anything
        for call in plain.get("tool_calls", ()):
            call["function"]["arguments"] = as_arguments(call["function"]["arguments"])
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
