"""Boost-tuning of several drafts (SpecInfer, arXiv:2305.09781, section 3): each learns what those before it miss."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foredraft.core.errors import OptionError
from foredraft.core.io import atomic_write
from foredraft.train.data.batches import Lessons
from foredraft.train.data.tokens import TokenStore
from foredraft.train.drafts import distil
from foredraft.train.drafts.distil import DistilRecipe
from foredraft.train.loop import LoopOptions
from foredraft.train.precision import autocast

ENOUGH = 0.005
"""Of drafts that miss less than this share nothing is left to learn: equal models differ so much in near ties, since
the target's states are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(distil.Options):
    """How drafts are taught one after another (see ``distil.Options``).

    easy: what a token still counts for the next draft once an earlier one has it right; 0 drops it, as the paper does
        with whole prompts.
    """

    easy: float = 0.0

    def __post_init__(self) -> None:
        distil.Options.__post_init__(self)  # super() knows only the class before it got slots
        if not 0 <= self.easy <= 1:
            raise OptionError("easy must be from 0 to 1.")


def missed(store: TokenStore, recipe: DistilRecipe, lessons: Lessons, loop: LoopOptions, easy: float) -> TokenStore:
    """The same text, in which what this draft has right counts at most ``easy``: where its likeliest token is the
    target's. What no lesson asks for, see ``_asked``, does not count at all.

    Args:
        lessons: of this store, with the target's final states.
    """
    counts = np.where(_asked(store, loop.length), store.counts, 0).astype(np.float32)
    for windows, lesson in lessons.every(loop.batch):
        with autocast(lesson.tokens.device, loop.precision):
            right = recipe.agrees(lesson)
        for window, row in zip(windows, right.cpu().numpy(), strict=True):
            begin = window * loop.length + 1  # the first row's law is that of the window's second token
            place = counts[begin : begin + len(row)]
            place[row] = np.minimum(place[row], easy)
    return replace(store, counts=counts)


def kept(path: Path, store: TokenStore) -> TokenStore | None:
    """What an earlier run has found to be missed; None where there is none."""
    return replace(store, counts=np.load(path)) if path.exists() else None


def keep(path: Path, store: TokenStore) -> None:
    """Write down what counts, whole or not at all."""
    atomic_write(path, lambda file: np.save(file, store.counts))


def share(rest: TokenStore, whole: TokenStore, length: int) -> float:
    """How much still counts of what lessons of this length ask for."""
    asked = _asked(whole, length)
    return float(rest.counts[asked].sum()) / max(float(whole.counts[asked].sum()), 1.0)


def _asked(store: TokenStore, length: int) -> np.ndarray:
    """Which tokens some row of a window is to foretell: neither a window's first, nor the tail that fills no window."""
    places = np.arange(len(store.ids))
    return (places % length > 0) & (places < store.windows(length) * length)
