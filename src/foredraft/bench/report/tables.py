"""A summary as tables of text, for a terminal, for a page and for Markdown alike, and as sentences."""

import json
from typing import Any, NamedTuple

from foredraft.bench.measure.summary import Setting, Share, Spread, Summary

MEAN = "mean"
"""The last column: the mean of the tasks, each counting the same."""


class Entry(NamedTuple):
    """A cell of the short table: "1.82x" and "4.34", empty where there is nothing; whether it is the column's best."""

    speed_up: str
    length: str
    best: bool = False


class Row(NamedTuple):
    """What one arm did on each task, and on their mean where there are several."""

    arm: str
    entries: tuple[Entry, ...]


class Table(NamedTuple):
    """A table of text; the first ``words`` columns are words, the others numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


def columns(summary: Summary, setting: Setting) -> list[str]:
    """Of the short table."""
    tasks = summary.tasks(setting)
    return [*tasks, MEAN] if len(tasks) > 1 else tasks


def short(summary: Summary, setting: Setting) -> list[Row]:
    """The table of the papers: a row for each method, speed-up and acceptance length for each task."""
    arms = summary.arms(setting)
    numbers = {arm: [_numbers(summary, setting, task, arm) for task in columns(summary, setting)] for arm in arms}
    sound = [numbers[arm] for arm in arms if summary.lossless(setting, arm)]
    best = [max((row[i][0] or 0.0 for row in sound), default=0.0) for i in range(len(numbers[arms[0]]))]
    rows = []
    for arm in arms:
        entries = [
            Entry("" if speed is None else f"{speed:.2f}x", _number(length), speed == top > 1 and numbers[arm] in sound)
            for (speed, length), top in zip(numbers[arm], best, strict=True)
        ]
        rows.append(Row(named(summary, setting, arm), tuple(entries)))
    return rows


def full(summary: Summary, setting: Setting) -> Table:
    """Everything known of every arm on every task."""
    head = ("task", "method", "speed-up (quartiles)", "pairs", "whole call", "in total", "length")
    tail = ("tokens/s", "draft", "same text", "errors")
    rows = []
    for task in summary.tasks(setting):
        for arm in summary.arms(setting):
            cell = summary.cell(setting, task, arm)
            if cell is None:
                continue
            pairs = str(cell.speed_up.size) if cell.speed_up else ""
            whole = cell.whole_speed_up.median if cell.whole_speed_up else None
            ours = (_quartiles(cell.speed_up), pairs, _times(whole), _times(cell.total_speed_up))
            speed = (_number(cell.acceptance_length), _number(cell.tokens_per_second, 1), _rounded(cell.draft_share))
            rows.append((task, named(summary, setting, arm), *ours, *speed, _share(cell.same), str(cell.errors)))
    return Table(head + tail, tuple(rows), words=2)


def training(summary: Summary) -> Table | None:
    """How far each training run has come, by the last lines of its log."""
    rows = []
    for run, lines in summary.file.training_runs.items():
        last: dict[str, Any] = {}
        for line in lines:
            last |= line
        held = last.get("validation", {})
        resumed = sum("resumed" in line for line in lines)
        of = f" of {last['steps']}" if "steps" in last else ""
        numbers = (_number(last.get("loss"), 3), _number(held.get("loss"), 3), _number(held.get("acceptance_length")))
        again = {0: "", 1: "once"}.get(resumed, f"{resumed} times")
        rows.append((run, f"{last.get('step', '')}{of}", f"{last['tokens']:,}", *numbers, again))
    head = ("run", "steps", "tokens", "loss", "held-out loss", "tokens a forward", "resumed")
    return Table(head, tuple(rows)) if rows else None


def named(summary: Summary, setting: Setting, arm: str) -> str:
    """An arm's name, marked if it is not lossless."""
    return arm if summary.lossless(setting, arm) else f"{arm} (lossy)"


def heading(setting: Setting) -> str:
    """Model, law and batch size."""
    return f"{setting.model}, {setting.label}" if setting.model else setting.label


def sentences(summary: Summary, setting: Setting) -> list[str]:
    """What a setting comes to: the fastest arm, how far the texts agree, and what went wrong."""
    said = []
    best = summary.best(setting)
    if best is not None:
        speed, length = summary.mean(setting, best)
        tasks = len(summary.tasks(setting))
        over = f" on the mean of {tasks} tasks" if tasks > 1 else ""
        tokens = f", with {length:.2f} tokens a forward" if length is not None else ""
        said.append(f"{best} is the fastest: {speed:.2f}x as fast as {summary.baseline}{over}{tokens}.")
    elif summary.baseline is not None:
        said.append(f"Nothing is faster than {summary.baseline} on the mean of the tasks.")
    agreed = summary.agreement.get(setting)
    if agreed is not None:
        of = f"all {agreed.of}" if agreed.part == agreed.of else f"{agreed.part} of {agreed.of}"
        said.append(f"The lossless methods said the same on {of} greedy units.")
    cells = [cell for name, cell in summary.cells.items() if name.setting == setting]
    errors, runs = sum(cell.errors for cell in cells), sum(cell.runs for cell in cells)
    if errors:
        said.append(f"{errors} of {runs} runs ended in an error and count nowhere else.")
    return said


def reading(summary: Summary) -> str:
    """What a cell of the short table says."""
    length = "acceptance length (tokens a forward of the target)"
    if summary.baseline is None:
        return f"Cells are {length}; without a run of plain decoding there is no speed-up."
    return f"Cells are speed-up over {summary.baseline}, the median over pairs after prefill, and {length}."


def provenance(record: dict[str, Any]) -> str:
    """Where numbers come from, as a sentence or two."""
    commit = f" at commit {record['commit'][:10]}" if record.get("commit") else ""
    parts = [f"foredraft {record.get('foredraft', '(version unknown)')}{commit}"]
    parts += [f"{name} {record[name]}" for name in ("torch", "transformers", "python") if record.get(name)]
    threads = record.get("threads")
    counted = f"{threads} thread{'' if threads == 1 else 's'} on " if threads else ""
    if record.get("device"):
        parts.append(f"{counted}{record['device']}")
    parts += [str(record["time"])[:10]] if record.get("time") else []
    said = ", ".join(parts) + "."
    if record.get("command"):
        said += f" Made by: {record['command']}"
    settings = {name: value for name, value in (record.get("settings") or {}).items() if value not in (None, False)}
    if settings:
        said += f" Settings: {', '.join(f'{name} {_plain(value)}' for name, value in settings.items())}."
    return said


def origins(summary: Summary) -> list[str]:
    """The provenance of all files, each said once."""
    return list(dict.fromkeys(provenance(record) for record in summary.file.provenance))


def markdown(summary: Summary, complete: bool = False) -> str:
    """GitHub's tables: one a setting, and with ``complete`` all numbers below each."""
    lines: list[str] = []
    for setting in summary.settings:
        lines += [f"### {_escaped(heading(setting))}", ""]
        lines += _grid(_short_table(summary, setting))
        lines += ["", _escaped(" ".join([reading(summary), *sentences(summary, setting)])), ""]
        if complete:
            lines += [*_grid(full(summary, setting)), ""]
    trained = training(summary)
    if trained is not None:
        lines += ["### Training", "", *_grid(trained), ""]
    lines += [f"{_escaped(said)}\n" for said in origins(summary)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _short_table(summary: Summary, setting: Setting) -> Table:
    def cell(entry: Entry) -> str:
        speed = f"**{entry.speed_up}**" if entry.best else entry.speed_up
        return " / ".join(part for part in (speed, entry.length) if part)

    rows = [(row.arm, *(cell(entry) for entry in row.entries)) for row in short(summary, setting)]
    return Table(("method", *columns(summary, setting)), tuple(rows))


def _grid(table: Table) -> list[str]:
    rule = [" --- " if place < table.words else " ---: " for place in range(len(table.head))]
    rows = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (table.head, *table.rows)]
    return [rows[0], f"|{'|'.join(rule)}|", *rows[1:]]


def _escaped(text: str) -> str:
    """A name from a file must not end a cell or begin a tag."""
    for sign, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(sign, instead)
    return text


def _numbers(summary: Summary, setting: Setting, column: str, arm: str) -> tuple[float | None, float | None]:
    if column == MEAN and column not in summary.tasks(setting):
        return summary.mean(setting, arm)
    cell = summary.cell(setting, column, arm)
    if cell is None:
        return None, None
    return cell.speed_up.median if cell.speed_up else None, cell.acceptance_length


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _quartiles(found: Spread | None) -> str:
    return f"{found.median:.2f}x ({found.low:.2f}-{found.high:.2f})" if found else ""


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(found: Share | None) -> str:
    return f"{found.part}/{found.of}" if found else ""


def _rounded(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"
