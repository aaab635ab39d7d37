"""A training run of a head, from data and target to a folder that ``load`` takes."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import check_known
from foredraft.core.target_parts import FINAL
from foredraft.files.outputs import check_output_folder
from foredraft.files.provenance import provenance, relative_name, short
from foredraft.heads.formats import load_head
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.bundled import resolve
from foredraft.train.checkpoint import Report
from foredraft.train.data.batches import TrainBatches
from foredraft.train.data.tokens import TokenStore
from foredraft.train.devices import cast_norm_inputs
from foredraft.train.heads.export import record_accuracies, save_head, save_target_and_heads
from foredraft.train.heads.init import frequent_tokens
from foredraft.train.heads.recipes import RECIPES, RecipeKind
from foredraft.train.heads.validate import validation_length, validation_losses
from foredraft.train.loop import train
from foredraft.train.options import HeadShape, LoopOptions
from foredraft.train.recipe import Recipe
from foredraft.train.run_context import Data, RunContext


def run(
    method: str,
    target_name: str,
    out: str | Path,
    data: Data,
    *,
    shape: HeadShape | None = None,
    recipe_options: Any = None,
    loop: LoopOptions | None = None,
    device: str | None = None,
    report: Report = lambda line: None,
) -> Path:
    """Train a head for a target, resuming an interrupted run in the same folder.

    Returns:
        the folder of the finished head, ``out/head``.

    Raises:
        UsageError: invalid data, options or target.
    """
    check_known("recipe", {method: None}, list(RECIPES))
    kind, shape, loop = RECIPES[method], shape or HeadShape(), loop or LoopOptions()
    options = recipe_options or kind.options()
    if kind.join is not None and data.store > 0:
        raise OptionError(f"{method} trains the target too, so hidden states cannot be stored: remove --store.")
    if shape.start is None:
        options.check_length(loop.length, shape.heads)
    terms = _terms(method, target_name, shape, options)
    with RunContext.open(target_name, out, data, device, partial=kind.join is not None) as context:
        context.check_resume(terms)
        net = _new_net(kind, shape, context.store, context.target, loop.seed)
        head = context.folder / "head"
        check_output_folder(head, "train", {"recipe": method})
        recipe = kind.trained(net, context.target, options)
        cast_norm_inputs(recipe)
        batches = context.batches(recipe.taps, loop)
        validate = functools.partial(_validate, kind, net, recipe, context.target, batches, loop)
        train(recipe, batches, context.folder, loop, validate=validate, report=report, accelerator=context.accelerator)
        if context.first:
            owner = {**_owner(kind, target_name, shape), "target_model": relative_name(target_name, head)}
            if kind.join is not None:
                owner["target_model"] = "."
            elif context.by.model is not None:
                owner["target_contents"] = context.by.model
            notes = {**provenance(), "recipe": method, **owner, "validation": validate()}
            record_accuracies(net, batches.held_out(16, (FINAL,)))
            if kind.join is None:
                save_head(net, head, context.loaded, target_name, notes)
            else:
                save_target_and_heads(net, head, context.loaded, notes)
        context.accelerator.wait_for_everyone()
    return head


def _terms(method: str, target_name: str, shape: HeadShape, options: Any) -> dict[str, Any]:
    """The settings that a resumed run must have."""
    terms = {"recipe": method, **_owner(RECIPES[method], target_name, shape), **dataclasses.asdict(shape)}
    return terms | {key: value for key, value in dataclasses.asdict(options).items() if key != "recompute"}


def _owner(kind: RecipeKind, target_name: str, shape: HeadShape) -> dict[str, Any]:
    """The head's origin and target, for the files of the run."""
    name = Path(target_name).name
    found: dict[str, Any] = {"model": name}
    if shape.start is not None:
        found["start"] = short(shape.start)
    if kind.join is not None:
        found["target"] = (
            f"the model in head/, tuned from {name} together with the heads: lossless for it, not for {name}"
        )
    return found


def _new_net(kind: RecipeKind, shape: HeadShape, store: TokenStore, target: TargetModel, seed: int) -> Any:
    """A new head, initialized from the seed, or the one to start from."""
    if shape.start is not None:
        head = load_head(resolve(shape.start), target)
        if not isinstance(head.net, kind.net):
            raise OptionError(f"{shape.start!r} has {head.info.format} weights, which this recipe cannot train.")
        return head.net.requires_grad_(True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.make(target, shape, _vocabulary(kind, shape, store, target))


def _vocabulary(kind: RecipeKind, shape: HeadShape, store: TokenStore, target: TargetModel) -> Any:
    """The ids of a reduced vocabulary: the most frequent tokens; None for the target's."""
    if not kind.reduces or not 0 < shape.vocabulary < target.vocab_size:
        return None
    return frequent_tokens(store.ids, store.counts, shape.vocabulary, target.vocab_size)


def _validate(
    kind: RecipeKind, net: Any, recipe: Recipe, target: CausalLM, batches: TrainBatches, loop: LoopOptions
) -> dict[str, float]:
    """Metrics on held-out samples, and the acceptance length of the head's chains."""
    cache = target.new_cache()
    return {
        **validation_losses(recipe, batches, loop),
        "acceptance_length": validation_length(target, kind.drafter(net, target, cache), batches, cache),
    }
