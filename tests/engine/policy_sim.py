"""A loop without models for policies: what would be accepted and what steps take is given, and so is the noise."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

import tiny
from foredraft.core.drafter import Needs, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.policy import Policy
from foredraft.engine.step import RowStep, StepDone

EMPTY = torch.zeros(1, 1, dtype=torch.long)
Ranks = Callable[[random.Random], Sequence[int]]
"""Draws the rank of each node of the target's path, were everything drafted: 1, 2, 3, ... for chains."""


def chain(rate: float, longest: int = 100) -> Ranks:
    """Each token of a chain is accepted with the same chance."""

    def draw(chance: random.Random) -> list[int]:
        length = 0
        while length < longest and chance.random() < rate:
            length += 1
        return list(range(1, length + 1))

    return draw


def tree(rate: float, tail: float = 1.2) -> Ranks:
    """Each token of the path is in the tree with this chance, some nodes after the one before it: seldom many."""

    def draw(chance: random.Random) -> list[int]:
        ranks: list[int] = []
        while chance.random() < rate:
            ranks.append((ranks[-1] if ranks else 0) + int(chance.paretovariate(tail)))
        return ranks

    return draw


@dataclass
class World:
    """What drafts bring and steps take.

    cost: seconds of a step by size and rows. start: seconds that the first draft of a row takes besides. noise: of
    the logarithm of each time. spikes: so many steps take ten times as long. life: steps of a request. reach: draws
    how many tokens a chain drafts at most.
    """

    needs: Needs
    ranks: Ranks
    cost: Callable[[int, int], float]
    start: float = 0.0
    noise: float = 0.0
    spikes: float = 0.0
    life: int = 80
    temperature: float = 0.0
    reach: Callable[[random.Random], int] | None = None
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def step(self, size: int, rows: int, fresh: int) -> tuple[list[RowStep], float]:
        results = []
        size = size if self.reach is None else min(size, self.reach(self.chance))
        for _ in range(rows):
            ranks = tuple(rank for rank in self.ranks(self.chance) if rank <= size)
            drafted = RowStep([0] * (1 + len(ranks)), size, min(size, 9), len(ranks), True, ranks, refused=size > 0)
            results.append(drafted)
        seconds = self.cost(size, rows) + (self.start * fresh if size else 0.0)
        seconds *= self.chance.lognormvariate(0.0, self.noise) if self.noise else 1.0
        return results, seconds * (10.0 if self.chance.random() < self.spikes else 1.0)


@dataclass
class Ran:
    """The sizes of some steps, their tokens, and their seconds."""

    sizes: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def view(*rows: int, temperature: float = 0.0) -> View:
    rows_of_four = tiny.view([[0] * 4] * len(rows), SamplingParams(temperature=temperature))
    return replace(rows_of_four, rows=rows)


def run(policy: Policy, world: World, steps: int, rows: int = 1) -> Ran:
    """Some steps of requests that come one after another, as many as rows at once."""
    ran, seen, drafting = Ran(), view(*range(rows), temperature=world.temperature), False
    for step in range(steps):
        if step % world.life == 0:
            for row in range(rows if step else 0):
                policy.release(row)
            drafting = False
        plan = policy.plan(seen, [100] * rows)
        size = (plan.nodes or plan.length) if plan.length else 0
        results, seconds = world.step(size, rows, 0 if drafting else rows)
        drafting = drafting or size > 0
        levels = results[0].depth
        policy.observe(seen, plan, StepDone(results, EMPTY, None, 0.1 * seconds, 0.9 * seconds, levels))
        ran.sizes.append(size)
        ran.tokens += sum(len(result.emitted) for result in results)
        ran.seconds += seconds
    return ran


def mean_step(world: World, size: int, steps: int = 4000) -> tuple[float, float]:
    """The tokens of a row and the seconds of a step of a fixed size, without the noise of its clock."""
    quiet = replace(world, noise=0.0, spikes=0.0, chance=random.Random(1))
    done = [quiet.step(size, 1, 0) for _ in range(steps)]
    tokens = sum(len(results[0].emitted) for results, _ in done)
    return tokens / steps, sum(seconds for _, seconds in done) / steps + (world.start / world.life if size else 0.0)


def fixed(world: World, size: int) -> float:
    """Tokens a second of a fixed size."""
    tokens, seconds = mean_step(world, size)
    return tokens / seconds


def ending(rate: float) -> Callable[[random.Random], int]:
    """Chains that end after each token with the same chance, as those with a confidence threshold do."""
    return lambda chance: 1 + len(chain(rate)(chance))


def matching(rate: float) -> Callable[[random.Random], int]:
    """Chains without a token where nothing matches, and else of any length."""
    return lambda chance: 100 if chance.random() < rate else 0
