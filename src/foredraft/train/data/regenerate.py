"""Training data from the target's own outputs: answers to prompts from the data, generated with speculation.

A head trained on its target's outputs drafts better than one trained on other text.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import DataError, PromptError
from foredraft.engine.generator import Generator
from foredraft.files.read import json_object
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.train.checkpoint import Report, lock_folder
from foredraft.train.data.answers import AnswerOptions, PendingAnswers, PromptPart
from foredraft.train.data.batches import LEAST_WINDOWS
from foredraft.train.data.sources import Sample, read_sources, sample_of, template_error

if TYPE_CHECKING:
    from accelerate import Accelerator

_NEXT = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateOptions(AnswerOptions):
    """How to generate answers, see ``AnswerOptions``, and to which prompts.

    count: number of prompts, spread evenly over the data.
    prompt_tokens: length of the prompt from a text; in a chat, the turns before each answer are the prompt.
    length: of the training windows that the answers must fill; 0: any.
    """

    count: int = 2000
    prompt_tokens: int = 48
    length: int = 0


def regenerate(
    generator: Generator,
    sources: list[str],
    out: Path,
    options: RegenerateOptions,
    report: Report = lambda line: None,
    accelerator: "Accelerator | None" = None,
) -> Path:
    """Write the target's answers as JSON Lines of ids; resumes an interrupted call, also in the middle of answers.

    Args:
        report: called with the progress of this process, see ``PendingAnswers``, and a ``note`` on prompts left out.
        accelerator: of several processes that answer a part of the prompts each; the file is that of one process.

    Raises:
        DataError: a source cannot be read or has no prompts, or the answers cannot fill the training windows, which is
            raised as soon as it is certain.
        OptionError: another call writes this file.
    """
    prompts = _chosen(generator, sources, options, report)
    return write_answers(generator, prompts, out, options, report, accelerator)


def write_answers(
    generator: Generator,
    prompts: list[list[int]],
    out: Path,
    options: RegenerateOptions,
    report: Report = lambda line: None,
    accelerator: "Accelerator | None" = None,
) -> Path:
    """As ``regenerate``, to these prompts."""
    first = accelerator is None or accelerator.is_main_process
    with lock_folder(out.parent, f".{out.name}.lock") if first else contextlib.nullcontext():
        before = _answered(out, prompts)
        size = _Size(prompts, before, options)
        if accelerator is None or accelerator.num_processes == 1:
            part = PromptPart(prompts, 0, out, len(before))
            _answer(generator, part, options, report, size)
            return out
        index, processes, left = accelerator.process_index, accelerator.num_processes, len(prompts) - len(before)
        bounds = [len(before) + left * part // processes for part in range(processes + 1)]
        files = [out.with_name(f".{out.name}.{begin}-{end}") for begin, end in pairwise(bounds)]
        accelerator.wait_for_everyone()  # all have read the file
        mine, file = prompts[bounds[index] : bounds[index + 1]], files[index]
        _answer(generator, PromptPart(mine, bounds[index], file, len(_answered(file, mine))), options, report)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _append(out, files)
        accelerator.wait_for_everyone()
    return out


class _Size:
    """The most tokens that prompts and answers can have, if all answers that have not ended have all of their tokens.

    Args:
        before: lengths of the answers that have ended.

    Raises:
        DataError: they do not fill the training windows.
    """

    def __init__(self, prompts: list[list[int]], before: list[int], options: RegenerateOptions) -> None:
        self._options = options
        missing = len(prompts) - len(before)
        self._most = sum(map(len, prompts)) + sum(before) + missing * options.new_tokens
        self._check(f"{len(prompts)} prompts with answers of {options.new_tokens} tokens")

    def ended(self, tokens: int) -> None:
        """Another answer has ended, after so many tokens."""
        self._most -= self._options.new_tokens - tokens
        self._check("Many answers end early, so prompts and answers")

    def _check(self, what: str) -> None:
        if self._options.length and self._most // self._options.length < LEAST_WINDOWS:
            raise DataError(
                f"{what} have at most {self._most} tokens, too few for {LEAST_WINDOWS} windows of "
                f"{self._options.length}: add data, raise --answers or --answer-tokens, or lower --length."
            )


def _chosen(generator: Generator, sources: list[str], options: RegenerateOptions, report: Report) -> list[list[int]]:
    """The prompts: those that fit into the model's context, of which ``options.count``."""
    found, fitting = fitting_prompts(generator, read_sources(sources), options)
    if not found or not fitting:
        reason = "; all are longer than the model's context" if found else ""
        raise DataError(f"No prompts in {', '.join(sources)}{reason}: add texts or chats.")
    if left_out := len(found) - len(fitting):
        report({"note": f"{left_out} of {len(found)} prompts are longer than the model's context and are left out"})
    return _evenly(fitting, options.count)


def fitting_prompts(
    generator: Generator, samples: Iterable[Sample], options: RegenerateOptions
) -> tuple[list[list[int]], list[list[int]]]:
    """All prompts of samples, and those that fit into the model's context with the longest answer."""
    assert generator.tokenizer is not None
    found = list(_prompts_of(samples, generator.tokenizer, options.prompt_tokens))
    return found, [prompt for prompt in found if _fits(generator, prompt, options)]


def _fits(generator: Generator, prompt: list[int], options: RegenerateOptions) -> bool:
    try:
        generator.engine.request(prompt, options.params(0), ())
    except PromptError:
        return False
    return True


def _answer(
    generator: Generator, part: PromptPart, options: RegenerateOptions, report: Report, size: _Size | None = None
) -> None:
    """Append to the file what it lacks of the answers."""
    with part.out.open("a", encoding="utf-8") as file:
        with contextlib.closing(iter(PendingAnswers(generator, part, options, report))) as answers:
            for prompt, answer in zip(part.prompts[part.before :], answers, strict=True):
                file.write(json.dumps({"ids": prompt + answer, "prompt_length": len(prompt)}) + "\n")
                file.flush()
                if size is not None:
                    size.ended(len(answer))


def _append(out: Path, files: list[Path]) -> None:
    """Move the contents of the files to the end of ``out``; a call that is killed here resumes at any whole line."""
    with out.open("ab") as whole:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, whole)
    for file in out.parent.glob(f".{out.name}.*-*"):  # also of calls with another number of processes
        file.unlink()


def _prompts_of(samples: Iterable[Sample], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """The prompts of samples: the turns before each answer of a chat and those of one that waits for its answer, and
    the first tokens of a text."""
    for sample in samples:
        if sample.messages is not None:
            for number, turn in enumerate([*sample.messages, _NEXT]):
                if turn["role"] == "assistant" and number and sample.messages[number - 1]["role"] != "assistant":
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


def _answered(path: Path, prompts: list[list[int]]) -> list[int]:
    """Lengths of the answers in the file; an incomplete last one is dropped.

    Raises:
        DataError: the answers are to other prompts.
    """
    if not path.exists():
        return []
    whole = path.read_bytes()
    *lines, torn = whole.decode("utf-8", errors="replace").split("\n")
    if torn:
        os.truncate(path, whole.rfind(b"\n") + 1)
    lengths = []
    for line, prompt in zip(lines, prompts, strict=False):
        sample = sample_of(json_object(line, str(path)), str(path))
        if (sample.ids or [])[: sample.prompt_length] != prompt:
            raise DataError(f"{path} has answers to other prompts; delete it, or use another folder.")
        lengths.append(len(sample.ids or []) - sample.prompt_length)
    return lengths
