"""Names that shells complete. Nothing here imports torch, since every press of the tab key starts a process."""

from foredraft.drafters import METHODS

FORMATS = ("eagle", "sglang", "speculators", "medusa", "hydra", "foredraft")
"""Those of ``formats.FORMATS``; the tests compare them."""
HEADS = ("eagle", "eagle3", "medusa", "medusa2", "hydra", "hydra++", "blockwise")
MODELS = ("draft", "prune", "boost")
"""Recipes of ``foredraft train``: those of ``train.recipes.RECIPES`` and ``train.drafts.DRAFTS``."""
RECIPES = (*HEADS, *MODELS)
_STOCK = ("transformers", "transformers_assisted", "transformers_lookup")


def drafters(incomplete: str) -> list[str]:
    """Drafters for ``--drafter``. Without descriptions, which zsh would get through a Markdown renderer: 0.2 s."""
    return _beginning(incomplete, "auto", *METHODS)


def arms(incomplete: str) -> list[str]:
    """Drafters for ``bench --drafter``, and transformers' own decoding."""
    return _beginning(incomplete, "auto", *METHODS, *_STOCK)


def methods(incomplete: str) -> list[str]:
    """The names that ``foredraft methods NAME`` explains."""
    return _beginning(incomplete, *METHODS)


def recipes(incomplete: str) -> list[str]:
    """What ``foredraft train`` can train."""
    return _beginning(incomplete, *RECIPES)


def formats(incomplete: str) -> list[str]:
    """What ``foredraft export`` can write."""
    return _beginning(incomplete, *FORMATS)


def _beginning(incomplete: str, *known: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
