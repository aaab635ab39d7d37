"""The exact law of what a verification rule emits: every draft, every coin, every outcome, summed in float64.

A *table* of a model gives its law after every prefix; ``grow`` draws all trees of a shape, with their
weights; ``outcomes`` runs a rule on all of them under ``EnumeratingRng`` and sums what comes out. Letters:
R rows (one draft and one script of coins each), N nodes, V vocabulary, L levels (tree depth + 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.rng import VerifierRng
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import RULES, rule_of

RuleFunction = Callable[[Tensor, Draft, VerifierRng], Verdict]
SPECS = (*(name for name, rule in RULES.items() if rule.lossless), "typical", "approximate,top_k=2,min_block=2")
"""A spec of every rule."""
Table = list[Tensor]
"""Entry l is [V**l, V]: the law of the next token after each prefix of l tokens (a number in base V)."""


def function_of(spec: str) -> RuleFunction:
    """The function of a rule, also of a lossy one, for sampled rows."""
    rule = rule_of(spec)
    if rule.lossless:
        return rule.function
    return lambda p, draft, coins: rule.function(Target(p.argmax(-1), p), draft, coins)


def random_table(vocabulary: int, levels: int, seed: int, zeros: float = 0.0) -> Table:
    """Random conditional laws; a share ``zeros`` of the entries is exactly 0, never all of one law."""
    source = torch.Generator().manual_seed(seed)
    table = []
    for level in range(levels):
        logits = 1.5 * torch.randn(vocabulary**level, vocabulary, generator=source, dtype=torch.float64)
        gone = torch.rand(logits.shape, generator=source) < zeros
        gone[torch.arange(len(logits)), torch.randint(vocabulary, (len(logits),), generator=source)] = False
        table.append(logits.masked_fill(gone, -torch.inf).softmax(-1))
    return table


def same_everywhere(law: Sequence[float], levels: int) -> Table:
    """The table of a model that draws every token independently from one law."""
    row = torch.tensor(law, dtype=torch.float64)
    return [row.expand(len(law) ** level, -1).clone() for level in range(levels)]


def continued(emitted: Sequence[Tensor], table: Table) -> Tensor:
    """Law over all sequences of L tokens, [V**L]; ``emitted[t]`` is the weight of saying just that prefix."""
    law = emitted[0]
    for extra, conditional in zip(emitted[1:], table[1 : len(emitted)], strict=True):
        law = (law[:, None] * conditional).flatten() + extra
    return law


def true_law(table: Table) -> Tensor:
    """Law over all sequences of as many tokens as the table has levels, [V**L]."""
    return continued([table[0][0], *(torch.zeros(t.numel(), dtype=t.dtype) for t in table[1:])], table)


def total_variation(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a - b).abs().sum())


@dataclass(frozen=True)
class Draws:
    """Every draft that may come of a shape, its probability, and the target's law at its nodes [R, N, V]."""

    draft: Draft
    weights: Tensor
    p: Tensor

    def select(self, rows: Tensor) -> "Draws":
        tree, q, scores = self.draft.tree, self.draft.q, self.draft.scores
        tree = replace(tree, tokens=tree.tokens[rows], parents=tree.parents[rows])
        q, scores = (None if each is None else each[rows] for each in (q, scores))
        draft = replace(self.draft, tree=tree, q=q, scores=scores)
        return Draws(draft, self.weights[rows], self.p[rows])

    def to(self, dtype: torch.dtype) -> "Draws":
        """The same with p and q in another precision; the weights stay in float64."""
        q = self.draft.q
        return Draws(replace(self.draft, q=None if q is None else q.to(dtype)), self.weights, self.p.to(dtype))


def grow(shape: Sequence[int], law: Law, p: Table, *q: Table, claim: Law | None = None) -> Draws:
    """All drafts of a tree with these parents whose children come about by ``law`` from q.

    Several q are the models of ``IID_MANY``, in turn among siblings. ``claim`` records the q of another law
    than the one that was drawn from: how a drafter would lie. What must not be read (q at the root,
    everything at padding) is NaN.
    """
    vocabulary, nodes = p[0].shape[1], len(shape)
    tokens = torch.full((1, nodes), -7)
    prefix = torch.zeros(1, nodes, dtype=torch.long)
    recorded = torch.full((1, nodes, vocabulary), torch.nan, dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    depth = [0] * nodes
    for node in range(1, nodes):
        if shape[node] == PAD:
            continue
        depth[node] = depth[shape[node]] + 1
        base = [table[depth[node] - 1][prefix[:, shape[node]]] for table in q]
        drawn = _child_law(law, base, shape, node, tokens)
        said = drawn if claim is None else _child_law(claim, base, shape, node, tokens)
        row, token = drawn.nonzero(as_tuple=True)
        weights = weights[row] * drawn[row, token]
        tokens, prefix, recorded = tokens[row], prefix[row], recorded[row]
        tokens[:, node], recorded[:, node] = token, said[row]
        prefix[:, node] = prefix[:, shape[node]] * vocabulary + token
    at_nodes = [
        p[d][prefix[:, i]] if shape[i] != PAD else torch.full_like(recorded[:, i], torch.nan)
        for i, d in enumerate(depth)
    ]
    parents = torch.tensor(shape).expand(len(tokens), -1).clone()
    linear = all(parent in (i - 1, PAD) for i, parent in enumerate(shape))
    tree = TokenTree(tokens, parents, depth=max(depth), linear=linear)
    law = claim or law
    return Draws(Draft(tree, law, None if law is Law.FIXED else recorded), weights, torch.stack(at_nodes, 1))


def _child_law(law: Law, base: list[Tensor], shape: Sequence[int], node: int, tokens: Tensor) -> Tensor:
    """[R, V]: what ``node`` is drawn from, given its elder siblings in ``tokens``."""
    elders = [i for i in range(1, node) if shape[i] == shape[node]]
    if law is Law.IID_MANY:
        return base[len(elders) % len(base)]
    if law in (Law.CHAIN, Law.IID):
        return base[0]
    if law is Law.FIXED:
        best = base[0].argsort(dim=-1, descending=True, stable=True)[:, len(elders)]
        return torch.nn.functional.one_hot(best, base[0].shape[1]).double()
    free = torch.ones_like(base[0]).scatter(1, tokens[:, elders], 0.0)
    rest = torch.where((base[0] * free).sum(1, keepdim=True) > 0, base[0] * free, free)  # Sequoia: then uniform
    return rest / rest.sum(1, keepdim=True)


def prune(draws: Draws, q: Table, keep: int) -> Draws:
    """Throw away all but the ``keep`` drafted nodes that q finds likeliest, as EAGLE-2 ranks its nodes."""
    tree = draws.draft.tree
    score = torch.ones_like(draws.weights)[:, None].repeat(1, tree.parents.shape[1])
    prefix = torch.zeros_like(tree.tokens)
    depth = torch.zeros_like(tree.tokens)
    row = torch.arange(len(score))
    for node in range(1, score.shape[1]):
        parent, token = tree.parents[:, node], tree.tokens[:, node]
        depth[:, node] = depth[row, parent] + 1
        conditional = torch.stack([q[d][c] for d, c in zip(depth[row, parent], prefix[row, parent], strict=True)])
        score[:, node] = score[row, parent] * conditional[row, token]
        prefix[:, node] = prefix[row, parent] * q[0].shape[1] + token
    rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # root first, parents before children
    parents = torch.where(rank <= keep, tree.parents, PAD)
    return replace(draws, draft=replace(draws.draft, tree=replace(tree, parents=parents, linear=False)))


class EnumeratingRng(VerifierRng):
    """Each row follows its script of outcomes, and notes the first decision that the script does not cover.

    Decisions with one possible outcome take it and use up nothing of the script.
    """

    def __init__(self, scripts: Tensor, vocabulary: int) -> None:
        self.scripts = scripts  # [R, decisions so far]
        self.taken = torch.zeros(len(scripts), dtype=torch.long)
        self.open = torch.zeros(len(scripts), dtype=torch.bool)
        self.options = torch.zeros(len(scripts), max(2, vocabulary), dtype=torch.float64)
        self.asked: set[str] = set()

    def accept(self, probability: Tensor) -> Tensor:
        self._once("accept")
        yes = probability.double()
        return torch.stack([self._decide(torch.stack([1 - each, each], 1)) == 1 for each in yes.unbind(1)], 1)

    def residual(self, law: Tensor) -> Tensor:
        self._once("residual")
        return self._decide(law.double() / law.double().sum(1, keepdim=True))

    def target(self, law: Tensor, depth: int, going: Tensor) -> Tensor:
        self._once(f"target {depth}")
        sure = torch.nn.functional.one_hot(law.nan_to_num().argmax(-1), law.shape[-1])
        return self._decide(torch.where(going[:, None], law.double() / law.double().sum(-1, keepdim=True), sure))

    def _once(self, kind: str) -> None:
        assert kind not in self.asked, "one coin was tossed twice"
        self.asked.add(kind)

    def _decide(self, weights: Tensor) -> Tensor:
        assert bool(((weights >= 0) & (weights <= 1 + 1e-6)).all()), "not a probability"
        choice = ((weights > 0).sum(1) > 1) & ~self.open
        scripted = choice & (self.taken < self.scripts.shape[1])
        fresh = choice & ~scripted
        outcome = weights.argmax(1)
        if self.scripts.shape[1]:
            said = self.scripts.gather(1, self.taken.clamp(max=self.scripts.shape[1] - 1)[:, None])[:, 0]
            outcome = torch.where(scripted, said, outcome)
        self.options[fresh, : weights.shape[1]] = weights[fresh]
        self.taken += scripted
        self.open |= fresh
        return outcome


@dataclass(frozen=True)
class Outcomes:
    """``emitted[t][prefix]``: the probability that the rule emits just this prefix of t + 1 tokens."""

    emitted: list[Tensor]

    @property
    def expected_tokens(self) -> float:
        return float(sum(t * e.sum() for t, e in enumerate(self.emitted, start=1)))


def outcomes(rule: RuleFunction, draws: Draws) -> Outcomes:
    """Run ``rule`` on every draft under every outcome of its coins, breadth first."""
    vocabulary, depth = draws.p.shape[2], draws.draft.tree.depth
    emitted = [torch.zeros(vocabulary**t, dtype=torch.float64) for t in range(1, depth + 2)]
    scripts = torch.zeros(len(draws.weights), 0, dtype=torch.long)
    while len(scripts):
        coins = EnumeratingRng(scripts, vocabulary)
        verdict = rule(draws.p, draws.draft, coins)
        closed = draws.select((~coins.open).nonzero()[:, 0])
        _add(emitted, closed, Verdict(verdict.path[~coins.open], verdict.bonus[~coins.open]))
        row, option = torch.where(coins.open[:, None], coins.options, 0.0).nonzero(as_tuple=True)
        scripts = torch.cat([scripts[row], option[:, None]], 1)
        draws = draws.select(row)
        draws = replace(draws, weights=draws.weights * coins.options[row, option])
    return Outcomes(emitted)


def _add(emitted: list[Tensor], draws: Draws, verdict: Verdict) -> None:
    """Check the verdict, and add the weights of finished rows to the prefixes that they emitted."""
    path, tree = verdict.path, draws.draft.tree
    inner = path[:, 1:] >= 0
    assert bool((path[:, 0] == 0).all()) and path.shape[1] == tree.depth + 1
    assert bool((inner <= (path[:, :-1] >= 0)).all()), "a gap in the path"
    assert bool((~inner | (tree.parents.gather(1, path[:, 1:].clamp(min=0)) == path[:, :-1])).all())
    tokens, count = verdict.emitted(tree), verdict.accepted() + 1
    vocabulary = draws.p.shape[2]
    for length in range(1, tree.depth + 2):
        mine = tokens[count == length, :length]
        assert bool((mine >= 0).all())
        number = mine @ vocabulary ** torch.arange(length - 1, -1, -1)
        emitted[length - 1].index_add_(0, number, draws.weights[count == length])


def difference(result: Outcomes, p: Table) -> float:
    """Total variation between what was emitted, continued by the target, and the target's own law."""
    return total_variation(continued(result.emitted, p), true_law(p[: len(result.emitted)]))


def loss(rule: RuleFunction, draws: Draws, p: Table) -> float:
    """Total variation between what the rule says, continued by the target, and the target's own law."""
    return difference(outcomes(rule, draws), p)
