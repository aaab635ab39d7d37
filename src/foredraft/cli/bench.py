"""``foredraft bench``."""

import contextlib
import functools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foredraft.cli.choices import SAMPLING
from foredraft.cli.console import busy, errors, output
from foredraft.cli.ending import Interrupted
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from foredraft.bench.compare import Change
    from foredraft.bench.prompts import Ask


@dataclass(frozen=True, slots=True)
class Arms:
    """What is compared."""

    model: str = field(
        default="sample", metadata={"names": ("--model", "-m"), "help": "A folder, a hub name, or sample."}
    )
    drafter: tuple[str, ...] = field(
        default=("none", "auto", "transformers"),
        metadata={
            "names": ("--drafter", "-d"),
            "help": "May be repeated: a drafter as for generate, or transformers, transformers_assisted:PATH, "
            "transformers_lookup. NAME=SPEC gives it another name. By default none, auto and transformers.",
        },
    )
    dtype: str | None = field(default=None, metadata={"help": "Such as bfloat16; by default as for generate."})
    device: str | None = field(default=None, metadata={"help": "Such as cuda:1 or cpu; by default a GPU if there."})


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is asked."""

    prompts: tuple[str, ...] = field(
        default=(),
        metadata={"help": "A prompt file; may be repeated. By default eight of ours."},
    )
    count: int = field(default=0, metadata={"help": "So many prompts of each file; 0: all of them."})
    chat: bool = field(default=False, metadata={"help": "In the model's chat template, all turns."})
    batch_size: tuple[int, ...] = field(default=(1,), metadata={"help": "Prompts at once; may be repeated."})
    repeats: int = field(default=1, metadata={"help": "Ask everything so many times."})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the answers are made, by every arm alike."""

    temperature: tuple[float, ...] = field(default=(0.0,), metadata={"help": "0 is greedy; may be repeated."})
    max_new_tokens: int = field(default=128, metadata={"help": SAMPLING.help["max_new_tokens"]})
    min_new_tokens: int = field(default=0, metadata={"help": SAMPLING.help["min_new_tokens"]})
    top_k: int | None = field(default=None, metadata={"help": SAMPLING.help["top_k"]})
    top_p: float | None = field(default=None, metadata={"help": SAMPLING.help["top_p"]})
    repetition_penalty: float = field(default=1.0, metadata={"help": SAMPLING.help["repetition_penalty"]})
    seed: int = field(default=0, metadata={"help": "Of the first prompt; the others follow."})


@dataclass(frozen=True, slots=True)
class Kept:
    """What is measured besides, and where it goes."""

    out: str = field(
        default="bench.jsonl",
        metadata={
            "help": "One JSON line a call. What is there already is not run again, so a run can be gone on with."
        },
    )
    texts: bool = field(default=True, metadata={"help": "Keep no texts in the file."})
    costs: bool = field(default=False, metadata={"help": "Also time forwards by rows, cached tokens and batch."})
    watch: int = field(
        default=0, metadata={"help": "Also look, on so many prompts of each file, at which drafted nodes are accepted."}
    )
    score: bool = field(default=False, metadata={"help": "Say which answers are right, where the prompts tell."})
    execute_code: bool = field(
        default=False, metadata={"help": "With --score: run what the model wrote for HumanEval, in a sandbox."}
    )
    spec_bench: str | None = field(
        default=None, metadata={"help": "A folder for the answers in Spec-Bench's own format."}
    )
    json: bool = field(default=False, metadata={"help": "Print one JSON object instead of tables."})


_GROUPS = {
    "arms": Group(Arms, "Compared"),
    "what": Group(Prompts, "Prompts"),
    "sampling": Group(Sampling, "Sampling"),
    "kept": Group(Kept, "Output"),
}


@flags(**_GROUPS)
def command(
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Run nothing: is B slower than A, two files of runs, beyond noise? Exit status 1 if it is.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="With --compare: a smaller change is none.")] = 0.05,
    *,
    arms: Arms,
    what: Prompts,
    sampling: Sampling,
    kept: Kept,
) -> None:
    """How fast is it here? Any drafters on any prompts, side by side.

    Every prompt is put to every arm before the next one, so that drift hits all alike; speeds are without prefill and
    paired prompt by prompt. The file that it writes is what foredraft report reads.
    """
    if compare is not None:
        raise typer.Exit(_compared(Path(compare[0]), Path(compare[1]), tolerance, kept.json))
    _check(what, kept)
    asks = _asks(what)
    from foredraft.bench.arms import ArmSpec, Ground, make_arms, short_name
    from foredraft.bench.run import Bench, Settings, earlier, grouped
    from foredraft.bench.watch import Besides

    names = ("max_new_tokens", "min_new_tokens", "top_k", "top_p", "repetition_penalty", "seed")
    options = {name: getattr(sampling, name) for name in names}
    settings = Settings(short_name(arms.model), chat=what.chat, dtype=arms.dtype, device=arms.device, **options)
    for temperature in sampling.temperature:  # a bad value is refused before anything is loaded or written
        settings.params(temperature, 0)
    groups = grouped(asks, sampling.temperature, what.batch_size, what.repeats)
    path = Path(kept.out)
    score = _score(kept)
    earlier(path, settings)  # before anything is loaded: does it go on with this?
    with busy(f"Loading {arms.model}"):
        specs = [ArmSpec.parse(text) for text in arms.drafter]
        made = make_arms(specs, Ground(arms.model, arms.dtype, arms.device, max(what.batch_size)))
    bench = Bench(made, settings, path, keep_texts=kept.texts, score=score)
    besides = Besides(
        made, settings, sampling.temperature, what.batch_size if kept.costs else (), _first(asks, kept.watch)
    )
    try:
        with _progress() as tell:
            bench.run(groups, tell)
        with busy("Watching drafts and timing forwards"):
            bench.append(besides.lines(earlier(path, settings)))
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted; {path} has what was measured, and the same command goes on.") from None
    _show(path, kept)


def _check(what: Prompts, kept: Kept) -> None:
    if what.count < 0 or what.repeats < 1 or kept.watch < 0:
        raise OptionError("count and watch must not be below 0, and repeats must be 1 or more.")
    if min(what.batch_size) < 1:
        raise OptionError("batch_size must be 1 or more.")
    if kept.execute_code and not kept.score:
        raise OptionError("--execute-code goes with --score.")
    if kept.spec_bench is not None and not kept.texts:
        raise OptionError("Spec-Bench's format is made of texts: leave out --no-texts.")


def _asks(what: Prompts) -> "list[Ask]":
    from foredraft.bench.prompts import read_prompts, standard_prompts

    if not what.prompts:
        return standard_prompts(what.chat)[: what.count or None]
    return [ask for path in what.prompts for ask in read_prompts(path, what.chat)[: what.count or None]]


def _first(asks: "list[Ask]", count: int) -> "list[Ask]":
    """So many of each task."""
    seen: dict[str, int] = {}
    chosen = []
    for ask in asks:
        seen[ask.task] = seen.get(ask.task, 0) + 1
        if seen[ask.task] <= count:
            chosen.append(ask)
    return chosen


def _score(kept: Kept) -> "Callable[[Ask, str], bool | None] | None":
    if not kept.score:
        return None
    from foredraft.bench.sandbox import check_platform
    from foredraft.bench.score import score

    if kept.execute_code:
        check_platform()  # before the first model is loaded
    return functools.partial(score, execute=kept.execute_code)


@contextlib.contextmanager
def _progress() -> "Iterator[Callable[[int, int, str], None]]":
    """A bar on a terminal, nothing elsewhere. It moves between calls only: a thread that draws would take its time
    from what is measured."""
    console = errors()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def tell(done: int, count: int, what: str) -> None:
            bar.update(task, completed=done, total=count, description=what, refresh=True)

        yield tell


def _show(path: Path, kept: Kept) -> None:
    """What the file says, all of it: what was measured before counts as well."""
    from foredraft.bench.records import read_runs
    from foredraft.bench.summary import summarise
    from foredraft.cli.report import record, show

    file = read_runs(path)
    summary = summarise([file])
    if kept.spec_bench is not None:
        from foredraft.bench.spec_bench import write_answers

        write_answers(file.runs, Path(kept.spec_bench))
    if kept.json:
        typer.echo(json.dumps(record(summary)))
        return
    show(summary, output(), full=False)
    for run in file.errors[:3]:
        errors().print(f"{run.arm} on {run.task} {', '.join(run.prompts)}: {run.error}", soft_wrap=True, markup=False)
    output().print(f"{path} has every call; foredraft report {path} --html PAGE shows more.", style="dim")


def _compared(before: Path, after: Path, tolerance: float, as_json: bool) -> int:
    """Print what has changed, and say whether something got slower."""
    from foredraft.bench.compare import compare
    from foredraft.bench.records import read_runs

    changes = compare(read_runs(before), read_runs(after), tolerance)
    slower = [change for change in changes if change.verdict == "slower"]
    if as_json:
        listed = [{**asdict(change), "setting": change.setting._asdict()} for change in changes]
        typer.echo(json.dumps({"slower": bool(slower), "changes": listed}))
        return int(bool(slower))
    console = output()
    console.print(_changes(changes))
    sentence = f"Slower: {', '.join(change.arm for change in slower)}." if slower else "Nothing is slower beyond noise."
    console.print(sentence, style="bold red" if slower else "bold green")
    return int(bool(slower))


def _changes(changes: "list[Change]") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("method", "over", "law, batch", "speed-up, B over A", "tokens a forward", "units", ""):
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
