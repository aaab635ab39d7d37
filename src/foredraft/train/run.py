"""A whole training run: data, target, head, loop, and the head in a folder that ``load`` takes."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.core.errors import DataError, OptionError
from foredraft.core.params import check_known
from foredraft.formats import load_head
from foredraft.model.causal import CausalLM
from foredraft.model.load import Loaded, load_model, resolve
from foredraft.model.provenance import provenance, short
from foredraft.nets.parts import FINAL
from foredraft.train import devices
from foredraft.train.checkpoint import hold_to
from foredraft.train.features import Stored, fingerprint
from foredraft.train.lessons import Lessons, Live
from foredraft.train.loop import LoopOptions, train
from foredraft.train.outcome import note_accuracies, save_both, save_head
from foredraft.train.precision import autocast, even_norms
from foredraft.train.recipe import Recipe
from foredraft.train.recipes import RECIPES, HeadShape, RecipeKind
from foredraft.train.start import frequent_tokens
from foredraft.train.tokens import TokenStore
from foredraft.train.validate import acceptance_length, mean_losses

Tell = Callable[[dict[str, Any]], None]
_PROMPT, _NEW, _PROMPTS = 48, 48, 8  # validation: tokens of a prompt, new tokens, prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is learned from, and where things are kept.

    sources: see ``sources.read_sources``.
    cache: a folder for token ids and hidden states, shared by runs on the same text; by default one in ``out``.
    store: gigabytes of hidden states that may be kept on disk, so that the target reads each text once; 0 keeps none.
    """

    sources: tuple[str, ...]
    cache: str | None = None
    store: float = 0.0


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
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = devices.accelerator(cpu=device == "cpu", partial=kind.join is not None)
    if device not in (None, accelerator.device.type):
        raise OptionError(f"Training would run on {accelerator.device.type}, not on {device!r}; cpu is always there.")
    loaded = load_model(target_name, dtype="float32", device=str(accelerator.device))
    if loaded.tokenizer is None:
        raise DataError(f"The target {target_name!r} has no tokenizer, so texts cannot be read with it.")
    target = CausalLM(loaded.model, fast=False)
    target.model.requires_grad_(False)
    store = _tokens(data, folder, loaded, target, accelerator)
    options = recipe_options or kind.options()
    terms = {"recipe": method, **_owner(kind, target_name, shape), "processes": accelerator.num_processes}
    terms |= {"data": [len(store.ids), int(store.counts.sum())], **dataclasses.asdict(shape)}
    terms |= {key: value for key, value in dataclasses.asdict(options).items() if key != "recompute"}
    hold_to(folder, terms, write=accelerator.is_main_process)
    net = _new_net(kind, shape, store, target, loop.seed)
    recipe = kind.recipe(net if kind.join is None else kind.join(net, target), options)
    even_norms(recipe)
    lessons = _lessons(store, target, recipe, data.store, loop)
    validate = functools.partial(_validate, kind, net, recipe, target, lessons, loop)
    train(recipe, lessons, folder, loop, validate=validate, tell=tell, accelerator=accelerator)
    head = folder / "head"
    if accelerator.is_main_process:
        notes = {**provenance(), **_owner(kind, target_name, shape), "validation": validate()}
        note_accuracies(net, lessons.held_out(16, (FINAL,)))
        if kind.join is None:
            save_head(net, head, loaded, target_name, notes)
        else:
            save_both(net, head, loaded, notes)
    accelerator.wait_for_everyone()
    target.close()
    return head


def _tokens(data: Data, folder: Path, loaded: Loaded, target: CausalLM, accelerator: Any) -> TokenStore:
    """The ids of the texts: one process makes them, the others read what it has made."""
    assert loaded.tokenizer is not None
    end = loaded.eos_token_ids[0] if loaded.eos_token_ids else None
    cache = Path(data.cache) if data.cache else folder / "cache"
    with accelerator.main_process_first():
        store = TokenStore.build(cache, list(data.sources), loaded.tokenizer, end)
    if (largest := int(store.ids.max())) >= target.vocab_size:
        raise DataError(f"The training text has the token id {largest}; the target's vocabulary ends before it.")
    return store


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


def _lessons(store: TokenStore, target: CausalLM, recipe: Recipe, gigabytes: float, loop: LoopOptions) -> Lessons:
    source: Any = Live(target, lambda: autocast(target.device, loop.precision))
    if gigabytes > 0 and store.windows(loop.length):
        width = target.model.config.get_text_config().hidden_size
        shape = (store.windows(loop.length), loop.length, width)
        place = store.folder / Path(target.model.config.name_or_path or "target").name
        source = Stored(place, source, recipe.taps, shape, bound=int(gigabytes * 1e9), owner=fingerprint(target.model))
    return Lessons(store, source, recipe.taps, loop.length, target.device)


def _validate(
    kind: RecipeKind, net: Any, recipe: Recipe, target: CausalLM, lessons: Lessons, loop: LoopOptions
) -> dict[str, float]:
    """Losses on held-out texts, and the acceptance length of a chain of this head on their beginnings."""
    recipe.eval()
    held_out = lessons.held_out(_PROMPTS)
    with autocast(target.device, loop.precision):
        said = mean_losses(recipe, held_out)
    prompts = [lesson.tokens[0, :_PROMPT].tolist() for lesson in held_out]
    said["acceptance_length"] = round(acceptance_length(target, kind.drafter(net), prompts, _NEW), 4)
    return said
