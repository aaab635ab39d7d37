"""From runs to numbers: how many times as fast as the baseline, paired unit by unit, and how many tokens a forward.

A unit is what all arms are asked in the same minute (``Run.unit``), so a slow minute of the machine cancels out of a
ratio. Runs of different files are never pairs.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foredraft.bench.measure.records import Run, RunFile, merged
from foredraft.core.errors import OptionError

PLAIN, THEIRS = "none", "transformers"
"""The arm of plain decoding by our own loop, and how the names of arms by transformers' own generate begin."""


class Setting(NamedTuple):
    """What a table holds still."""

    model: str
    temperature: float
    batch: int

    @property
    def label(self) -> str:
        """Without the model, which most files have one of."""
        return f"{law(self.temperature)}, batch {self.batch}"


class Key(NamedTuple):
    """What makes up one cell of a table."""

    model: str
    temperature: float
    batch: int
    task: str
    arm: str

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.temperature, self.batch)


class Pair(NamedTuple):
    """A run, and the baseline's of the same unit."""

    run: Run
    baseline: Run


class Spread(NamedTuple):
    """Of several numbers: the median, the quartiles, and how many they are."""

    median: float
    low: float
    high: float
    size: int


class Share(NamedTuple):
    """So many of so many."""

    part: int
    of: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm on one task in one setting. None stands where nothing was measured.

    The speed-ups are over pairs: the median of ratios of decoding, of the whole call with its prefill, and all tokens
    over all seconds. ``draft_share``: of the time after prefill, what went into drafting, where forwards are ours.
    ``same``: of the pairs, those with the baseline's own text.
    """

    key: Key
    runs: int
    errors: int
    lossless: bool
    speed_up: Spread | None
    whole_speed_up: Spread | None
    total_speed_up: float | None
    acceptance_length: float | None
    tokens_per_second: float | None
    draft_share: float | None
    same: Share | None


class Mean(NamedTuple):
    """Over the tasks, each counting the same, as papers have it; None unless every task has a number."""

    speed_up: float | None
    acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All cells of some files, and the files as one. ``agreement``: of the greedy units, those on which all lossless
    arms said the same."""

    file: RunFile
    baseline: str | None
    cells: dict[Key, Cell]
    agreement: dict[Setting, Share]

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(key.setting for key in self.cells))

    def tasks(self, setting: Setting) -> list[str]:
        return list(dict.fromkeys(key.task for key in self.cells if key.setting == setting))

    def arms(self, setting: Setting) -> list[str]:
        """As the file has them, but the baseline first."""
        found = dict.fromkeys(key.arm for key in self.cells if key.setting == setting)
        return sorted(found, key=lambda arm: arm != self.baseline)

    def cell(self, setting: Setting, task: str, arm: str) -> Cell | None:
        return self.cells.get(Key(*setting, task, arm))

    def lossless(self, setting: Setting, arm: str) -> bool:
        return all(cell.lossless for key, cell in self.cells.items() if (key.setting, key.arm) == (setting, arm))

    def mean(self, setting: Setting, arm: str) -> Mean:
        """The column of all tasks."""
        cells = [self.cell(setting, task, arm) for task in self.tasks(setting)]
        speeds = [cell.speed_up.median if cell and cell.speed_up else None for cell in cells]
        lengths = [cell.acceptance_length if cell else None for cell in cells]
        return Mean(_mean(speeds), _mean(lengths))

    def best(self, setting: Setting) -> str | None:
        """The lossless arm that is the fastest on the mean of the tasks; None where none is faster than the
        baseline."""
        lossless = [arm for arm in self.arms(setting) if self.lossless(setting, arm)]
        means = {arm: self.mean(setting, arm).speed_up or 0.0 for arm in lossless}
        arm = max(means, key=lambda each: means[each], default=None)
        return arm if arm is not None and means[arm] > 1.0 else None


def law(temperature: float) -> str:
    """The word for a temperature."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def key(run: Run) -> Key:
    """The cell that a run belongs to."""
    return Key(run.model, run.temperature, run.batch, run.task, run.arm)


def pairs(file: RunFile, baseline: str) -> dict[Key, list[Pair]]:
    """Runs without an error beside the baseline's of their units, in the order of the file; the baseline beside
    itself, too."""
    good = [run for run in file.runs if not run.error]
    plain = {run.unit: run for run in good if run.arm == baseline}
    found: dict[Key, list[Pair]] = {}
    for run in good:
        if run.unit in plain:
            found.setdefault(key(run), []).append(Pair(run, plain[run.unit]))
    return found


def ratios(found: Iterable[Pair], speed: Callable[[Run], float] = lambda run: run.speed) -> list[float]:
    """How many times as fast each run is as its baseline; pairs in which one has no speed are left out."""
    speeds = [(speed(run), speed(baseline)) for run, baseline in found]
    return [ours / theirs for ours, theirs in speeds if ours > 0 and theirs > 0]


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles (inclusive: of few values they are among them); None of nothing."""
    if not values:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(middle, low, high, len(values))


def acceptance_length(runs: Iterable[Run]) -> float | None:
    """Tokens over forwards of the target, of all of these runs together."""
    tokens = forwards = 0
    for run in runs:
        if run.forwards:
            tokens, forwards = tokens + run.tokens, forwards + run.forwards
    return tokens / forwards if forwards else None


def summarise(files: Sequence[RunFile], baseline: str | None = None) -> Summary:
    """Everything that the tables and most figures show.

    Args:
        baseline: the arm that is 1.00x; by default plain decoding by our own loop, else by transformers'. Where there
            is neither, there are no speed-ups.

    Raises:
        OptionError: an arm that no file has.
    """
    whole = merged(files)
    baseline = _baseline(whole, baseline)
    paired = _all_pairs(files, baseline) if baseline is not None else {}
    groups: dict[Key, list[Run]] = {}
    for run in whole.runs:
        groups.setdefault(key(run), []).append(run)
    cells = {name: _cell(name, runs, paired.get(name, [])) for name, runs in groups.items()}
    return Summary(whole, baseline, cells, _agreement(files))


def _baseline(file: RunFile, asked: str | None) -> str | None:
    arms = list(dict.fromkeys(run.arm for run in file.runs))
    if asked is None:
        return PLAIN if PLAIN in arms else next((arm for arm in arms if arm.startswith(THEIRS)), None)
    if asked not in arms:
        raise OptionError(f"No run has the arm {asked!r}; there are {', '.join(arms) or 'none at all'}.")
    return asked


def _all_pairs(files: Sequence[RunFile], baseline: str) -> dict[Key, list[Pair]]:
    found: dict[Key, list[Pair]] = {}
    for file in files:
        for name, some in pairs(file, baseline).items():
            found.setdefault(name, []).extend(some)
    return found


def _cell(name: Key, runs: list[Run], paired: list[Pair]) -> Cell:
    good = [run for run in runs if not run.error]
    speeds = [run.speed for run in good if run.speed > 0]
    compared = [pair for pair in paired if pair.run.said and pair.baseline.said]
    same = sum(_texts(pair.run) == _texts(pair.baseline) for pair in compared)
    return Cell(
        key=name,
        runs=len(runs),
        errors=len(runs) - len(good),
        lossless=all(run.lossless for run in good),
        speed_up=spread(ratios(paired)),
        whole_speed_up=spread(ratios(paired, lambda run: run.whole_speed)),
        total_speed_up=_total(paired),
        acceptance_length=acceptance_length(good),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        draft_share=_draft_share(good),
        same=Share(same, len(compared)) if compared and name.temperature == 0 else None,
    )


def _draft_share(runs: list[Run]) -> float | None:
    timed = [run for run in runs if run.verify_seconds > 0]  # transformers does not say how its time is spent
    spent = sum(run.seconds - run.prefill_seconds for run in timed)
    return sum(run.draft_seconds for run in timed) / spent if spent > 0 else None


def _total(paired: list[Pair]) -> float | None:
    """All tokens over all seconds after prefill: long answers weigh more than in the median."""
    used = [pair for pair in paired if pair.run.speed > 0 and pair.baseline.speed > 0]
    if not used:
        return None
    ours, theirs = [pair.run for pair in used], [pair.baseline for pair in used]
    return _rate(ours) / _rate(theirs)


def _rate(runs: list[Run]) -> float:
    return sum(run.decoded for run in runs) / sum(run.seconds - run.prefill_seconds for run in runs)


def _texts(run: Run) -> tuple[str, ...]:
    return tuple(said.digest for said in run.said)


def _agreement(files: Sequence[RunFile]) -> dict[Setting, Share]:
    """Units that only one arm has are not counted."""
    found: dict[Setting, Share] = {}
    for file in files:
        units: dict[tuple[object, ...], list[Run]] = {}
        for run in file.runs:
            if run.temperature == 0 and run.lossless and run.said and not run.error:
                units.setdefault(run.unit, []).append(run)
        for runs in units.values():
            if len(runs) > 1:
                setting = key(runs[0]).setting
                part, of = found.get(setting, Share(0, 0))
                found[setting] = Share(part + (len({_texts(run) for run in runs}) == 1), of + 1)
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
