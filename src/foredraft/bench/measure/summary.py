"""Summaries of runs: speed-up over the baseline, paired by unit, and acceptance length.

All arms run a unit (``Run.unit``) in close succession, so machine drift cancels in the ratio. Runs of different files
are never paired.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from foredraft.bench.measure.records import Run, RunFile, merge
from foredraft.core.errors import OptionError

PLAIN, THEIRS = "none", "transformers"
"""The arm of plain decoding by our loop, and the name prefix of arms of transformers' generate."""


_Item = TypeVar("_Item")
_Group = TypeVar("_Group")


class Setting(NamedTuple):
    """What all cells of a table share."""

    model: str
    temperature: float
    batch: int

    @property
    def label(self) -> str:
        """Temperature and batch size."""
        return f"{temperature_label(self.temperature)}, batch {self.batch}"


class Key(NamedTuple):
    """Identifies a table cell."""

    model: str
    temperature: float
    batch: int
    task: str
    arm: str

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.temperature, self.batch)


class RunPair(NamedTuple):
    """A run, and the baseline's run of the same unit."""

    run: Run
    baseline: Run


class Spread(NamedTuple):
    """Median, quartiles and number of values."""

    median: float
    low: float
    high: float
    size: int


class Share(NamedTuple):
    """``part`` out of ``of``."""

    part: int
    of: int

    @property
    def percent(self) -> str:
        """0% and 100% only for none and all."""
        rounded = round(100 * self.part / self.of)
        return f"{rounded if self.part in (0, self.of) else min(max(rounded, 1), 99)}%"


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm on one task in one setting. None: not measured.

    Speed-ups are over pairs: ``speed_up`` of decoding, ``whole_speed_up`` with prefill (both medians of ratios), and
    ``total_speed_up`` of all tokens / all seconds. ``draft_share``: drafting's share of the time after prefill, for
    our loop. ``drafted``: forwards that verified a draft, of all forwards, for our loop. ``same``: greedy pairs whose
    output equals the baseline's.
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
    drafted: Share | None
    same: Share | None


class Mean(NamedTuple):
    """Unweighted mean over tasks, as in papers; None unless every task has a number."""

    speed_up: float | None
    acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All cells of some files, and the merged files. ``agreement``: greedy units on which the outputs of all lossless
    arms are equal."""

    file: RunFile
    baseline: str | None
    cells: dict[Key, ArmSummary]
    agreement: dict[Setting, Share]

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(key.setting for key in self.cells))

    def tasks(self, setting: Setting) -> list[str]:
        return list(dict.fromkeys(key.task for key in self.cells if key.setting == setting))

    def arms(self, setting: Setting) -> list[str]:
        """In file order, but the baseline first."""
        found = dict.fromkeys(key.arm for key in self.cells if key.setting == setting)
        return sorted(found, key=lambda arm: arm != self.baseline)

    def cell(self, setting: Setting, task: str, arm: str) -> ArmSummary | None:
        return self.cells.get(Key(*setting, task, arm))

    def lossless(self, setting: Setting, arm: str) -> bool:
        return all(cell.lossless for key, cell in self.cells.items() if (key.setting, key.arm) == (setting, arm))

    def mean(self, setting: Setting, arm: str) -> Mean:
        """The mean over all tasks."""
        cells = [self.cell(setting, task, arm) for task in self.tasks(setting)]
        speeds = [cell.speed_up.median if cell and cell.speed_up else None for cell in cells]
        lengths = [cell.acceptance_length if cell else None for cell in cells]
        return Mean(_mean(speeds), _mean(lengths))

    def drafted(self, setting: Setting, arm: str) -> Share | None:
        """See ``ArmSummary``, over all tasks."""
        cells = [self.cell(setting, task, arm) for task in self.tasks(setting)]
        shares = [cell.drafted for cell in cells if cell is not None and cell.drafted is not None]
        return Share(*map(sum, zip(*shares, strict=True))) if shares else None

    def best(self, setting: Setting) -> str | None:
        """The lossless arm with the highest mean speed-up; None if none is faster than the baseline."""
        lossless = [arm for arm in self.arms(setting) if self.lossless(setting, arm)]
        means = {arm: self.mean(setting, arm).speed_up or 0.0 for arm in lossless}
        arm = max(means, key=lambda each: means[each], default=None)
        return arm if arm is not None and means[arm] > 1.0 else None


def temperature_label(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def grouped(items: Iterable[_Item], by: Callable[[_Item], _Group]) -> dict[_Group, list[_Item]]:
    """Items by group, groups and items in order of appearance."""
    groups: dict[_Group, list[_Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return groups


def key(run: Run) -> Key:
    """The cell of a run."""
    return Key(run.model, run.temperature, run.batch, run.task, run.arm)


def pairs(file: RunFile, baseline: str) -> dict[Key, list[RunPair]]:
    """Successful runs with the baseline's run of the same unit, in file order; includes the baseline's own."""
    good = [run for run in file.runs if not run.error]
    plain = {run.unit: run for run in good if run.arm == baseline}
    return grouped((RunPair(run, plain[run.unit]) for run in good if run.unit in plain), lambda pair: key(pair.run))


def ratios(found: Iterable[RunPair], speed: Callable[[Run], float] = lambda run: run.speed) -> list[float]:
    """Speed ratios run / baseline; pairs without a speed are skipped."""
    speeds = [(speed(run), speed(baseline)) for run, baseline in found]
    return [ours / theirs for ours, theirs in speeds if ours > 0 and theirs > 0]


def spread(values: Sequence[float]) -> Spread | None:
    """Median and (inclusive) quartiles; None if there are no values."""
    if not values:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(middle, low, high, len(values))


def acceptance_length(runs: Iterable[Run]) -> float | None:
    """Total tokens / total target forwards."""
    tokens = forwards = 0
    for run in runs:
        if run.forwards:
            tokens, forwards = tokens + run.tokens, forwards + run.forwards
    return tokens / forwards if forwards else None


def summarise(files: Sequence[RunFile], baseline: str | None = None) -> Summary:
    """Compute all numbers of the tables and most figures.

    Args:
        baseline: the arm that is 1.00x; by default plain decoding by our loop, else by transformers. Without either
            there are no speed-ups.

    Raises:
        OptionError: no run has that arm.
    """
    whole = merge(files)
    baseline = _baseline(whole, baseline)
    paired = _all_pairs(files, baseline) if baseline is not None else {}
    cells = {name: _cell(name, runs, paired.get(name, [])) for name, runs in grouped(whole.runs, key).items()}
    return Summary(whole, baseline, cells, _agreement(files))


def _baseline(file: RunFile, asked: str | None) -> str | None:
    arms = list(dict.fromkeys(run.arm for run in file.runs))
    if asked is None:
        return PLAIN if PLAIN in arms else next((arm for arm in arms if arm.startswith(THEIRS)), None)
    if asked not in arms:
        raise OptionError(f"No run has the arm {asked!r}. Known: {', '.join(arms) or 'none'}.")
    return asked


def _all_pairs(files: Sequence[RunFile], baseline: str) -> dict[Key, list[RunPair]]:
    found: dict[Key, list[RunPair]] = {}
    for file in files:
        for name, some in pairs(file, baseline).items():
            found.setdefault(name, []).extend(some)
    return found


def _cell(name: Key, runs: list[Run], paired: list[RunPair]) -> ArmSummary:
    good = [run for run in runs if not run.error]
    speeds = [run.speed for run in good if run.speed > 0]
    compared = [pair for pair in paired if pair.run.outputs and pair.baseline.outputs]
    same = sum(_digests(pair.run) == _digests(pair.baseline) for pair in compared)
    return ArmSummary(
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
        drafted=drafted(good),
        same=Share(same, len(compared)) if compared and name.temperature == 0 else None,
    )


def _draft_share(runs: list[Run]) -> float | None:
    timed = [run for run in runs if run.verify_seconds > 0]  # transformers' arms are not timed by part
    spent = sum(run.seconds - run.prefill_seconds for run in timed)
    return sum(run.draft_seconds for run in timed) / spent if spent > 0 else None


def drafted(runs: Iterable[Run]) -> Share | None:
    """In how many of their steps runs of our loop drafted; a step of three rows counts three. None without any."""
    timed = [run for run in runs if run.verify_seconds > 0]  # of transformers' arms it is not known
    steps = sum(run.forwards for run in timed)
    return Share(sum(sum(run.drafted_by_depth[:1]) for run in timed), steps) if steps else None


def _total(paired: list[RunPair]) -> float | None:
    """Speed-up of total tokens / total seconds after prefill; long outputs weigh more than in the median."""
    used = [pair for pair in paired if pair.run.speed > 0 and pair.baseline.speed > 0]
    if not used:
        return None
    ours, theirs = [pair.run for pair in used], [pair.baseline for pair in used]
    return _rate(ours) / _rate(theirs)


def _rate(runs: list[Run]) -> float:
    return sum(run.decoded for run in runs) / sum(run.seconds - run.prefill_seconds for run in runs)


def _digests(run: Run) -> tuple[str, ...]:
    return tuple(output.digest for output in run.outputs)


def _agreement(files: Sequence[RunFile]) -> dict[Setting, Share]:
    """Greedy units with equal outputs, of those that several lossless arms ran."""
    found: dict[Setting, Share] = {}
    for file in files:
        used = [run for run in file.runs if run.temperature == 0 and run.lossless and run.outputs and not run.error]
        for runs in grouped(used, lambda run: run.unit).values():
            if len(runs) > 1:
                setting = key(runs[0]).setting
                part, of = found.get(setting, Share(0, 0))
                found[setting] = Share(part + (len({_digests(run) for run in runs}) == 1), of + 1)
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
