"""Texts as token ids on disk, once, and windows of equal length over them.

Documents follow each other in one long row of ids, as they did when the target was trained; a window may begin and
end anywhere. A byte beside each id says whether it counts in the loss.
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
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.data.sources import Sample, files_of, read_sources, refused

_BATCH = 256  # documents given to the tokenizer at once


@dataclass(frozen=True, slots=True)
class TokenStore:
    """``ids`` and ``counts`` are of equal length; ``counts`` is 1 where the loss looks at a token.

    ``folder`` is where they are, and what else is made of this text may be kept.
    """

    ids: np.ndarray
    counts: np.ndarray
    folder: Path

    @classmethod
    def build(cls, folder: Path, sources: list[str], tokenizer: Tokenizer, end: int | None) -> "TokenStore":
        """Read what an earlier run has left in ``folder``, or make it: whole or not at all.

        Args:
            end: the id that is put after each document; None for none.

        Raises:
            DataError: a source that cannot be read, or nothing to learn from.
        """
        key = _fingerprint(sources, tokenizer, end)
        place = folder / f"tokens-{key}"
        if not place.is_dir():
            _build(place, encoded(read_sources(sources), tokenizer, end))
        store = cls(np.load(place / "ids.npy", mmap_mode="r"), np.load(place / "counts.npy", mmap_mode="r"), place)
        if not store.counts.any():
            raise DataError(f"There is nothing to learn from in {', '.join(sources)}: no token counts.")
        return store

    def windows(self, length: int) -> int:
        return len(self.ids) // length

    def window(self, number: int, length: int) -> tuple[Int[Tensor, "T"], Float[Tensor, "T"]]:
        """Ids, and what the token after each of them counts."""
        begin = number * length
        ids = torch.from_numpy(self.ids[begin : begin + length].astype(np.int64))
        counts = torch.from_numpy(self.counts[begin : begin + length + 1].astype(np.float32))
        following = counts[1:]
        if following.shape[0] < length:
            following = torch.cat([following, counts[-1:]])
        return ids, following


def encoded(samples: Iterable[Sample], tokenizer: Tokenizer, end: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Ids of each document and what counts: everything in a text, the assistant's turns in a chat, and what the
    target has said itself after a prompt."""
    texts: list[str] = []
    tail = [] if end is None else [end]
    for sample in samples:
        if sample.text is not None:
            texts.append(sample.text)
            if len(texts) < _BATCH:
                continue
        for ids in tokenizer.encode_many(texts):
            yield ids + tail, [1] * (len(ids) + len(tail))
        texts.clear()
        if sample.messages is not None:
            yield _turns(sample, tokenizer)
        elif sample.ids is not None:
            own = len(sample.ids) - sample.prompt_length
            yield sample.ids, [0] * sample.prompt_length + [1] * own
    for ids in tokenizer.encode_many(texts):
        yield ids + tail, [1] * (len(ids) + len(tail))


def _turns(sample: Sample, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    try:
        return tokenizer.encode_turns(sample.messages or [])
    except Exception as error:  # a template raises what it likes
        raise refused(sample, error) from error


def _build(place: Path, documents: Iterator[tuple[list[int], list[int]]]) -> None:
    """Fill a folder that nobody else fills, and give it its name when it is whole; the first to be ready wins."""
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, documents)
        partial.rename(place)
    except OSError as error:
        if not place.is_dir():
            raise DataError(f"The tokens of the training text cannot be written to {place.parent}: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, documents: Iterator[tuple[list[int], list[int]]]) -> None:
    ids, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)]
    for tokens, mask in documents:
        ids.append(np.asarray(tokens, np.int32))
        counts.append(np.asarray(mask, np.uint8))
    np.save(folder / "ids.npy", np.concatenate(ids))
    np.save(folder / "counts.npy", np.concatenate(counts))


def _fingerprint(sources: list[str], tokenizer: Tokenizer, end: int | None) -> str:
    """The same for the same sources (by name, size and time of writing) and the same tokenizer."""
    facts: list[object] = [end, tokenizer.fingerprint()]
    for source in sources:
        files = files_of(Path(source))
        facts.append([source, [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
