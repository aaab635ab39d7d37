"""Names that shells complete. Nothing here imports torch: completion has to answer while a key is held down."""

from collections.abc import Iterable, Iterator

from foredraft.drafters import METHODS

FORMATS = ("eagle", "sglang", "speculators", "medusa", "hydra", "foredraft")
"""Those of ``formats.FORMATS``; the tests compare them."""
HEADS = ("eagle", "eagle3", "medusa", "medusa2", "hydra", "hydra++", "blockwise")
MODELS = ("draft", "prune", "boost")
"""Recipes of ``foredraft train``: those of ``train.recipes.RECIPES`` and ``train.drafts.DRAFTS``."""
RECIPES = (*HEADS, *MODELS)

_THEIRS = ("transformers", "transformers_assisted", "transformers_lookup")


def drafters(incomplete: str) -> Iterator[tuple[str, str]]:
    """Drafters for ``--drafter``, each with what it does."""
    yield from _beginning(incomplete, [("auto", "the default for this model"), *_methods()])


def arms(incomplete: str) -> Iterator[tuple[str, str]]:
    """Drafters for ``bench --drafter``, and transformers' own decoding."""
    yield from _beginning(incomplete, [("auto", "the default for this model"), *_methods()])
    yield from _beginning(incomplete, [(name, "transformers' own generate") for name in _THEIRS])


def methods(incomplete: str) -> Iterator[tuple[str, str]]:
    """The names that ``foredraft methods NAME`` explains."""
    yield from _beginning(incomplete, _methods())


def recipes(incomplete: str) -> Iterator[str]:
    """What ``foredraft train`` can train."""
    return (name for name in RECIPES if name.startswith(incomplete))


def formats(incomplete: str) -> Iterator[str]:
    """What ``foredraft export`` can write."""
    return (name for name in FORMATS if name.startswith(incomplete))


def _methods() -> list[tuple[str, str]]:
    return [(name, method.what) for name, method in METHODS.items()]


def _beginning(incomplete: str, known: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((name, what) for name, what in known if name.startswith(incomplete))
