"""Text to ids and back, chats to prompts, and whether two tokenizers are one."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.core.errors import DrafterError, PromptError

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``; the content is a string, or a list of parts ``{"type": "text", "text": ...}``."""


class Tokenizer:
    """What foredraft needs of a transformers tokenizer."""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        """Ids of a text that begins a document: with whatever special tokens the tokenizer puts in front."""
        if not text:
            raise PromptError("The prompt is empty: there is nothing to continue.")
        return self._ids(text, special=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation in the model's chat template, ready for the assistant's answer."""
        if not messages:
            raise PromptError("The chat has no messages: there is nothing to answer.")
        plain = [_plain(message, number) for number, message in enumerate(messages, start=1)]
        if self.inner.chat_template is None:
            raise PromptError("The model has no chat template; give it a plain text instead of chat messages.")
        try:
            text: Any = self.inner.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse what they do not like in ways of their own
            said = str(error).strip() or error.__class__.__name__
            raise PromptError(f"The chat template refuses these messages: {said.splitlines()[0]}") from error
        return self._ids(text, special=False)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"The prompt is not valid Unicode: {error.reason} at character {error.start}.") from None
        return list(self.inner(text, add_special_tokens=special)["input_ids"])

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts at once, without special tokens; what is no valid Unicode becomes a question mark."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        return [list(ids) for ids in self.inner(clean, add_special_tokens=False)["input_ids"]] if clean else []

    def encode_turns(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ids of a whole conversation, and for each whether the assistant says it (1) or not (0).

        What the assistant says begins where the template asks for it and ends where the template closes its turn.
        """
        if self.inner.chat_template is None:
            raise PromptError("The model has no chat template; give it plain texts instead of chat messages.")
        turns = [dict(message) for message in messages]
        whole = self._rendered(turns)
        said = [0] * len(whole)
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                begin = len(self._rendered(turns[:number], add_generation_prompt=True))
                end = len(self._rendered(turns[: number + 1]))
                said[begin:end] = [1] * (end - begin)
        encoding = self.inner(whole, add_special_tokens=False, return_offsets_mapping=True)
        spans = encoding["offset_mapping"]
        return list(encoding["input_ids"]), [int(end > begin and said[begin] == 1) for begin, end in spans]

    def _rendered(self, turns: list[dict[str, str]], **options: Any) -> str:
        return str(self.inner.apply_chat_template(turns, tokenize=False, **options)) if turns else ""

    def fingerprint(self) -> str:
        """The same for tokenizers that give the same ids."""
        facts = [sorted(self.inner.get_vocab().items()), self.inner.chat_template]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def decode(self, tokens: list[int]) -> str:
        """Text of ids, special tokens left out, spaces as they are."""
        return str(self.inner.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def first_difference(self, other: "Tokenizer") -> str | None:
        """A sentence on where two tokenizers differ, or None if each id that both have is the same token.

        Vocabularies may be padded to different sizes; that is no difference.
        """
        mine = {index: token for token, index in self.inner.get_vocab().items()}
        theirs = {index: token for token, index in other.inner.get_vocab().items()}
        shared = mine.keys() & theirs.keys()
        odd = next((index for index in sorted(shared) if mine[index] != theirs[index]), None)
        if odd is not None:
            return f"token {odd} is {mine[odd]!r} in one and {theirs[odd]!r} in the other"
        fewer, more = sorted((len(mine), len(theirs)))
        if more - fewer > max(1024, more // 50):
            return f"one has {fewer} tokens and the other {more}"
        return None


def _plain(message: Message, number: int) -> dict[str, Any]:
    """A message whose content is a string: text parts are joined as they are."""
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
            raise PromptError(f"Chat message {number} has a part of type {kind!r}; foredraft reads text parts only.")
        texts.append(part)
    return {**message, "content": "".join(texts)}


def check_same_tokenizer(target: Tokenizer | None, draft: Tokenizer | None, name: str) -> None:
    """Raise a ``DrafterError`` unless the two give the same ids the same meaning; padded sizes may differ."""
    if target is None or draft is None:
        return
    difference = target.first_difference(draft)
    if difference is not None:
        raise DrafterError(
            f"The draft {name!r} has another tokenizer than the target ({difference}); let it draft as "
            f"universal:{name}, take a draft of the target's own family, or one that needs no model: prompt_lookup."
        )
