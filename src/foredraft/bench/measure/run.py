"""A benchmark: every prompt is put to every arm before the next prompt, in an order that rotates, so that drift of the
machine hits all alike. Whatever is measured is on disk before the next call."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.bench.measure.arms import Arm, Call, LoopArm
from foredraft.bench.measure.records import Run, RunFile, Said, digest, mend, read_runs
from foredraft.bench.prompts import Ask
from foredraft.core.errors import DataError, ForedraftError, OptionError
from foredraft.core.io import provenance
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator, Prompt

Tell = Callable[[int, int, str], None]
"""Told how many groups of prompts are done, of how many, and what comes next."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What makes two runs comparable: a file is gone on with only where all of this is the same."""

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
class Group:
    """Prompts of one task that are asked at once, all their turns one after another. ``number`` counts all groups,
    ``place`` those of one temperature and batch size, which share a cell of a table: it says which arm is first."""

    number: int
    place: int
    asks: tuple[Ask, ...]
    temperature: float
    batch: int
    repeat: int

    @property
    def turns(self) -> int:
        return max(ask.rounds for ask in self.asks)

    def runs(self, model: str, names: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What stands in the file when all of it is done: arms and units."""
        for turn in range(self.turns):
            prompts = tuple(ask.name for ask in self.asks if ask.rounds > turn)
            for name in names:
                yield name, (model, self.asks[0].task, prompts, turn, self.repeat, self.temperature, self.batch)


def grouped(
    asks: Sequence[Ask], temperatures: Sequence[float], batches: Sequence[int], repeats: int = 1
) -> list[Group]:
    """All groups, task by task; a task's last one is smaller where its prompts do not divide by the batch.

    Raises:
        DataError: two prompts of a task have one name, so that nobody could tell their runs apart.
    """
    tasks: dict[str, dict[str, Ask]] = {}
    for ask in asks:
        if ask.name in tasks.setdefault(ask.task, {}):
            raise DataError(f"Prompt {ask.name} of {ask.task} is there twice: is a file named twice, or are two alike?")
        tasks[ask.task][ask.name] = ask
    groups: list[Group] = []
    places: Counter[tuple[float, int]] = Counter()
    for some, temperature, batch in _chosen([list(each.values()) for each in tasks.values()], temperatures, batches):
        for repeat in range(repeats):
            place = places[temperature, batch]
            groups.append(Group(len(groups), place, some, temperature, batch, repeat))
            places[temperature, batch] += 1
    return groups


def _chosen(
    tasks: Iterable[list[Ask]], temperatures: Sequence[float], batches: Sequence[int]
) -> Iterator[tuple[tuple[Ask, ...], float, int]]:
    """Prompts with a temperature and a batch size. All that is asked of a prompt is asked in the same minutes."""
    for listed in tasks:
        for first in range(0, len(listed), max(batches)):
            window = listed[first : first + max(batches)]
            for batch in batches:
                for begin in range(0, len(window), batch):
                    for temperature in temperatures:
                        yield tuple(window[begin : begin + batch]), temperature, batch


class Bench:
    """Runs groups that are not in the file yet, and appends what came of it.

    Args:
        arms: the first of them that can answers for the conversation where there are several turns: every arm reads
            the same.
        path: where lines are appended; it may exist, made with the same settings.
        keep_texts: write out what was said, and not only what tells two texts apart.

    Raises:
        OptionError: no arm is ours, or the file was made with other settings.
        PromptError: the settings ask for a chat, and the model has no chat template.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        settings: Settings,
        path: Path,
        *,
        keep_texts: bool = True,
    ) -> None:
        self._arms = list(arms)
        self._settings = settings
        self._path = path
        self._keep_texts = keep_texts
        self._host = _host(arms)
        if settings.chat:
            self._host.encode([{"role": "user", "content": "Hello"}])
        self._before = earlier(path, settings)

    def run(self, groups: Sequence[Group], tell: Tell = lambda done, count, what: None) -> None:
        """Whatever is missing. Prompts that fail are noted, and tried again the next time."""
        names = [arm.name for arm in self._arms]
        done = {(run.arm, run.unit) for run in self._before.runs if not run.error}
        able = {group.batch: [arm.name for arm in self._arms if arm.most >= group.batch] for group in groups}
        model = self._settings.model
        left = [group for group in groups if not done.issuperset(group.runs(model, able[group.batch]))]
        if not left:
            return
        self._warm_up(left)
        self.append([self._origin(names)])
        for count, group in enumerate(left):
            tell(count, len(left), group.asks[0].task)
            self.append(run.line() for run in self._play(group))
        tell(len(left), len(left), "")

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write each line as soon as it is there; a last line of the file that was cut off goes first."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                mend(self._path)
            with self._path.open("a", encoding="utf-8") as out:
                for line in lines:
                    out.write(json.dumps(line) + "\n")
                    out.flush()
        except OSError as error:
            raise DataError(f"Cannot write the run file {self._path}: {error.strerror}.") from None

    def _origin(self, names: Sequence[str]) -> dict[str, Any]:
        return {"kind": "provenance", **provenance(), "settings": asdict(self._settings), "arms": list(names)}

    def _warm_up(self, groups: Sequence[Group]) -> None:
        """Kernels, packed weights, policies: one call an arm, batch size and temperature that nobody counts."""
        first = {(group.batch, group.temperature): group for group in reversed(groups)}
        for group in reversed(first.values()):
            params = self._settings.params(group.temperature, 0)
            for arm in self._arms:
                if arm.most >= group.batch:
                    self._guarded(arm, [ask.prompt for ask in group.asks], params)

    def _play(self, group: Group) -> Iterator[Run]:
        arms = [arm for arm in self._arms if arm.most >= group.batch]
        first = group.place % len(arms)
        answers: dict[str, list[str]] = {ask.name: [] for ask in group.asks}
        for turn in range(group.turns):
            asks = [ask for ask in group.asks if ask.rounds > turn]
            params = self._settings.params(group.temperature, group.number)
            said: dict[str, list[str]] = {}
            for arm in arms[first:] + arms[:first]:
                run = self._one(arm, group, turn, [(ask, ask.after(answers[ask.name])) for ask in asks], params)
                if not run.error:
                    said[arm.name] = [each.text for each in run.said]
                yield run if self._keep_texts else _without_texts(run)
            spoken = next((said[arm.name] for arm in arms if arm.name in said), None)
            if spoken is None:  # nobody could answer: there is nothing to go on from
                return
            for ask, text in zip(asks, spoken, strict=True):
                answers[ask.name].append(text)

    def _one(self, arm: Arm, group: Group, turn: int, asked: Sequence[tuple[Ask, Any]], params: SamplingParams) -> Run:
        """One call of one arm."""
        asks = [ask for ask, _ in asked]
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
        done = self._guarded(arm, [prompt for _, prompt in asked], params)
        if isinstance(done, str):
            return replace(run, error=done)
        prompts, call = done
        stats = call.stats
        return replace(
            run,
            tokens=stats.tokens,
            forwards=stats.target_forwards,
            drafted=stats.drafted,
            accepted=stats.accepted,
            drafted_by_depth=stats.drafted_by_depth,
            accepted_by_depth=stats.accepted_by_depth,
            seconds=stats.seconds,
            prefill_seconds=stats.prefill_seconds,
            draft_seconds=stats.draft_seconds,
            verify_seconds=stats.verify_seconds,
            decoded=call.decoded,
            said=tuple(self._said(*each) for each in zip(asks, prompts, call.tokens, strict=True)),
        )

    def _said(self, ask: Ask, prompt: Sequence[int], tokens: list[int]) -> Said:
        text = self._host.tokenizer.decode(tokens) if self._host.tokenizer is not None else ""
        return Said(ask.name, len(prompt), len(tokens), digest(tokens), tuple(tokens), text)

    def _guarded(
        self, arm: Arm, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[list[list[int]], Call] | str:
        """The prompts' tokens and the call, or the sentence of what went wrong: one bad prompt is no reason to lose
        the others."""
        try:
            tokens = [self._host.encode(prompt) for prompt in prompts]
            return tokens, arm.run(tokens, params)
        except ForedraftError as error:
            return str(error)
        except Exception as error:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # perhaps it was that
            lines = str(error).strip().splitlines()
            return f"{error.__class__.__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _host(arms: Sequence[Arm]) -> Generator:
    """Who reads and writes text for all of them."""
    ours = next((arm for arm in arms if isinstance(arm, LoopArm)), None)
    if ours is None:
        raise OptionError("At least one arm must be ours: add none, plain decoding by the same loop.")
    return ours.generator


def _without_texts(run: Run) -> Run:
    return replace(run, said=tuple(replace(each, output=(), text="") for each in run.said))


def earlier(path: Path, settings: Settings) -> RunFile:
    """What is in the file already; nothing where there is none.

    Raises:
        DataError: it is no run file.
        OptionError: it was made with other settings.
    """
    if not path.exists():
        return RunFile()
    found = read_runs(path)
    for each in found.provenance:
        for name, value in asdict(settings).items():
            there = each.get("settings", {}).get(name)
            if there != value:
                raise OptionError(
                    f"{path} holds runs with {name} {there!r}, not {value!r}: take another file, or the same options."
                )
    return found
