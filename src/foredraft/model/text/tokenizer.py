"""Tokenizer wrapper: encoding, decoding, chat templates, and comparison of two tokenizers."""

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.core.errors import DrafterError, PromptError, first_line
from foredraft.model.text.token_bytes import TokenBytes, readable

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``; the content is a string, or a list of parts ``{"type": "text", "text": ...}``,
which are joined by line ends."""

ChatEnding = Literal["answer", "open", "closed"]
"""Where the prompt of a conversation ends: behind what begins the assistant's answer; in the last message, which the
output continues; or behind the last message."""

_RESERVED = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Arguments of transformers, a template's source among them, which are no variables of the template."""
_PADDING = re.compile(r"\[PAD\d+\]")
"""Names of tokens that fill up the vocabulary of a GGUF file."""


class Tokenizer:
    """The parts of a transformers tokenizer that foredraft uses."""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner: Any = inner
        fast, kind = PreTrainedTokenizerFast, inner.__class__
        plain = issubclass(kind, fast) and kind.decode is fast.decode and kind._decode is fast._decode
        # without transformers' wrapper, which takes longer than a few tokens
        self._direct = self.inner.backend_tokenizer.decode if plain else None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer adds at the start.

        Raises:
            PromptError: it is empty or not valid Unicode.
        """
        if not text:
            raise PromptError("The prompt is empty: there is nothing to continue.")
        return self._ids(text, special=True)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        ending: ChatEnding = "answer",
        as_text: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation in the model's chat template.

        Args:
            tools: functions that the assistant may call, in OpenAI's form.
            as_text: special tokens that others than the assistant write are text, not special.
            options: further variables of the template.

        Raises:
            PromptError: there are no messages, there is no chat template or none for tools, or the template rejects
                the messages.
        """
        if not messages:
            raise PromptError("The chat has no messages: there is nothing to answer.")
        plain = [_plain(message, number) for number, message in enumerate(messages, start=1)]
        self._check_template()
        if tools and not self.has_tools:
            raise PromptError("The model's chat template has no tools.")
        if wrong := sorted(_RESERVED & (options or {}).keys()):
            raise PromptError(f"{wrong[0]} is not a variable of the chat template.")
        quote = _Quoted(plain, self._specials()) if as_text else None
        try:
            text = self._rendered(
                plain if quote is None else quote.messages,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=ending == "answer",
                continue_final_message=ending == "open",
                **(options or {}),
            )
        except Exception as error:  # templates may raise anything
            message = str(error).strip() or error.__class__.__name__
            raise PromptError(f"The chat template rejects these messages: {message.splitlines()[0]}") from error
        parts = [text] if quote is None else quote.parts(text)
        return [token for part in parts if part for token in self._ids(part, special=False)]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files.

        Raises:
            OSError: they cannot be written.
        """
        try:
            self.inner.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # tokenizers raises no OSError
            raise OSError(first_line(error)) from error

    @property
    def chat_template(self) -> str:
        """The source of the chat template, of all of them if there are several; empty for none."""
        template = self.inner.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)

    @property
    def has_tools(self) -> bool:
        """Whether the chat template can write tools."""
        return "tools" in self.chat_template

    def _check_template(self) -> None:
        if self.inner.chat_template is None:
            raise PromptError("The model has no chat template; pass plain text instead of chat messages.")

    def _specials(self) -> list[str]:
        """Added tokens that mean something to the model: those marked as special, and those in the template."""
        added = self.inner.added_tokens_decoder.values()
        found = [each.content for each in added if each.special or each.content in self.chat_template]
        return [each for each in found if each.strip()]

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"The prompt is not valid Unicode: {error.reason} at character {error.start}.") from None
        return list(self.inner(text, add_special_tokens=special, verbose=False)["input_ids"])

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many strings at once, without special tokens; invalid Unicode is replaced by question marks."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        if not clean:
            return []
        return [list(ids) for ids in self.inner(clean, add_special_tokens=False, verbose=False)["input_ids"]]

    def encode_turns(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ids of a whole conversation, and a mask of the assistant's tokens (1) for training.

        An assistant turn starts after the template's generation prompt and ends where the template closes it.

        Raises:
            PromptError: there is no chat template.
        """
        self._check_template()
        turns = [dict(message) for message in messages]
        whole = self._rendered(turns)
        by_assistant = [0] * len(whole)
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                begin = len(self._rendered(turns[:number], add_generation_prompt=True))
                end = len(self._rendered(turns[: number + 1]))
                by_assistant[begin:end] = [1] * (end - begin)
        encoding = self.inner(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = encoding["offset_mapping"]
        return list(encoding["input_ids"]), [int(end > begin and by_assistant[begin] == 1) for begin, end in spans]

    def _rendered(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The messages in the chat template, which sees fields that are None as Jinja does.

        Where it fails on them, or would write "None", an empty content takes their place and other fields are left out.
        """
        if not any(value is None for message in messages for value in message.values()):
            return self._in_template(messages, **options) if messages else ""
        known = [{name: value for name, value in message.items() if value is not None} for message in messages]
        without = [{"content": "", **message} for message in known]
        try:
            found = self._in_template(messages, **options)
        except Exception:  # templates may raise anything
            if options.get("continue_final_message") and messages[-1]["content"] is None:
                raise
            return self._in_template(without, **options)
        try:
            other = self._in_template(without, **options)
        except Exception:
            return found
        return other if found.replace("None", "") == other.replace("None", "") else found

    def _in_template(self, messages: Sequence[dict[str, Any]], *, tools: Any = None, **options: Any) -> str:
        """The template's text. transformers' own method drops fields that are None."""
        inner = self.inner
        if inner.__class__.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return str(inner.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        template = inner.get_chat_template(None, tools)
        options = {**inner.special_tokens_map, **options}
        rendered: Any = render_jinja_template([list(messages)], tools=tools, chat_template=template, **options)
        return str(rendered[0][0])

    def fingerprint(self) -> str:
        """A hash of vocabulary and chat template; equal for tokenizers that produce the same ids."""
        facts = [sorted(self.inner.get_vocab().items()), self.inner.chat_template]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def tokens_hash(self) -> str:
        """A hash of the ids and their tokens, but for those that pad a vocabulary; equal if ids mean the same."""
        known = [pair for pair in sorted(self.inner.get_vocab().items()) if not _PADDING.fullmatch(pair[0])]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def decode(self, tokens: list[int], *, special: bool = False, shown: frozenset[int] = frozenset()) -> str:
        """The string of ids, with spaces unchanged and without special tokens, but for those ``shown`` or all."""
        if not special and not shown.isdisjoint(tokens):
            names, special = self.token_bytes.names, True
            tokens = [token for token in tokens if token in shown or token not in names]
        if self._direct is not None:
            return str(self._direct(tokens, skip_special_tokens=not special))
        return str(self.inner.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[Any]]:
        return Tokenizer, (self.inner,)

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens."""
        return TokenBytes(self.inner)

    def bytes_of(self, token: int, *, first: bool = False) -> bytes:
        """What a token adds to a text in UTF-8; nothing for special tokens.

        Args:
            first: no text precedes it: many decoders drop a space there.
        """
        raw = self.token_bytes[token]
        if first and raw[:1] == b" ":
            alone = self.decode([token]).encode()
            return alone if raw.endswith(alone) else raw
        return raw

    def text_of(self, token: int) -> str:
        r"""A token by itself, for readers: bytes of incomplete characters as ``\xf0``, special tokens by name."""
        return self.token_bytes.names.get(token) or readable(self.token_bytes[token])

    def first_difference(self, other: "Tokenizer") -> str | None:
        """Where two tokenizers differ, as a clause, or None if every shared id is the same token.

        Vocabularies padded to different sizes are not different.
        """
        mine = {index: token for token, index in self.inner.get_vocab().items()}
        theirs = {index: token for token, index in other.inner.get_vocab().items()}
        shared = mine.keys() & theirs.keys()
        different = next((index for index in sorted(shared) if mine[index] != theirs[index]), None)
        if different is not None:
            return f"token {different} is {mine[different]!r} in one and {theirs[different]!r} in the other"
        fewer, more = sorted((len(mine), len(theirs)))
        if more - fewer > max(1024, more // 50):
            return f"one has {fewer} tokens and the other {more}"
        return None


class _Quoted:
    """Messages in which special tokens are broken up, so that they are encoded as text.

    A mark, a character that is nowhere in the messages, goes after their first character. The rendered text is cut
    where the marks are.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], specials: Sequence[str]) -> None:
        whole = str(messages)
        self._mark = next(mark for mark in map(chr, range(0xFDD0, 0xFDF0)) if mark not in whole)
        longest = sorted((each for each in specials if len(each) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest))) if longest else None
        self.messages = [self._quoted(message) for message in messages]

    def parts(self, text: str) -> list[str]:
        """The parts of a rendered text, to be encoded one by one."""
        return text.split(self._mark)

    def _quoted(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if self._special is None or message["role"] == "assistant" or not isinstance(content, str):
            return message
        return {**message, "content": self._special.sub(lambda found: self._broken(found[0]), content)}

    def _broken(self, special: str) -> str:
        return special[0] + self._mark + special[1:]


def _plain(message: Message, number: int) -> dict[str, Any]:
    """A message with its text parts as the lines of one string."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise PromptError(f"Chat message {number} must be a mapping with 'role' and 'content'.")
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return dict(message)
    if not isinstance(content, Sequence):
        raise PromptError(f"The content of chat message {number} must be a string or a list of text parts.")
    texts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            part = part["text"]
        if not isinstance(part, str):
            kind = part.get("type") if isinstance(part, Mapping) else part.__class__.__name__
            raise PromptError(f"Chat message {number} has a part of type {kind!r}; foredraft accepts text parts only.")
        texts.append(part)
    return {**message, "content": "\n".join(texts)}


def check_same_tokenizer(target: Tokenizer | None, draft: Tokenizer | None, name: str) -> None:
    """Raise a ``DrafterError`` unless equal ids are equal tokens; padded sizes may differ."""
    if target is None or draft is None:
        return
    difference = target.first_difference(draft)
    if difference is not None:
        raise DrafterError(
            f"The draft {name!r} has another tokenizer than the target ({difference}); use universal:{name}, a draft "
            "of the target's model family, or a drafter without a model such as prompt_lookup."
        )
