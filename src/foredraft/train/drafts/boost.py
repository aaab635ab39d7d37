"""Boost-tuning of several draft models (SpecInfer, arXiv:2305.09781, section 3): each trains on the earlier ones'
errors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from foredraft.core.options import check_bounds
from foredraft.train.data.batches import TrainBatches
from foredraft.train.data.tokens import TokenStore
from foredraft.train.devices import autocast
from foredraft.train.drafts import distil
from foredraft.train.drafts.distil import DistilRecipe
from foredraft.train.options import LoopOptions
from foredraft.train.partial import ResumableState

MIN_SHARE = 0.005
"""Smallest share of missed tokens to train on: even equal models differ this much, in near-ties, because the target's
states are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(distil.Options):
    """Options of boosting (see ``distil.Options``).

    easy: weight of a token for the next draft model once an earlier one predicts it; 0 drops it, as the paper does with
        whole prompts.
    """

    easy: float = 0.0

    def __post_init__(self) -> None:
        distil.Options.__post_init__(self)  # super() knows only the class before it got slots
        check_bounds(self, least={"easy": 0}, most={"easy": 1})


def missed(
    store: TokenStore,
    recipe: DistilRecipe,
    batches: TrainBatches,
    loop: LoopOptions,
    easy: float,
    path: Path,
    *,
    windows: Sequence[int],
) -> TokenStore:
    """The same data, in which tokens that this draft model predicts (equal argmax) have weight ``easy`` at most.

    Tokens that these windows do not predict, see ``_predicted``, get weight 0.

    Args:
        batches: batches of this store, with the target's final states.
        path: a file for the counts of an interrupted call; its name says what they depend on.
        windows: those that the next draft reads.
    """
    counts = np.where(_predicted(store, loop.length, windows), store.counts, 0).astype(np.float32)
    terms, start = {"length": loop.length}, {"windows": 0, "counts": torch.from_numpy(counts)}
    with ResumableState(path, terms, start, loop.checkpoint_seconds) as work:
        for some, batch in batches.of(windows[work.state["windows"] :], loop.batch):
            with autocast(batch.tokens.device, loop.precision):
                right = recipe.agrees(batch)
            with work.update() as state:
                for window, row in zip(some, right.cpu(), strict=True):
                    begin = window * loop.length + 1  # the first law is that of the window's second token
                    place = state["counts"][begin : begin + len(row)]
                    place[row] = place[row].clamp(max=easy)
                state["windows"] += len(some)
    return replace(store, counts=work.state["counts"].numpy())


def share(rest: TokenStore, whole: TokenStore, length: int, windows: Sequence[int]) -> float:
    """Remaining weight in ``rest`` as a fraction of ``whole``'s, over tokens that these windows predict."""
    predicted = _predicted(whole, length, windows)
    return float(rest.counts[predicted].sum()) / max(float(whole.counts[predicted].sum()), 1.0)


def _predicted(store: TokenStore, length: int, windows: Sequence[int]) -> np.ndarray:
    """Mask of the tokens that these windows predict: all but each window's first."""
    mask = np.zeros(len(store.ids), bool)
    for window in windows:
        mask[window * length + 1 : (window + 1) * length] = True
    return mask
