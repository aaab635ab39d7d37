"""``foredraft tune``."""

import json
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from foredraft.cli import completion_names as names
from foredraft.cli.choices import NEW_TOKENS, TARGET, OutputChoice, TargetChoice, check_processes
from foredraft.cli.console import busy, output, starting
from foredraft.cli.exit_status import interruptible
from foredraft.cli.flags import FlagGroup, flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.bench.tune.tune import Configuration, Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(TargetChoice):
    """The candidates."""

    drafter: tuple[str, ...] = field(
        default=(),
        metadata={
            "names": ("--drafter", "-d"),
            "help": "Candidate, as for generate; repeatable. Sizes are searched unless given as options. Default: "
            "prompt_lookup, the drafts bundled for the model, and auto.",
            "complete": names.drafters,
        },
    )


@dataclass(frozen=True, slots=True)
class TunePrompts(OutputChoice):
    """The prompts."""

    count: int = field(default=4, metadata={"help": "Prompts to use from each file; 0: all."})
    max_new_tokens: int = field(default=96, metadata={"names": NEW_TOKENS, "help": "Maximum tokens per output."})
    batch_size: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16), metadata={"help": "Batch sizes to test; repeatable. Default: 1, 2, 4, 8, 16."}
    )


@dataclass(frozen=True, slots=True)
class TuneOutput:
    """How many candidates to run, and what to write."""

    verify: int = field(default=3, metadata={"help": "Number of predicted configurations to run, best methods first."})
    out: str = field(default="tuned.json", metadata={"help": "File for the choice; pass it to --drafter."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object."})


_INTERRUPTED = (
    "Interrupted; measurements are not kept, since times of another moment do not compare; the same command starts "
    "over."
)
EXAMPLES = (
    "foredraft tune -m PATH -d eagle3:HEAD -d draft_model:SMALL --prompts mine.jsonl",
    "foredraft tune -m PATH -d eagle3:HEAD --batch-size 1 --batch-size 8 --batch-size 32",
    "foredraft generate -m PATH -d tuned.json < prompt.txt",
)


@flags(
    choice=FlagGroup(Choice, "Choice", first=("model", "drafter", *TARGET, "threads"), others=False),
    what=FlagGroup(TunePrompts, "Prompts"),
    shown=FlagGroup(TuneOutput, "Output"),
)
def command(*, choice: Choice, what: TunePrompts, shown: TuneOutput) -> None:
    """Find the fastest drafter and draft size for this machine.

    Times forwards, runs each method once at its largest size, predicts all smaller sizes, and runs the best of them.
    Writes the choice to a file for --drafter.
    """
    _check(what, shown)
    check_processes()
    prompts = [prompt.prompt for prompt in what.read()]
    with starting():
        from foredraft.bench.tune.candidates import default_drafters
        from foredraft.bench.tune.tune import TuneConfig, Tuner
        from foredraft.files.outputs import output_file

    with busy(f"Loading {choice.model}"):
        plain = choice.plain(max_batch_size=max(what.batch_size))
    config = TuneConfig(prompts, what.params(), shown.verify, what.batch_size)
    with output_file(shown.out, "tune"), busy("Measuring") as update:
        tuner = Tuner(
            plain,
            choice.drafter or default_drafters(choice.model),
            choice.model,
            lambda what: update(f"Measuring {what}"),
        )
        with interruptible(lambda: _INTERRUPTED):
            found = tuner.run(config)
        _write(shown.out, choice.model, found, what)
    if shown.json:
        typer.echo(json.dumps(_to_json(found)))
        return
    _print(found, shown.out, choice)


def _check(what: TunePrompts, shown: TuneOutput) -> None:
    """Refuse what cannot be written or run, before minutes of measuring."""
    if shown.verify < 1 or min(what.batch_size) < 1:
        raise OptionError("--verify and --batch-size must be 1 or more.")
    if not shown.out.endswith(".json"):
        raise OptionError(f"--out {shown.out}: the name must end in .json, which --drafter needs to recognize it.")
    with starting():
        from foredraft.files.outputs import output_file

    with output_file(shown.out, "tune"):
        pass


def _write(path: str, model: str, found: "Tuning", what: TunePrompts) -> None:
    from foredraft.files.provenance import provenance, short, shortened
    from foredraft.heads.formats.tuned import Tuned, write_tuned

    facts: dict[str, Any] = {"provenance": provenance(), "temperature": what.temperature}
    facts["tried"] = [
        {
            "drafter": shortened(trial.spec),
            "predicted": round(trial.predicted.speed_up, 3),
            "measured": round(trial.measured, 3),
        }
        for trial in found.trials
        if trial.measured is not None
    ]
    facts["batches"] = [point._asdict() for point in found.batches]
    drafter = found.chosen.spec if found.chosen is not None else "none"
    write_tuned(path, Tuned(short(model), drafter, found.off_from or 0, facts, found.learned))


def _to_json(found: "Tuning") -> dict[str, Any]:
    return {
        "pays": found.chosen is not None,
        "drafter": found.chosen.spec if found.chosen is not None else "none",
        "speed_up": found.chosen.measured if found.chosen is not None else None,
        "off_from": found.off_from,
        "batches": [point._asdict() for point in found.batches],
        "trials": [asdict(trial) for trial in found.trials],
        "costs": [asdict(table) for table in found.costs],
        "skipped": list(found.skipped),
    }


def _print(found: "Tuning", path: str, choice: Choice) -> None:
    console = output()
    console.print(_table(found))
    console.print(_tried(found), style="dim", soft_wrap=True, markup=False)
    for sentence in found.skipped:
        console.print(f"Not tried: {sentence}", style="dim", soft_wrap=True, markup=False)
    best = found.chosen
    if best is None:
        console.print("No drafter is faster than plain decoding here.", style="bold yellow")
    else:
        console.print(
            f"Best: {best.spec}, {best.measured:.2f}x plain decoding.", style="bold green", soft_wrap=True, markup=False
        )
        points = ", ".join(f"{point.speed_up:.2f} at {point.batch}" for point in found.batches)
        gain = f"no gain from batch size {found.off_from}" if found.off_from else "faster at every size"
        console.print(f"Speed-up by batch size: {points}; {gain}.", soft_wrap=True)
    command = f"foredraft generate {choice.arguments} --drafter {shlex.quote(path)} ..."
    console.print(f"{path}: {command}", style="dim", soft_wrap=True, markup=False)


def _tried(found: "Tuning") -> str:
    """Every drafter that was tried, and in how many sizes."""
    from foredraft.files.provenance import shortened

    sizes = Counter(trial.family for trial in found.trials if trial.spec != trial.family)
    named = [f"{shortened(family)} in {count} size{'s' if count > 1 else ''}" for family, count in sizes.items()]
    return f"Tried: {', '.join(named)}."


def _table(found: "Tuning") -> Table:
    """The configurations that were run, fastest first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("drafter", overflow="fold")
    for name in ("tokens/forward", "predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    ran = sorted((t for t in found.trials if t.measured is not None), key=lambda t: -(t.measured or 0.0))
    for trial in ran:
        style = "bold green" if trial is found.chosen else ""
        table.add_row(*map(escape, _cells(trial)), style=style)
    table.caption = f"{len(found.trials)} configurations predicted, {len(ran)} run."
    return table


def _cells(trial: "Configuration") -> list[str]:
    from foredraft.bench.tune.candidates import short_spec

    off = "" if trial.error is None else f"{100 * trial.error:+.0f}%"
    return [
        short_spec(trial.spec),
        f"{trial.acceptance_length:.2f}",
        f"{trial.predicted.speed_up:.2f}x",
        "" if trial.measured is None else f"{trial.measured:.2f}x",
        off,
    ]
