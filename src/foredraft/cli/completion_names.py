"""Names for shell completion. Nothing here imports torch: every press of Tab starts a process."""

import typer

from foredraft.drafters import METHODS
from foredraft.train.options import PRECISIONS

FORMATS = ("eagle", "sglang", "speculators", "medusa", "hydra", "foredraft")
"""The names in ``formats.FORMATS``; a test compares them, as for the lists below."""
HEADS = ("eagle", "eagle3", "medusa", "medusa2", "hydra", "hydra++", "blockwise")
MODELS = ("draft", "prune", "boost")
"""Recipes of ``foredraft train``, from ``train.heads.recipes.RECIPES`` and ``train.drafts.run.DRAFTS``."""
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
"""The options of each recipe."""
VERIFIERS = ("target_sampling", "token", "block", "recursive", "kseq", "traversal", "typical")
"""The names in ``core.verify.RULES``."""
FIGURES = ("svg", "png", "pdf")
"""The suffixes in ``bench.report.plots.SUFFIXES``."""
_NESTING = ("bandit", "cascade", "online", "relay", "triforce")  # methods that nest other drafters
_STOCK = ("transformers", "transformers_assisted", "transformers_lookup")


def drafters(incomplete: str) -> list[str]:
    """Drafters for ``--drafter``, without descriptions: rendering their Markdown for zsh takes 0.2 s."""
    return _spec(incomplete, "auto", *METHODS)


def arms(incomplete: str) -> list[str]:
    """Drafters for ``bench --drafter``, including transformers' own decoding."""
    return _spec(incomplete, "auto", *METHODS, *_STOCK)


def methods(incomplete: str) -> list[str]:
    """Methods for ``foredraft methods NAME``."""
    return _with_prefix(incomplete, *METHODS)


def recipes(incomplete: str) -> list[str]:
    """Recipes of ``foredraft train``."""
    return _with_prefix(incomplete, *RECIPES)


def recipe_options(ctx: typer.Context, incomplete: str) -> list[str]:
    """The options of the recipe on the command line; ``ctx.obj`` holds the preceding words."""
    recipe = next((word for word in ctx.obj if word in RECIPE_OPTIONS), None)
    return _with_prefix(incomplete, *(f"{name}=" for name in RECIPE_OPTIONS[recipe])) if recipe else []


def precisions(incomplete: str) -> list[str]:
    """Precisions of ``foredraft train``."""
    return _with_prefix(incomplete, *PRECISIONS)


def verifiers(incomplete: str) -> list[str]:
    """Verification rules."""
    return _with_prefix(incomplete, *VERIFIERS)


def formats(incomplete: str) -> list[str]:
    """Formats of ``foredraft export``."""
    return _with_prefix(incomplete, *FORMATS)


def figures(incomplete: str) -> list[str]:
    """Figure formats of ``foredraft report``."""
    return _with_prefix(incomplete, *FIGURES)


def _spec(incomplete: str, *known: str) -> list[str]:
    """A drafter, or a nested one, as in ``bandit:prompt_lookup+[max_gram``."""
    place = max(map(incomplete.rfind, ":+[")) + 1
    outer = incomplete[:place]
    if not outer:
        return _with_prefix(incomplete, *known)
    if outer.partition(":")[0] not in _NESTING:
        return []
    return [outer + name for name in _with_prefix(incomplete[place:], *METHODS)]


def _with_prefix(incomplete: str, *known: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
