"""``foredraft train``."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.console import errors
from foredraft.cli.ending import Interrupted
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError
from foredraft.core.options import read_options, read_pairs
from foredraft.core.params import check_known
from foredraft.train.checkpoint import alone
from foredraft.train.devices import accelerator
from foredraft.train.drafts import DRAFTS, check_parts, run_drafts
from foredraft.train.loop import LoopOptions
from foredraft.train.prune import Shape
from foredraft.train.recipes import RECIPES, HeadShape
from foredraft.train.regenerate import Answers
from foredraft.train.run import run
from foredraft.train.site import Data


@dataclass(frozen=True, slots=True)
class Source:
    """What is learned from."""

    data: tuple[str, ...] = field(
        default=(),
        metadata={"help": "JSON Lines of text or messages, text files, a folder of these, or datasets:NAME. Repeat."},
    )
    cache: str | None = field(
        default=None, metadata={"help": "Folder for token ids and hidden states; runs on the same text share it."}
    )
    store: float = field(
        default=0.0, metadata={"help": "Gigabytes of hidden states to keep on disk, so that texts are read once."}
    )
    regenerate: bool = field(
        default=False, metadata={"help": "Learn from the target's own continuations of the data, made first."}
    )
    answers: int = field(default=2000, metadata={"help": "With --regenerate: so many continuations."})
    answer_tokens: int = field(default=208, metadata={"help": "With --regenerate: tokens of each."})
    answer_temperature: float = field(default=0.8, metadata={"help": "With --regenerate: their temperature."})
    answer_drafter: str = field(
        default="prompt_lookup", metadata={"help": "With --regenerate: what drafts them; see foredraft methods."}
    )


@dataclass(frozen=True, slots=True)
class Small:
    """What a whole draft model begins as."""

    draft: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "For draft, prune and boost: the model to begin with. Repeat for boost; prune cuts the target "
            "unless told otherwise."
        },
    )
    shape: str | None = field(
        default=None,
        metadata={
            "help": "For prune: layers, hidden, intermediate, heads, kv_heads, as in layers=2,hidden=256. What is left "
            "out stays."
        },
    )

    @property
    def cut(self) -> Shape | None:
        return Shape.parse(self.shape) if self.shape is not None else None


_LOOP = {
    "tokens": "Tokens of text to read in all.",
    "length": "Tokens of each text.",
    "batch": "Texts at once.",
    "accumulate": "Batches before each step of the optimizer.",
    "lr": "Peak learning rate.",
    "floor": "What it falls to, as a share of the peak.",
    "warmup": "Share of the steps in which it rises.",
    "weight_decay": "AdamW's.",
    "beta1": "AdamW's.",
    "beta2": "AdamW's.",
    "clip": "Largest norm of a gradient.",
    "precision": "bf16, fp32, or auto: bf16 where it is fast.",
    "seed": "Of the order of texts and of all noise.",
    "validate": "Steps between two validations.",
    "checkpoint": "Steps between two checkpoints.",
    "report": "Steps between two lines of the log.",
}
_SHAPE = {
    "vocabulary": "Size of an EAGLE-3 head's own vocabulary; 0 for the target's.",
    "taps": "Hidden layer of the target that an EAGLE-3 head reads. Repeat; by default 2, N/2 and N-3.",
    "heads": "Heads of Medusa, Hydra and blockwise decoding.",
    "layers": "Layers of each head.",
    "own_heads": "Each head gets an output layer of its own.",
    "cold": "Do not start from the target's weights.",
}


_NAMES = (*RECIPES, *DRAFTS)


@flags(
    source=Group(Source, "Data"),
    head=Group(HeadShape, "Head", help=_SHAPE),
    small=Group(Small, "Draft model"),
    loop=Group(LoopOptions, "Training", help=_LOOP),
)
def command(
    method: Annotated[str, typer.Argument(help=f"One of {', '.join(_NAMES)}.", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The target: a folder, a hub name, or sample.")
    ] = "sample",
    out: Annotated[
        str,
        typer.Option("--out", "-o", help="Folder of the run; what comes of it is OUT/head, or OUT/draft."),
    ] = "head",
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", help="An option of the recipe, such as loss=lk or steps=7. Repeat.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, to stay off a GPU that there is.", show_default=False)
    ] = None,
    *,
    source: Source,
    head: HeadShape,
    small: Small,
    loop: LoopOptions,
) -> None:
    """Train a draft head or a draft model for a target, on your text or on its own.

    Heads: eagle, eagle3, medusa, medusa2, hydra, hydra++, blockwise. Whole models: draft distils one from the target,
    prune cuts one out of a larger model first, boost distils several in turn, each where those before it are wrong, on
    the target's own continuations.

    The same command, given again after it was cut off, goes on where it was and ends in the same weights. With several
    GPUs: `torchrun --nproc-per-node N -m foredraft train ...`.
    """
    check_known("recipe", {method: None}, _NAMES)
    if not source.data:
        raise OptionError("There is nothing to learn from: give --data FILE.")
    kind = RECIPES[method].options if method in RECIPES else DRAFTS[method].options
    options = read_options(kind, f"the recipe {method}", read_pairs(recipe or ()))
    _check_parts(method, head, small)
    sources = source.data
    if source.regenerate or method == "boost":
        sources = (str(answers := Path(out) / "answers.jsonl"),)
        processes = accelerator(cpu=device == "cpu")
        with processes.main_process_first():
            if processes.is_main_process:
                _own_words(source, model, answers, device)
    data = Data(sources=tuple(sources), cache=source.cache, store=source.store)
    with Progress() as progress:
        common: dict[str, Any] = {"recipe_options": options, "loop": loop, "device": device, "tell": progress.tell}
        try:
            if method in RECIPES:
                made = [run(method, model, out, data, shape=head, **common)]
            else:
                made = run_drafts(method, model, out, data, drafts=small.draft, shape=small.cut, **common)
        except KeyboardInterrupt:
            raise Interrupted(
                f"Interrupted at step {progress.step}; the same command goes on from the last checkpoint."
            ) from None
    errors().print(_use(method, made), style="dim", soft_wrap=True)


def _check_parts(method: str, head: HeadShape, small: Small) -> None:
    """Refuse flags that say nothing to this recipe."""
    if method in DRAFTS:
        check_parts(method, small.draft, small.cut)
    odd: Any = head if method in DRAFTS else small
    usual = odd.__class__()
    for each in fields(odd):
        if getattr(odd, each.name) != getattr(usual, each.name):
            raise OptionError(f"{method} has no --{each.name.replace('_', '-')}.")


def _use(method: str, made: list[Path]) -> str:
    """What came of it, and how it is run."""
    if method in DRAFTS:
        where = " and ".join(map(str, made))
        subject = f"The draft is in {where}." if len(made) == 1 else f"The drafts are in {where}."
        return f"{subject} To use it: --drafter draft_model:{made[0]}"
    use = f"--drafter {_drafts_as(method)[0]}:{made[0]}"
    if RECIPES[method].join is not None:
        return f"The tuned target and its heads are in {made[0]}. To use them: --model {made[0]} {use}"
    return f"The head is in {made[0]}. To use it: {use}"


def _own_words(source: Source, model: str, path: Path, device: str | None) -> None:
    """Let the target continue the data, for a run to learn from that."""
    from foredraft.compose import load
    from foredraft.train.regenerate import regenerate

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
    return sorted((name for name, method in METHODS.items() if made in method.heads), key=lambda name: name != made)


class Progress:
    """Shows where a run stands: a line that moves on a terminal, now and then a line elsewhere."""

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
