"""An experiment: its question, its options, its cells and how they are measured, and its tables, each stated once."""

import argparse
import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.kit.origin import provenance
from foredraft.files.provenance import shortened

if TYPE_CHECKING:
    from benchmarks.kit.claims import Claim

ROOT = Path(__file__).resolve().parents[2]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
Line = dict[str, Any]
"""A line of a results file. Its ``kind`` says what it is; of kind ``provenance`` is the first one of each run."""
Cell = dict[str, Any]
"""What is measured at once: entries that its line has, too, and that no other line has all of."""
Command = list[str]


def option(default: Any = None, about: str = "", **given: Any) -> dict[str, Any]:
    """An option, as ``argparse`` takes it: False is a switch, a list takes several values, a type has no default."""
    if default is False:
        return {"action": "store_true", "help": about}
    first = default[0] if isinstance(default, list | tuple) and default else ""
    several = {"nargs": "*" if not default else "+"} if isinstance(default, list | tuple) else {}
    kind = default if isinstance(default, type) else type(first if several or default is None else default)
    return {"default": None if kind is default else default, "type": kind, "help": about, **several, **given}


PROMPTS = option([], "files of prompts", type=Path)


TASKS = ("humaneval", "gsm8k", "mt_bench")
ALL_TASKS = ("mt_bench", "gsm8k", "humaneval", "alpaca", "sum", "qa")


class Inputs(NamedTuple):
    """Folders and files that do not ship with the repository, and what a reader of ``scripts/reproduce`` chose."""

    models: Path
    prompts: Path
    corpus: Path
    heads: Path
    smollm2: str
    head: Path
    openvino: Path
    own_model: str | None
    own_prompts: Sequence[str]
    state: Path

    @property
    def own(self) -> bool:
        """Whether a reader's model or prompts take the place of ours."""
        return bool(self.own_model or self.own_prompts)

    def questions(self, *tasks: str) -> list[str]:
        """Files of prompts, by default of three tasks."""
        return [str(self.prompts / "eagle" / task / "question.jsonl") for task in tasks or TASKS]

    def answers(self) -> Command:
        """What makes the real model's own answers, which its heads learn from."""
        excluded = repeated("--exclude", self.questions())
        model = ["-m", self.smollm2, "--weights", "int4", "--own-prompts", "14000"]
        return command("foredraft", "answers", self.state / "answers", *model, *excluded)


def repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def command(module: str, *words: str | Path) -> Command:
    """``python -m module`` with these words."""
    return [sys.executable, "-m", module, *map(str, words)]


def measured(name: str, *words: str | Path) -> Command:
    """The command that runs an experiment."""
    return command("benchmarks", name, *words)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What ``python -m benchmarks NAME`` measures, and what pages and ``scripts/reproduce`` know of it.

    name: of the command and, by default, of the results file. question: what is asked, and the pages that say it.
    measure: gives the lines of these cells as they are made; one of kind ``provenance`` is added to that of the run.
    cells: all of them; those in the file are not measured again. Without it, the file is made as a whole.
    make: in place of both, writes the results file itself, as by ``foredraft bench``.
    shown: of a results file, what is printed in the end. figures: SVG texts by name of the file in docs/figures;
    claims: of docs/results.md, with their pictures.
    tables: by page, the text between the markers of each name. The ``measured`` of a method's page has the parts of all
    experiments in the order of their ``rank``.
    hours: on two quiet cores. needs: files and folders without which it cannot be reproduced; commands: what does it.
    threads: of torch, if not all cores'.
    """

    name: str
    question: str
    measure: Callable[[Namespace, Sequence[Cell]], Iterator[Line]] | None = None
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    cells: Callable[[Namespace], Sequence[Cell]] | None = None
    make: Callable[[Namespace], None] | None = None
    facts: Callable[[Namespace], dict[str, Any]] = lambda args: {}
    shown: Callable[[Path], str] | None = None
    threads: int | None = 1
    tables: Mapping[str, Mapping[str, Callable[[], str]]] = field(default_factory=dict)
    figures: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    claims: Mapping[str, Callable[[], "Claim"]] = field(default_factory=dict)
    rank: int = 5
    hours: float = 0.0
    needs: Callable[[Inputs], Sequence[Path]] = lambda inputs: ()
    commands: Callable[[Inputs], Sequence[Command]] | None = None
    results: tuple[str, ...] | None = None
    own: bool = False
    """Whether a reader's model and prompts may take the place of ours."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its results files."""
        return (f"{self.name}.jsonl",) if self.results is None else self.results

    def reproduction(self, inputs: Inputs) -> Sequence[Command]:
        """The commands that make its results again."""
        return [measured(self.name)] if self.commands is None else self.commands(inputs)

    def parser(self, about: str | None) -> argparse.ArgumentParser:
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(f"python -m benchmarks {self.name}", description=about, formatter_class=form)
        for name, given in self.options.items():
            words = {key: value for key, value in given.items() if key != "flags"}
            parser.add_argument(*given.get("flags", ()), f"--{name.replace('_', '-')}", **words)
        parser.add_argument("--out", type=Path, default=RESULTS / "".join(self.files[:1]), help="results file")
        parser.add_argument("--threads", type=int, default=self.threads)
        if self.measure:
            parser.add_argument("--again", action="store_true", help="measure what the file has already")
            parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th cell, from the I-th on")
            parser.add_argument("--seconds", type=float, default=float("inf"), help="then no other line is begun")
        return parser

    def run(self, words: Sequence[str], about: str | None = None) -> None:
        """Measure what is missing; ``words`` are those of the command line."""
        import torch

        args = self.parser(about).parse_args(words)
        if args.threads:
            torch.set_num_threads(args.threads)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        if self.make:
            self.make(args)
        elif self.measure:
            self._measure(args, words)
        else:
            raise SystemExit(f"{self.name} is made by other commands: scripts/reproduce {self.name}")
        if self.shown and args.out.exists() and args.out.stat().st_size:
            print(self.shown(args.out))

    def _measure(self, args: Namespace, words: Sequence[str]) -> None:
        assert self.measure is not None
        args.until = time.monotonic() + args.seconds
        if args.again:
            args.out.unlink(missing_ok=True)
        cells = None if self.cells is None else missing(self.cells(args), args)
        if cells == []:
            return
        file = args.out if cells else args.out.with_suffix(".part")  # an interrupted whole keeps the last one
        head = provenance(f"python -m benchmarks {self.name} {shlex.join(map(shortened, words))}".strip())
        wrote = self._write(file, head | self.facts(args), self.measure(args, cells or ()), args.until)
        if not cells and wrote:
            file.replace(args.out)

    def _write(self, path: Path, head: Line, lines: Iterator[Line], until: float) -> bool:
        """Whether there was a line."""
        with ExitStack() as stack:
            out = None
            for number, line in enumerate(lines):
                if line["kind"] == "provenance":
                    head |= line
                    continue
                if out is None:
                    out = stack.enter_context(path.open("a" if self.cells else "w", encoding="utf-8"))
                    out.write(json.dumps(head) + "\n")
                out.write(json.dumps(line) + "\n")
                out.flush()
                facts = [f"{key} {value}" for key, value in line.items() if isinstance(value, str | float | int)]
                print(f"{number + 1}: {', '.join(facts)}"[:400], flush=True)
                if time.monotonic() > until:
                    break
        return out is not None


def missing(cells: Sequence[Cell], args: Namespace) -> list[Cell]:
    """Those of a part of the cells that the results file does not have."""
    first, every = map(int, args.part.split("/"))
    made: list[Line] = []
    if args.out.exists():
        made = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]
    return [cell for cell in cells[first - 1 :: every] if not any(cell.items() <= line.items() for line in made)]
