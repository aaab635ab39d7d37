"""Training data as token ids on disk, and windows of equal length over them.

Documents are concatenated, as in pre-training; windows may start and end anywhere. A byte per id says whether it
counts in the loss.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import DataError
from foredraft.engine.prefix_cache import common_prefix
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.model.text.vocab_mapping import VocabMapping
from foredraft.train.data.sources import ANYONE, AnsweredBy, Sample, answers_of, files_of, read_sources, template_error

_BATCH = 256  # documents per tokenizer call


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Token ids and, of equal length, ``counts``: 1 for tokens that count in the loss.

    ``folder`` holds them, and other files derived from the same data.
    """

    ids: np.ndarray
    counts: np.ndarray
    folder: Path

    @classmethod
    def build(
        cls,
        folder: Path,
        sources: list[str],
        tokenizer: Tokenizer,
        end: int | None,
        mapping: VocabMapping | None = None,
        by: AnsweredBy = ANYONE,
    ) -> "TokenStore":
        """Read the store of an earlier run from ``folder``, or build it atomically.

        Args:
            end, mapping: see ``encoded``.
            by: the target, by whom answers must be.

        Raises:
            DataError: a source cannot be read, an answer is another model's, or no token counts.
        """
        key = _fingerprint(sources, tokenizer, end, mapping, by)
        place = folder / f"tokens-{key}"
        if not place.is_dir():
            _build(place, encoded(answers_of(read_sources(sources), by), tokenizer, end, mapping))
        store = cls(np.load(place / "ids.npy", mmap_mode="r"), np.load(place / "counts.npy", mmap_mode="r"), place)
        if not store.counts.any():
            raise DataError(f"No token in {', '.join(sources)} counts in the loss: add texts or assistant turns.")
        return store

    def windows(self, length: int) -> int:
        return len(self.ids) // length

    def window(self, number: int, length: int) -> tuple[Int[Tensor, "T"], Float[Tensor, "T"]]:
        """Ids, and the loss weight of the token after each."""
        begin = number * length
        ids = torch.from_numpy(self.ids[begin : begin + length].astype(np.int64))
        counts = torch.from_numpy(self.counts[begin : begin + length + 1].astype(np.float32))
        following = counts[1:]
        if following.shape[0] < length:
            following = torch.cat([following, counts[-1:]])
        return ids, following


Document = tuple[list[int], list[int]]
"""Ids, and for each whether it counts in the loss."""


def encoded(
    samples: Iterable[Sample], tokenizer: Tokenizer, end: int | None, mapping: VocabMapping | None = None
) -> Iterator[Document]:
    """Each document: what counts is all of a text, the assistant's turns of a chat, the target's answer to a prompt.

    Args:
        end: id to append to texts; None for none.
        mapping: from the target's tokens, which answers are in, to the tokenizer's; None if they are the same.
    """
    texts: list[str] = []
    suffix = [] if end is None else [end]
    for sample in samples:
        if sample.text is not None:
            texts.append(sample.text)
            if len(texts) < _BATCH:
                continue
        for ids in tokenizer.encode_many(texts):
            yield ids + suffix, [1] * (len(ids) + len(suffix))
        texts.clear()
        if sample.messages is not None:
            yield _turns(sample, tokenizer)
        elif sample.ids is not None and mapping is not None:
            yield _converted(sample.ids, sample.prompt_length, mapping, suffix)
        elif sample.ids is not None:
            own = len(sample.ids) - sample.prompt_length
            yield sample.ids, [0] * sample.prompt_length + [1] * own
    for ids in tokenizer.encode_many(texts):
        yield ids + suffix, [1] * (len(ids) + len(suffix))


def _converted(ids: list[int], prompt_length: int, mapping: VocabMapping, suffix: list[int]) -> Document:
    """A prompt with its answer as a draft with another tokenizer reads them when it drafts. Of the special tokens that
    it lacks, the answer's end becomes its own."""
    made = mapping.to_draft(ids)
    prompt = common_prefix(mapping.to_draft(ids[:prompt_length]), made)
    if len(ids) > prompt_length and not mapping.to_draft(ids[-1:], first=False):
        made += suffix
    return made, [0] * prompt + [1] * (len(made) - prompt)


def _turns(sample: Sample, tokenizer: Tokenizer) -> Document:
    try:
        return tokenizer.encode_turns(sample.messages or [])
    except Exception as error:  # templates raise any exception
        raise template_error(sample, error) from error


def _build(place: Path, documents: Iterator[Document]) -> None:
    """Fill a temporary folder and rename it when complete; the first process to finish wins."""
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, documents)
        partial.rename(place)
    except OSError as error:
        if not place.is_dir():
            raise DataError(f"Cannot write the tokenized data to {place.parent}: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, documents: Iterator[Document]) -> None:
    ids, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)]
    for tokens, mask in documents:
        ids.append(np.asarray(tokens, np.int32))
        counts.append(np.asarray(mask, np.uint8))
    np.save(folder / "ids.npy", np.concatenate(ids))
    np.save(folder / "counts.npy", np.concatenate(counts))


def _fingerprint(
    sources: list[str], tokenizer: Tokenizer, end: int | None, mapping: VocabMapping | None, by: AnsweredBy
) -> str:
    """A hash of the sources (name, size, modification time), the tokenizer, the target and its tokens."""
    facts: list[object] = [end, tokenizer.fingerprint(), by.known]
    if mapping is not None:
        facts.append([mapping.target.names, [piece.hex() for piece in mapping.target.pieces]])
    for source in sources:
        files = files_of(Path(source))
        facts.append([source, [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
