"""``foredraft train``."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import completion_names as names
from foredraft.cli.console import busy, errors
from foredraft.cli.exit_status import Interrupted
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError
from foredraft.core.options import read_options, read_pairs
from foredraft.core.sampling.params import check_known
from foredraft.train.options import HeadShape, LoopOptions

if TYPE_CHECKING:
    from accelerate import Accelerator

    from foredraft.train.drafts.prune import PrunedShape


@dataclass(frozen=True, slots=True)
class Source:
    """The training data."""

    data: tuple[str, ...] = field(
        default=(), metadata={"help": "JSON Lines or text file, folder, or datasets:NAME; repeatable."}
    )
    cache: str | None = field(
        default=None, metadata={"help": "Folder for tokens and hidden states, to share with other runs."}
    )
    store: float = field(default=0.0, metadata={"help": "Gigabytes of the target's hidden states to keep on disk."})
    regenerate: bool = field(default=False, metadata={"help": "Train on the target's own answers to the data."})
    answers: int = field(default=2000, metadata={"help": "With --regenerate: number of answers."})
    answer_tokens: int = field(default=208, metadata={"help": "With --regenerate: tokens per answer."})
    answer_temperature: float = field(default=0.8, metadata={"help": "With --regenerate: temperature."})
    answer_drafter: str = field(
        default="prompt_lookup", metadata={"help": "With --regenerate: drafter.", "complete": names.drafters}
    )


@dataclass(frozen=True, slots=True)
class Small:
    """The initial models of draft, prune and boost."""

    draft: tuple[str, ...] = field(
        default=(), metadata={"help": "Initial model; repeat for boost. Default of prune: the target."}
    )
    shape: str | None = field(default=None, metadata={"help": "prune: e.g. layers=2,hidden=256,heads=4."})

    @property
    def cut(self) -> "PrunedShape | None":
        from foredraft.train.drafts.prune import PrunedShape

        return PrunedShape.parse(self.shape) if self.shape is not None else None


_RECIPE = "Recipe option, such as loss=lk or steps=7; repeatable. An unknown name lists all."
EXAMPLES = (
    "foredraft train eagle3 -m PATH --data texts.jsonl --out run --tokens 20000000",
    "torchrun --nproc-per-node 8 -m foredraft train eagle3 -m PATH --data texts.jsonl --out run",
)


@flags(
    source=Group(Source, "Data"),
    head=Group(HeadShape, "Head"),
    small=Group(Small, "Draft model"),
    loop=Group(LoopOptions, "Training", complete={"precision": names.precisions}),
)
def command(
    method: Annotated[
        str, typer.Argument(help="Recipe (listed above).", autocompletion=names.recipes, show_default=False)
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="TEXT", help="Target: folder, hub name or sample.")
    ] = "sample",
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FOLDER", help="Run folder; the result is OUT/head or OUT/draft.")
    ] = "head",
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", metavar="NAME=VALUE", help=_RECIPE, show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="TEXT", help="cpu: do not use the GPU.", show_default=False)
    ] = None,
    *,
    source: Source,
    head: HeadShape,
    small: Small,
    loop: LoopOptions,
) -> None:
    """Train a draft head or a draft model for a target.

    Heads: eagle, eagle3, medusa, medusa2, hydra, hydra++, blockwise. Models: draft (distilled from the target), prune
    (pruned from a larger model, then distilled), boost (several, each trained on the errors of the earlier ones). The
    same command resumes an interrupted run and reaches the same weights.
    """
    from foredraft.train.devices import leads
    from foredraft.train.drafts.run import DRAFTS, run_drafts
    from foredraft.train.heads.recipes import RECIPES
    from foredraft.train.heads.run import run
    from foredraft.train.run_context import Data

    check_known("recipe", {method: None}, names.RECIPES)
    if not source.data:
        raise OptionError("No training data: give --data FILE.")
    kind = RECIPES[method].options if method in RECIPES else DRAFTS[method].options
    options = read_options(kind, f"the recipe {method}", read_pairs(recipe or ()))
    _check_parts(method, head, small)
    if source.regenerate or method == "boost":
        source = _regenerated(source, model, Path(out) / "answers.jsonl", device)
    data = Data(sources=tuple(source.data), cache=source.cache, store=source.store)
    with busy("Reading") as update:
        progress = Progress(update)
        common: dict[str, Any] = {"recipe_options": options, "loop": loop, "device": device, "report": progress.report}
        try:
            if method in RECIPES:
                made = [run(method, model, out, data, shape=head, **common)]
            else:
                made = run_drafts(method, model, out, data, drafts=small.draft, shape=small.cut, **common)
        except KeyboardInterrupt:
            at = f" at step {progress.step}" if leads() else ""
            raise Interrupted(f"Interrupted{at}; the same command continues from the last checkpoint.") from None
    if leads():
        errors().print(_use(method, made), style="dim", soft_wrap=True)


def _regenerated(source: Source, model: str, answers: Path, device: str | None) -> Source:
    """Replace the data by the target's own answers, of which each process writes a part."""
    from foredraft.train.devices import accelerator

    _write_answers(source, model, answers, accelerator(cpu=device == "cpu"))
    return replace(source, data=(str(answers),))


def _check_parts(method: str, head: HeadShape, small: Small) -> None:
    """Refuse options that the recipe does not have."""
    from foredraft.train.drafts.run import check_parts

    if method in names.MODELS:
        check_parts(method, small.draft, small.cut)
    unused: Any = head if method in names.MODELS else small
    defaults = unused.__class__()
    for each in fields(unused):
        if getattr(unused, each.name) != getattr(defaults, each.name):
            raise OptionError(f"The recipe {method} has no option --{each.name.replace('_', '-')}.")


def _use(method: str, made: list[Path]) -> str:
    """The path of the result, and how to use it."""
    from foredraft.train.heads.recipes import RECIPES

    if method in names.MODELS:
        where = " and ".join(map(str, made))
        subject = f"The draft model is in {where}." if len(made) == 1 else f"The draft models are in {where}."
        return f"{subject} To use it: --drafter draft_model:{made[0]}"
    use = f"--drafter {_drafts_as(method)[0]}:{made[0]}"
    if RECIPES[method].join is not None:
        return f"The tuned target and its heads are in {made[0]}. To use them: --model {made[0]} {use}"
    return f"The head is in {made[0]}. To use it: {use}"


def _write_answers(source: Source, model: str, path: Path, processes: "Accelerator") -> None:
    from foredraft.compose.load import load
    from foredraft.train.checkpoint import lock_folder
    from foredraft.train.data.regenerate import RegenerateOptions, regenerate

    options = replace(
        RegenerateOptions(),
        count=source.answers,
        new_tokens=source.answer_tokens,
        temperature=source.answer_temperature,
    )
    lock = lock_folder(path.parent) if processes.is_main_process else nullcontext()
    with lock, busy("Reading") as update:
        progress = Progress(update)
        report = progress.report if processes.is_main_process else lambda line: None
        generator = load(model, source.answer_drafter, device=str(processes.device), max_batch_size=options.batch)
        try:
            regenerate(generator, list(source.data), path, options, report, processes)
        except KeyboardInterrupt:
            raise Interrupted(
                f"Interrupted after {progress.answers} answers; the same command continues from there."
            ) from None
        finally:
            generator.close()


def _drafts_as(kind: str) -> list[str]:
    from foredraft.drafters import METHODS

    made = {"hydra++": "hydra", "medusa2": "medusa"}.get(kind, kind)
    return sorted(
        (name for name, method in METHODS.usable().items() if made in method.heads), key=lambda name: name != made
    )


class Progress:
    """Shows log lines: on a terminal in the status line that ``update`` changes, as lines elsewhere."""

    def __init__(self, update: Callable[[str], None]) -> None:
        self._console = errors()
        self._update = update
        self.step = self.answers = 0

    def report(self, line: dict[str, Any]) -> None:
        text = _format(line)
        self.step, self.answers = line.get("step", self.step), line.get("answers", self.answers)
        if not self._console.is_terminal or not line.keys().isdisjoint(("validation", "note", "resumed")):
            self._console.print(text, style="dim", soft_wrap=True)
        else:
            self._update(text)


def _format(line: dict[str, Any]) -> str:
    if "note" in line:
        return str(line["note"])
    if "answers" in line:
        left = f" · {_clock(line['left'])} left" if "left" in line else ""
        return f"answer {line['answers']} of {line['of']}{left}"
    if "resumed" in line:
        if line["step"] == line["steps"]:
            return f"all {line['steps']} steps were already done"
        return f"resumed after step {line['step']} of {line['steps']} and {_clock(line['seconds'])} of training"
    if "validation" in line:
        values = ", ".join(f"{name} {value:.3f}" for name, value in line["validation"].items())
        return f"step {line['step']} · {line['tokens']:,} tokens · validation: {values}"
    rate = line["tokens"] / max(line["seconds"], 1e-9)
    return (
        f"step {line['step']} of {line['steps']} · loss {line['loss']:.3f} · {rate:,.0f} tokens/s · "
        f"{_clock(line['left'])} left"
    )


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. 0:12:30."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
