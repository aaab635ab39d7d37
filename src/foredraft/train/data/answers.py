"""Answers of a generator to numbered prompts, many at once and in order, as training data; unfinished ones are kept on
disk.

Random numbers depend on a seed and a position alone (``core/rng``), so an answer that is continued as a longer prompt
is the answer that it would have been, up to rounding, where two tokens are almost equally likely.
"""

import contextlib
import itertools
import json
import os
import shutil
import time
from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import DataError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence
from foredraft.files.outputs import locked, may_cut, written_by
from foredraft.files.read import json_object
from foredraft.files.write import write_json
from foredraft.train.checkpoint import Report, changed_terms
from foredraft.train.data.sources import AnsweredBy, sample_of
from foredraft.train.interruptions import Interruptions
from foredraft.train.pace import SpeedMeter

if TYPE_CHECKING:
    from accelerate import Accelerator

_SECONDS = 5.0
"""Seconds between progress reports."""
_SAVE = 30.0
"""Seconds between savings of unfinished answers."""
_FEW = 8
"""With fewer finished answers than this, their mean length says nothing about the others."""
_WAITING = 16
"""Batches of finished answers that may wait in memory for a long one before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How to generate answers.

    new_tokens, temperature: maximum tokens and temperature of each answer.
    batch: answers that are generated at once.
    """

    new_tokens: int = 256
    temperature: float = 0.0
    batch: int = 32

    def params(self, seed: int, generated: int = 0) -> SamplingParams:
        """For an answer of which ``generated`` tokens exist."""
        return SamplingParams(max_new_tokens=self.new_tokens - generated, temperature=self.temperature, seed=seed)


def write_answers(
    generator: Generator,
    prompts: list[list[int]],
    out: Path,
    options: AnswerOptions,
    report: Report = lambda line: None,
    accelerator: "Accelerator | None" = None,
) -> Path:
    """Write the answers as JSON Lines of ids; resumes an interrupted call, also in the middle of answers.

    Args:
        report: called with the progress of this process, see ``PendingAnswers``.
        accelerator: of several processes that answer a part of the prompts each; the file is that of one process.

    Raises:
        DataError: the file has answers to other prompts, or something else.
        OptionError: another call writes this file, or began it with other options.
    """
    first = accelerator is None or accelerator.is_main_process
    by = AnsweredBy.of(generator.engine.target, generator.tokenizer)
    with locked(out.parent, f".{out.name}.lock") if first else contextlib.nullcontext():
        answered = _answered(out, prompts, by)
        if first:
            _check_terms(out, answered, {"new_tokens": options.new_tokens, "temperature": options.temperature})
        if accelerator is None or accelerator.num_processes == 1:
            _answer(generator, PromptPart(prompts, 0, out, answered, by), options, report)
            return out
        index, processes, left = accelerator.process_index, accelerator.num_processes, len(prompts) - answered
        bounds = [answered + left * part // processes for part in range(processes + 1)]
        files = [out.with_name(f".{out.name}.{begin}-{end}") for begin, end in pairwise(bounds)]
        accelerator.wait_for_everyone()  # all have read the file
        mine, file = prompts[bounds[index] : bounds[index + 1]], files[index]
        part = PromptPart(mine, bounds[index], file, _answered(file, mine, by), by)
        _answer(generator, part, options, report)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _append(out, files)
        accelerator.wait_for_everyone()
    return out


def _check_terms(out: Path, answered: int, terms: dict[str, Any]) -> None:
    """Refuse to continue a file with other options, which a hidden file beside it keeps."""
    path = out.with_name(f".{out.name}.run.json")
    if not answered:
        write_json(path, {**terms, **written_by("answers")}, DataError)
    elif changed := changed_terms(path, terms):
        raise OptionError(
            f"{out} was begun with another {', '.join(sorted(changed))}: use the same options to continue it, or "
            "another folder."
        )


def _answer(generator: Generator, part: "PromptPart", options: AnswerOptions, report: Report) -> None:
    """Append to the file what it lacks of the answers."""
    with part.out.open("a", encoding="utf-8") as file:
        with contextlib.closing(iter(PendingAnswers(generator, part, options, report))) as answers:
            for prompt, answer in zip(part.prompts[part.before :], answers, strict=True):
                row = {"ids": prompt + answer, "prompt_length": len(prompt), **part.by.known}
                file.write(json.dumps(row) + "\n")
                file.flush()


def _append(out: Path, files: list[Path]) -> None:
    """Move the contents of the files to the end of ``out``; a call that is killed here resumes at any whole line."""
    with out.open("ab") as whole:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, whole)
    for file in out.parent.glob(f".{out.name}.*-*"):  # also of calls with another number of processes
        file.unlink()


def _answered(path: Path, prompts: list[list[int]], by: AnsweredBy) -> int:
    """The number of answers in the file; an incomplete last one is dropped.

    Raises:
        DataError: the answers are to other prompts, or of another model.
    """
    if not path.exists():
        return 0
    whole = path.read_bytes()
    *lines, torn = whole.decode("utf-8", errors="replace").split("\n")
    if torn and not lines and not may_cut(whole, json.dumps({"ids": prompts[0]}).encode()[:-2]):
        raise DataError(f"{path} has something else than answers to these prompts; use another folder.")
    for line, prompt in zip(lines, prompts, strict=False):
        sample = sample_of(json_object(line, str(path)), str(path))
        if (sample.ids or [])[: sample.prompt_length] != prompt:
            raise DataError(f"{path} has answers to other prompts; delete it, or use another folder.")
        if (name := sample.by.other(by)) is not None:
            raise DataError(f"{path} has answers of another {name}; delete it, or use another folder.")
    if torn:
        os.truncate(path, whole.rfind(b"\n") + 1)
    return min(len(lines), len(prompts))


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Numbered prompts, and the file for their answers.

    first: number of the first prompt; the seed of the answer to prompt i is ``first + i + 1``.
    before: prompts that have an answer in the file.
    by: whose answers they are.
    """

    prompts: list[list[int]]
    first: int
    out: Path
    before: int
    by: AnsweredBy


@dataclass(slots=True, eq=False)
class _RunningAnswer:
    """An answer in the making: its number, the tokens that an earlier call made, and the request for the rest."""

    number: int
    earlier: list[int]
    sequence: Sequence | None

    @property
    def finished(self) -> bool:
        return self.sequence is None or self.sequence.finished

    @property
    def generated(self) -> list[int]:
        return self.sequence.tokens if self.sequence is not None else []

    @property
    def tokens(self) -> list[int]:
        return self.earlier + self.generated


class PendingAnswers:
    """Answers to the prompts that have none in the file yet.

    Args:
        report: called at the start, every few seconds and at the end with the number of ``answers`` before the next
            one, the total ``of``, and if known the tokens per second (``rate``) and the seconds ``left``, which are an
            upper ``bound`` until several answers have ended.
    """

    def __init__(self, generator: Generator, part: PromptPart, options: AnswerOptions, report: Report) -> None:
        self._generator, self._part, self._options = generator, part, options
        self._kept = _Kept(part, options)
        self._waiting = iter(range(part.before, len(part.prompts)))
        self._running: deque[_RunningAnswer] = deque()
        self._progress = _AnswerProgress(report, part.before, len(part.prompts), options.new_tokens)

    def __iter__(self) -> abc.Generator[list[int], None, None]:
        """The answers' tokens in order; rows that are free take the next prompts.

        When the iterator is closed, or the process is interrupted, unfinished answers are saved.
        """
        running, earlier = self._running, self._kept.read()
        self._progress.report(running)
        with Interruptions() as interruptions:
            try:
                while self._fill(earlier):
                    if not running[0].finished:
                        with interruptions.deferred():  # or half a step would be saved
                            self._generator.engine.step()
                        self._progress.update(running)
                        self._kept.save_sometimes(running)
                        continue
                    if running[0].sequence is not None and running[0].sequence.error is not None:
                        raise running[0].sequence.error
                    yield running[0].tokens
                    self._progress.wrote(running.popleft())
                    if not running:
                        self._progress.report(running)
            finally:
                with interruptions.deferred():
                    self._generator.engine.cancel([each.sequence for each in running if each.sequence is not None])
                    self._kept.save(running)

    def _fill(self, earlier: dict[int, list[int]]) -> bool:
        """Start answers until a batch is running. False if nothing is left."""
        free = self._options.batch - sum(not each.finished for each in self._running)
        capacity = _WAITING * self._options.batch - len(self._running)
        for number in itertools.islice(self._waiting, max(0, min(free, capacity))):
            known, sequence = earlier.get(number, []), None
            if len(known) < self._options.new_tokens and not set(known[-1:]) & set(self._generator.eos_token_ids):
                params = self._options.params(self._part.first + number + 1, len(known))
                sequence = self._generator.submit([self._part.prompts[number] + known], params)[0]
            self._running.append(_RunningAnswer(number, known, sequence))
        return bool(self._running)


class _Kept:
    """A file beside the answers with those that are not finished, or wait for one before them; replaced atomically.

    A later call with the same options reads it; what does not fit its prompts is ignored.
    """

    def __init__(self, part: PromptPart, options: AnswerOptions) -> None:
        self._path, self._prompts = part.out.with_name(f"{part.out.name}.unfinished"), part.prompts
        self._terms = {"new_tokens": options.new_tokens, "temperature": options.temperature, **part.by.known}
        self._saved = time.monotonic()

    def read(self) -> dict[int, list[int]]:
        """The tokens of answers, by number."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if {name: found[name] for name in self._terms} != self._terms:
                return {}
            return {
                each["number"]: each["ids"][each["prompt_length"] :] for each in found["answers"] if self._own(each)
            }
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return {}

    def _own(self, each: dict[str, Any]) -> bool:
        return each["ids"][: each["prompt_length"]] == self._prompts[each["number"]]

    def save_sometimes(self, running: Iterable[_RunningAnswer]) -> None:
        """Save if the file is old."""
        if time.monotonic() - self._saved >= _SAVE:
            self.save(running)

    def save(self, running: Iterable[_RunningAnswer]) -> None:
        """Replace the file; remove it if there is nothing to keep."""
        answers = [
            {"number": each.number, "ids": prompt + each.tokens, "prompt_length": len(prompt)}
            for each in running
            if (prompt := self._prompts[each.number]) and each.tokens
        ]
        if answers:
            write_json(self._path, {**self._terms, "answers": answers}, DataError)
        else:
            self._path.unlink(missing_ok=True)
        self._saved = time.monotonic()


class _AnswerProgress:
    """Reports the number of answers, the speed and the time left."""

    def __init__(self, report: Report, before: int, total: int, most: int) -> None:
        self._report, self._total, self._most = report, total, most
        self._written = self._before = before
        self._generated = self._tokens = 0  # of written answers: tokens generated in this call, and all
        self._pace = SpeedMeter()
        self._updated = self._reported = time.perf_counter()

    def wrote(self, answer: _RunningAnswer) -> None:
        """The answer has been written."""
        self._written += 1
        self._generated += len(answer.generated)
        self._tokens += len(answer.tokens)

    def update(self, running: Iterable[_RunningAnswer]) -> None:
        """Note the progress, and report it every few seconds."""
        now = time.perf_counter()
        if now - self._updated >= 1.0:
            self._updated = now
            self._pace.update(self._generated + sum(len(each.generated) for each in running))
        if now - self._reported >= _SECONDS:
            self.report(running)

    def report(self, running: "deque[_RunningAnswer] | Iterable[_RunningAnswer]") -> None:
        self._reported = time.perf_counter()
        line: dict[str, Any] = {"answers": self._written, "of": self._total}
        if (rate := self._pace.rate) is not None:
            line["rate"] = round(rate, 1)
        ended, rest = self._rest(list(running))
        if (left := self._pace.left(rest)) is not None and self._before < self._total:
            line |= {"left": left} | ({"bound": True} if rest and ended < _FEW else {})
        self._report(line)

    def _rest(self, running: list[_RunningAnswer]) -> tuple[int, float]:
        """The number of answers that have ended, and the tokens that are to be generated.

        While some still run, the mean length of those that have ended is too short. If all tokens are equally likely
        to be the last one, tokens of all answers / answers that have ended is the mean length.
        """
        ended = self._written - self._before + sum(each.finished for each in running)
        mean = float(self._most)
        if ended >= _FEW:
            mean = min(mean, (self._tokens + sum(len(each.tokens) for each in running)) / ended)
        rest = sum(min(mean, self._most - len(each.tokens)) for each in running if not each.finished)
        return ended, rest + mean * (self._total - self._written - len(running))
