"""Runs whose outcome is a whole small model: distilled, pruned and distilled, or several boost-tuned in turn."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError, OptionError
from foredraft.core.io import provenance, short
from foredraft.core.sampling.params import check_known
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.model.hf import CausalLM
from foredraft.model.load import load_model
from foredraft.model.pruning import sizes_of
from foredraft.model.tokenizer import check_same_tokenizer
from foredraft.train.data.batches import Lessons
from foredraft.train.data.features import fingerprint
from foredraft.train.data.tokens import TokenStore
from foredraft.train.drafts import boost, distil, prune
from foredraft.train.drafts.distil import DistilRecipe, Student, Teacher
from foredraft.train.heads.export import save_draft
from foredraft.train.heads.validate import length_now, losses_now
from foredraft.train.loop import LoopOptions, train
from foredraft.train.run_context import Data, RunContext

Tell = Callable[[dict[str, Any]], None]
_CHAIN = DraftOptions(num_assistant_tokens=5, assistant_confidence_threshold=0.0)


@dataclass(frozen=True, slots=True)
class DraftKind:
    """One line of the table: the options of the recipe, how many drafts it takes, and whether it takes a shape."""

    options: type
    fewest: int
    most: int
    shaped: bool = False


DRAFTS = {
    "draft": DraftKind(distil.Options, 1, 1),
    "prune": DraftKind(prune.Options, 0, 1, shaped=True),
    "boost": DraftKind(boost.Options, 2, 64),
}
"""Recipes for whole models; those for heads are ``recipes.RECIPES``."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What the parts of a run have in common."""

    site: RunContext
    method: str
    target_name: str
    options: Any
    loop: LoopOptions
    tell: Tell


def run_drafts(
    method: str,
    target_name: str,
    out: str | Path,
    data: Data,
    *,
    drafts: tuple[str, ...] = (),
    shape: prune.Shape | None = None,
    recipe_options: Any = None,
    loop: LoopOptions | None = None,
    device: str | None = None,
    tell: Tell = lambda line: None,
) -> list[Path]:
    """Train whole draft models for a target; go on where an earlier run with the same folder was cut off.

    Args:
        method: draft, to distil the one of ``drafts``; prune, to cut it, or the target where there is none, to
            ``shape`` and distil what is left; boost, to distil ``drafts`` in turn, each where those before it fail.

    Returns:
        the folders of the finished models: ``out/draft``, or for boost ``out/1/draft``, ``out/2/draft`` and so on.

    Raises:
        UsageError: data, options, a target or drafts that cannot be; the sentence says why.
    """
    check_known("recipe", {method: None}, list(DRAFTS))
    check_parts(method, drafts, shape)
    loop, options = loop or LoopOptions(), recipe_options or DRAFTS[method].options()
    with RunContext.open(target_name, out, data, device) as site:
        run = _Run(site, method, target_name, options, loop, tell)
        if method == "boost":
            return _boost(run, drafts)
        if method == "prune":
            assert shape is not None
            return [_prune(run, drafts[0] if drafts else None, shape)]
        return [_distil(run, drafts[0])]


def check_parts(method: str, drafts: tuple[str, ...], shape: prune.Shape | None) -> None:
    """Raise an ``OptionError`` unless there are as many drafts as the recipe takes, and a shape where it takes one."""
    kind = DRAFTS[method]
    if len(drafts) < kind.fewest:
        number = "a model" if kind.fewest == 1 else f"{kind.fewest} or more models"
        raise OptionError(f"{method} trains {number}: name what to begin with, as --draft MODEL.")
    if len(drafts) > kind.most:
        raise OptionError(f"{method} takes one --draft, not {len(drafts)}; boost takes several.")
    if kind.shaped != (shape is not None):
        why = "needs --shape, such as layers=2,hidden=256" if kind.shaped else "has no --shape: that is for prune"
        raise OptionError(f"{method} {why}.")


def _distil(run: _Run, name: str) -> Path:
    run.site.check_resume(_terms(run, {"draft": short(name)}))
    recipe = _recipe(run, _opened(run.site, name))
    return _taught(run, recipe, run.site.folder, run.site.store, {"start": short(name)})


def _prune(run: _Run, name: str | None, shape: prune.Shape) -> Path:
    site = run.site
    source = site.loaded.model if name is None else _opened(site, name)
    wanted = shape.of(sizes_of(source))
    notes = {"start": short(name or run.target_name), "shape": asdict(wanted), "by": run.options.by}
    terms = _terms(run, {**notes, "draft": notes["start"]})
    site.check_resume(terms)
    if run.options.by == "masks":
        site.check_resume(terms, site.folder / "masks")
    small = prune.pruned(site, source, wanted, run.options, run.loop, run.tell)
    del source
    return _taught(run, _recipe(run, small), site.folder, site.store, notes)


def _boost(run: _Run, names: tuple[str, ...]) -> list[Path]:
    site, made = run.site, []
    rest = site.store
    for number, name in enumerate(names, start=1):
        folder = site.folder / str(number)
        share = boost.share(rest, site.store, run.loop.length)
        learns = round(share, 4)
        site.check_resume(_terms(run, {"drafts": [short(each) for each in names[:number]], "learns": learns}), folder)
        if share < boost.ENOUGH:
            raise DataError(f"The drafts before {name!r} say all that the target says; nothing is left to learn.")
        recipe = _recipe(run, _opened(site, name))
        notes = {"start": short(name), "after": [short(each) for each in names[: number - 1]]}
        run.tell({"note": f"draft {number} of {len(names)} learns {learns:.0%} of the text"})
        made.append(_taught(run, recipe, folder, rest, {**notes, "learns": learns}))
        if number < len(names):
            rest = _rest(run, recipe, rest, folder)
    return made


def _rest(run: _Run, recipe: DistilRecipe, store: TokenStore, folder: Path) -> TokenStore:
    """What the next draft is to learn: one process finds it, the others and later runs read it."""
    model = recipe.net.model.bfloat16().float()  # what this draft gets right is judged as it was saved
    path = folder / f"missed-{fingerprint(model)}-{run.options.easy:g}.npy"
    with run.site.accelerator.main_process_first():
        rest = boost.kept(path, store)
        if rest is None:
            lessons = run.site.lessons(recipe.taps, run.loop, store)
            rest = boost.missed(store, recipe, lessons, run.loop, run.options.easy)
            boost.keep(path, rest)
    return rest


def _terms(run: _Run, more: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in asdict(run.options).items() if key != "rows"}
    return {"recipe": run.method, "model": Path(run.target_name).name, **options, **more}


def _opened(site: RunContext, name: str) -> Any:
    """A model that reads the target's tokens."""
    found = load_model(name, dtype="float32", device=str(site.accelerator.device))
    check_same_tokenizer(site.loaded.tokenizer, found.tokenizer, name)
    if (largest := int(site.store.ids.max())) >= found.model.config.get_text_config().vocab_size:
        raise DataError(f"The training text has the token id {largest}; the vocabulary of {name!r} ends before it.")
    return found.model


def _recipe(run: _Run, model: Any) -> DistilRecipe:
    CausalLM(model, fast=False).close()  # says at once what could never draft
    return DistilRecipe(Student(model), Teacher(run.site.target, run.options))


def _taught(run: _Run, recipe: DistilRecipe, folder: Path, store: TokenStore, notes: dict[str, Any]) -> Path:
    """Train, and leave the model in ``folder/draft``."""
    site, loop = run.site, run.loop
    lessons = site.lessons(recipe.taps, loop, store)
    validate = functools.partial(_validate, recipe, lessons, site.target, loop)
    train(recipe, lessons, folder, loop, validate=validate, tell=run.tell, accelerator=site.accelerator)
    if site.first:
        origin = {**provenance(), "recipe": run.method, "model": Path(run.target_name).name, **notes}
        save_draft(recipe.net.model, folder / "draft", site.loaded, {**origin, "validation": validate()})
    site.accelerator.wait_for_everyone()
    return folder / "draft"


def _validate(recipe: DistilRecipe, lessons: Lessons, target: CausalLM, loop: LoopOptions) -> dict[str, float]:
    """Losses on held-out texts, and the acceptance length of a chain of this draft on their beginnings."""
    said = losses_now(recipe, lessons, loop)
    draft = CausalLM(recipe.net.model, fast=False, verify=False)
    try:
        said["acceptance_length"] = length_now(target, DraftModel(_CHAIN, draft, target.vocab_size), lessons)
    finally:
        draft.close()
    return said
