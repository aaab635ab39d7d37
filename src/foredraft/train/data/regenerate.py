"""Texts in the target's own words: prompts from the data, continued by the loop itself, speculation and all.

A head that is trained on what its target says drafts better than one trained on what others wrote.
"""

import contextlib
import json
import os
import time
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.checkpoint import alone
from foredraft.train.data.sources import Sample, parsed, read_sources, refused, sample_of

_SECONDS = 5.0
"""Between two lines on the progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How answers are made.

    count: prompts that are taken, evenly from all of the data.
    prompt_tokens: a text is cut to so many tokens, of which the rest is said anew; of a chat, each question is asked.
    new_tokens, temperature: of each answer.
    batch: answers at once.
    """

    count: int = 2000
    prompt_tokens: int = 48
    new_tokens: int = 208
    temperature: float = 0.8
    batch: int = 64


def regenerate(
    generator: Generator,
    sources: list[str],
    out: Path,
    options: Answers,
    tell: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Path:
    """Write the target's answers as JSON Lines of ids; go on where an earlier call was cut off.

    Args:
        tell: called at the start, every few seconds and after each batch, with the ``answers`` that are in the file,
            ``of`` how many, and after the start the seconds ``left`` at this call's pace.

    Raises:
        DataError: a source that cannot be read, or no prompts in it.
        OptionError: another call writes this file.
    """
    assert generator.tokenizer is not None
    prompts = _evenly(list(_prompts(read_sources(sources), generator.tokenizer, options.prompt_tokens)), options.count)
    if not prompts:
        raise DataError(f"There are no prompts in {', '.join(sources)}.")
    with alone(out.parent, f".{out.name}.lock"):
        before = _answered(out, prompts)
        tell({"answers": before, "of": len(prompts)})
        progress = _Progress(tell, before, len(prompts))
        with out.open("a", encoding="utf-8") as file:
            for begin in range(before, len(prompts), options.batch):
                batch = prompts[begin : begin + options.batch]
                with contextlib.closing(_said(generator, batch, begin + 1, options, progress.running)) as answers:
                    for prompt, answer in zip(batch, answers, strict=True):
                        file.write(json.dumps({"ids": prompt + answer, "prompt_length": len(prompt)}) + "\n")
                        file.flush()
                        progress.written += 1
                progress.tell()
    return out


class _Progress:
    """Tells how many answers are written, and how long the rest will take."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], before: int, total: int) -> None:
        self._tell, self._before, self._total = tell, before, total
        self._begin = self._told = time.perf_counter()
        self.written = before

    def running(self, unwritten: float) -> None:
        """Tell now and then; ``unwritten`` counts answers that are not in the file yet, unfinished ones by a share."""
        if time.perf_counter() - self._told >= _SECONDS and unwritten > 0:
            self.tell(unwritten)

    def tell(self, unwritten: float = 0.0) -> None:
        self._told, done = time.perf_counter(), self.written + unwritten
        left = (self._told - self._begin) / (done - self._before) * (self._total - done)
        self._tell({"answers": self.written, "of": self._total, "left": round(left, 1)})


def _said(
    generator: Generator,
    prompts: list[list[int]],
    seed: int,
    options: Answers,
    running: Callable[[float], None],
) -> abc.Generator[list[int], None, None]:
    """Answers to these prompts, made together; each has a seed of its own, so neighbours draw different numbers.

    ``running`` is called after each step with the number of answers that are not handed out yet, where an unfinished
    one counts as a share.
    """
    sequences = []
    for number, prompt in enumerate(prompts, start=seed):
        params = SamplingParams(max_new_tokens=options.new_tokens, temperature=options.temperature, seed=number)
        sequences += generator.submit([prompt], params)
    try:
        for place, sequence in enumerate(sequences):
            while not sequence.finished:
                generator.engine.step()
                running(sum(_share(each, options) for each in sequences[place:]))
            if sequence.error is not None:
                raise sequence.error
            yield sequence.tokens
    finally:  # after an interruption, or a file that cannot be written
        generator.engine.cancel(sequences)


def _share(sequence: Sequence, options: Answers) -> float:
    return 1.0 if sequence.finished else len(sequence.tokens) / options.new_tokens


def _prompts(samples: Iterator[Sample], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    for sample in samples:
        if sample.messages is not None:
            for number, turn in enumerate(sample.messages):
                if turn["role"] == "assistant" and number:
                    yield _asked(sample, tokenizer, number)
        elif sample.text is not None:
            ids = tokenizer.encode_many([sample.text[: 16 * length]])[0][:length]
            if len(ids) >= 2:
                yield ids


def _asked(sample: Sample, tokenizer: Tokenizer, turns: int) -> list[int]:
    """Ids of the first turns of a chat, ready for the assistant's answer."""
    try:
        return tokenizer.encode_chat((sample.messages or [])[:turns])
    except Exception as error:  # a template raises what it likes
        raise refused(sample, error) from error


def _evenly(prompts: list[list[int]], count: int) -> list[list[int]]:
    if len(prompts) <= count:
        return prompts
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _answered(path: Path, prompts: list[list[int]]) -> int:
    """How many answers there are; one that was cut off is dropped.

    Raises:
        DataError: they answer other prompts.
    """
    if not path.exists():
        return 0
    whole = path.read_bytes()
    *lines, torn = whole.decode("utf-8", errors="replace").split("\n")
    if torn:
        os.truncate(path, whole.rfind(b"\n") + 1)
    for line, prompt in zip(lines, prompts, strict=False):
        sample = sample_of(parsed(line, str(path)), str(path))
        if (sample.ids or [])[: sample.prompt_length] != prompt:
            raise DataError(f"{path} holds answers to other prompts; delete it, or take another folder.")
    return len(lines)
