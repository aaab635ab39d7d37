"""``foredraft train``."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import completion_names as names
from foredraft.cli.console import busy, errors, starting
from foredraft.cli.exit_status import Interrupted, terminable
from foredraft.cli.flags import FlagGroup, flags
from foredraft.cli.train_progress import Progress
from foredraft.core.errors import DataError, OptionError
from foredraft.core.options import read_options, read_pairs
from foredraft.core.sampling.params import check_known
from foredraft.files.read import read_json
from foredraft.train.options import HeadShape, LoopOptions

if TYPE_CHECKING:
    from foredraft.train.drafts.prune import PrunedShape


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training data."""

    data: tuple[str, ...] = field(
        default=(),
        metadata={"help": "JSON Lines or text file, folder (as of foredraft answers), datasets:NAME; repeatable."},
    )
    cache: str | None = field(
        default=None, metadata={"help": "Folder for tokens and hidden states, to share with other runs."}
    )
    store: float = field(default=0.0, metadata={"help": "Gigabytes of the target's hidden states to keep on disk."})


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
    source=FlagGroup(TrainingData, "Data"),
    head=FlagGroup(HeadShape, "Head"),
    small=FlagGroup(Small, "Draft model"),
    loop=FlagGroup(LoopOptions, "Training", complete={"precision": names.precisions}),
)
def command(
    method: Annotated[
        str, typer.Argument(help="Recipe (listed above).", autocompletion=names.recipes, show_default=False)
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="TEXT", help="Target: folder, hub name or sample.")
    ] = "sample",
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Run folder; the result is OUT/head, OUT/draft or OUT/model."
        ),
    ] = "head",
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", metavar="NAME=VALUE", help=_RECIPE, show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="TEXT", help="cpu: do not use the GPU.", show_default=False)
    ] = None,
    *,
    source: TrainingData,
    head: HeadShape,
    small: Small,
    loop: LoopOptions,
) -> None:
    """Train a draft head or a draft model for a target.

    Heads: eagle, eagle3, medusa, medusa2, hydra, hydra++, blockwise, glide. Models: draft (distilled from the target),
    prune (pruned from a larger model, then distilled), boost (several, each trained on the errors of the earlier ones),
    early_exit (a copy of the target whose first layers draft). The same command resumes an interrupted run and reaches
    the same weights.
    """
    check_known("recipe", {method: None}, names.RECIPES)
    if not source.data:
        raise OptionError("No training data: give --data FILE.")
    progress, started = Progress(), False
    with terminable():
        try:
            with starting():
                from foredraft.train.drafts import run  # noqa: F401
            _check_parts(method, head, small)
            options = _options(method, recipe or ())
            started = True
            place, shape = (method, model, Path(out)), small if method in names.MODELS else head
            paths = _train(place, source, shape, progress, recipe_options=options, loop=loop, device=device)
        except KeyboardInterrupt as error:
            if not started:  # torch may be half imported
                raise Interrupted("Interrupted before the run began.", error) from None
            raise Interrupted(_kept(progress, Path(out)) if _leads() else "", error) from None
    if _leads():
        errors().print(_use(method, paths), style="dim", soft_wrap=True)


def _leads() -> bool:
    """Whether this process reports."""
    from foredraft.train.devices import leads

    return leads()


def _options(method: str, given: Iterable[str]) -> Any:
    """The recipe's options."""
    from foredraft.train.drafts.run import DRAFTS
    from foredraft.train.heads.recipes import RECIPES

    kind = RECIPES[method].options if method in RECIPES else DRAFTS[method].options
    return read_options(kind, f"the recipe {method}", read_pairs(given))


def _train(
    place: tuple[str, str, Path], source: TrainingData, shape: HeadShape | Small, progress: Progress, **given: Any
) -> list[Path]:
    """Train, and return the folders of the results. ``place``: recipe, target and folder."""
    from foredraft.train.drafts.run import run_drafts
    from foredraft.train.heads.run import run
    from foredraft.train.run_context import Data

    data = Data(sources=source.data, cache=source.cache, store=source.store)
    with busy("Loading the target, reading the data") as progress.update:
        given["report"] = progress.report
        if isinstance(shape, Small):
            return run_drafts(*place, data, drafts=shape.draft, shape=shape.cut, **given)
        return [run(*place, data, shape=shape, **given)]


def _kept(progress: "Progress", out: Path) -> str:
    """What an interrupted run has kept, and what the same command does with it."""
    from foredraft.train.checkpoint import resumable

    if progress.kept is not None:
        place = f" of {progress.kept['folder']}" if progress.kept["folder"] != out.name else ""
        step = f"step {progress.kept['kept']} of {progress.kept['steps']}{place}"
        return f"Interrupted after {step}; the same command continues from there."
    if resumable(out):
        return "Interrupted; the same command continues from the last checkpoint."
    return "Interrupted before anything was saved; the same command starts over."


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


def _use(method: str, paths: list[Path]) -> str:
    """The path of the result, and how to use it."""
    from foredraft.train.heads.recipes import RECIPES

    if method == "early_exit":
        layers = read_json(paths[0] / "provenance.json", DataError)["exit"]
        use = f"--model {paths[0]} --drafter early_exit,assistant_early_exit={layers}"
        return f"The tuned target is in {paths[0]}. To use it: {use}"
    if method in names.MODELS:
        where = " and ".join(map(str, paths))
        subject = f"The draft model is in {where}." if len(paths) == 1 else f"The draft models are in {where}."
        drafter = read_json(paths[0] / "provenance.json", DataError).get("drafter", "draft_model")
        return f"{subject} To use it: --drafter {drafter}:{paths[0]}"
    use = f"--drafter {_drafts_as(method)[0]}:{paths[0]}"
    if RECIPES[method].join is not None:
        return f"The tuned target and its heads are in {paths[0]}. To use them: --model {paths[0]} {use}"
    return f"The head is in {paths[0]}. To use it: {use}"


def _drafts_as(kind: str) -> list[str]:
    from foredraft.drafters import METHODS

    head = {"hydra++": "hydra", "medusa2": "medusa"}.get(kind, kind)
    return sorted(
        (name for name, method in METHODS.usable().items() if head in method.heads), key=lambda name: name != head
    )
