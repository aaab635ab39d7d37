"""Loops inside drafters on tables: models that are tables over a real slot cache, and every coin enumerated.

``enumerated`` runs an ``NestedLoop`` once for each sequence of outcomes that chance can have in it, on all levels, and
returns every draft with its exact probability. Letters: R rows (one script of coins each), V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, StepOut, View
from foredraft.core.rng import Noise, VerifierRng
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.core.verify import verify
from foredraft.engine import tail
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import Layout, StepIn, address
from oracle import EnumeratingRng, Table

PROMPT = (1, 0, 1)


def fill(law: Tensor, table: Table, tokens: Tensor, sizes: Tensor) -> None:
    """Write to ``law`` [R, V] what the table says after the first ``sizes`` tokens, where it says anything."""
    for level in range(len(table)):
        here = sizes == len(PROMPT) + level
        if bool(here.any()):
            law[here] = at(table, tokens[here], level)


def at(table: Table, tokens: Tensor, level: int) -> Tensor:
    """[R, V]: the law after the prompt and the next ``level`` tokens."""
    vocabulary = table[0].shape[1]
    said = tokens[:, len(PROMPT) : len(PROMPT) + level]
    number = (said * vocabulary ** torch.arange(level - 1, -1, -1)).sum(1)
    return table[level][number]


@final
class TableLM(TargetModel):
    """A model that is a table. It finds what it has read in the slots that its masks show, so both must be right."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.vocab_size = table[0].shape[1]
        self.max_length = 64
        self.read = 0  # tokens, padding included
        self._tokens = torch.full((0, 64), -1)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def new_cache(self) -> SlotCache:
        return SlotCache(0)

    def empty_hidden(self) -> dict[int, Tensor]:
        return {}

    def address(
        self, tree: TokenTree, bases: Tensor, rows: Sequence[int], used_slots: int, *, start: int = 0
    ) -> StepIn:
        layout = Layout({"all": None}, by_type=False)
        return address(tree, bases, rows, used_slots, layout, max_position=self.max_length, start=start)

    def compute(self, step: StepIn, cache: SlotCache, keep: Tensor | None = None) -> StepOut:
        rows = torch.tensor(step.rows)
        missing = max(step.rows) + 1 - len(self._tokens)
        self._tokens = torch.nn.functional.pad(self._tokens, (0, 0, 0, max(missing, 0)), value=-1)
        self._tokens[rows[:, None], step.slots] = step.tokens
        self.read += step.tokens.numel()
        said = self._tokens[rows]
        laws, mask = [], step.masks(self.dtype)["all"]
        for node in range(step.tokens.shape[1]):
            seen = (mask[:, 0, node] == 0).sum(1)
            place, padding = step.positions[:, node], step.positions[:, node] == step.positions[:, 0]
            assert bool(((seen == place + 1) | padding).all()), "a chain sees what stands before it"
            assert bool((said[torch.arange(64) < seen[:, None]] >= 0).all()), "a slot was never written"
            law = torch.full((len(said), self.vocab_size), 1 / self.vocab_size, dtype=torch.float64)
            long = seen >= len(PROMPT)
            assert bool((said[long, : len(PROMPT)] == torch.tensor(PROMPT)).all()), "not the text that was said"
            fill(law, self.table, said, seen)
            laws.append(law)
        logits = torch.stack(laws, 1).log()
        return StepOut(logits if keep is None else logits[:, keep])


class Chances:
    """The coins of all levels in the order in which they are tossed, by one script a row."""

    def __init__(self, scripts: Tensor, vocabulary: int, end: int) -> None:
        self.coins = EnumeratingRng(scripts, vocabulary)
        self._end = end  # what rows do that have said so much does not matter

    def decide(self, weights: Tensor, positions: Tensor) -> Tensor:
        first = torch.nn.functional.one_hot(weights.argmax(1), weights.shape[1]).double()
        return self.coins._decide(torch.where((positions >= self._end)[:, None], first, weights.double()))


@final
class StepCoins(VerifierRng):
    """One inner step's."""

    def __init__(self, chances: Chances, noise: Noise) -> None:
        self._chances = chances
        self._positions = noise.positions

    def accept(self, probability: Tensor) -> Tensor:
        yes = probability.double()
        weights = [torch.stack([1 - each, each], 1) for each in yes.unbind(1)]
        return torch.stack([self._chances.decide(each, self._positions) == 1 for each in weights], 1)

    def residual(self, law: Tensor) -> Tensor:
        return self._chances.decide(law / law.sum(1, keepdim=True), self._positions)

    def target(self, law: Tensor, depth: int, going: Tensor) -> Tensor:
        return self._chances.decide(law / law.sum(-1, keepdim=True), torch.where(going, self._positions, 1 << 30))


@final
class TableDrafter(Rewindable):
    """Draws chains from a table; ``picks`` takes the likeliest tokens instead."""

    def __init__(self, table: Table, length: int, chances: Chances, picks: bool = False) -> None:
        self._table = table
        self._chances = chances
        self._picks = picks
        self.needs = Needs(max_nodes=length)

    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self.needs.max_nodes)
        rows = len(view.rows)
        tokens = torch.cat([view.roots[:, None], torch.zeros(rows, depth, dtype=torch.long)], 1)
        laws = [torch.full((rows, self._table[0].shape[1]), torch.nan, dtype=torch.float64)]
        for node in range(1, depth + 1):
            paths = view.followed_by(tokens[:, 1:node], [node - 1] * rows)
            law = torch.ones_like(laws[0]) / laws[0].shape[1]
            fill(law, self._table, paths.history, paths.lengths)
            # a node that is not planned is not drawn: it must not branch
            drawn = torch.where(torch.tensor(plan.lengths) >= node, view.lengths, 1 << 30)
            tokens[:, node] = law.argmax(1) if self._picks else self._chances.decide(law, drawn)
            laws.append(law)
        allowed = torch.tensor(plan.lengths).clamp(max=depth)
        tree = TokenTree.chain(tokens, allowed + 1)
        return Draft(tree, Law.FIXED) if self._picks else Draft(tree, Law.CHAIN, torch.stack(laws, 1))

    def rewind(self, row: int, length: int) -> None: ...


@dataclass(frozen=True)
class Nested:
    """Every draft that a drafter can make, how likely each is, and how much its first inner step said."""

    draft: Draft
    weights: Tensor
    first: Tensor


def enumerated(
    make: Callable[[Chances], Rewindable],
    vocabulary: int,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    alone: bool = False,
) -> Nested:
    """All drafts of ``length`` tokens of the drafter that ``make`` makes, breadth first over its coins.

    Args:
        alone: one row at a time; for loops in loops, whose rows toss more coins if others need more inner steps.
    """
    left = [(torch.zeros(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.float64))]
    tokens, laws, found, firsts = [], [], [], []
    law = Law.CHAIN
    while left:
        scripts, weights = left.pop()
        rows = len(scripts)
        chances = Chances(scripts, vocabulary, len(PROMPT) + length)
        steps: list[Tensor] = []

        def coins(noise: Noise, plain: Tensor | None = None, chances: Chances = chances) -> StepCoins:
            return StepCoins(chances, noise)

        def judge(target, draft, coins, rule, steps: list[Tensor] = steps):
            verdict = verify(target, draft, coins, rule)
            steps.append(verdict.accepted() + 1)
            return verdict

        with monkeypatch.context() as patch:
            patch.setattr(tail, "HashedRng", coins)
            patch.setattr(tail, "verify", judge)
            drafter = make(chances)
            for row in range(rows):
                drafter.admit(row, torch.tensor(PROMPT[:-1]), {})
            view = tiny.view([PROMPT] * rows, SamplingParams(temperature=1.0), vocabulary, draws=True)
            draft = drafter.propose(view, Plan((length,) * rows))
        assert bool(draft.tree.valid.all()) and draft.tree.tokens.shape[1] == length + 1
        law, closed = draft.law, ~chances.coins.open
        tokens.append(draft.tree.tokens[closed])
        laws.append(draft.q[closed] if draft.q is not None else torch.zeros(int(closed.sum()), length + 1, vocabulary))
        found.append(weights[closed])
        firsts.append(steps[0][closed] if steps else torch.full((int(closed.sum()),), length))
        row, option = torch.where(chances.coins.open[:, None], chances.coins.options, 0.0).nonzero(as_tuple=True)
        weights = weights[row] * chances.coins.options[row, option]
        scripts = torch.cat([scripts[row], option[:, None]], 1)
        if len(scripts):
            left += zip(scripts.split(1), weights.split(1), strict=True) if alone else [(scripts, weights)]
    draft = Draft(TokenTree.chain(torch.cat(tokens)), law, torch.cat(laws))
    return Nested(draft, torch.cat(found), torch.cat(firsts))
