"""``foredraft train``."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import completion_names as names
from foredraft.cli.console import errors
from foredraft.cli.exit_status import Interrupted
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError
from foredraft.core.options import read_options, read_pairs
from foredraft.core.sampling.params import check_known
from foredraft.train.options import HeadShape, LoopOptions

if TYPE_CHECKING:
    from foredraft.train.drafts.prune import Shape


@dataclass(frozen=True, slots=True)
class Source:
    """The training text."""

    data: tuple[str, ...] = field(
        default=(),
        metadata={"help": "JSON Lines, text files, a folder, or datasets:NAME; repeatable."},
    )
    cache: str | None = field(default=None, metadata={"help": "Folder for tokens and features, shared by runs."})
    store: float = field(default=0.0, metadata={"help": "Gigabytes of features to keep on disk."})
    regenerate: bool = field(default=False, metadata={"help": "Let the target continue the data first; train on that."})
    answers: int = field(default=2000, metadata={"help": "With --regenerate: continuations."})
    answer_tokens: int = field(default=208, metadata={"help": "With --regenerate: tokens of each."})
    answer_temperature: float = field(default=0.8, metadata={"help": "With --regenerate: temperature."})
    answer_drafter: str = field(
        default="prompt_lookup", metadata={"help": "With --regenerate: its drafter.", "complete": names.drafters}
    )


@dataclass(frozen=True, slots=True)
class Small:
    """The models that draft, prune and boost start from."""

    draft: tuple[str, ...] = field(
        default=(), metadata={"help": "Model to start from; repeat for boost. Default of prune: the target."}
    )
    shape: str | None = field(default=None, metadata={"help": "For prune, such as layers=2,hidden=256,heads=4."})

    @property
    def cut(self) -> "Shape | None":
        from foredraft.train.drafts.prune import Shape

        return Shape.parse(self.shape) if self.shape is not None else None


_LOOP = {
    "tokens": "Tokens of text in all.",
    "length": "Tokens per sample.",
    "batch": "Samples per batch.",
    "accumulate": "Batches per optimizer step.",
    "lr": "Peak learning rate.",
    "floor": "Final learning rate, as a share of the peak.",
    "warmup": "Share of steps with a rising rate.",
    "weight_decay": "Of AdamW.",
    "beta1": "Of AdamW.",
    "beta2": "Of AdamW.",
    "clip": "Gradient norm limit.",
    "precision": "bf16, fp32, or auto.",
    "seed": "Seed of data order and noise.",
    "validate": "Steps between validations.",
    "checkpoint": "Steps between checkpoints.",
    "report": "Steps between log lines.",
}
_SHAPE = {
    "vocabulary": "EAGLE-3: draft vocabulary; 0: the target's.",
    "taps": "EAGLE-3: hidden layer to read, repeatable; default: 2, N/2, N-3.",
    "heads": "Medusa, Hydra, blockwise: heads.",
    "layers": "Layers per head.",
    "own_heads": "One output layer per head.",
    "start": "Trained head to continue from.",
    "cold": "Do not start from the target's weights.",
}


_RECIPE = "Recipe option, such as loss=lk or steps=7; repeatable."
EXAMPLES = (
    "foredraft train eagle3 -m PATH --data texts.jsonl --out run --tokens 20000000",
    "torchrun --nproc-per-node 8 -m foredraft train eagle3 -m PATH --data texts.jsonl --out run",
)


@flags(
    source=Group(Source, "Data"),
    head=Group(HeadShape, "Head", help=_SHAPE),
    small=Group(Small, "Draft model"),
    loop=Group(LoopOptions, "Training", help=_LOOP, complete={"precision": names.precisions}),
)
def command(
    method: Annotated[
        str, typer.Argument(help="A recipe, see above.", autocompletion=names.recipes, show_default=False)
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="TEXT", help="The target: folder, hub name or sample.")
    ] = "sample",
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FOLDER", help="Folder of the run; writes OUT/head or OUT/draft."),
    ] = "head",
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", metavar="NAME=VALUE", help=_RECIPE, autocompletion=names.recipe_options, show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="TEXT", help="cpu: do not use a GPU.", show_default=False)
    ] = None,
    *,
    source: Source,
    head: HeadShape,
    small: Small,
    loop: LoopOptions,
) -> None:
    """Train a draft head or a draft model for a target.

    Heads: eagle, eagle3, medusa, medusa2, hydra, hydra++, blockwise. Models: draft (distilled from the target), prune
    (cut out of a larger model, then distilled), boost (several, each trained where the earlier ones are wrong). The
    same command continues an interrupted run and ends with the same weights.
    """
    from foredraft.train.drafts.run import DRAFTS, run_drafts
    from foredraft.train.heads.recipes import RECIPES
    from foredraft.train.heads.run import run
    from foredraft.train.run_context import Data

    check_known("recipe", {method: None}, names.RECIPES)
    if not source.data:
        raise OptionError("There is no training text: give --data FILE.")
    kind = RECIPES[method].options if method in RECIPES else DRAFTS[method].options
    options = read_options(kind, f"the recipe {method}", read_pairs(recipe or ()))
    _check_parts(method, head, small)
    if source.regenerate or method == "boost":
        source = _regenerated(source, model, Path(out) / "answers.jsonl", device)
    data = Data(sources=tuple(source.data), cache=source.cache, store=source.store)
    with Progress() as progress:
        common: dict[str, Any] = {"recipe_options": options, "loop": loop, "device": device, "tell": progress.tell}
        try:
            if method in RECIPES:
                made = [run(method, model, out, data, shape=head, **common)]
            else:
                made = run_drafts(method, model, out, data, drafts=small.draft, shape=small.cut, **common)
        except KeyboardInterrupt:
            raise Interrupted(
                f"Interrupted at step {progress.step}; the same command continues from the last checkpoint."
            ) from None
    errors().print(_use(method, made), style="dim", soft_wrap=True)


def _regenerated(source: Source, model: str, answers: Path, device: str | None) -> Source:
    """The same with the target's own answers as the text; one process writes them."""
    from foredraft.train.devices import accelerator

    processes = accelerator(cpu=device == "cpu")
    with processes.main_process_first():
        if processes.is_main_process:
            _own_words(source, model, answers, device)
    return replace(source, data=(str(answers),))


def _check_parts(method: str, head: HeadShape, small: Small) -> None:
    """Refuse options that this recipe does not have."""
    from foredraft.train.drafts.run import check_parts

    if method in names.MODELS:
        check_parts(method, small.draft, small.cut)
    odd: Any = head if method in names.MODELS else small
    usual = odd.__class__()
    for each in fields(odd):
        if getattr(odd, each.name) != getattr(usual, each.name):
            raise OptionError(f"{method} has no --{each.name.replace('_', '-')}.")


def _use(method: str, made: list[Path]) -> str:
    """Where the result is, and how to run it."""
    from foredraft.train.heads.recipes import RECIPES

    if method in names.MODELS:
        where = " and ".join(map(str, made))
        subject = f"The draft is in {where}." if len(made) == 1 else f"The drafts are in {where}."
        return f"{subject} To use it: --drafter draft_model:{made[0]}"
    use = f"--drafter {_drafts_as(method)[0]}:{made[0]}"
    if RECIPES[method].join is not None:
        return f"The tuned target and its heads are in {made[0]}. To use them: --model {made[0]} {use}"
    return f"The head is in {made[0]}. To use it: {use}"


def _own_words(source: Source, model: str, path: Path, device: str | None) -> None:
    """Let the target continue the data, for a run to learn from that."""
    from foredraft.compose.load import load
    from foredraft.train.checkpoint import alone
    from foredraft.train.data.regenerate import Answers, regenerate

    options = replace(
        Answers(), count=source.answers, new_tokens=source.answer_tokens, temperature=source.answer_temperature
    )
    with alone(path.parent), Progress() as progress:
        generator = load(model, source.answer_drafter, device=device, max_batch_size=options.batch)
        try:
            regenerate(generator, list(source.data), path, options, progress.tell)
        except KeyboardInterrupt:
            raise Interrupted(
                f"Interrupted after {progress.answers} answers; the same command goes on after them."
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
    """Shows progress: a status line on a terminal, log lines elsewhere."""

    def __init__(self) -> None:
        self._console = errors()
        self._status: Any = None
        self.step = self.answers = 0

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._status = self._console.status("[dim]Reading[/dim]")
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, line: dict[str, Any]) -> None:
        """Show one line of the log."""
        text = _told(line)
        self.step, self.answers = line.get("step", self.step), line.get("answers", self.answers)
        if self._status is None or not line.keys().isdisjoint(("validation", "note", "resumed")):
            self._console.print(text, style="dim", soft_wrap=True)
        else:
            self._status.update(f"[dim]{text}[/dim]")


def _told(line: dict[str, Any]) -> str:
    if "note" in line:
        return str(line["note"])
    if "answers" in line:
        left = f" · {_clock(line['left'])} left" if "left" in line else ""
        return f"answer {line['answers']} of {line['of']}{left}"
    if "resumed" in line:
        if line["step"] == line["steps"]:
            return f"all {line['steps']} steps were done before"
        return f"resumed after step {line['step']} of {line['steps']} and {_clock(line['seconds'])} of training"
    if "validation" in line:
        said = ", ".join(f"{name} {value:.3f}" for name, value in line["validation"].items())
        return f"step {line['step']} · {line['tokens']:,} tokens · validation: {said}"
    rate = line["tokens"] / max(line["seconds"], 1e-9)
    return (
        f"step {line['step']} of {line['steps']} · loss {line['loss']:.3f} · {rate:,.0f} tokens/s · "
        f"{_clock(line['left'])} left"
    )


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 0:12:30."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
