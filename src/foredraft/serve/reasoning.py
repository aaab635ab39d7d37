"""Reasoning at the beginning of an output, between ``<think>`` tags; calls that are quoted in it are none."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from foredraft.engine.detokenizer import Decode, IncrementalText
from foredraft.engine.results import Result
from foredraft.model.text.tokenizer import Tokenizer

BEGIN, END = TAGS = ("<think>", "</think>")
"""In some vocabularies special tokens, which are otherwise no text."""
_TAIL = 16
"""Tokens of a prompt that hold the tag at its end, written letter by letter and with line ends behind it."""


class Split(NamedTuple):
    """Reasoning, and what the output says."""

    reasoning: str
    content: str


class ReasoningParser:
    """Takes the text of one output as it comes. White space around the reasoning belongs to neither part.

    Args:
        begun: the prompt ends within the reasoning.
    """

    def __init__(self, begun: bool) -> None:
        self._begun = begun
        self._inside: bool | None = None  # None until it is known
        self._held = ""
        self._blank = True  # nothing but white space since the last tag

    def push(self, text: str) -> Split:
        """Add text; return what is final."""
        self._held += text
        if self._inside is None:
            start = self._held.lstrip()
            if BEGIN.startswith(start):  # perhaps a tag
                return Split("", "")
            tag = start.startswith(BEGIN)
            self._inside = tag or self._begun
            if not self._inside:
                self._blank = False
            elif tag:
                self._held = start.removeprefix(BEGIN)
        reasoning = ""
        if self._inside:
            before, tag, after = self._held.partition(END)
            if not tag:
                return Split(self._said(len(before) - _partial(before)), "")
            reasoning = self._said(len(before))
            self._held, self._inside, self._blank = after, False, True
        content = self._held.lstrip() if self._blank else self._held
        self._held, self._blank = "", self._blank and not content
        return Split(reasoning, content)

    def finish(self) -> Split:
        """The rest."""
        rest, self._held = self._held, ""
        if self._inside or (self._inside is None and self._begun):
            return Split(rest.strip() if self._blank else rest.rstrip(), "")
        return Split("", rest)

    def _said(self, most: int) -> str:
        """Take reasoning of at most so many characters from what is held, without white space around it."""
        text = self._held[:most].rstrip()
        self._held = self._held[len(text) :]
        if self._blank:
            text = text.lstrip()
            self._blank = not text
        return text


def split(text: str, begun: bool) -> Split:
    """Reasoning and content of a whole output."""
    parser = ReasoningParser(begun)
    first, rest = parser.push(text), parser.finish()
    return Split(first.reasoning + rest.reasoning, first.content + rest.content)


def begins(tokenizer: Tokenizer, prompt: Seq[int]) -> bool:
    """Whether a prompt ends with the tag that begins reasoning."""
    return tokenizer.decode(list(prompt[-_TAIL:]), special=True).rstrip().endswith(BEGIN)


def count_tokens(decode: Decode, result: Result, begun: bool) -> int:
    """Tokens of the reasoning of an output, tags included."""
    if not begun and not result.text.lstrip().startswith(BEGIN):
        return 0
    end = result.text.find(END) + len(END)
    if end < len(END):
        return len(result.tokens)
    count = characters = 0
    for piece in result.pieces:
        if characters + len(piece.text) >= end:
            text = IncrementalText(decode, result.tokens[:count])
            for token in piece.tokens:
                if characters >= end:
                    break
                characters += len(text.push([token]))
                count += 1
            break
        characters += len(piece.text)
        count += len(piece.tokens)
    return count


def _partial(text: str) -> int:
    """Length of the end of a text that may be the start of ``END``."""
    return next(size for size in range(len(END) - 1, -1, -1) if text.endswith(END[:size]))
