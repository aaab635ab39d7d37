"""Grammars compiled for a tokenizer, and the state of a request in one: the only module that imports xgrammar.

Masks have a bit for each token of the target, padding included, and one more: the bit of ``end``, which is no token,
is set where the output is complete. So a request without end-of-sequence ids can end too.
"""

import importlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.model.text.byte_vocab import ByteVocab
from foredraft.model.text.ebnf import matching
from foredraft.model.text.json_schema import schema_rules
from foredraft.model.text.regex_reader import matched
from foredraft.model.text.tokenizer import Tokenizer

_CACHE_BYTES = 256 * 2**20
"""Compiled grammars that are kept."""
_TOKEN_SECONDS = 0.002
"""For the mask of a node, or for a token that is accepted; most take a tenth of this."""
_THREADS = min(8, os.cpu_count() or 1)
_UNUSED = 1024
"""Pieces behind the vocabulary that are no text, so no state of a grammar allows them. xgrammar (0.2.8) keeps the
tokens that a state rejects as a list if they are fewer than 1,000, and then checks tokens again that are uncertain in
another state although this one allows them; it takes milliseconds a token in strings of a limited length."""
_WRITTEN_BYTES = 256 * 1024
"""Of a compiled grammar that is quick to write and to read; one of 0.8 MB is 15 MB when written."""


class CompiledGrammar:
    """A grammar for one vocabulary. Requests share it."""

    def __init__(self, inner: Any, vocab_size: int, delay_seconds: float | None = None) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._delay_seconds = delay_seconds

    @property
    def bytes(self) -> int:
        """The memory that it takes, about."""
        return int(self._inner.memory_size_bytes)

    def written(self) -> str | None:
        """The grammar for ``GrammarCompiler.read``; None if compiling it again is quicker than reading it."""
        return str(self._inner.serialize_json()) if self.bytes <= _WRITTEN_BYTES else None

    def matcher(self, eos: Sequence[int]) -> "Matcher":
        """Start an output that these end-of-sequence ids end; those beyond the vocabulary never do."""
        known = sorted(each for each in eos if 0 <= each < self._vocab_size)
        inner = _xgrammar().GrammarMatcher(self._inner, override_stop_tokens=[*known, self._vocab_size])
        return Matcher(inner, frozenset(eos), self._vocab_size, self._delay_seconds)


class Matcher:
    """The state of an output in its grammar.

    Args:
        delay_seconds: the time that it may take in all, beyond ``_TOKEN_SECONDS`` a token; see ``masks``.
    """

    def __init__(self, inner: Any, eos: frozenset[int], vocab_size: int, delay_seconds: float | None = None) -> None:
        self._left = delay_seconds
        self._inner = inner
        self._eos = eos
        self._end = vocab_size
        self.ended = False  # complete, and no token may follow

    def masks(self, tokens: list[int], parents: list[int]) -> Int[Tensor, "N W"]:
        """The legal tokens at each node of a draft tree, 32 in a word, the lowest in its lowest bit.

        Everything is legal at nodes that cannot be reached: below illegal tokens, behind the output's end, and at
        padding. So these have a law too.

        Args:
            tokens, parents: of the tree's nodes (see ``TokenTree``); the root's token has been accepted.

        Raises:
            OptionError: this output has taken too long. Where a text can be read in many ways, the time grows with its
                length, and all rows of the batch wait for it.
        """
        began = time.thread_time()
        masks = self._masks(tokens, parents)
        self._charge(began, len(tokens))
        if self._left is not None and self._left < 0:
            raise OptionError(
                "The grammar delays other requests by more than this server allows (--grammar-delay-seconds): write it "
                "so that a text can be read in one way only."
            )
        return masks

    def _charge(self, began: float, count: int) -> None:
        """Count the time of this thread since ``began``, beyond that of ``count`` tokens."""
        if self._left is not None:
            self._left -= max(0.0, time.thread_time() - began - _TOKEN_SECONDS * count)

    def _masks(self, tokens: list[int], parents: list[int]) -> Int[Tensor, "N W"]:
        count = len(tokens)
        masks = torch.full((count, mask_words(self._end)), -1, dtype=torch.int32)
        child, sibling = [-1] * count, [-1] * count
        for node in range(count - 1, 0, -1):
            if parents[node] >= 0:
                sibling[node], child[parents[node]] = child[parents[node]], node
        self._inner.traverse_draft_tree(torch.tensor(child), torch.tensor(sibling), torch.tensor(tokens), masks)
        words = masks.numpy()
        reached = [True] * count
        for node in range(count):
            token, parent = tokens[node], parents[node]
            if node > 0:
                legal = parent >= 0 and reached[parent] and _bit(words[parent], token)
                reached[node] = legal and token not in self._eos
            if not reached[node] or self._is_end(words[node]):
                words[node] = -1
                reached[node] = False
        return masks

    def advance(self, tokens: Sequence[int]) -> int:
        """Accept emitted tokens up to the output's end; the number accepted, less than all at an illegal one."""
        began = time.thread_time()
        accepted = 0
        for token in tokens:
            if self.ended or not self._inner.accept_token(token):
                break
            accepted += 1
            self.ended = token in self._eos or self._nothing_follows()
        self._charge(began, len(tokens))
        return accepted

    def _nothing_follows(self) -> bool:
        """Whether the output is complete and cannot be continued, nor ended by a token."""
        if self._eos or not self._inner.is_completed():
            return False
        mask = torch.empty(1, mask_words(self._end), dtype=torch.int32)
        self._inner.fill_next_token_bitmask(mask)
        return self._is_end(mask.numpy()[0])

    def _is_end(self, words: Any) -> bool:
        """Whether only the bit of the end is set."""
        if self._eos or not _bit(words, self._end):
            return False
        word, bit = divmod(self._end, 32)
        alone = int(words[word]) & 0xFFFFFFFF == 1 << bit
        return alone and not words[:word].any() and not words[word + 1 :].any()


def mask_words(vocab_size: int) -> int:
    """Words of a mask; bits behind the end's mean nothing."""
    return (vocab_size + _UNUSED) // 32 + 1


def _bit(words: Any, index: int) -> bool:
    return bool(int(words[index // 32]) >> index % 32 & 1)


class GrammarCompiler:
    """Compiles grammars for a target's tokens. Thread-safe.

    Grammars in use are not compiled again, nor are the last ones, as far as they fit into ``cache_bytes``.

    Args:
        tokenizer: None if the model came without one: grammars are then refused.
        vocab_size: the width of the target's logits. Special tokens and ids without a token are never legal.
        threads: that compile one grammar; each has a stack.

    ``delay_seconds``: of the grammars that are compiled from now on, see ``Matcher``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        cache_bytes: int = _CACHE_BYTES,
        threads: int = _THREADS,
    ) -> None:
        self.delay_seconds: float | None = None
        self._threads = threads
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Any = None
        self._tokens: Any = None
        self._lock = threading.Lock()
        self._in_use: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._cached: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # the last used at the end
        self._free = cache_bytes

    def __call__(self, grammar: Grammar | None) -> CompiledGrammar | None:
        """The compiled grammar; None for None.

        Raises:
            OptionError: the grammar is not valid, or xgrammar or a tokenizer is missing.
            MemoryError: there is not enough memory.
        """
        if grammar is None:
            return None
        found = self.known(grammar)
        if found is None:
            self.prepare()
            try:
                found = CompiledGrammar(_compiled(self._compiler, grammar), self._vocab_size, self.delay_seconds)
            except UnicodeDecodeError:  # of xgrammar's own message, which may cut a character
                raise OptionError(f"The {grammar.kind} grammar is not valid.") from None
            except RuntimeError as error:
                if "bad_alloc" in str(error):
                    raise MemoryError("There is not enough memory to compile the grammar.") from None
                raise OptionError(f"The {grammar.kind} grammar is not valid: {_reason(error)}") from None
            self._keep(grammar, found)
        return found

    def read(self, grammar: Grammar, written: str) -> CompiledGrammar:
        """Take over a grammar that a compiler for the same tokens has written."""
        self.prepare()
        inner = _xgrammar().CompiledGrammar.deserialize_json(written, self._tokens)
        found = CompiledGrammar(inner, self._vocab_size, self.delay_seconds)
        self._keep(grammar, found)
        return found

    def known(self, grammar: Grammar) -> CompiledGrammar | None:
        """The grammar if it has been compiled already."""
        with self._lock:
            if grammar in self._cached:
                self._cached.move_to_end(grammar)
            return self._in_use.get(grammar)

    def prepare(self) -> None:
        """Make what all grammars share, for which the first one would wait.

        Raises:
            OptionError: xgrammar or a tokenizer is missing.
        """
        with self._lock:
            if self._compiler is not None:
                return
            if self._tokenizer is None:
                raise OptionError(
                    "A grammar needs the model's tokenizer, and this model came without one: pass tokenizer=... "
                    "to load."
                )
            xgrammar = _xgrammar()
            size = self._vocab_size
            unused = [b"\xff%d" % index for index in range(_UNUSED)]
            self._tokens = xgrammar.TokenizerInfo(
                [*ByteVocab(self._tokenizer, size).pieces[:size], b"", *unused],
                xgrammar.VocabType.RAW,
                vocab_size=size + 1 + _UNUSED,
                stop_token_ids=[size],
            )
            self._compiler = xgrammar.GrammarCompiler(self._tokens, max_threads=self._threads, cache_enabled=False)

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        with self._lock:
            if grammar in self._in_use:  # another thread was faster
                return
            self._in_use[grammar] = self._cached[grammar] = compiled
            self._free -= _held(grammar, compiled)
            while self._free < 0:
                self._free += _held(*self._cached.popitem(last=False))


def _held(grammar: Grammar, compiled: CompiledGrammar) -> int:
    """Bytes of a grammar in the cache."""
    return len(grammar.text) + compiled.bytes


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    if grammar.kind == "structural_tag":
        return compiler.compile_structural_tag(json.dumps(_with_rules(json.loads(grammar.text))))
    if grammar.kind == "json_schema":
        return compiler.compile_grammar(schema_rules(json.loads(grammar.text)))
    return compiler.compile_grammar(_of_regex(grammar.text) if grammar.kind == "regex" else grammar.text)


def _of_regex(pattern: str) -> str:
    """The grammar of a regular expression, which the whole text matches."""
    try:
        return f"root ::= {matching(matched(pattern))}\n"
    except OptionError as error:
        raise OptionError(f"The regex grammar is not valid: {error}") from None


def _with_rules(tag: Any) -> Any:
    """A structural tag with our grammars of JSON schemas and regular expressions.

    White space between parts of JSON is as the model likes it, one character at most.
    """
    if isinstance(tag, list):
        return [_with_rules(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        space = f"[ \\n\\r\\t]{{0,{_most_space(tag)}}}"
        return {"type": "grammar", "grammar": schema_rules(tag["json_schema"], space=space)}
    if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
        return {"type": "grammar", "grammar": _of_regex(tag["pattern"])}
    return {key: _with_rules(value) for key, value in tag.items()}


def _most_space(part: dict[str, Any]) -> int:
    """White space between the tokens of a structural tag's JSON.

    Raises:
        OptionError: the part asks for what xgrammar's own converter of schemas does, which is not used.
    """
    plain = {"type": "json_schema", "style": "json", "any_order": False, "excludes": []}
    for key, value in part.items():
        if key not in ("json_schema", "max_whitespace_cnt") and (key not in plain or value != plain[key]):
            raise OptionError(f"{key} {value!r} of a structural tag's JSON schema is not supported.")
    most = part.get("max_whitespace_cnt", 1)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise OptionError(f"max_whitespace_cnt of a structural tag must be a whole number, 1 or more, not {most!r}.")
    return most


def _xgrammar() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ImportError:
        raise OptionError("A grammar needs the package xgrammar: pip install 'foredraft[grammar]'.") from None


def _reason(error: RuntimeError) -> str:
    """xgrammar's reason without its source line, one sentence."""
    first = str(error).strip().splitlines()[0]
    text = re.sub(r"^(\[[\d:]+\] \S+\.(?:cc|h):\d+: )?(Check failed: \(.*?\) is false: ?)?", "", first).strip()
    return text if text.endswith(".") else f"{text}."
