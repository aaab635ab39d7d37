"""From a model and a shape to a smaller model of that shape: a shallow and wide draft (arXiv:2402.01528)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError, OptionError
from foredraft.core.io import read_json, write_json
from foredraft.core.options import parts, read_options, read_pairs
from foredraft.core.sampling.params import check_known
from foredraft.heads.nets.pruning_masks import Kept, Sizes
from foredraft.model.pruning import cut
from foredraft.train.data.features import fingerprint
from foredraft.train.drafts import distil
from foredraft.train.drafts.distil import Teacher
from foredraft.train.drafts.importance import important
from foredraft.train.drafts.masks import Masked, MaskRecipe
from foredraft.train.heads.validate import mean_losses
from foredraft.train.loop import LoopOptions, train
from foredraft.train.run_context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the pruned model is to look like; what is None stays. ``heads`` are query heads; they go by whole groups."""

    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From layers=2,hidden=256,...

        Raises:
            OptionError: an unknown part, or no number.
        """
        return read_options(cls, "--shape", read_pairs(parts(text, ",")))

    def of(self, sizes: Sizes) -> Sizes:
        """The sizes that this asks for, of a model with these sizes.

        Raises:
            OptionError: no model of these sizes can be cut to them; the sentence says which number, and why.
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
                raise OptionError(f"{name}={asked} cannot be: the model has {most}, so it must be from 1 to {most}.")
        if self.heads is not None and self.heads != groups * share:
            near = max(1, min(sizes.groups, groups))
            raise OptionError(
                f"heads={self.heads} cannot be: {share} query heads share a key-value head and groups are kept whole; "
                f"kv_heads={near} has heads={near * share}."
            )
        found = Sizes(
            layers=self.layers or sizes.layers,
            hidden=self.hidden or sizes.hidden,
            intermediate=self.intermediate or sizes.intermediate,
            heads=groups * share,
            groups=groups,
        )
        if found == sizes:
            raise OptionError("The shape is the model's own, so nothing can be pruned; name a part, as in layers=2.")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(distil.Options):
    """How to find what is kept, and how the rest is taught (see ``distil.Options``).

    by: importance, scores from a few texts; or masks, learned under Lagrange terms.
    texts: for importance, how many texts of the loop's length.
    mask_tokens, mask_lr: for masks, tokens that they are learned from, and their peak learning rate.
    rise: for masks, the share of these tokens after which the whole way to the shape is due.
    tune: for masks, the learning rate of the weights meanwhile as a share of the masks'; 0 leaves them alone, and needs
        no second copy of the model.
    """

    by: str = "importance"
    texts: int = 32
    mask_tokens: int = 1_000_000
    mask_lr: float = 0.1
    rise: float = 0.5
    tune: float = 0.0

    def __post_init__(self) -> None:
        distil.Options.__post_init__(self)  # super() knows only the class before it got slots
        check_known("way to prune", {self.by: None}, ["importance", "masks"])
        if self.texts < 1 or self.mask_tokens < 1:
            raise OptionError("texts and mask_tokens must be 1 or more.")
        if not (self.mask_lr > 0 and 0 < self.rise <= 1 and self.tune >= 0):
            raise OptionError("mask_lr must be above 0, rise above 0 and at most 1, and tune 0 or more.")


def pruned(
    site: RunContext,
    source: Any,
    wanted: Sizes,
    options: Options,
    loop: LoopOptions,
    tell: Callable[[dict[str, Any]], None],
) -> Any:
    """The model cut to these sizes, not yet distilled. What is kept is written to kept.json in the folder of the run.

    Args:
        source: the model, which may be the target's; it is left as it is.
    """
    if options.by == "masks":
        net = _learned(site, source, wanted, options, loop, tell)
        kept, source = net.gates.kept(wanted), net.whole
        if site.first:
            _write(site.folder / "kept.json", kept, {"sizes": asdict(wanted)})
    else:
        with site.accelerator.main_process_first():
            kept = _weighed(site, source, wanted, options, loop, tell)
    return cut(source, kept)


def _weighed(
    site: RunContext,
    source: Any,
    wanted: Sizes,
    options: Options,
    loop: LoopOptions,
    tell: Callable[[dict[str, Any]], None],
) -> Kept:
    """By importance, or as an earlier call has found."""
    path = site.folder / "kept.json"
    terms = {"sizes": asdict(wanted), "texts": options.texts, "length": loop.length, "seed": loop.seed}
    terms |= {"model": fingerprint(source), "data": site.store.folder.name}
    if (kept := _read(path, terms)) is not None:
        return kept
    lessons, single = site.lessons((), loop), replace(loop, batch=1)
    texts = [lessons.lesson(number, single, (0, 1)) for number in range(options.texts)]
    source.requires_grad_(False)
    kept = important(source, texts, wanted, lambda sentence: tell({"note": sentence}))
    _write(path, kept, terms)
    return kept


def _learned(
    site: RunContext,
    source: Any,
    wanted: Sizes,
    options: Options,
    loop: LoopOptions,
    tell: Callable[[dict[str, Any]], None],
) -> Masked:
    """By gates, in a run of their own: in its own folder, resumable as every run."""
    net = Masked(source, wanted, tuned=options.tune > 0)
    recipe = MaskRecipe(net, Teacher(site.target, options), options.rise, options.tune)
    mine = replace(loop, tokens=options.mask_tokens, lr=options.mask_lr)
    lessons = site.lessons(recipe.taps, mine)

    def validate() -> dict[str, float]:
        recipe.eval()
        return mean_losses(recipe, lessons.held_out(4))

    train(recipe, lessons, site.folder / "masks", mine, validate=validate, tell=tell, accelerator=site.accelerator)
    return net


def _write(path: Path, kept: Kept, terms: dict[str, Any]) -> None:
    write_json(path, {**kept._asdict(), "from": terms}, DataError)


def _read(path: Path, terms: dict[str, Any]) -> Kept | None:
    """What was found on these terms; None where there is no such file, or it was found on others."""
    if not path.exists():
        return None
    found = read_json(path, "what is kept,", "delete it to begin again", DataError)
    try:
        inner = {name: tuple(map(tuple, found[name])) for name in ("groups", "intermediate")}
        kept = Kept(tuple(found["layers"]), tuple(found["hidden"]), **inner)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} does not say what is kept; delete it to begin again.") from error
    return kept if found.get("from") == terms else None
