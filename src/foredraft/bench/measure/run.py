"""The benchmark loop. Every prompt runs on every arm before the next prompt, in rotating order, so that machine drift
affects all arms alike. Each measurement is on disk before the next call."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.bench.measure.arms import ArmResult, BenchArm, LoopArm
from foredraft.bench.measure.records import OutputRecord, Run, RunFile, digest, read_runs, repair_end
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.errors import DataError, ForedraftError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.detokenizer import text_after
from foredraft.engine.generator import Generator, Prompt
from foredraft.files.outputs import may_cut
from foredraft.files.provenance import provenance

Report = Callable[[int, int, str], None]
"""Progress callback: groups done, total groups, next task."""
_FIRST = b'{"kind": "provenance", "time": "'
"""The begin of a run file."""
_COUNTS = (
    *("tokens", "drafted", "accepted", "drafted_by_depth", "accepted_by_depth"),
    *("seconds", "prefill_seconds", "draft_seconds", "verify_seconds"),
)
"""What ``DecodeStats`` and ``Run`` have under the same names."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run file; a file is only continued with the same settings."""

    model: str
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    chat: bool = False
    dtype: str | None = None
    device: str | None = None
    weights: str | None = None
    kv_cache_dtype: str | None = None

    def params(self, temperature: float, seed: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            temperature=temperature,
            seed=self.seed + seed,
        )


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """A batch of prompts from one task, run through all their turns.

    ``number`` counts all groups; ``place`` counts groups of the same temperature and batch size, and rotates the order
    of the arms.
    """

    number: int
    place: int
    prompts: tuple[BenchPrompt, ...]
    temperature: float
    batch: int
    repeat: int

    @property
    def turns(self) -> int:
        return max(prompt.num_turns for prompt in self.prompts)

    def runs(self, model: str, names: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The (arm, unit) pairs of the finished group."""
        for turn in range(self.turns):
            prompts = tuple(prompt.name for prompt in self.prompts if prompt.num_turns > turn)
            for name in names:
                yield name, (model, self.prompts[0].task, prompts, turn, self.repeat, self.temperature, self.batch)


def make_groups(
    prompts: Sequence[BenchPrompt], temperatures: Sequence[float], batches: Sequence[int], repeats: int = 1
) -> list[PromptBatch]:
    """All groups, task by task; a task's last group may be smaller than the batch.

    Raises:
        DataError: two prompts of a task have the same name.
    """
    tasks: dict[str, dict[str, BenchPrompt]] = {}
    for prompt in prompts:
        if prompt.name in tasks.setdefault(prompt.task, {}):
            raise DataError(f"Task {prompt.task} has prompt {prompt.name} twice: remove the duplicate file or prompt.")
        tasks[prompt.task][prompt.name] = prompt
    groups: list[PromptBatch] = []
    places: Counter[tuple[float, int]] = Counter()
    for some, temperature, batch in _batches([list(each.values()) for each in tasks.values()], temperatures, batches):
        for repeat in range(repeats):
            place = places[temperature, batch]
            groups.append(PromptBatch(len(groups), place, some, temperature, batch, repeat))
            places[temperature, batch] += 1
    return groups


def _batches(
    tasks: Iterable[list[BenchPrompt]], temperatures: Sequence[float], batches: Sequence[int]
) -> Iterator[tuple[tuple[BenchPrompt, ...], float, int]]:
    """Prompts, temperature and batch size; all combinations of a prompt run close together in time."""
    for listed in tasks:
        for first in range(0, len(listed), max(batches)):
            window = listed[first : first + max(batches)]
            for batch in batches:
                for begin in range(0, len(window), batch):
                    for temperature in temperatures:
                        yield tuple(window[begin : begin + batch]), temperature, batch


class Bench:
    """Runs the groups that the file lacks and appends the results.

    Args:
        arms: in a conversation, the first arm that succeeds supplies the answers that all arms continue.
        path: the run file; an existing one must have the same settings.
        keep_texts: write the outputs, not only their digests.

    Raises:
        OptionError: no arm uses our loop, or the file has other settings.
        PromptError: ``settings.chat`` is set, but the model has no chat template.
    """

    def __init__(self, arms: Sequence[BenchArm], settings: Settings, path: Path, *, keep_texts: bool = True) -> None:
        self._arms = list(arms)
        self._settings = settings
        self._path = path
        self._keep_texts = keep_texts
        self._host = _host(arms)
        if settings.chat:
            self._host.encode([{"role": "user", "content": "Hello"}])
        self._existing = read_existing(path, settings)

    def run(self, groups: Sequence[PromptBatch], report: Report = lambda completed, count, what: None) -> None:
        """Run the missing groups. Failed prompts are recorded, and retried by the next ``Bench``."""
        names = [arm.name for arm in self._arms]
        finished = {(run.arm, run.unit) for run in self._existing.runs if not run.error}
        able = {group.batch: [arm.name for arm in self._arms if arm.max_batch >= group.batch] for group in groups}
        model = self._settings.model
        left = [group for group in groups if not finished.issuperset(group.runs(model, able[group.batch]))]
        if not left:
            return
        self._warm_up(left)
        settings = {"settings": asdict(self._settings), "arms": names}
        self.append([{"kind": "provenance", **provenance(), **settings}])
        for count, group in enumerate(left):
            report(count, len(left), group.prompts[0].task)
            self.append(run.line() for run in self._run_group(group))
        report(len(left), len(left), "")

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Repair the end of the file if needed, then write each line as soon as it is available."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                repair_end(self._path)
            with self._path.open("a", encoding="utf-8") as out:
                for line in lines:
                    out.write(json.dumps(line) + "\n")
                    out.flush()
        except OSError as error:
            raise DataError(f"Cannot write the run file {self._path}: {error.strerror}.") from None

    def _warm_up(self, groups: Sequence[PromptBatch]) -> None:
        """One uncounted call per arm, batch size and temperature, for kernels, packed weights and policies."""
        first = {(group.batch, group.temperature): group for group in reversed(groups)}
        for group in reversed(first.values()):
            params = self._settings.params(group.temperature, 0)
            for arm in self._arms:
                if arm.max_batch >= group.batch:
                    self._try(arm, [prompt.prompt for prompt in group.prompts], params)

    def _run_group(self, group: PromptBatch) -> Iterator[Run]:
        arms = [arm for arm in self._arms if arm.max_batch >= group.batch]
        first = group.place % len(arms)
        answers: dict[str, list[str]] = {prompt.name: [] for prompt in group.prompts}
        for turn in range(group.turns):
            prompts = [prompt for prompt in group.prompts if prompt.num_turns > turn]
            params = self._settings.params(group.temperature, group.number)
            outputs: dict[str, list[str]] = {}
            for arm in arms[first:] + arms[:first]:
                turns = [(prompt, prompt.after(answers[prompt.name])) for prompt in prompts]
                run = self._run_arm(arm, group, turn, turns, params)
                if not run.error:
                    outputs[arm.name] = [each.text for each in run.outputs]
                yield run if self._keep_texts else _without_texts(run)
            chosen = next((outputs[arm.name] for arm in arms if arm.name in outputs), None)
            if chosen is None:  # every arm failed: the conversation cannot continue
                return
            for prompt, text in zip(prompts, chosen, strict=True):
                answers[prompt.name].append(text)

    def _run_arm(
        self,
        arm: BenchArm,
        group: PromptBatch,
        turn: int,
        turns: Sequence[tuple[BenchPrompt, Any]],
        params: SamplingParams,
    ) -> Run:
        """One call of one arm."""
        asks = [ask for ask, _ in turns]
        run = Run(
            arm=arm.name,
            task=asks[0].task,
            prompts=tuple(ask.name for ask in asks),
            turn=turn,
            repeat=group.repeat,
            temperature=group.temperature,
            batch=group.batch,
            category=asks[0].category if len({ask.category for ask in asks}) == 1 else "",
            lossless=arm.lossless,
        )
        outcome = self._try(arm, [prompt for _, prompt in turns], params)
        if isinstance(outcome, str):
            return replace(run, error=outcome)
        prompts, call = outcome
        counts = {name: getattr(call.stats, name) for name in _COUNTS}
        outputs = tuple(self._output(*each) for each in zip(asks, prompts, call.tokens, strict=True))
        return replace(run, **counts, forwards=call.stats.target_forwards, decoded=call.decoded, outputs=outputs)

    def _output(self, ask: BenchPrompt, prompt: Sequence[int], tokens: list[int]) -> OutputRecord:
        text = text_after(self._host.decode, prompt, tokens)
        return OutputRecord(ask.name, len(prompt), len(tokens), digest(tokens), tuple(tokens), text)

    def _try(
        self, arm: BenchArm, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[list[list[int]], ArmResult] | str:
        """The prompts' tokens and the call, or an error message: a failing prompt must not stop the benchmark."""
        try:
            tokens = [self._host.encode(prompt) for prompt in prompts]
            return tokens, arm.run(tokens, params)
        except ForedraftError as error:
            return str(error)
        except Exception as error:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # it may have been out of memory
            lines = str(error).strip().splitlines()
            return f"{error.__class__.__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _host(arms: Sequence[BenchArm]) -> Generator:
    """The generator that tokenizes and decodes for all arms."""
    ours = next((arm for arm in arms if isinstance(arm, LoopArm)), None)
    if ours is None:
        raise OptionError("At least one arm must use foredraft's loop: add --drafter none (plain decoding).")
    return ours.generator


def _without_texts(run: Run) -> Run:
    return replace(run, outputs=tuple(replace(each, output=(), text="") for each in run.outputs))


def read_existing(path: Path, settings: Settings) -> RunFile:
    """Read the file that a run continues; empty if there is none.

    Raises:
        DataError: not a run file.
        OptionError: it has other settings, or only half a line of something else.
    """
    if not path.exists():
        return RunFile()
    found = read_runs(path)
    with path.open("rb") as file:
        first = file.readline(1 << 16)
    if not first.endswith(b"\n") and not may_cut(first, _FIRST):
        raise OptionError(f"{path} holds something else than runs of foredraft bench: choose another file.")
    for each in found.provenance:
        for name, value in asdict(settings).items():
            old = each.get("settings", {}).get(name)
            if old != value:
                raise OptionError(
                    f"{path} has runs with {name} {old!r}, not {value!r}: use {name} {old!r}, or another file, since "
                    "foredraft report reads several."
                )
    return found
