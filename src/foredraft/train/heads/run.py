"""A whole training run: data, target, head, loop, and the head in a folder that ``load`` takes."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foredraft.core.errors import OptionError
from foredraft.core.io import provenance, short
from foredraft.core.sampling.params import check_known
from foredraft.heads.formats import load_head
from foredraft.heads.nets.target_parts import FINAL
from foredraft.model.hf import CausalLM
from foredraft.model.load import resolve
from foredraft.train.data.batches import Lessons
from foredraft.train.data.tokens import TokenStore
from foredraft.train.heads.export import note_accuracies, save_both, save_head
from foredraft.train.heads.init import frequent_tokens
from foredraft.train.heads.recipes import RECIPES, HeadShape, RecipeKind
from foredraft.train.heads.validate import length_now, losses_now
from foredraft.train.loop import LoopOptions, train
from foredraft.train.precision import even_norms
from foredraft.train.recipe import Recipe
from foredraft.train.run_context import Data, RunContext

Tell = Callable[[dict[str, Any]], None]


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
    tell: Tell = lambda line: None,
) -> Path:
    """Train a head of this kind for a target; go on where an earlier run with the same folder was cut off.

    Returns:
        the folder of the finished head, ``out/head``.

    Raises:
        UsageError: data, options or a target that cannot be; the sentence says why.
    """
    check_known("recipe", {method: None}, list(RECIPES))
    kind, shape, loop = RECIPES[method], shape or HeadShape(), loop or LoopOptions()
    if kind.join is not None and data.store > 0:
        raise OptionError(
            f"{method} changes the target as it goes, so hidden states cannot be kept: leave out --store."
        )
    options = recipe_options or kind.options()
    terms = {"recipe": method, **_owner(kind, target_name, shape), **dataclasses.asdict(shape)}
    terms |= {key: value for key, value in dataclasses.asdict(options).items() if key != "recompute"}
    with RunContext.open(target_name, out, data, device, partial=kind.join is not None) as site:
        site.check_resume(terms)
        net = _new_net(kind, shape, site.store, site.target, loop.seed)
        recipe = kind.recipe(net if kind.join is None else kind.join(net, site.target), options)
        even_norms(recipe)
        lessons = site.lessons(recipe.taps, loop)
        validate = functools.partial(_validate, kind, net, recipe, site.target, lessons, loop)
        train(recipe, lessons, site.folder, loop, validate=validate, tell=tell, accelerator=site.accelerator)
        head = site.folder / "head"
        if site.first:
            notes = {**provenance(), **_owner(kind, target_name, shape), "validation": validate()}
            note_accuracies(net, lessons.held_out(16, (FINAL,)))
            if kind.join is None:
                save_head(net, head, site.loaded, target_name, notes)
            else:
                save_both(net, head, site.loaded, notes)
        site.accelerator.wait_for_everyone()
    return head


def _owner(kind: RecipeKind, target_name: str, shape: HeadShape) -> dict[str, Any]:
    """Where the head comes from and which target it is for, to be told by the files of the run."""
    name = Path(target_name).name
    found: dict[str, Any] = {"model": name}
    if shape.start is not None:
        found["start"] = short(shape.start)
    if kind.join is not None:
        found["target"] = (
            f"the model in head/, which was tuned from {name} with the heads: lossless for it, not for {name}"
        )
    return found


def _new_net(kind: RecipeKind, shape: HeadShape, store: TokenStore, target: CausalLM, seed: int) -> Any:
    """A new head, or the one to go on from; whatever is random in a new one is decided by the seed, here and now."""
    if shape.start is not None:
        head = load_head(resolve(shape.start), target)
        if not isinstance(head.net, kind.net):
            raise OptionError(f"{shape.start!r} holds {head.info.format} weights, which this recipe does not train.")
        return head.net.requires_grad_(True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.make(target, shape, _vocabulary(kind, shape, store, target))


def _vocabulary(kind: RecipeKind, shape: HeadShape, store: TokenStore, target: CausalLM) -> Any:
    """The ids of a reduced vocabulary: what the text has most."""
    if not kind.reduces or not 0 < shape.vocabulary < target.vocab_size:
        return None
    return frequent_tokens(store.ids, store.counts, shape.vocabulary, target.vocab_size)


def _validate(
    kind: RecipeKind, net: Any, recipe: Recipe, target: CausalLM, lessons: Lessons, loop: LoopOptions
) -> dict[str, float]:
    """Losses on held-out texts, and the acceptance length of a chain of this head on their beginnings."""
    return {
        **losses_now(recipe, lessons, loop),
        "acceptance_length": length_now(target, kind.drafter(net), lessons),
    }
