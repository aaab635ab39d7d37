"""Training that is interrupted at random moments, in processes of its own, ends as if nothing had been."""

import random
import signal
from pathlib import Path

import pytest
from interrupted import RECIPES, Place, interrupt, serving

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@pytest.mark.parametrize(
    ("recipe", "signals"), [("answers", SIGNALS), ("medusa", SIGNALS), ("prune", (signal.SIGTERM, signal.SIGKILL))]
)
def test_interrupted_runs_end_as_undisturbed_ones(tmp_path: Path, recipe: str, signals: tuple[int, ...]):
    """Answers, scores of a pruning and steps."""
    place = Place(tmp_path)
    with serving(tmp_path) as server:
        interrupt(server, lambda out: place.command(recipe, out), tmp_path, signals, random.Random(1))


@pytest.mark.slow
def test_sixty_interruptions_over_all_recipes(tmp_path: Path):
    """Twenty of each signal."""
    place, chance = Place(tmp_path), random.Random(28)
    signals = chance.sample(SIGNALS * 20, 60)
    count = 0
    with serving(tmp_path) as server:
        for number, recipe in enumerate(RECIPES):
            own = signals[number :: len(RECIPES)]
            folder = tmp_path / f"run-{number}"
            folder.mkdir()
            count += len(interrupt(server, lambda out, r=recipe: place.command(r, out), folder, own, chance))
    assert count == 60
