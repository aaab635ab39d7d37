"""``foredraft bench``."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foredraft.cli import completion_names as names
from foredraft.cli.choices import HEAT, NEW_TOKENS, SAMPLING, TARGET, PromptChoice, TargetChoice, check_processes
from foredraft.cli.console import busy, errors, output, progress_bar, starting
from foredraft.cli.exit_status import FAILED, UNJUDGED, interruptible
from foredraft.cli.flags import FlagGroup, flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from foredraft.bench.measure.compare import Change
    from foredraft.bench.prompts import BenchPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget(TargetChoice):
    """What to compare."""

    drafter: tuple[str, ...] = field(
        default=("none", "auto", "transformers"),
        metadata={
            "names": ("--drafter", "-d"),
            "help": "A drafter (as for generate), transformers, transformers_assisted:PATH or transformers_lookup; "
            "NAME=SPEC sets the arm's name; repeatable. Default: none, auto, transformers.",
            "complete": names.arms,
        },
    )


@dataclass(frozen=True, slots=True)
class BenchPrompts(PromptChoice):
    """The prompts; with ``--chat``, all their turns."""

    batch_size: tuple[int, ...] = field(default=(1,), metadata={"help": "Prompts per batch; repeatable. Default: 1."})
    repeats: int = field(default=1, metadata={"help": "Repeat all runs this many times."})


@dataclass(frozen=True, slots=True)
class BenchSampling:
    """Sampling options of all arms."""

    temperature: tuple[float, ...] = field(
        default=(0.0,), metadata={"names": HEAT, "help": "0 (default): greedy; repeatable."}
    )
    max_new_tokens: int = field(default=128, metadata={"names": NEW_TOKENS, "help": "Maximum number of new tokens."})
    min_new_tokens: int = field(default=0, metadata={"help": SAMPLING.help["min_new_tokens"]})
    top_k: int | None = field(default=None, metadata={"help": SAMPLING.help["top_k"]})
    top_p: float | None = field(default=None, metadata={"help": SAMPLING.help["top_p"]})
    repetition_penalty: float = field(default=1.0, metadata={"help": SAMPLING.help["repetition_penalty"]})
    seed: int = field(default=0, metadata={"help": "Seed of the first prompt; each next prompt adds 1."})


@dataclass(frozen=True, slots=True)
class BenchOutput:
    """Extra measurements, and where results go."""

    out: str = field(
        default="bench.jsonl", metadata={"help": "JSON Lines, one per call; an existing file is continued."}
    )
    texts: bool = field(default=True, metadata={"help": "Do not write the outputs' tokens and text to the file."})
    costs: bool = field(default=False, metadata={"help": "Also time forwards by nodes, cached tokens and batch size."})
    watch: int = field(default=0, metadata={"help": "Also record acceptance by draft position, on N prompts per task."})
    calibrate: bool = field(
        default=False,
        metadata={"help": "Store how often drafts were accepted in the folders of heads and draft models."},
    )
    spec_bench: str | None = field(default=None, metadata={"help": "Folder for answers in Spec-Bench's format."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object instead of tables."})


_GROUPS = {
    "compared": FlagGroup(
        BenchTarget, "Compared", first=("model", "drafter", *TARGET, "threads", "tensor_parallel"), others=False
    ),
    "what": FlagGroup(BenchPrompts, "Prompts"),
    "sampling": FlagGroup(BenchSampling, "Sampling"),
    "shown": FlagGroup(BenchOutput, "Output"),
}


_TOLERANCE = "With --compare: ignore changes up to this fraction."
EXAMPLES = (
    "foredraft bench -m PATH -d none -d eagle3:HEAD --prompts question.jsonl --out run.jsonl",
    "foredraft bench --compare before.jsonl after.jsonl",
)


@flags(**_GROUPS)
def command(
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="Only compare two files: is B slower than A, beyond noise?", show_default=False
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(metavar="FLOAT", help=_TOLERANCE)] = 0.05,
    *,
    compared: BenchTarget,
    what: BenchPrompts,
    sampling: BenchSampling,
    shown: BenchOutput,
) -> None:
    """Measure drafters against each other on your prompts.

    Each prompt runs on every arm before the next prompt, so machine drift affects all arms alike. foredraft report
    reads the file. Exit status of --compare: 0 if nothing is slower, 1 if an arm is slower, 3 if no arm can be judged
    (each needs six prompts or batches in common).
    """
    if compare is not None:
        raise typer.Exit(_compared(Path(compare[0]), Path(compare[1]), tolerance, shown.json))
    _check(what, shown)
    check_processes(compared.tensor_parallel)
    from foredraft.files.outputs import continued_file

    leads = os.environ.get("RANK", "0") == "0"  # the other processes end when the arms are made
    with continued_file(shown.out) if leads else contextlib.nullcontext():
        stored = _measured(compared, what, sampling, shown)
    _show(Path(shown.out), shown, stored)


def _measured(
    compared: BenchTarget, what: BenchPrompts, sampling: BenchSampling, shown: BenchOutput
) -> "Sequence[Path]":
    """Measure what the file lacks; returns the calibrations that were stored."""
    prompts = what.read()
    with starting():
        from foredraft.bench.measure.arms import ArmSpec, calibrated, make_arms, short_name, store_calibrations
        from foredraft.bench.measure.run import Bench, Settings, make_groups, read_existing
        from foredraft.bench.measure.watch import ExtraMeasurements

    options = {name: value for name, value in asdict(sampling).items() if name != "temperature"}
    about = {name: getattr(compared, name) for name in TARGET}
    settings = Settings(short_name(compared.model), chat=what.chat, **about, **options)
    for temperature in sampling.temperature:  # fail before loading or writing
        settings.params(temperature, 0)
    groups = make_groups(prompts, sampling.temperature, what.batch_size, what.repeats)
    path = Path(shown.out)
    read_existing(path, settings)  # fail before loading if the file has other settings
    specs = [ArmSpec.parse(text) for text in compared.drafter]
    folders = calibrated(specs, compared.model) if shown.calibrate else {}
    with busy(f"Loading {compared.model}"):
        compared.set_threads()
        arms = make_arms(specs, compared.model, replace(compared, max_batch_size=max(what.batch_size)))
    bench = Bench(arms, settings, path, keep_texts=shown.texts)
    extra = ExtraMeasurements(
        arms, settings, sampling.temperature, what.batch_size if shown.costs else (), _first(prompts, shown.watch)
    )
    with interruptible(lambda: f"Interrupted; {path} keeps what was measured, and the same command continues it."):
        with _progress() as report:
            bench.run(groups, report)
        with busy("Recording drafts and timing forwards"):
            bench.append(extra.lines(read_existing(path, settings)))
    return store_calibrations(arms, folders)


def _check(what: BenchPrompts, shown: BenchOutput) -> None:
    if what.repeats < 1 or shown.watch < 0:
        raise OptionError("--watch must be 0 or more, and --repeats 1 or more.")
    if min(what.batch_size) < 1:
        raise OptionError("--batch-size must be 1 or more.")
    if shown.spec_bench is not None and not shown.texts:
        raise OptionError("--spec-bench needs the outputs: remove --no-texts.")
    with starting():
        from foredraft.files.write import check_writable_folder

    if shown.spec_bench is not None:
        check_writable_folder(shown.spec_bench)


def _first(prompts: "list[BenchPrompt]", count: int) -> "list[BenchPrompt]":
    """The first ``count`` prompts of each task."""
    from foredraft.bench.measure.summary import grouped

    return [prompt for some in grouped(prompts, lambda each: each.task).values() for prompt in some[:count]]


@contextlib.contextmanager
def _progress() -> "Iterator[Callable[[int, int, str], None]]":
    """A progress bar that is drawn only between calls: a drawing thread would disturb the measurement."""
    with progress_bar(auto_refresh=False) as bar:
        task = bar.add_task("Measuring")

        def report(completed: int, count: int, what: str) -> None:
            bar.update(task, completed=completed, total=count, description=what, refresh=True)

        yield report


def _show(path: Path, shown: BenchOutput, stored: "Sequence[Path]") -> None:
    """Print all results in the file, including earlier ones, and which calibrations were stored."""
    from foredraft.bench.measure.records import read_runs
    from foredraft.bench.measure.summary import summarise
    from foredraft.cli.report import show, to_json

    file = read_runs(path)
    summary = summarise([file])
    if shown.spec_bench is not None:
        from foredraft.bench.measure.spec_bench import write_answers

        write_answers(file.runs, Path(shown.spec_bench))
    if shown.json:
        typer.echo(json.dumps(to_json(summary)))
        return
    show(summary, output(), full=False)
    for each in stored:
        output().print(f"{each} has what was learned of acceptance.", soft_wrap=True, markup=False)
    for run in file.errors[:3]:
        errors().print(f"{run.arm} on {run.task} {', '.join(run.prompts)}: {run.error}", soft_wrap=True, markup=False)
    output().print(f"All calls are in {path}; foredraft report {path} --html PAGE shows more.", style="dim")


def _compared(before: Path, after: Path, tolerance: float, as_json: bool) -> int:
    """Print the changes and return the exit status (``FAILED`` if an arm is slower, ``UNJUDGED`` if none can be)."""
    from foredraft.bench.measure.compare import FEWEST, compare
    from foredraft.bench.measure.records import read_runs

    changes = compare(read_runs(before), read_runs(after), tolerance)
    slower = [change for change in changes if change.verdict == "slower"]
    judged = [change for change in changes if change.verdict != "too few"]
    status = FAILED if slower else 0 if judged else UNJUDGED
    if as_json:
        listed = [{**asdict(change), "setting": change.setting._asdict()} for change in changes]
        typer.echo(json.dumps({"slower": bool(slower), "judged": len(judged), "changes": listed}))
        return status
    console = output()
    console.print(_changes(changes))
    if slower:
        sentence, style = f"Slower: {', '.join(change.arm for change in slower)}.", "bold red"
    elif judged:
        sentence, style = "Nothing is slower beyond noise.", "bold green"
    else:
        sentence, style = f"Cannot compare: an arm needs {FEWEST} units in both files.", "bold yellow"
    if judged and len(judged) < len(changes):
        sentence += f" {len(changes) - len(judged)} of {len(changes)} comparisons have too few units."
    console.print(sentence, style=style, soft_wrap=True)
    return status


def _changes(changes: "list[Change]") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("method", "baseline", "sampling, batch", "speed-up, B over A", "tokens/forward", "units", ""):
        table.add_column(name, justify="right" if name == "units" else "left")
    colours = {"slower": "bold red", "faster": "bold green", "too few": "dim"}
    for each in changes:
        bounds = "" if each.low is None else f" ({each.low:.2f} to {each.high:.2f})"
        table.add_row(
            each.arm,
            each.baseline,
            each.setting.label,
            f"{each.ratio:.2f}{bounds}",
            f"{each.lengths[0]:.2f} to {each.lengths[1]:.2f}",
            str(each.units),
            each.verdict,
            style=colours.get(each.verdict, ""),
        )
    return table
