"""Names that shells complete. Nothing here imports torch, since every press of the tab key starts a process."""

import typer

from foredraft.drafters import METHODS
from foredraft.train.options import PRECISIONS

FORMATS = ("eagle", "sglang", "speculators", "medusa", "hydra", "foredraft")
"""Those of ``formats.FORMATS``; the tests compare them."""
HEADS = ("eagle", "eagle3", "medusa", "medusa2", "hydra", "hydra++", "blockwise")
MODELS = ("draft", "prune", "boost")
"""Recipes of ``foredraft train``: those of ``train.recipes.RECIPES`` and ``train.drafts.DRAFTS``."""
RECIPES = (*HEADS, *MODELS)
_DISTIL = ("loss", "weight", "rows")
_HEAD = ("teacher", "loss", "decay", "share", "recompute")
RECIPE_OPTIONS = {
    "eagle": ("regression", "classification", "loss", "noise", "share", "recompute"),
    "eagle3": ("steps", "loss", "decay", "share", "any_label", "recompute"),
    "medusa": _HEAD,
    "medusa2": (*_HEAD, "alone", "ramp", "weight", "pace", "own"),
    "hydra": _HEAD,
    "hydra++": _HEAD,
    "blockwise": _HEAD,
    "draft": _DISTIL,
    "prune": (*_DISTIL, "by", "texts", "mask_tokens", "mask_lr", "rise", "tune"),
    "boost": (*_DISTIL, "easy"),
}
"""The options of each recipe; the tests compare them."""
VERIFIERS = ("target_sampling", "token", "block", "recursive", "kseq", "traversal", "typical")
"""Those of ``core.verify.RULES``; the tests compare them."""
FIGURES = ("svg", "png", "pdf")
"""Those of ``bench.plots.SUFFIXES``; the tests compare them."""
_NESTING = ("bandit", "cascade", "online", "relay", "triforce")  # methods with other drafters inside
_STOCK = ("transformers", "transformers_assisted", "transformers_lookup")


def drafters(incomplete: str) -> list[str]:
    """Drafters for ``--drafter``. Without descriptions, which zsh would get through a Markdown renderer: 0.2 s."""
    return _spec(incomplete, "auto", *METHODS)


def arms(incomplete: str) -> list[str]:
    """Drafters for ``bench --drafter``, and transformers' own decoding."""
    return _spec(incomplete, "auto", *METHODS, *_STOCK)


def methods(incomplete: str) -> list[str]:
    """The names that ``foredraft methods NAME`` explains."""
    return _beginning(incomplete, *METHODS)


def recipes(incomplete: str) -> list[str]:
    """What ``foredraft train`` can train."""
    return _beginning(incomplete, *RECIPES)


def recipe_options(ctx: typer.Context, incomplete: str) -> list[str]:
    """The options of the recipe on the command line; ``ctx.obj`` is what stands before."""
    recipe = next((word for word in ctx.obj if word in RECIPE_OPTIONS), None)
    return _beginning(incomplete, *(f"{name}=" for name in RECIPE_OPTIONS[recipe])) if recipe else []


def precisions(incomplete: str) -> list[str]:
    """In what ``foredraft train`` can compute."""
    return _beginning(incomplete, *PRECISIONS)


def verifiers(incomplete: str) -> list[str]:
    """Verification rules."""
    return _beginning(incomplete, *VERIFIERS)


def formats(incomplete: str) -> list[str]:
    """What ``foredraft export`` can write."""
    return _beginning(incomplete, *FORMATS)


def figures(incomplete: str) -> list[str]:
    """In what ``foredraft report`` can draw."""
    return _beginning(incomplete, *FIGURES)


def _spec(incomplete: str, *known: str) -> list[str]:
    """A drafter, or one inside another, as in ``bandit:prompt_lookup+[max_gram``."""
    place = max(map(incomplete.rfind, ":+[")) + 1
    outer = incomplete[:place]
    if not outer:
        return _beginning(incomplete, *known)
    if outer.partition(":")[0] not in _NESTING:
        return []
    return [outer + name for name in _beginning(incomplete[place:], *METHODS)]


def _beginning(incomplete: str, *known: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
