"""Pruning a model to a given shape, e.g. a shallow and wide draft model (arXiv:2402.01528)."""

import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError, OptionError
from foredraft.core.options import check_bounds, parts, read_options, read_pairs
from foredraft.core.sampling.params import check_known
from foredraft.files.provenance import fingerprint
from foredraft.files.read import read_json
from foredraft.files.write import write_json
from foredraft.model.hf.pruned_parts import Kept, TransformerSizes
from foredraft.model.hf.pruning import cut
from foredraft.train.drafts import distil
from foredraft.train.drafts.distil import DraftRun, Teacher
from foredraft.train.drafts.importance import START, select_by_importance
from foredraft.train.drafts.masks import Masked, MaskRecipe
from foredraft.train.heads.validate import mean_losses
from foredraft.train.loop import train
from foredraft.train.partial import ResumableState


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedShape:
    """Shape of the pruned model; None: unchanged. ``heads`` are query heads, pruned in whole groups."""

    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None

    @classmethod
    def parse(cls, text: str) -> "PrunedShape":
        """Parse layers=2,hidden=256,...

        Raises:
            OptionError: unknown name, or not a number.
        """
        return read_options(cls, "--shape", read_pairs(parts(text, ",")))

    def of(self, sizes: TransformerSizes) -> TransformerSizes:
        """The pruned sizes of a model with these sizes.

        Raises:
            OptionError: the model cannot be pruned to this shape; the message names the size and the reason.
        """
        share = sizes.heads // sizes.groups
        groups = self.kv_heads if self.kv_heads is not None else sizes.groups
        if self.kv_heads is None and self.heads is not None:
            groups = self.heads // share
        has = {"layers": sizes.layers, "hidden": sizes.hidden, "intermediate": sizes.intermediate}
        has |= {"heads": sizes.heads, "kv_heads": sizes.groups}
        for name, most in has.items():
            asked = getattr(self, name)
            if asked is not None and not 1 <= asked <= most:
                raise OptionError(f"Invalid {name}={asked}: the model has {most}, so it must be from 1 to {most}.")
        if self.heads is not None and self.heads != groups * share:
            near = max(1, min(sizes.groups, groups))
            raise OptionError(
                f"Invalid heads={self.heads}: {share} query heads share a key-value head, and groups are pruned whole; "
                f"use kv_heads={near} (heads={near * share})."
            )
        found = TransformerSizes(
            layers=self.layers or sizes.layers,
            hidden=self.hidden or sizes.hidden,
            intermediate=self.intermediate or sizes.intermediate,
            heads=groups * share,
            groups=groups,
        )
        if found == sizes:
            raise OptionError("The shape equals the model's, so nothing is pruned: give a smaller one, as in layers=2.")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(distil.Options):
    """Options of pruning and of the distillation that follows (see ``distil.Options``).

    by: importance: scores from a few samples; masks: learned with Lagrange multipliers.
    samples: for importance, number of samples.
    mask_tokens, mask_lr: for masks, training tokens and peak learning rate.
    rise: for masks, fraction of these tokens after which the full reduction is required.
    tune: for masks, learning rate of the weights as a fraction of the masks'; 0 freezes them and needs no second copy
        of the model.
    """

    by: str = "importance"
    samples: int = 32
    mask_tokens: int = 1_000_000
    mask_lr: float = 0.1
    rise: float = 0.5
    tune: float = 0.0

    def __post_init__(self) -> None:
        distil.Options.__post_init__(self)  # super() knows only the class before it got slots
        check_known("pruning method", {self.by: None}, ["importance", "masks"])
        check_bounds(self, least={"samples": 1, "mask_tokens": 1, "tune": 0}, most={"rise": 1})
        check_bounds(self, above={"mask_lr": 0, "rise": 0})


def pruned(run: DraftRun, source: Any, wanted: TransformerSizes) -> Any:
    """Prune a model to the wanted sizes, without distillation; the run's kept.json has the kept indices.

    Args:
        source: the model, unchanged; may be the target's.
    """
    if run.options.by == "masks":
        net = _learn_masks(run, source, wanted)
        kept, source = net.gates.kept(wanted), net.whole
        if run.context.first:
            _write(run.context.folder / "kept.json", kept, {"sizes": asdict(wanted)})
    else:
        with run.context.accelerator.main_process_first():
            kept = _select_by_importance(run, source, wanted)
    return cut(source, kept)


def _select_by_importance(run: DraftRun, source: Any, wanted: TransformerSizes) -> Kept:
    """The indices to keep, by importance, or as found by an earlier call."""
    context, count = run.context, run.options.samples
    path = context.folder / "kept.json"
    terms = {"sizes": asdict(wanted), "samples": count, "length": run.loop.length, "seed": run.loop.seed}
    terms |= {"model": fingerprint(source), "data": context.store.folder.name}
    if (kept := _read(path, terms)) is not None:
        return kept
    batches, single = context.batches((), run.loop), replace(run.loop, batch=1)
    samples = [batches.batch(number, single, (0, 1)) for number in range(count)]
    source.requires_grad_(False)
    start, seconds = copy.deepcopy(START), run.loop.checkpoint_seconds
    partial = ResumableState(context.folder / "importance.pt", terms, start, seconds)
    kept = select_by_importance(source, samples, wanted, lambda sentence: run.report({"note": sentence}), partial)
    _write(path, kept, terms)
    partial.remove()
    return kept


def _learn_masks(run: DraftRun, source: Any, wanted: TransformerSizes) -> Masked:
    """Learn masks in a resumable sub-run with its own folder."""
    context, options = run.context, run.options
    net = Masked(source, wanted, tuned=options.tune > 0)
    recipe = MaskRecipe(net, Teacher(context.target, options), options.rise, options.tune)
    loop = replace(run.loop, tokens=options.mask_tokens, lr=options.mask_lr)
    batches, folder = context.batches(recipe.taps, loop), context.folder / "masks"

    def validate() -> dict[str, float]:
        recipe.eval()
        return mean_losses(recipe, batches.held_out(4))

    train(recipe, batches, folder, loop, validate=validate, report=run.report, accelerator=context.accelerator)
    return net


def _write(path: Path, kept: Kept, terms: dict[str, Any]) -> None:
    write_json(path, {**kept._asdict(), "from": terms}, DataError)


def _read(path: Path, terms: dict[str, Any]) -> Kept | None:
    """The indices found with these settings; None if the file is missing or has other settings."""
    if not path.exists():
        return None
    found = read_json(path, DataError, remedy="delete it to start over")
    try:
        inner = {name: tuple(map(tuple, found[name])) for name in ("groups", "intermediate")}
        kept = Kept(tuple(found["layers"]), tuple(found["hidden"]), **inner)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} lacks the kept indices; delete it to start over.") from error
    return kept if found.get("from") == terms else None
