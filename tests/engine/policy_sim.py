"""A loop without models for policies: what would be accepted and what steps take is given, and so is the noise."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import tiny
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.core.worth import DraftNodes
from foredraft.engine.fitting import round_up
from foredraft.engine.policy import Policy
from foredraft.engine.step import RowStep, StepResult
from foredraft.engine.tail import StepEnd

Chances = Callable[[random.Random], float]
"""Draws the true probability that a token is accepted after its parent."""


def always(chance: float) -> Chances:
    return lambda chances: chance


def uneven(low: float, high: float) -> Chances:
    """Some tokens are nearly certain and others are not: what a drafter's scores can tell apart."""
    return lambda chances: high if chances.random() < 0.5 else low


@dataclass
class World:
    """What drafts bring and steps take.

    Args:
        chances: of the first child of each node; in trees the second child has half of the rest, and so on.
        draft, forward: seconds of a draft's levels, and of a forward's nodes over all rows.
        start: seconds that the first draft of a row takes besides. resumption: the first one after a plain step.
        sharpness: the draft's log-odds are this many times the true ones.
        noise: of the logarithm of each time. spikes: so many steps take ten times as long.
        life: steps of a request.
        matches: the share of steps in which there is a draft at all.
        draws: see ``View``.
    """

    needs: Needs
    chances: Chances
    draft: Callable[[int], float]
    forward: Callable[[int], float]
    start: float = 0.0
    resumption: float = 0.0
    sharpness: float = 1.0
    noise: float = 0.0
    spikes: float = 0.0
    life: int = 80
    temperature: float = 0.0
    draws: bool = False
    matches: float = 1.0
    width: int = 2  # children of a node of a tree
    seed: int = 0
    chance: random.Random = field(init=False)
    paused: bool = field(default=False, init=False)
    spent: float = field(default=0.0, init=False)  # seconds of all steps so far, but for noise and spikes

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def grow(self, length: int, worth: float) -> tuple[DraftNodes, list[float], int]:
        """A draft of one row with its true conditional chances, and its levels: all children of the likeliest node of
        each level, while its value is above ``worth``."""
        parents, scores, truth, levels = [-1], [0.0], [1.0], 0
        if self.chance.random() >= self.matches:
            return DraftNodes(parents, None), truth, 0
        last, value = 0, 1.0
        for _ in range(length):
            levels += 1
            first = self.chances(self.chance)
            place = len(parents)
            for child in range(self.width if self.needs.scored else 1):
                chance = first if not child else 0.5 * (1 - first) / 2 ** (child - 1)
                odds = self.sharpness * math.log(chance / (1 - chance))
                parents.append(last)
                scores.append(scores[last] - math.log1p(math.exp(-odds)))
                truth.append(chance)
            last, value = place, value * first
            if value < worth:
                break
        return DraftNodes(parents, scores if self.needs.scored else None), truth, levels

    def accepted(self, nodes: DraftNodes, truth: list[float]) -> list[int]:
        """The accepted path."""
        path, last = [], 0
        while True:
            left = 1.0
            for node, parent in enumerate(nodes.parents):
                if parent != last:
                    continue
                if self.chance.random() < truth[node] / left:
                    path.append(node)
                    break
                left -= truth[node]
            if not path or path[-1] == last:
                return path
            last = path[-1]

    def seconds(self, levels: int, nodes: int, fresh: int) -> tuple[float, float]:
        """Of a draft and of the rest of its step."""
        draft, rest = 0.0, self.forward(nodes)
        if levels:
            draft = self.draft(levels) + self.start * fresh + self.resumption * self.paused
        self.paused = not levels
        self.spent += draft + rest
        factor = self.chance.lognormvariate(0.0, self.noise) if self.noise else 1.0
        factor *= 10.0 if self.chance.random() < self.spikes else 1.0
        return draft * factor, rest * factor


@dataclass
class Ran:
    """The nodes that some steps verified besides roots, their tokens, and their seconds but for noise."""

    sizes: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def view(*rows: int, temperature: float = 0.0, draws: bool = False) -> View:
    rows_of_four = tiny.view([[0] * 4] * len(rows), SamplingParams(temperature=temperature))
    return replace(rows_of_four, rows=rows, draws=draws)


def run(policy: Policy, world: World, steps: int, rows: int = 1) -> Ran:
    """Some steps of requests that come one after another, as many as rows at once."""
    world = replace(world)  # the same chances whatever ran before
    ran, drafting = Ran(), False
    seen = view(*range(rows), temperature=world.temperature, draws=world.draws)
    for step in range(steps):
        if step % world.life == 0:
            for row in range(rows if step else 0):
                policy.release(row)
            drafting = False
        plan = policy.plan(seen, [100] * rows)
        done = step_of(world, plan, rows, fresh=0 if drafting else rows)
        drafting = drafting or plan.length > 0
        policy.observe(seen, plan, done)
        ran.sizes.append(max(sum(parent >= 0 for parent in row.nodes.parents) for row in done.rows))
        ran.tokens += sum(len(result.emitted) for result in done.rows)
    ran.seconds = world.spent
    return ran


def step_of(world: World, plan: Plan, rows: int, fresh: int = 0) -> StepResult:
    """What a step with this plan comes to."""
    least = 0.0 if world.needs.whole else sum(plan.level_price)
    grown = [world.grow(plan.length, least) for _ in range(rows)]
    drafts = [nodes for nodes, _, _ in grown]
    kept = [list(range(1 + (plan.nodes or len(nodes.parents) - 1))) for nodes in drafts]
    if plan.worth is not None and plan.worth.prices:
        kept = plan.worth.keep(drafts)
    results = []
    for (nodes, truth, _), own in zip(grown, kept, strict=True):
        own = [node for node in own if node < len(nodes.parents)]
        numbers = {node: number for number, node in enumerate(own)}
        left = DraftNodes(
            [-1, *(numbers.get(nodes.parents[node], -2) for node in own[1:])],
            nodes.scores and [nodes.scores[node] for node in own],
        )
        path = world.accepted(left, [truth[node] for node in own])
        depth = min(len(own) - 1, world.needs.longest)
        results.append(RowStep([0] * (1 + len(path)), len(own) - 1, depth, len(path), True, path, left))
    width = round_up(max(map(len, kept)))
    levels = max(levels for _, _, levels in grown)
    draft, rest = world.seconds(levels, rows * width, fresh)
    tree = TokenTree.root(torch.zeros(rows, dtype=torch.long))
    tree = replace(tree, tokens=tree.tokens.expand(-1, width))
    return StepResult(results, StepEnd.known(results, 1), None, draft, rest, levels, tree=tree)


def plain(world: World) -> float:
    """Tokens a second of plain decoding."""
    return 1 / world.forward(1)


def fixed(world: World, nodes: int, steps: int = 3000) -> float:
    """Tokens a second of drafts of the whole length of which so many nodes are verified, in rising order of their
    paths' scores; of lengths for chains."""
    quiet = replace(world, noise=0.0, spikes=0.0, seed=1)
    length = world.needs.longest if world.needs.scored else nodes
    tokens = seconds = 0.0
    for step in range(steps):
        done = step_of(quiet, Plan((length,), nodes=nodes), 1, fresh=step % world.life == 0)
        tokens += len(done.rows[0].emitted)
        seconds += done.draft_seconds + done.verify_seconds
    return tokens / seconds
