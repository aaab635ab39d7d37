"""Training data from the target's own outputs: answers to prompts from the data, generated with speculation.

A head trained on its target's outputs drafts better than one trained on other text.
"""

import contextlib
import json
import os
import shutil
import time
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import DataError
from foredraft.core.io import json_object
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.checkpoint import Report, lock_folder
from foredraft.train.data.sources import Sample, read_sources, sample_of, template_error

if TYPE_CHECKING:
    from accelerate import Accelerator

_SECONDS = 5.0
"""Seconds between progress reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateOptions:
    """How to generate answers.

    count: number of prompts, spread evenly over the data.
    prompt_tokens: length of the prompt from a text; in a chat, the turns before each answer are the prompt.
    new_tokens, temperature: maximum tokens and temperature of each answer.
    batch: answers per batch.
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
    options: RegenerateOptions,
    report: Report = lambda line: None,
    accelerator: "Accelerator | None" = None,
) -> Path:
    """Write the target's answers as JSON Lines of ids; resumes an interrupted call.

    Args:
        report: called at the start, every few seconds and after each batch, with the number of ``answers`` of this
            process, the total ``of``, and later the estimated seconds ``left``.
        accelerator: of several processes that answer a part of the prompts each; the file is that of one process.

    Raises:
        DataError: a source cannot be read, or has no prompts.
        OptionError: another call writes this file.
    """
    assert generator.tokenizer is not None
    prompts = _evenly(list(_prompts(read_sources(sources), generator.tokenizer, options.prompt_tokens)), options.count)
    if not prompts:
        raise DataError(f"No prompts in {', '.join(sources)}: add texts or chats.")
    if accelerator is None or accelerator.num_processes == 1:
        with lock_folder(out.parent, f".{out.name}.lock"):
            _answer(generator, prompts, 0, out, options, report)
        return out
    with lock_folder(out.parent, f".{out.name}.lock") if accelerator.is_main_process else contextlib.nullcontext():
        before = _answered(out, prompts)
        index, processes, left = accelerator.process_index, accelerator.num_processes, len(prompts) - before
        bounds = [before + left * part // processes for part in range(processes + 1)]
        files = [out.with_name(f".{out.name}.{begin}-{end}") for begin, end in pairwise(bounds)]
        accelerator.wait_for_everyone()  # all have read the file
        mine = prompts[bounds[index] : bounds[index + 1]]
        _answer(generator, mine, bounds[index], files[index], options, report)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _append(out, files)
        accelerator.wait_for_everyone()
    return out


def _answer(
    generator: Generator,
    prompts: list[list[int]],
    first: int,
    out: Path,
    options: RegenerateOptions,
    report: Report,
) -> None:
    """Append to ``out`` what it lacks of the answers to these prompts, whose numbers begin with ``first``."""
    before = _answered(out, prompts)
    report({"answers": before, "of": len(prompts)})
    progress = _Progress(report, before, len(prompts))
    with out.open("a", encoding="utf-8") as file:
        for begin in range(before, len(prompts), options.batch):
            batch = prompts[begin : begin + options.batch]
            made = _answers(generator, batch, first + begin + 1, options, progress.running)
            with contextlib.closing(made) as answers:
                for prompt, answer in zip(batch, answers, strict=True):
                    file.write(json.dumps({"ids": prompt + answer, "prompt_length": len(prompt)}) + "\n")
                    file.flush()
                    progress.written += 1
            progress.report()


def _append(out: Path, files: list[Path]) -> None:
    """Move the contents of the files to the end of ``out``; a call that is killed here resumes at any whole line."""
    with out.open("ab") as whole:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, whole)
    for file in out.parent.glob(f".{out.name}.*-*"):  # also of calls with another number of processes
        file.unlink()


class _Progress:
    """Reports the number of written answers and the estimated time left."""

    def __init__(self, report: Report, before: int, total: int) -> None:
        self._report, self._before, self._total = report, before, total
        self._begin = self._reported = time.perf_counter()
        self.written = before

    def running(self, unwritten: float) -> None:
        """Report every few seconds; ``unwritten`` counts answers not yet in the file, unfinished ones as fractions."""
        if time.perf_counter() - self._reported >= _SECONDS and unwritten > 0:
            self.report(unwritten)

    def report(self, unwritten: float = 0.0) -> None:
        self._reported, done = time.perf_counter(), self.written + unwritten
        left = (self._reported - self._begin) / (done - self._before) * (self._total - done)
        self._report({"answers": self.written, "of": self._total, "left": round(left, 1)})


def _answers(
    generator: Generator,
    prompts: list[list[int]],
    seed: int,
    options: RegenerateOptions,
    running: Callable[[float], None],
) -> abc.Generator[list[int], None, None]:
    """Answer prompts in one batch, each request with its own seed.

    ``running`` is called after each step with the number of answers not yet yielded, unfinished ones as fractions.
    """
    sequences = []
    for number, prompt in enumerate(prompts, start=seed):
        params = SamplingParams(max_new_tokens=options.new_tokens, temperature=options.temperature, seed=number)
        sequences += generator.submit([prompt], params)
    try:
        for place, sequence in enumerate(sequences):
            while not sequence.finished:
                generator.engine.step()
                running(sum(_fraction(each, options) for each in sequences[place:]))
            if sequence.error is not None:
                raise sequence.error
            yield sequence.tokens
    finally:  # also after an interruption or a write error
        generator.engine.cancel(sequences)


def _fraction(sequence: Sequence, options: RegenerateOptions) -> float:
    return 1.0 if sequence.finished else len(sequence.tokens) / options.new_tokens


def _prompts(samples: Iterator[Sample], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    for sample in samples:
        if sample.messages is not None:
            for number, turn in enumerate(sample.messages):
                if turn["role"] == "assistant" and number:
                    yield _chat_prompt(sample, tokenizer, number)
        elif sample.text is not None:
            ids = tokenizer.encode_many([sample.text[: 16 * length]])[0][:length]
            if len(ids) >= 2:
                yield ids


def _chat_prompt(sample: Sample, tokenizer: Tokenizer, turns: int) -> list[int]:
    """Ids of a chat's first turns, with the generation prompt."""
    try:
        return tokenizer.encode_chat((sample.messages or [])[:turns])
    except Exception as error:  # templates raise any exception
        raise template_error(sample, error) from error


def _evenly(prompts: list[list[int]], count: int) -> list[list[int]]:
    if len(prompts) <= count:
        return prompts
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _answered(path: Path, prompts: list[list[int]]) -> int:
    """Number of answers in the file; an incomplete last one is dropped.

    Raises:
        DataError: the answers are to other prompts.
    """
    if not path.exists():
        return 0
    whole = path.read_bytes()
    *lines, torn = whole.decode("utf-8", errors="replace").split("\n")
    if torn:
        os.truncate(path, whole.rfind(b"\n") + 1)
    for line, prompt in zip(lines, prompts, strict=False):
        sample = sample_of(json_object(line, str(path)), str(path))
        if (sample.ids or [])[: sample.prompt_length] != prompt:
            raise DataError(f"{path} has answers to other prompts; delete it, or use another folder.")
    return len(lines)
