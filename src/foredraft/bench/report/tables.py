"""A summary as tables of text and as sentences, for terminal, HTML and Markdown."""

import json
from typing import Any, NamedTuple

from foredraft.bench.measure.summary import Mean, Setting, Summary, temperature_label
from foredraft.files.provenance import short_commit

DRAFTED = "drafted"


class Entry(NamedTuple):
    """A cell of the short table, e.g. "1.82x" and "4.34" (empty if unknown); ``best``: the column's best."""

    speed_up: str
    length: str
    best: bool = False


class TableRow(NamedTuple):
    """An arm's cells: each task, their mean if there are several, and where it is known of some arm the share of its
    steps that drafted."""

    arm: str
    entries: tuple[Entry, ...]
    drafted: tuple[str, ...] = ()


class Table(NamedTuple):
    """A table of text; the first ``words`` columns are words, the others are numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


def columns(summary: Summary, setting: Setting) -> list[str]:
    """The column names of the short table: the tasks, their unweighted mean if there are several, and if it is known
    the share of steps with a draft."""
    tasks = summary.tasks(setting)
    return [*tasks, *(["mean"] if len(tasks) > 1 else []), *([DRAFTED] if _steps_known(summary, setting) else [])]


def _steps_known(summary: Summary, setting: Setting) -> bool:
    return any(summary.drafted(setting, arm) is not None for arm in summary.arms(setting))


def short(summary: Summary, setting: Setting) -> list[TableRow]:
    """The usual table of papers: a row per method, speed-up and acceptance length per task."""
    numbers = {arm: _numbers(summary, setting, arm) for arm in summary.arms(setting)}
    lossless = [found for arm, found in numbers.items() if summary.lossless(setting, arm)]
    width, known = max(map(len, numbers.values()), default=0), _steps_known(summary, setting)
    best = [max((row[i].speed_up or 0.0 for row in lossless), default=0.0) for i in range(width)]
    rows = []
    for arm, found in numbers.items():
        entries = [
            Entry(_text(speed, "{:.2f}x"), _text(length, "{:.2f}"), speed == top > 1 and found in lossless)
            for (speed, length), top in zip(found, best, strict=True)
        ]
        share = summary.drafted(setting, arm)
        drafted = (share.percent if share else "",) if known else ()
        rows.append(TableRow(named(summary, setting, arm), tuple(entries), drafted))
    return rows


def _numbers(summary: Summary, setting: Setting, arm: str) -> list[Mean]:
    """Speed-up and acceptance length for each column of the short table."""
    cells = [summary.cell(setting, task, arm) for task in summary.tasks(setting)]
    found = [
        Mean(cell.speed_up.median if cell.speed_up else None, cell.acceptance_length) if cell else Mean(None, None)
        for cell in cells
    ]
    return [*found, summary.mean(setting, arm)] if len(found) > 1 else found


_NUMBERS = {
    "speed-up (quartiles)": ("speed_up", "{0.median:.2f}x ({0.low:.2f}-{0.high:.2f})"),
    "pairs": ("speed_up", "{.size}"),
    "whole call": ("whole_speed_up", "{.median:.2f}x"),
    "in total": ("total_speed_up", "{:.2f}x"),
    "length": ("acceptance_length", "{:.2f}"),
    "tokens/s": ("tokens_per_second", "{:.1f}"),
    "draft": ("draft_share", "{:.0%}"),
    "same output": ("same", "{0.part}/{0.of}"),
    "errors": ("errors", "{}"),
}
"""Columns of the full table: the field of ``Cell``, and its form."""


def full(summary: Summary, setting: Setting) -> Table:
    """All numbers of every arm on every task."""
    rows = []
    for task in summary.tasks(setting):
        for arm in summary.arms(setting):
            cell = summary.cell(setting, task, arm)
            if cell is not None:
                numbers = (_text(getattr(cell, field), form) for field, form in _NUMBERS.values())
                rows.append((task, named(summary, setting, arm), *numbers))
    return Table(("task", "method", *_NUMBERS), tuple(rows), words=2)


def training(summary: Summary) -> Table | None:
    """Progress of each training run, from the last lines of its log."""
    rows = []
    for run, lines in summary.file.training_runs.items():
        last: dict[str, Any] = {}
        for line in lines:
            last |= line
        held = last.get("validation", {})
        resumed = sum("resumed" in line for line in lines)
        of = f" of {last['steps']}" if "steps" in last else ""
        losses = (_text(each.get("loss"), "{:.3f}") for each in (last, held))
        length = _text(held.get("acceptance_length"), "{:.2f}")
        again = {0: "", 1: "once"}.get(resumed, f"{resumed} times")
        rows.append((run, f"{last.get('step', '')}{of}", f"{last['tokens']:,}", *losses, length, again))
    head = ("run", "steps", "tokens", "loss", "held-out loss", "tokens/forward", "resumed")
    return Table(head, tuple(rows)) if rows else None


def named(summary: Summary, setting: Setting, arm: str) -> str:
    """An arm's name, marked if it is not lossless."""
    return arm if summary.lossless(setting, arm) else f"{arm} (lossy)"


def heading(setting: Setting) -> str:
    """Model, temperature and batch size."""
    return f"{label(setting.model, setting.temperature)}, batch {setting.batch}"


def label(model: str, temperature: float, arm: str = "") -> str:
    """Model, arm and temperature, as far as they are known."""
    return ", ".join(part for part in (model, arm, temperature_label(temperature)) if part)


def sentences(summary: Summary, setting: Setting) -> list[str]:
    """Summary of a setting: the fastest arm, agreement of the outputs, and errors."""
    found = []
    best = summary.best(setting)
    if best is not None:
        speed, length = summary.mean(setting, best)
        tasks = len(summary.tasks(setting))
        over = f" on the mean of {tasks} tasks" if tasks > 1 else ""
        tokens = f", with {length:.2f} tokens per forward" if length is not None else ""
        found.append(f"{best} is the fastest: {speed:.2f}x as fast as {summary.baseline}{over}{tokens}.")
    elif summary.baseline is not None:
        found.append(f"Nothing is faster than {summary.baseline} on the mean of the tasks.")
    agreed = summary.agreement.get(setting)
    if agreed is not None:
        of = f"all {agreed.of}" if agreed.part == agreed.of else f"{agreed.part} of {agreed.of}"
        found.append(f"The lossless methods have equal outputs on {of} greedy units.")
    cells = [cell for name, cell in summary.cells.items() if name.setting == setting]
    errors, runs = sum(cell.errors for cell in cells), sum(cell.runs for cell in cells)
    if errors:
        found.append(f"{errors} of {runs} runs failed and are not counted elsewhere.")
    return found


def reading(summary: Summary) -> str:
    """How to read a cell of the short table."""
    length = "acceptance length (tokens per target forward)"
    known = any(_steps_known(summary, setting) for setting in summary.settings)
    steps = f" {DRAFTED}: the share of steps in which something was drafted." if known else ""
    if summary.baseline is None:
        return f"Cells: {length}; without a run of plain decoding there is no speed-up.{steps}"
    return f"Cells: speed-up over {summary.baseline} (median over pairs, after prefill) and {length}.{steps}"


def provenance(record: dict[str, Any]) -> str:
    """A provenance record in one to three sentences."""
    commit = f" at commit {short_commit(str(record['commit']))}" if record.get("commit") else ""
    parts = [f"foredraft {record.get('foredraft', '(version unknown)')}{commit}"]
    parts += [f"{name} {record[name]}" for name in ("torch", "transformers", "python") if record.get(name)]
    threads = record.get("threads")
    counted = f"{threads} thread{'' if threads == 1 else 's'} on " if threads else ""
    if record.get("device"):
        parts.append(f"{counted}{record['device']}")
    parts += [str(record["time"])[:10]] if record.get("time") else []
    text = ", ".join(parts) + "."
    if record.get("command"):
        text += f" Command: {record['command']}"
    settings = [
        f"{name} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in (record.get("settings") or {}).items()
        if value not in (None, False)
    ]
    if settings:
        text += f" Settings: {', '.join(settings)}."
    return text


def origins(summary: Summary) -> list[str]:
    """The distinct provenance records of all files."""
    return list(dict.fromkeys(provenance(record) for record in summary.file.provenance))


def markdown(summary: Summary, complete: bool = False) -> str:
    """GitHub tables: one per setting; with ``complete``, all numbers below each."""
    lines: list[str] = []
    for setting in summary.settings:
        lines += [f"### {_escaped(heading(setting))}", ""]
        lines += grid(_short_table(summary, setting))
        lines += ["", _escaped(" ".join([reading(summary), *sentences(summary, setting)])), ""]
        if complete:
            lines += [*grid(full(summary, setting)), ""]
    trained = training(summary)
    if trained is not None:
        lines += ["### Training", "", *grid(trained), ""]
    lines += [f"{_escaped(origin)}\n" for origin in origins(summary)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _short_table(summary: Summary, setting: Setting) -> Table:
    def cell(entry: Entry) -> str:
        speed = f"**{entry.speed_up}**" if entry.best else entry.speed_up
        return " / ".join(part for part in (speed, entry.length) if part)

    rows = [(row.arm, *(cell(entry) for entry in row.entries), *row.drafted) for row in short(summary, setting)]
    return Table(("method", *columns(summary, setting)), tuple(rows))


def grid(table: Table) -> list[str]:
    """A GitHub table, line by line."""
    rule = [" --- " if place < table.words else " ---: " for place in range(len(table.head))]
    rows = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (table.head, *table.rows)]
    return [rows[0], f"|{'|'.join(rule)}|", *rows[1:]]


def _escaped(text: str) -> str:
    """Escape a name from a file, so that it cannot end a cell or start a tag."""
    for sign, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(sign, instead)
    return text


def _text(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
