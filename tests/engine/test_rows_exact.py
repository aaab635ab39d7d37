"""Two requests with one seed, one ahead of the other, with drawn drafts, under every policy: each has the target's law.

A policy that learns plans for a row by the results of another. If both rows drew the same numbers at the same place,
the plan would depend on the row's own future. All numbers of both rows are enumerated: a number that two draws share is
one number, whose interval each draw narrows. With two tokens an exponential race is a threshold on one number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_policies_exact import CASES, V, chain, place

import runs
import tiny
from foredraft.core.drafter import Plan, View
from foredraft.core.rng import RandomStream
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.worth import DraftNodes
from foredraft.drafters.none import NoDrafter
from foredraft.engine.policy import Constant, Policy
from foredraft.engine.step import RowStep, StepResult
from foredraft.engine.tail import StepEnd
from oracle import Table, random_table, total_variation, true_law

AHEAD, LENGTH, DEEPEST = 2, 3, 1
SEED = 7


class OnAcceptance(Policy):
    """Drafts for everyone just after everything was accepted: the quickest reaction to another row."""

    def __init__(self) -> None:
        self._drafts = True

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan(tuple(min(limit, int(self._drafts)) for limit in limits))

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        drafted = [row for row in step.rows if row.drafted]
        self._drafts = all(row.accepted for row in drafted) if drafted else not self._drafts

    def release(self, row: int) -> None: ...


@dataclass
class Numbers:
    """Uniform numbers by name, each an interval in which it lies; ``script`` says which way each draw goes."""

    script: list[int]
    taken: list[tuple[int, int]] = field(default_factory=list)  # of each draw: what it took, of how many
    weight: float = 1.0
    _known: dict[tuple, tuple[float, float]] = field(default_factory=dict)

    def below(self, name: tuple, threshold: float) -> bool:
        """Whether the number is below the threshold."""
        low, high = self._known.get(name, (0.0, 1.0))
        parts = [part for part in ((low, min(high, threshold)), (max(low, threshold), high)) if part[0] < part[1]]
        choice = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append((choice, len(parts)))
        part = parts[choice]
        self.weight *= (part[1] - part[0]) / (high - low)
        self._known[name] = part
        return part[0] < threshold


@dataclass
class Row:
    """A request: its output so far, and the stream that it draws from."""

    number: int
    stream: int
    length: int
    output: tuple[int, ...] = ()

    @property
    def limit(self) -> int:
        return min(DEEPEST, self.length - len(self.output) - 1)

    def step(self, planned: int, p: Table, q: Table, numbers: Numbers) -> RowStep:
        """Token verification of a chain of ``planned`` tokens, by the numbers that ``HashedRng`` takes."""

        def name(stream: RandomStream, index: int) -> tuple:
            return self.stream, len(self.output), stream, index

        said: tuple[int, ...] = ()
        for i in range(1, planned + 1):
            own, drafted = at(p, self.output + said), at(q, self.output + said)
            token = 0 if numbers.below(name(RandomStream.DRAFT, i), drafted[0]) else 1
            if numbers.below(name(RandomStream.ACCEPT, i), min(1.0, own[token] / drafted[token])):
                said = (*said, token)
                continue
            return self._end((*said, 1 - token), planned, len(said))  # of two tokens the residual has the other
        stream = RandomStream.RESIDUAL if planned else RandomStream.TARGET
        last = 0 if numbers.below(name(stream, 0), at(p, self.output + said)[0]) else 1
        return self._end((*said, last), planned, len(said))

    def _end(self, said: tuple[int, ...], planned: int, accepted: int) -> RowStep:
        self.output += said
        nodes = DraftNodes(range(-1, planned), [-0.5 * node for node in range(planned + 1)])
        return RowStep(list(said), planned, planned, accepted, True, range(1, accepted + 1), nodes)


def at(table: Table, text: tuple[int, ...]) -> list[float]:
    return table[len(text)][place(text)].tolist()


def run(rows: tuple[Row, Row], policy: Policy, p: Table, q: Table, numbers: Numbers) -> None:
    """The first row begins; the second joins after a step."""
    batch = rows[:1]
    while batch:
        seen = together(batch)
        plan = policy.plan(seen, [row.limit for row in batch])
        steps = [row.step(planned, p, q, numbers) for row, planned in zip(batch, plan.lengths, strict=True)]
        policy.observe(
            seen, plan, StepResult(steps, StepEnd.known(steps, 1), None, 0.05 * plan.length, 1.0, plan.length)
        )
        for row in batch:
            if len(row.output) >= row.length:
                policy.release(row.number)
        batch = tuple(row for row in rows if len(row.output) < row.length)


def together(batch: Sequence[Row]) -> View:
    """What the policy sees: the rows, how long they are, and that they are sampled."""
    view = tiny.view([[0, *row.output] for row in batch], SamplingParams(temperature=1.0), V)
    return replace(view, rows=tuple(row.number for row in batch), draws=True)


def law(make: Callable[[], Policy], streams: tuple[int, int], p: Table, q: Table) -> list[torch.Tensor]:
    """The law of the first tokens of each row's output, over all numbers."""
    totals = [torch.zeros(2**AHEAD, dtype=torch.float64), torch.zeros(2**LENGTH, dtype=torch.float64)]
    script: list[int] = []
    while True:
        numbers = Numbers(script)
        rows = Row(0, streams[0], AHEAD), Row(1, streams[1], LENGTH)
        run(rows, make(), p, q, numbers)
        for row, total in zip(rows, totals, strict=True):
            total[place(row.output[: row.length])] += numbers.weight
        taken = numbers.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return totals
        script = [*(choice for choice, _ in taken[:-1]), taken[-1][0] + 1]


def streams_of(policy: Policy, **options: Any) -> tuple[int, int]:
    """The streams that an engine gives two requests with one seed."""
    g = tiny.generator(runs.model(), NoDrafter(), policy, **options)
    first, second = (g.submit([[1, 2]], SamplingParams(temperature=1.0, seed=SEED))[0] for _ in range(2))
    assert first.seed == second.seed == SEED
    return first.stream, second.stream


def tables() -> tuple[Table, Table]:
    return random_table(2, LENGTH + DEEPEST + 1, 3), random_table(2, LENGTH + DEEPEST + 1, 4)


CHAINS = {name: make for name, (make, drafted, _) in CASES.items() if drafted is chain} | {"accepted": OnAcceptance}


@pytest.mark.parametrize("name", CHAINS)
def test_each_row_has_the_targets_law(name: str):
    p, q = tables()
    streams = streams_of(CHAINS[name](), rule="token")
    for total, length in zip(law(CHAINS[name], streams, p, q), (AHEAD, LENGTH), strict=True):
        assert total_variation(total, true_law(p[:length])) < 1e-12


def test_the_sum_sees_rows_that_share_a_stream():
    p, q = tables()
    first, second = law(OnAcceptance, (SEED, SEED), p, q)
    assert total_variation(first, true_law(p[:AHEAD])) < 1e-12
    assert total_variation(second, true_law(p[:LENGTH])) > 1e-3


def test_requests_have_streams_of_their_own_where_drafts_are_drawn_and_else_the_seed():
    for policy in (OnAcceptance(), CASES["calibrated"][0](), CASES["throughput"][0](), Constant(3)):
        for rule in ("token", "block", "traversal"):
            first, second = streams_of(policy, rule=rule)
            assert first != second and SEED not in (first, second)
        for rule in (None, "target_sampling", "typical"):
            assert streams_of(policy, rule=rule) == (SEED, SEED)
