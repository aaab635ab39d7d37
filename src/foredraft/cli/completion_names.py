"""Names for shell completion. Nothing here imports torch: every press of Tab starts a process."""

from collections.abc import Callable, Iterable

from foredraft.drafters import METHODS
from foredraft.train.options import PRECISIONS

FORMATS = ("eagle", "sglang", "speculators", "vllm", "medusa", "hydra", "foredraft")
"""The names in ``formats.FORMATS``; a test compares them, as for the lists below."""
HEADS = ("eagle", "eagle3", "medusa", "medusa2", "hydra", "hydra++", "blockwise", "glide")
MODELS = ("draft", "prune", "boost", "early_exit")
"""Recipes of ``foredraft train``, from ``train.heads.recipes.RECIPES`` and ``train.drafts.run.DRAFTS``."""
RECIPES = (*HEADS, *MODELS)
VERIFIERS = ("target_sampling", "token", "block", "recursive", "kseq", "traversal", "typical", "approximate")
"""The names in ``core.verify.RULES``."""
FIGURES = ("svg", "png", "pdf")
"""The suffixes in ``bench.report.plots.SUFFIXES``."""
_STOCK = ("transformers", "transformers_assisted", "transformers_lookup")


def drafters(incomplete: str) -> list[str]:
    """Drafters for ``--drafter``, without descriptions: rendering their Markdown for zsh takes 0.2 s."""
    return _spec(incomplete, "auto", *METHODS)


def arms(incomplete: str) -> list[str]:
    """Drafters for ``bench --drafter``, including transformers' own decoding."""
    return _spec(incomplete, "auto", *METHODS, *_STOCK)


def _one_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return _with_prefix(incomplete, *known)

    return complete


methods, recipes, precisions = _one_of(METHODS), _one_of(RECIPES), _one_of(PRECISIONS)
verifiers, formats, figures = _one_of(VERIFIERS), _one_of(FORMATS), _one_of(FIGURES)


def _spec(incomplete: str, *known: str) -> list[str]:
    """A drafter, or a nested one, as in ``bandit:prompt_lookup+[max_gram``."""
    place = max(map(incomplete.rfind, ":+[")) + 1
    outer = incomplete[:place]
    if not outer:
        return _with_prefix(incomplete, *known)
    method = outer.partition(":")[0]
    if method not in METHODS or not METHODS[method].nests:
        return []
    return [outer + name for name in _with_prefix(incomplete[place:], *METHODS)]


def _with_prefix(incomplete: str, *known: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
