"""What drafting may lose: a share of the time, however wrong the controller is, and nothing where it wins."""

from typing import NamedTuple

import pytest
import torch
from watched_rows import view

from foredraft.engine.allowance import Allowance
from foredraft.engine.control import Constant, Controller
from foredraft.engine.costs import CostTable
from foredraft.engine.step import RowStep, StepDone

FLAT = CostTable((1, 16), (1.0, 1.0))
FIXED = Allowance.FIRST + (1 + Allowance.STEPS) * 10.0
"""Plain steps' time that is lost at most beyond the share: what is there at first, and a trial of dear steps after the
first draft of all, which is not booked."""


class Told(NamedTuple):
    """What each step drafted, and all seconds over those of plain decoding for the same tokens."""

    lengths: list[int]
    lost: float
    seconds: float


def run(controller: Controller, steps: int, seconds: float, accepted: int, rows: int = 1, plain: float = 1.0) -> Told:
    """Some steps; one that drafts takes so long and has so many accepted, another ``plain`` seconds."""
    seen, told, empty = view(*range(rows)), Told([], 0.0, 0.0), torch.zeros(rows, 1, dtype=torch.long)
    for _ in range(steps):
        plan = controller.plan(seen, [100] * rows)
        took, new = (seconds, accepted) if plan.length else (plain, 0)
        row = RowStep([0] * (new + 1), plan.length, plan.length, new, True)
        controller.observe(seen, plan, StepDone([row] * rows, empty, empty[:, 0], None, took / 2, took / 2))
        told.lengths.append(plan.length)
        told = Told(told.lengths, told.lost + took - (new + 1) * plain, told.seconds + took)
    return told


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize(("seconds", "accepted"), [(10.0, 0), (3.0, 1), (1.5, 0), (2.1, 1)])
def test_drafts_that_do_not_pay_lose_a_small_share_of_the_time(seconds: float, accepted: int, rows: int):
    told = run(Allowance(Constant(4), FLAT), 20_000, seconds, accepted, rows)
    assert told.lost < Allowance.SHARE * told.seconds + FIXED
    assert told.lost > 0.5 * Allowance.SHARE * told.seconds, "it should go on trying"


def test_without_it_they_lose_a_multiple():
    assert run(Constant(4), 2000, 3.0, 1).lost > 10 * (Allowance.SHARE * 6000 + FIXED)


def test_what_pays_is_never_kept_from_drafting():
    """But for the steps that time plain decoding."""
    lengths = run(Allowance(Constant(4), FLAT), 2000, 2.0, 2).lengths
    assert lengths.count(0) <= Allowance.PLAIN + 2000 // Allowance.AGAIN


def test_what_wins_goes_on_whatever_it_took_to_begin():
    """A small model has read a long prompt; what it drafts then pays."""
    controller = Allowance(Constant(4), FLAT)
    run(controller, Allowance.PLAIN + 1, 2.0, 2)
    run(controller, 1, 90.0, 0)
    assert all(run(controller, 100, 2.0, 2).lengths)


def test_but_not_text_after_text():
    """Each text is too short for what it takes to begin."""
    controller, lost, seconds = Allowance(Constant(4), FLAT), 0.0, 0.0
    for _ in range(500):
        for steps, took in ((1, 20.0), (9, 2.0)):
            told = run(controller, steps, took, 2)
            lost, seconds = lost + told.lost, seconds + told.seconds
        controller.release(0)
    assert lost < Allowance.SHARE * seconds + FIXED


def test_wins_are_credit_for_bad_times_but_not_for_long():
    """Code, and then prose: what the one has won does not pay for a whole text of the other."""
    controller = Allowance(Constant(4), FLAT)
    run(controller, 5000, 2.0, 3)
    told = run(controller, 1000, 3.0, 0)
    assert told.lengths[: int(Allowance.CREDIT / 3)].count(4) >= int(Allowance.CREDIT / 3) - 1
    assert told.lost < Allowance.SHARE * told.seconds + Allowance.CREDIT + 2 * Allowance.STEPS * 3.0


def test_it_comes_back_when_drafting_pays_again():
    controller = Allowance(Constant(4), FLAT)
    run(controller, 3000, 5.0, 0)
    assert run(controller, 3000, 2.0, 3).lengths[-2000:].count(0) <= 1 + 2000 // Allowance.AGAIN


def test_a_trial_is_not_broken_off():
    """Its first step may be dear because it reads a prompt; then the others are cheap."""
    lengths = run(Allowance(Constant(4), FLAT), 20_000, 30.0, 0).lengths
    trials = "".join("d" if length else "." for length in lengths).strip(".").split(".")
    assert {len(trial) for trial in trials if trial} == {Allowance.STEPS}


def test_the_very_first_draft_may_take_its_time():
    """A drafter that measures for a minute what it needs to know, and then pays."""
    controller = Allowance(Constant(4), FLAT)
    run(controller, Allowance.PLAIN, 1.0, 0)
    assert run(controller, 1, 60_000.0, 0).lengths == [4]
    assert all(run(controller, 100, 2.0, 2).lengths)


def test_a_machine_that_was_asleep_is_no_debt_for_ever():
    controller = Allowance(Constant(4), FLAT)
    run(controller, 100, 2.0, 1)
    run(controller, 1, 60_000.0, 1)
    most = (Allowance.DEBT + Allowance.DEAR) / Allowance.SHARE
    assert any(run(controller, int(most) + 2 * Allowance.STEPS, 2.0, 2).lengths[-Allowance.STEPS :])


def test_plain_steps_are_what_is_timed_and_not_what_the_table_says():
    """On a machine that is three times as slow as when the table was made, drafting at five seconds still pays."""
    lengths = run(Allowance(Constant(4), FLAT), 4000, 5.0, 1, plain=3.0).lengths
    assert lengths.count(0) <= Allowance.PLAIN + 4000 // Allowance.AGAIN


def test_plain_decoding_is_timed_again():
    """A context grows: what took one second takes three, so drafting at two and a half begins to pay."""
    controller = Allowance(Constant(4), FLAT)
    run(controller, 500, 2.5, 1)
    lengths = run(controller, 6000, 2.5, 1, plain=3.0).lengths
    assert lengths[-2000:].count(0) <= 1 + 2000 // Allowance.AGAIN
