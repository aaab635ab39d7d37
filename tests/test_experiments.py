"""benchmarks/kit: finished cells are skipped, an interrupted whole keeps the last one, and pages have every table."""

import json
import random
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit import catalog
from benchmarks.kit.experiment import Cell, Experiment, Line, option
from benchmarks.pages import summary


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    yield {"kind": "provenance", "found": len(cells)}
    for cell in cells:
        if cell["number"] == args.broken:
            raise ValueError("broken")
        yield {**cell, "square": cell["number"] ** 2, "texts": [[cell["number"]]]}


def squares(**changed: Any) -> Experiment:
    given: dict[str, Any] = {
        "name": "squares",
        "question": "squares of numbers",
        "options": {"count": option(3), "names": option(["a", "b"]), "broken": option(int)},
        "cells": lambda args: [
            {"kind": "run", "name": name, "number": number} for number in range(args.count) for name in args.names
        ],
        "measure": measure,
        "facts": lambda args: {"count": args.count},
    }
    return Experiment(**{**given, **changed})


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_finished_cells_are_skipped_and_each_run_has_its_provenance(tmp_path: Path):
    out, count = tmp_path / "squares.jsonl", random.randint(2, 5)
    words = ["--out", str(out), "--count", str(count)]
    squares().run([*words, "--part", "1/2"])
    with pytest.raises(ValueError, match="broken"):
        squares().run([*words, "--broken", str(count - 1)])
    squares().run(words)
    runs = [line for line in lines_of(out) if line["kind"] == "run"]
    assert sorted((run["name"], run["number"]) for run in runs) == [(n, i) for n in "ab" for i in range(count)]
    assert all(run["square"] == run["number"] ** 2 for run in runs)
    origins = [line for line in lines_of(out) if line["kind"] == "provenance"]
    assert [each["found"] for each in origins[::2]] == [count, 1] and origins[0]["count"] == count
    assert origins[0]["command"].startswith("python -m benchmarks squares --out ")
    before = out.read_text()
    squares().run(words)
    assert out.read_text() == before
    squares().run([*words, "--again", "--names", "c"])
    assert {line.get("name", "c") for line in lines_of(out)} == {"c"}


def test_no_line_is_begun_after_the_time(tmp_path: Path):
    out = tmp_path / "squares.jsonl"
    squares().run(["--out", str(out), "--seconds", "0"])
    assert [line["kind"] for line in lines_of(out)] == ["provenance", "run"]


def test_a_whole_takes_the_place_of_the_last_one_when_it_is_finished(tmp_path: Path):
    def whole(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
        yield from measure(args, [{"kind": "run", "number": number} for number in range(args.count)])

    out, experiment = tmp_path / "squares.jsonl", squares(cells=None, measure=whole)
    experiment.run(["--out", str(out), "--count", "1"])
    with pytest.raises(ValueError, match="broken"):
        experiment.run(["--out", str(out), "--broken", "2"])
    assert [line["number"] for line in lines_of(out)[1:]] == [0]
    experiment.run(["--out", str(out), "--count", "0"])
    assert [line["number"] for line in lines_of(out)[1:]] == [0], "nothing was measured"
    experiment.run(["--out", str(out)])
    assert [line["number"] for line in lines_of(out)[1:]] == [0, 1, 2]


def test_options_have_the_types_of_their_defaults():
    options = {
        "one": option(1.5),
        "several": option([1, 2]),
        "none": option(int),
        "files": option([], type=Path),
        "switch": option(False),
    }
    parser = squares(options=options).parser(None)
    found = parser.parse_args([])
    assert (found.one, found.several, found.none, found.files, found.switch) == (1.5, [1, 2], None, [], False)
    words = ["--one", "2", "--several", "3", "--none", "4", "--files", "a", "b", "--switch"]
    found = parser.parse_args(words)
    assert (found.one, found.several, found.none, found.switch) == (2.0, [3], 4, True)
    assert found.files == [Path("a"), Path("b")]


def test_what_other_commands_make_says_so():
    with pytest.raises(SystemExit, match="scripts/reproduce squares"):
        squares(measure=None).run([])
    with pytest.raises(SystemExit, match=r"no experiment dance\. Known: .*step"):
        catalog.find("dance")


def test_tables_of_a_page_stand_in_the_order_of_their_rank(monkeypatch: pytest.MonkeyPatch):
    page = "docs/methods/online.md"
    several = {
        str(rank): squares(rank=rank, tables={page: {"measured": lambda rank=rank: f"table {rank}"}})
        for rank in random.sample(range(9), 3)
    }
    several["empty"] = squares(tables={page: {"measured": lambda: ""}, "README.md": {"results": lambda: ""}})
    monkeypatch.setattr(summary.catalog, "every", lambda: several)
    ranks = sorted(rank for rank in several if rank != "empty")
    found = summary.blocks()
    assert found[page] == {"measured online": "\n\n".join(f"table {rank}" for rank in ranks)}
    assert found["README.md"] == {}
