"""Every policy in the loop, step after step, all drafts and all coins summed: the text's law is the target's.

What a policy sees of one step decides what is drafted in the next, so each branch carries a policy of its own.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import DEFAULT, RULES
from foredraft.core.worth import DraftNodes
from foredraft.engine.fitting import fitted
from foredraft.engine.policy import Calibrated, Constant, Heuristic, OffFrom, Policy, Throughput
from foredraft.engine.step import RowStep, StepResult
from foredraft.engine.tail import StepEnd
from oracle import Draws, EnumeratingRng, Table, grow, random_table, total_variation, true_law

V, LENGTH, DEEPEST = 2, 4, 2
CHEAP, DEAR = 0.05, 0.3  # seconds of a drafted level; a forward takes one


def place(text: Sequence[int]) -> int:
    """Where the law of what follows a text stands in its table."""
    return sum(token * V**i for i, token in enumerate(reversed(text)))


@dataclass(frozen=True)
class Branch:
    """One way in which things may go: what was said, and what the policy makes of it."""

    text: tuple[int, ...]
    weight: float
    policy: Policy
    following: tuple[View, Plan] | None = None  # of the next step, if it was planned already


Drafted = Callable[[Table, Table, Plan], Draws]


def chain(p: Table, q: Table, plan: Plan) -> Draws:
    """All chains drawn from q; each ends after its first token below the plan's confidence, which is kept."""
    draws = grow(range(-1, plan.length), Law.CHAIN, p, q)
    return _ended(draws, lambda own: (own < plan.confidence).long().cumsum(1) - (own < plan.confidence).long() > 0)


def anticipating(p: Table, q: Table, plan: Plan) -> Draws:
    """The same, but the unsure token is thrown away."""
    draws = grow(range(-1, plan.length), Law.CHAIN, p, q)
    return _ended(draws, lambda own: (own < plan.confidence).cumsum(1) > 0)


def _ended(draws: Draws, gone: Callable[[Tensor], Tensor]) -> Draws:
    tree, q = draws.draft.tree, draws.draft.q
    assert q is not None
    own = q.gather(2, tree.tokens.clamp(min=0)[..., None])[..., 0][:, 1:]
    keep = torch.cat([torch.ones(len(own), 1, dtype=torch.bool), ~gone(own)], 1)
    scores = torch.cat([torch.zeros(len(own), 1, dtype=own.dtype), own.log().cumsum(1)], 1)
    tree = replace(tree, parents=torch.where(keep, tree.parents, PAD))
    return replace(draws, draft=replace(draws.draft, tree=tree, scores=scores))


def picked(p: Table, q: Table, plan: Plan) -> Draws:
    """The likeliest nodes of the whole tree, as many as the plan says and as pay, with their scores."""
    paths = [path for depth in range(1, plan.length + 1) for path in itertools.product(range(V), repeat=depth)]
    chances = {(): 1.0}
    for path in paths:
        chances[path] = chances[path[:-1]] * float(q[len(path) - 1][place(path[:-1]), path[-1]])
    best = sorted(sorted(paths, key=lambda path: -chances[path])[: plan.nodes or None], key=len)
    numbers = {(): 0, **{path: i for i, path in enumerate(best, start=1)}}
    tokens = torch.tensor([[0, *(path[-1] for path in best)]])
    parents = torch.tensor([[-1, *(numbers[path[:-1]] for path in best)]])
    scores = torch.tensor([[0.0, *(math.log(chances[path]) for path in best)]])
    at = torch.stack([p[len(path)][place(path)] for path in numbers])[None]
    draft = Draft(TokenTree(tokens, parents, depth=plan.length), Law.FIXED, scores=scores)
    if plan.worth is not None and plan.worth.prices:
        (kept,) = plan.worth.keep([DraftNodes(parents[0].tolist(), scores[0].tolist())])
        draft, at = fitted(draft, plan, any_width=True), at[:, kept]
    return Draws(draft, torch.ones(1, dtype=torch.float64), at)


CHAIN, TREE = Needs(max_nodes=2), Needs(max_nodes=6, max_depth=2, scored=True)
CASES: dict[str, tuple[Callable[[], Policy], Drafted, float]] = {
    "constant": (lambda: Constant(2), chain, CHEAP),
    "unsure": (lambda: Constant(2, confidence=0.45), chain, CHEAP),
    "heuristic": (lambda: Heuristic(1, confidence=0.3, longest=2), chain, CHEAP),
    "calibrated": (lambda: Calibrated(2, 0.3), chain, CHEAP),
    "off from": (lambda: OffFrom(ready(CHAIN, CHEAP), 2), chain, CHEAP),
    "throughput": (lambda: ready(CHAIN, CHEAP), chain, CHEAP),
    "throughput, dear": (lambda: ready(CHAIN, DEAR), chain, DEAR),
    "throughput of trees": (lambda: ready(TREE, CHEAP), picked, CHEAP),
    "throughput of trees, dear": (lambda: ready(TREE, DEAR), picked, DEAR),
}


def ready(needs: Needs, level: float) -> Throughput:
    """One that knows enough for what was drawn and accepted to decide from the first step on: drafting pays a little
    more than plain decoding, and two tokens as much as one.

    Args:
        level: seconds of a drafted level.
    """
    policy = Throughput(needs)
    forward = {"1": 1.0, "2": 1.1, "4": 1.3, "8": 1.7}
    rate = {"tokens": 2.2, "levels": 0.0, "widths": {"1": 2.0}}
    pace = {"forward": forward, "level": level, **rate, "curve": [0.0, 0.5, 0.62]}
    policy.restore({"weights": {"2": [0.0, 1.0, 0.0, 0.0]}, "paces": {"1/2": pace}})
    return policy


def after(table: Table, text: tuple[int, ...]) -> Table:
    """The laws of what follows a text."""
    own = place(text)
    return [row[own * V**d : (own + 1) * V**d] for d, row in enumerate(table[len(text) :])]


def results(draws: Draws) -> dict[tuple, float]:
    """What may come of a step, as a row's result without its lists, and its weight."""
    found: dict[tuple, float] = {}
    scripts = torch.zeros(len(draws.weights), 0, dtype=torch.long)
    rule = RULES["block" if draws.draft.law is Law.CHAIN else DEFAULT].function
    while len(scripts):
        coins = EnumeratingRng(scripts, V)
        verdict = rule(draws.p, draws.draft, coins)
        tree, scores = draws.draft.tree, draws.draft.scores
        emitted, counts = verdict.emitted(tree).tolist(), (verdict.accepted() + 1).tolist()
        for row in (~coins.open).nonzero()[:, 0].tolist():
            valid = tree.valid[row, 1:]
            drafted = int(valid.sum())
            path = tuple(node for node in verdict.path[row, 1:].tolist() if node >= 0)
            nodes = DraftNodes(
                tuple(tree.parents[row].tolist()), None if scores is None else tuple(scores[row].tolist())
            )
            depth = tree.depth if not tree.linear else drafted
            key = (tuple(emitted[row][: counts[row]]), drafted, min(depth, drafted), path, nodes)
            found[key] = found.get(key, 0.0) + float(draws.weights[row])
        row, option = torch.where(coins.open[:, None], coins.options, 0.0).nonzero(as_tuple=True)
        scripts = torch.cat([scripts[row], option[:, None]], 1)
        draws = draws.select(row)
        draws = replace(draws, weights=draws.weights * coins.options[row, option])
    return found


def law(
    make: Callable[[], Policy], drafted: Drafted, level: float, p: Table, q: Table, *, ahead: bool = False
) -> tuple[Tensor, set[tuple[int, int]]]:
    """The law of texts of ``LENGTH`` tokens, and the plans (length, nodes) that came up on the way.

    Args:
        ahead: each plan is made before the last step's result is known to the policy.
    """

    def planned(policy: Policy, text: tuple[int, ...]) -> tuple[View, Plan]:
        seen = replace(tiny.view([[0, *text]], SamplingParams(temperature=1.0), V), draws=drafted is not picked)
        return seen, policy.plan(seen, [max(min(DEEPEST, LENGTH - len(text) - 1), 0)])

    total = torch.zeros(V**LENGTH, dtype=torch.float64)
    plans: set[tuple[int, int]] = set()
    open_branches = [Branch((), 1.0, make())]
    while open_branches:
        branch = open_branches.pop()
        if len(branch.text) >= LENGTH:
            total[place(branch.text[:LENGTH])] += branch.weight
            continue
        seen, plan = branch.following or planned(branch.policy, branch.text)
        laws = after(p, branch.text), after(q, branch.text)
        draws = drafted(*laws, plan) if plan.length else grow([-1], Law.CHAIN, *laws)
        plans.add((plan.length, draws.draft.tree.tokens.shape[1]))
        for (emitted, drafted_nodes, depth, path, nodes), weight in results(draws).items():
            own = copy.deepcopy(branch.policy)
            row = RowStep(list(emitted), drafted_nodes, depth, len(emitted) - 1, True, path, nodes)
            text = (*branch.text, *emitted)
            following = planned(own, text) if ahead else None
            own.observe(seen, plan, StepResult([row], StepEnd.known([row], 1), None, level * depth, 1.0, depth))
            open_branches.append(Branch(text, branch.weight * weight, own, following))
    return total, plans


def tables() -> tuple[Table, Table]:
    return random_table(V, LENGTH + DEEPEST + 1, 3), random_table(V, LENGTH + DEEPEST + 1, 4)


@pytest.mark.parametrize(
    ("name", "ahead"), [(name, ahead) for name, case in CASES.items() for ahead in sorted({False, case[0]().ahead})]
)
def test_a_text_has_the_targets_law_whatever_the_policy_makes_of_the_past(name: str, ahead: bool):
    p, q = tables()
    found, plans = law(*CASES[name], p, q, ahead=ahead)
    assert total_variation(found, true_law(p[:LENGTH])) < 1e-12
    assert len(plans) > 1


def test_the_sum_sees_a_policy_that_looks_at_what_was_drawn():
    p, q = tables()
    found, _ = law(lambda: Constant(2, confidence=0.45), anticipating, CHEAP, p, q)
    assert total_variation(found, true_law(p[:LENGTH])) > 1e-3
