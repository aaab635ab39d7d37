"""The tokenizer of a GGUF file, equal to the one that the file was made from."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer as Backend, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foredraft.core.errors import first_line
from foredraft.model.gguf.config import CONTROL, end_ids, token_id
from foredraft.model.gguf.file import GgufError, GgufFile, shown
from foredraft.model.gguf.pre_tokenizers import SPLITS, Split, fitting_split

_log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED = 1, 2, 4, 5
_SPACE = "▁"
_LONGEST_PIECE = 64
"""Characters of a SentencePiece token of which the merges are looked for; the longest real ones are runs of spaces."""


class UnknownTokenizer(GgufError):
    """The file's tokenizer is of a kind that cannot be rebuilt."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id, with their types, scores and merges (None if the file has none)."""

    tokens: list[str]
    kinds: np.ndarray
    scores: np.ndarray
    merges: list[tuple[str, str]] | None
    ids: dict[str, int]

    def of_kind(self, *kinds: int) -> list[str]:
        return [self.tokens[index] for index in np.flatnonzero(np.isin(self.kinds, kinds)).tolist()]


class _Uncopied:
    """Gives a new backend where transformers would copy it, which takes longer than to build it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Backend:
        return self._backend


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer in a file, with special tokens and chat templates.

    Raises:
        UnknownTokenizer: the file has none, or one of an unknown kind.
        GgufError: it is damaged.
    """
    model = file.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        what = "no tokenizer" if model is None else f"a tokenizer of the kind {shown(model)}"
        raise UnknownTokenizer(
            f"{file.path!r} has {what}; byte-level BPE (gpt2) and SentencePiece (llama) are supported."
        )
    vocabulary = _vocabulary(file)
    split = None
    if model == "gpt2":
        split = SPLITS[name := _split_name(file, vocabulary)]
        if not _names_split(file):
            _log.warning(
                "%s does not name the split of its tokenizer: %s fits its tokens and is used. If token ids are wrong, "
                "pass the original tokenizer.",
                file.path,
                name,
            )
    try:
        backend = _sentence_piece(file, vocabulary) if split is None else _byte_level(file, vocabulary, split)
        _add_special(backend, vocabulary, sentence_piece=split is None)
        backend.post_processor = _post_processor(file, vocabulary, split)
        named = {key: vocabulary.tokens[number] for key, number in _special(file).items()}
        return PreTrainedTokenizerFast(
            tokenizer_object=_Uncopied(backend),
            clean_up_tokenization_spaces=False,
            chat_template=chat_template_of(file),
            **named,
        )
    except GgufError:
        raise
    except Exception as error:  # the tokenizers library raises many types
        raise GgufError(f"The tokenizer of {file.path!r} is damaged: {first_line(error)[:200].rstrip('.')}.") from error


def _vocabulary(file: GgufFile) -> _Vocabulary:
    found: dict[str, Any] = {
        key: file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "scores", "merges")
    }
    tokens, merges = found["tokens"], found["merges"]
    if not isinstance(tokens, list) or not tokens:
        raise GgufError(f"The tokenizer of {file.path!r} is damaged: it has no tokens.")
    kinds = _numbers(file, "token_type", found["token_type"], len(tokens), _NORMAL).copy()
    kinds[end_ids(file)] = CONTROL  # whatever the file says, they are no text
    scores = _numbers(file, "scores", found["scores"], len(tokens), 0)
    ids = {
        token: index
        for index, token in enumerate(tokens)
        if kinds[index] != _UNUSED or not re.fullmatch(r"\[PAD\d+\]", token)  # put there by the converter
    }
    if len(ids) < len(tokens) - int((kinds == _UNUSED).sum()):
        raise GgufError(f"The tokenizer of {file.path!r} is damaged: it has tokens twice.")
    pairs = None
    if isinstance(merges, list):
        cuts = [merge.find(" ", 1) for merge in merges]
        pairs = [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]
        if -1 in cuts:
            raise GgufError(f"The tokenizer of {file.path!r} is damaged: the merge {cuts.index(-1)} is no pair.")
    return _Vocabulary(tokens, kinds, scores, pairs, ids)


def _numbers(file: GgufFile, key: str, value: Any, count: int, default: int) -> np.ndarray:
    """An array with a number for each token."""
    if value is None:
        return np.full(count, default)
    if not isinstance(value, np.ndarray) or len(value) < count or not np.isfinite(value).all():
        raise GgufError(f"The tokenizer of {file.path!r} is damaged: its {key} is no array of {count} numbers.")
    return value[:count]


def tokenizer_kind(file: GgufFile) -> str:
    """A name for the kind of a tokenizer that ``tokenizer_of`` reads, for people."""
    if file.text("tokenizer.ggml.model") == "llama":
        return "SentencePiece"
    guessed = "" if _names_split(file) else " (not named by the file)"
    return f"byte-level BPE, split {_split_name(file, _vocabulary(file))}{guessed}"


def _names_split(file: GgufFile) -> bool:
    return file.text("tokenizer.ggml.pre") not in (None, "", "default")


def _split_name(file: GgufFile, vocabulary: _Vocabulary) -> str:
    """The split before BPE: the file's own, or the one that fits its tokens.

    Raises:
        UnknownTokenizer: the file names one that is not known, or has no tokens of several characters.
    """
    name = file.text("tokenizer.ggml.pre")
    if _names_split(file):
        if name not in SPLITS:
            raise UnknownTokenizer(
                f"{file.path!r} names the unknown split {shown(name)} of its tokenizer, without which its tokens would "
                "be others."
            )
        return name
    tokens = [vocabulary.tokens[index] for index in vocabulary.ids.values() if vocabulary.kinds[index] == _NORMAL]
    found = fitting_split(tokens)
    if found is None:
        raise UnknownTokenizer(f"{file.path!r} does not name the split of its tokenizer, and none fits its tokens.")
    return found


def _byte_level(file: GgufFile, vocabulary: _Vocabulary, split: Split) -> Backend:
    """Byte-level BPE."""
    if vocabulary.merges is None:
        raise GgufError(f"The tokenizer of {file.path!r} is damaged: it has no merges.")
    backend = Backend(BPE(vocabulary.ids, vocabulary.merges, ignore_merges=split.whole_words))
    if (normalizer := split.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(file: GgufFile, vocabulary: _Vocabulary) -> Backend:
    """SentencePiece's BPE: spaces are a character of their own, and characters without a token become bytes."""
    gemma = (file.text("general.architecture") or "").startswith("gemma")
    if gemma:  # its runs of spaces are written as spaces
        ids = {
            _SPACE * len(token) if token.strip(" ") == "" else token: index for token, index in vocabulary.ids.items()
        }
    else:
        ids = vocabulary.ids
    merges = vocabulary.merges if vocabulary.merges is not None else _merges(vocabulary, ids, by_score=not gemma)
    unknown = vocabulary.of_kind(_UNKNOWN)
    backend = Backend(BPE(ids, merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True))
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    if not prefix:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(vocabulary: _Vocabulary, ids: Mapping[str, int], *, by_score: bool) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, best first.

    By scores, tokens of one score by id; or by ids alone, which is Gemma's order.
    """
    spaces = {token for token in ids if token.strip(_SPACE) == ""}
    usable = {token: index for token, index in ids.items() if vocabulary.kinds[index] == _NORMAL or token in spaces}
    scores = vocabulary.scores if by_score else np.zeros(len(vocabulary.tokens))
    order = sorted(usable, key=lambda token: (-scores[usable[token]], usable[token]))
    found = []
    for token in order:
        if len(token) > _LONGEST_PIECE:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in usable and pair[1] in usable]
        found += sorted(known, key=lambda pair: (-len(pair[0]), usable[pair[0]], usable[pair[1]]))
    return found


def _add_special(backend: Backend, vocabulary: _Vocabulary, *, sentence_piece: bool) -> None:
    """Control tokens, which text means as they stand, and the user's own, which are ordinary text."""
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_kind(CONTROL, _UNKNOWN) if token]
    )
    own = [
        token for token in vocabulary.of_kind(_USER_DEFINED) if token and not (sentence_piece and not token.strip(" "))
    ]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _special(file: GgufFile) -> dict[str, int]:
    """Ids of the special tokens by transformers' names."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {f"{theirs}_token": token_id(file, ours) for ours, theirs in names.items()}
    return {name: number for name, number in found.items() if number is not None}


def _post_processor(file: GgufFile, vocabulary: _Vocabulary, split: Split | None) -> processors.PostProcessor:
    """Adds the first and the last token as the file says. ``split``: None for SentencePiece."""
    special = _special(file)
    begins = split is None or split.bos
    wanted = {"bos_token": ("add_bos_token", begins), "eos_token": ("add_eos_token", False)}
    added = {
        name: special[name]
        for name, (key, default) in wanted.items()
        if name in special and file.metadata.get(f"tokenizer.ggml.{key}", default) is True
    }
    named = {name: vocabulary.tokens[number] for name, number in added.items()}
    before, behind = ([named[name]] if name in named else [] for name in ("bos_token", "eos_token"))
    ends = [(named[name], number) for name, number in added.items()]
    template = processors.TemplateProcessing(
        single=_template(before, "A", 0, behind),
        pair=[*_template(before, "A", 0, behind), *_template(before, "B", 1, behind)],
        special_tokens=list(dict(ends).items()),
    )
    if split is None:
        return template
    return processors.Sequence([processors.ByteLevel(trim_offsets=True), template])


def _template(before: Sequence[str], text: str, kind: int, behind: Sequence[str]) -> list[str]:
    return [*(f"{each}:{kind}" for each in before), f"${text}:{kind}", *(f"{each}:{kind}" for each in behind)]


def chat_template_of(file: GgufFile) -> str | dict[str, str] | None:
    """The chat template, or all of them by name; the first is the default where none has this name."""
    default = file.text("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates")
    others = {name: file.text(f"tokenizer.chat_template.{name}") for name in names} if isinstance(names, list) else {}
    found = {name: text for name, text in {"default": default, **others}.items() if text is not None}
    if len(found) < 2:
        return next(iter(found.values()), None)
    return {"default": next(iter(found.values())), **found}
