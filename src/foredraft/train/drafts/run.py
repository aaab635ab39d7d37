"""Training runs of whole models: drafts that are distilled, pruned and distilled, or boost-tuned in turn, and a target
whose early exits draft."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.core.drafter import Drafter
from foredraft.core.errors import DataError, DrafterError, OptionError
from foredraft.core.sampling.params import check_known
from foredraft.core.target_parts import FINAL
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.early_exit import Options as ExitOptions
from foredraft.drafters.universal.method import Options as UniversalOptions, Universal
from foredraft.files.outputs import check_output_folder
from foredraft.files.provenance import fingerprint, provenance, short
from foredraft.files.write import atomic_write
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.pruning import resized, sizes_of
from foredraft.model.loading.load import Loaded, load_model
from foredraft.model.text.vocab_mapping import VocabMapping
from foredraft.train.checkpoint import Report
from foredraft.train.data.batches import TrainBatches
from foredraft.train.data.tokens import TokenStore
from foredraft.train.drafts import boost, distil, early_exit, prune
from foredraft.train.drafts.distil import DistilRecipe, DraftRun, Student, Teacher
from foredraft.train.heads.export import save_model
from foredraft.train.heads.validate import validation_length, validation_losses
from foredraft.train.loop import train
from foredraft.train.options import LoopOptions
from foredraft.train.run_context import Data, RunContext

_CHAIN: dict[str, Any] = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}


Validate = Callable[[Any, TrainBatches, TargetModel, LoopOptions], dict[str, float]]
"""Metrics of a recipe on held-out samples."""


@dataclass(frozen=True, slots=True)
class DraftKind:
    """One entry of the table: the recipe's options, numbers of initial models, and whether it takes a shape."""

    options: type
    fewest: int
    most: int
    shaped: bool = False


DRAFTS = {
    "draft": DraftKind(distil.Options, 1, 1),
    "prune": DraftKind(prune.Options, 0, 1, shaped=True),
    "boost": DraftKind(boost.Options, 2, 64),
    "early_exit": DraftKind(early_exit.Options, 0, 0),
}
"""Recipes for whole models; those for heads are ``train.heads.recipes.RECIPES``."""


def run_drafts(
    method: str,
    target_name: str,
    out: str | Path,
    data: Data,
    *,
    drafts: tuple[str, ...] = (),
    shape: prune.PrunedShape | None = None,
    recipe_options: Any = None,
    loop: LoopOptions | None = None,
    device: str | None = None,
    report: Report = lambda line: None,
) -> list[Path]:
    """Train draft models for a target, or a copy of it for early exits, resuming an interrupted run in the same folder.

    Args:
        method: draft: distil the one model in ``drafts``; prune: prune it (default: the target) to ``shape`` and distil
            the result; boost: distil ``drafts`` in turn, each on the errors of the earlier ones; early_exit: train a
            copy of the target.

    Returns:
        the folders of the finished models: ``out/draft``, for boost ``out/1/draft``, ``out/2/draft`` and so on, for
        early_exit ``out/model``.

    Raises:
        UsageError: invalid data, options, target or drafts.
    """
    check_known("recipe", {method: None}, list(DRAFTS))
    check_parts(method, drafts, shape)
    loop, options = loop or LoopOptions(), recipe_options or DRAFTS[method].options()
    with RunContext.open(target_name, out, data, device, partial=method == "early_exit") as context:
        run = DraftRun(context, method, target_name, options, loop, report)
        if method == "early_exit":
            return [_early_exit(run)]
        if method == "boost":
            return _boost(run, drafts)
        if method == "prune":
            assert shape is not None
            return [_prune(run, drafts[0] if drafts else None, shape)]
        return [_distil(run, drafts[0])]


def check_parts(method: str, drafts: tuple[str, ...], shape: prune.PrunedShape | None) -> None:
    """Check the number of drafts and the shape.

    Raises:
        OptionError: they do not fit the recipe.
    """
    kind = DRAFTS[method]
    if len(drafts) < kind.fewest:
        number = "a model" if kind.fewest == 1 else f"{kind.fewest} or more models"
        raise OptionError(f"{method} trains {number}: give the initial model with --draft MODEL.")
    if drafts and not kind.most:
        raise OptionError(f"{method} trains a copy of the target: remove --draft.")
    if len(drafts) > kind.most:
        raise OptionError(f"{method} takes one --draft, not {len(drafts)}; boost takes several.")
    if kind.shaped != (shape is not None):
        reason = "needs --shape, e.g. layers=2,hidden=256" if kind.shaped else "has no --shape, which is for prune"
        raise OptionError(f"{method} {reason}.")


def _distil(run: DraftRun, name: str) -> Path:
    target, draft, notes = run.context, _loaded(run.context, name), {"start": short(name)}
    validate = _validate
    if run.options.loss == "text" and _difference(target, draft):
        mapping = _mapping(target, draft)
        run = replace(run, context=target.in_tokens_of(draft, mapping))
        options, prompts = UniversalOptions(**_CHAIN), target.batches((), run.loop)
        validate = functools.partial(_validate, made=lambda model: Universal(options, model, mapping), prompts=prompts)
        notes["drafter"] = "universal"
    run.context.check_resume(_terms(run, {"draft": notes["start"]}))
    recipe = _recipe(run, _checked(run.context, draft, name))
    return _train_model(run, recipe, run.context.folder, run.context.store, notes, validate=validate)


def _early_exit(run: DraftRun) -> Path:
    context, name = run.context, Path(run.target_name).name
    context.check_resume(_terms(run, {}))
    tuned = CausalLM(_load_draft(context, run.target_name), fast=False)
    recipe = early_exit.EarlyExitRecipe(tuned, context.target, run.options)
    chain = ExitOptions(assistant_early_exit=recipe.exit, **_CHAIN)
    validate = functools.partial(early_exit.validate, chain)
    notes = {"exit": recipe.exit, "target": f"the model here, tuned from {name}: lossless for it, not for {name}"}
    try:
        return _train_model(run, recipe, context.folder, context.store, notes, result="model", validate=validate)
    finally:
        tuned.close()


def _prune(run: DraftRun, name: str | None, shape: prune.PrunedShape) -> Path:
    context = run.context
    source = context.loaded.model if name is None else _load_draft(context, name)
    wanted = shape.of(sizes_of(source))
    resized(source, wanted)  # so that a shape is refused before it is trained
    notes = {"start": short(name or run.target_name), "shape": asdict(wanted), "by": run.options.by}
    terms = _terms(run, {**notes, "draft": notes["start"]})
    context.check_resume(terms)
    if run.options.by == "masks":
        context.check_resume(terms, context.folder / "masks")
    small = prune.pruned(run, source, wanted)
    del source
    return _train_model(run, _recipe(run, small), context.folder, context.store, notes)


def _boost(run: DraftRun, names: tuple[str, ...]) -> list[Path]:
    context, drafts = run.context, []
    rest = context.store
    windows = context.batches((), run.loop).windows(run.loop, context.accelerator.num_processes)
    for name in names:
        _recipe(run, _load_draft(context, name))  # so that none is refused when those before it are trained
    for number, name in enumerate(names, start=1):
        folder = context.folder / str(number)
        share = boost.share(rest, context.store, run.loop.length, windows)
        learns = round(share, 4)
        context.check_resume(
            _terms(run, {"drafts": [short(each) for each in names[:number]], "learns": learns}), folder
        )
        if share < boost.MIN_SHARE:
            raise DataError(f"The drafts before {name!r} already match the target; remove it and the following drafts.")
        recipe = _recipe(run, _load_draft(context, name))
        notes = {"start": short(name), "after": [short(each) for each in names[: number - 1]]}
        run.report({"note": f"draft {number} of {len(names)} trains on {learns:.0%} of the data"})
        drafts.append(_train_model(run, recipe, folder, rest, {**notes, "learns": learns}))
        if number < len(names):
            rest = _rest(run, recipe, rest, folder, windows)
    return drafts


def _rest(run: DraftRun, recipe: DistilRecipe, store: TokenStore, folder: Path, windows: Sequence[int]) -> TokenStore:
    """The data of the next draft: one process computes it, the others and later runs read it."""
    model = recipe.net.model.bfloat16().float()  # rounded as it is saved
    path = folder / f"missed-{fingerprint(model)}-{run.options.easy:g}.npy"
    with run.context.accelerator.main_process_first():
        if path.exists():
            return replace(store, counts=np.load(path))
        batches = run.context.batches((FINAL,), run.loop, store)
        partial = path.with_suffix(".pt")
        rest = boost.missed(store, recipe, batches, run.loop, run.options.easy, partial, windows=windows)
        atomic_write(path, lambda file: np.save(file, rest.counts))
        partial.unlink(missing_ok=True)
    return rest


def _terms(run: DraftRun, more: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in asdict(run.options).items() if key != "rows"}
    return {"recipe": run.method, "model": Path(run.target_name).name, **options, **more}


def _load_draft(context: RunContext, name: str) -> Any:
    """Load a model with the target's tokenizer."""
    return _checked(context, _loaded(context, name), name)


def _loaded(context: RunContext, name: str) -> Loaded:
    return load_model(name, dtype="float32", device=str(context.accelerator.device))


def _checked(context: RunContext, draft: Loaded, name: str) -> Any:
    """The model of a draft that reads the data's tokens."""
    if difference := _difference(context, draft):
        raise DrafterError(
            f"The draft {name!r} has another tokenizer than the target ({difference}): it can only learn texts, by "
            "foredraft train draft with --recipe loss=text."
        )
    if (largest := int(context.store.ids.max())) >= _vocabulary(draft):
        raise DataError(f"The training data has the token id {largest}, beyond the vocabulary of {name!r}.")
    return draft.model


def _difference(context: RunContext, draft: Loaded) -> str | None:
    """Where the draft's tokenizer differs from that of the data; None if it does not."""
    ours, theirs = context.loaded.tokenizer, draft.tokenizer
    return None if ours is None or theirs is None else ours.first_difference(theirs)


def _mapping(target: RunContext, draft: Loaded) -> VocabMapping:
    """From the target's tokens to the draft's."""
    ours, theirs = target.loaded.tokenizer, draft.tokenizer
    assert ours is not None and theirs is not None
    return VocabMapping(ours, theirs, target.target.vocab_size, _vocabulary(draft))


def _vocabulary(draft: Loaded) -> int:
    return draft.model.config.get_text_config().vocab_size


def _recipe(run: DraftRun, model: Any) -> DistilRecipe:
    CausalLM(model, fast=False).close()  # fails early for unsupported models
    return DistilRecipe(Student(model), Teacher(run.context.target, run.options))


def _validate(
    recipe: DistilRecipe,
    batches: TrainBatches,
    target: TargetModel,
    loop: LoopOptions,
    made: Callable[[CausalLM], Drafter] | None = None,
    prompts: TrainBatches | None = None,
) -> dict[str, float]:
    """Metrics on held-out samples, and the acceptance length of the draft's chains.

    Args:
        made: the drafter of a draft with another tokenizer, with ``prompts`` in the target's tokens.
    """
    metrics, chain = validation_losses(recipe, batches, loop), DraftOptions(**_CHAIN)
    draft = CausalLM(recipe.net.model, fast=False, verify=False)
    try:
        drafter = DraftModel(chain, draft, target.vocab_size) if made is None else made(draft)
        metrics["acceptance_length"] = validation_length(target, drafter, prompts or batches)
    finally:
        draft.close()
    return metrics


def _train_model(
    run: DraftRun,
    recipe: Any,
    folder: Path,
    store: TokenStore,
    notes: dict[str, Any],
    *,
    result: str = "draft",
    validate: Validate = _validate,
) -> Path:
    """Train the recipe's model and save it in ``folder/result``."""
    context, loop, made = run.context, run.loop, folder / result
    check_output_folder(made, "train", {"recipe": run.method})
    batches = context.batches(recipe.taps, loop, store)
    validation = functools.partial(validate, recipe, batches, context.target, loop)
    train(recipe, batches, folder, loop, validate=validation, report=run.report, accelerator=context.accelerator)
    if context.first:
        origin = {**provenance(), "recipe": run.method, "model": Path(run.target_name).name, **notes}
        save_model(recipe.net.model, made, context.loaded, {**origin, "validation": validation()})
    context.accelerator.wait_for_everyone()
    return made
