"""The report as one self-contained HTML file: no network, no scripts, light or dark by the reader's setting."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from foredraft.bench.measure.summary import Summary
from foredraft.bench.report import tables
from foredraft.bench.report.figures import FigureSet, left_out, missing_figures
from foredraft.bench.report.plots import themed_svg
from foredraft.bench.report.tables import Entry, Table
from foredraft.files.outputs import generator_tag

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6670; --line: #d9dee3; --page: #fff; --best: #12703f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa4ae; --line: #343b43; --page: #14171b; --best: #5fce8f; } }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--page);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 .5rem; }
p, figcaption { margin: .5rem 0 1rem; max-width: 44rem; }
a { color: inherit; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; }
.soft, figcaption, footer, summary { color: var(--soft); font-size: .9rem; }
figure { margin: 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem 2.5rem; }
.panel { max-width: 31rem; min-width: 0; }
.panel svg { display: block; width: 100%; height: auto; overflow: visible; }
.panel svg text { font-family: inherit !important; }
.table { overflow-x: auto; border: 1px solid var(--line); margin: .5rem 0; max-width: max-content; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .75rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
.word { text-align: left; }
th:first-child { position: sticky; left: 0; background: var(--page); white-space: normal; min-width: 7.25rem;
  max-width: 13rem; overflow-wrap: break-word; }
td small { display: block; color: var(--soft); }
td b { color: var(--best); }
"""


def page(summary: Summary, found: Sequence[FigureSet]) -> str:
    """The whole page, with everything from the files escaped."""
    models = ", ".join(dict.fromkeys(setting.model for setting in summary.settings if setting.model))
    title = escape(f"foredraft report: {models}" if models else "foredraft report")
    shown = [each for each in found if each.panels]
    links = [("tables", "Tables")] if summary.settings else []
    links += [*((each.kind.name, escape(each.kind.title)) for each in shown), ("provenance", "Provenance")]
    contents = "".join(f'<a href="#{name}">{text}</a>' for name, text in links)
    trained, missing = tables.training(summary), missing_figures(found, summary)
    items = "".join(f"<li>{escape(each)}</li>\n" for each in missing)
    origins = "\n".join(f"<p>{escape(each)}</p>" for each in tables.origins(summary))
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        generator_tag("report"),
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f'<header>\n<h1>{title}</h1>\n<nav aria-label="Contents">{contents}</nav>\n</header>\n<main>',
        _tables(summary) if summary.settings else "" if trained is not None else "<p>These files have no runs.</p>",
        _section("training-runs", "Training", _table(trained, "Training")) if trained is not None else "",
        *(_figure(each) for each in shown),
        _section("absent", "Missing figures", f"<ul>\n{items}</ul>") if missing else "",
        '</main>\n<footer id="provenance">\n<h2>Provenance</h2>',
        f"{origins or '<p>Not recorded in the files.</p>'}\n</footer>\n</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}">\n<h2>{title}</h2>\n{content}\n</section>'


def _tables(summary: Summary) -> str:
    parts = [f'<p class="soft">{escape(tables.reading(summary))} The best of a column is bold.</p>']
    for setting in summary.settings:
        heading = tables.heading(setting)
        head = ("method", *tables.columns(summary, setting))
        every = _table(tables.full(summary, setting), f"{heading}, all numbers")
        short = tables.short(summary, setting)
        rows = [
            [_word(row.arm), *map(_entry, row.entries), *(f"<td>{each}</td>" for each in row.drafted)] for row in short
        ]
        parts += [
            f"<h3>{escape(heading)}</h3>",
            f"<p>{escape(' '.join(tables.sentences(summary, setting)))}</p>",
            _grid(head, rows, 1, heading),
            f"<details><summary>All numbers</summary>{every}</details>",
        ]
    return _section("tables", "Speed-up and acceptance length", "\n".join(parts))


def _entry(entry: Entry) -> str:
    speed = f"<b>{escape(entry.speed_up)}</b>" if entry.best else escape(entry.speed_up)
    return f"<td>{speed}{f'<small>{escape(entry.length)}</small>' if entry.length else ''}</td>"


def _table(table: Table, heading: str) -> str:
    rows = []
    for row in table.rows:
        words = [_word(row[0]), *(f'<td class="word">{escape(cell)}</td>' for cell in row[1 : table.words])]
        rows.append([*words, *(f"<td>{escape(cell)}</td>" for cell in row[table.words :])])
    return _grid(table.head, rows, table.words, heading)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]], words: int, heading: str) -> str:
    """A table in a box that scrolls on narrow screens, also by keyboard."""
    names = "".join(
        f'<th scope="col"{" class=word" if place < words else ""}>{escape(name)}</th>'
        for place, name in enumerate(head)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(heading)}">\n'
        f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _word(text: str) -> str:
    """A row's name, breakable after punctuation."""
    breakable = re.sub(r"([:,_/]+)", r"\1<wbr>", escape(text, quote=False))
    return f'<th scope="row" class="word">{breakable}</th>'


def _figure(each: FigureSet) -> str:
    title, panels = each.kind.title, []
    for label, figure, _ in each.panels:
        heading = f"<h3>{escape(label)}</h3>\n" if label else ""
        svg = themed_svg(figure, f"{title}: {label}" if label else title)
        panels.append(f'<div class="panel">\n{heading}{svg}\n</div>\n')
    notes = "".join(f"<p>{escape(sentence)}</p>\n" for sentence in left_out(each))
    return (
        f"<section>\n<h2>{escape(title)}</h2>\n"
        f'<figure id="{each.kind.name}">\n<figcaption>{escape(each.kind.caption)}</figcaption>\n'
        f'<div class="panels">\n{"".join(panels)}</div>\n{notes}</figure>\n</section>'
    )
