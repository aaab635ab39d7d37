"""What a step of some size would cost, and what it would bring, from steps that were made up by hand."""

import random

import pytest

from foredraft.bench.tune.predict import StepModel, predict
from foredraft.bench.tune.probe import DraftSize, Fit, ProbeStep, typical
from foredraft.engine.cost_model import CostTable
from foredraft.engine.fitting import SIZES, round_up

GENTLE = CostTable((1, 64), (1.0, 7.3))
"""One second for a row, and a tenth for each one more."""


def chain(
    depth: int,
    accepted: int,
    *,
    level: float = 0.02,
    beside: float = 0.5,
    reads: float = 0.0,
    costs: CostTable = GENTLE,
    short: bool = False,
    padded: bool = True,
) -> ProbeStep:
    """A step that costs what it should: the forward and ``beside``, and ``level`` seconds for each level. ``reads``: so
    many seconds more, the first of its text."""
    rows = round_up(1 + depth) if padded else 1 + depth
    return ProbeStep(
        depths=tuple(range(1, depth + 1)),
        scores=(),
        path=tuple(range(accepted)),
        levels=depth,
        draft_seconds=level * depth + reads,
        verify_seconds=costs(rows) + beside,
        short=short,
        first=reads > 0,
    )


def test_a_fit_goes_straight_from_point_to_point_and_is_level_beyond():
    fit = Fit((1.0, 2.0, 4.0), (1.0, 2.0, 6.0))
    assert [fit(x) for x in (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 9.0)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 6.0]
    assert [Fit((3.0,), (5.0,))(x) for x in (0.0, 3.0, 9.0)] == [5.0, 5.0, 5.0]
    assert Fit((), ())(3.0) == 0.0


def test_a_fit_of_two_groups_goes_through_what_is_typical_of_each():
    fit = Fit.through([*[(8.0, y) for y in (3.0, 5.0, 4.0, 4.0)], *[(2.0, y) for y in (1.0, 1.0, 2.0, 2.0)]])
    assert (fit.xs, fit.ys) == ((2.0, 8.0), (1.5, 4.0))


def test_a_fit_of_one_group_is_level_and_of_none_zero():
    assert [Fit.through([(4.0, 7.0)] * 5)(x) for x in (1.0, 4.0, 8.0)] == [7.0, 7.0, 7.0]
    assert Fit.through([])(4.0) == 0.0


def test_what_was_seen_once_does_not_count_beside_what_was_seen_often():
    often = [(2.0, 1.0)] * 5
    assert Fit.through([*often, (8.0, 99.0)])(8.0) == 1.0
    assert Fit.through([(2.0, 1.0), (8.0, 99.0)])(8.0) == 99.0, "where all is rare it is all that there is"


def test_a_stall_of_the_machine_counts_for_no_more_than_three():
    assert typical([1.0, 1.0, 1.0, 100.0]) == 1.5
    assert typical([1.0, 2.0, 3.0]) == 2.0
    assert typical([-3.0, -1.0]) == -2.0


def test_a_model_of_steps_by_hand():
    steps = [chain(4, a) for a in (4, 2, 0, 2)] + [chain(1, 1, short=True)] * 4
    model = StepModel.of(steps, GENTLE, 0.1, padded=True)
    assert model.prefill == 0.0 and model.other == 0.1
    assert model.drafting(4) == pytest.approx(0.08) and model.drafting(2) == pytest.approx(0.04)
    for levels, rows in ((4, 6), (3, 4), (2, 4), (1, 2)):
        assert model.seconds(levels, levels) == pytest.approx(GENTLE(rows) + 0.5 + 0.02 * levels + 0.1)


def test_forwards_are_padded_where_they_are():
    model = StepModel.of([chain(4, 0, padded=False)] * 4, GENTLE, 0.0, padded=False)
    assert model.seconds(4, 4) == pytest.approx(1.4 + 0.5 + 0.08)
    assert StepModel.of([chain(4, 0)] * 4, GENTLE, 0.0, padded=True).seconds(4, 4) == pytest.approx(1.5 + 0.5 + 0.08)


def test_a_prediction_by_hand():
    steps = [chain(4, a) for a in (4, 2, 0, 2)] + [chain(1, 1, short=True)] * 4
    model = StepModel.of(steps, GENTLE, 0.1, padded=True)
    two = predict(steps, model, DraftSize(depth=2), 1.6)
    assert two.tokens == pytest.approx((3 + 3 + 1 + 3) / 4), "short steps bring nothing"
    assert two.seconds == pytest.approx(GENTLE(4) + 0.5 + 0.04 + 0.1)
    assert two.speed_up == pytest.approx(2.5 * 1.6 / two.seconds)
    four = predict(steps, model, DraftSize(depth=4), 1.6)
    assert (four.tokens, four.seconds) == pytest.approx((3.0, GENTLE(6) + 0.5 + 0.08 + 0.1))


def test_steps_in_which_nothing_was_drafted_cost_a_forward_of_one():
    steps = [chain(4, 4), *[chain(0, 0)] * 3] * 4
    found = predict(steps, StepModel.of(steps, GENTLE, 0.0, padded=True), DraftSize(depth=4), 1.5)
    assert found.tokens == 2.0
    bare = GENTLE(1) + 0.5  # and the draft's own time, which was not nothing where nothing came of it
    least, most = ((GENTLE(6) + 0.58 + 3 * each) / 4 for each in (bare, bare + 0.08))
    assert least - 1e-9 <= found.seconds <= most + 1e-9


def test_reading_a_prompt_is_shared_out_over_its_text():
    steps = [chain(4, 4, reads=3.0), *[chain(4, 1)] * 5, chain(1, 1, short=True, reads=50.0), chain(1, 1, short=True)]
    model = StepModel.of(steps, GENTLE, 0.0, padded=True)
    assert model.prefill == pytest.approx(3.0 / (5 + 5 * 2)), "short texts only show what levels cost"
    found = predict(steps, model, DraftSize(depth=4), 1.5)
    assert found.tokens == pytest.approx(15 / 6)
    assert found.seconds == pytest.approx(GENTLE(6) + 0.5 + 0.08 + 3.0 / 6)


def test_a_forward_is_never_taken_for_less_than_half_of_one():
    model = StepModel.of([chain(4, 4, beside=-9.0)] * 4, GENTLE, 0.0, padded=True)
    assert model.seconds(4, 4) == pytest.approx(0.5 + 0.08)


def test_first_steps_alone_say_nothing_of_costs_but_break_nothing():
    steps = [chain(1, 1, reads=0.3)] * 2
    found = predict(steps, StepModel.of(steps, GENTLE, 0.0, padded=True), DraftSize(depth=1), 1.0)
    assert found.tokens == 2.0 and found.seconds == pytest.approx(GENTLE(2) + 0.32)


@pytest.mark.parametrize("padded", [True, False])
def test_steps_that_cost_what_the_table_says_are_predicted_exactly(padded: bool):
    """Against the same texts, drafted for with each smaller length."""
    source = random.Random(3)
    costs = CostTable(SIZES, tuple(1.0 + 0.01 * size**1.3 for size in SIZES))
    accepted = [source.randrange(9) for _ in range(40)]
    steps = [chain(8, a, beside=0.0, costs=costs, padded=padded) for a in accepted]
    steps += [chain(k, 0, beside=0.0, costs=costs, padded=padded, short=True) for k in (1, 2) for _ in range(5)]
    model = StepModel.of(steps, costs, 0.0, padded)
    for depth in (1, 2, 3, 5, 8):
        truth = [chain(depth, min(a, depth), beside=0.0, costs=costs, padded=padded) for a in accepted]
        seconds = sum(step.draft_seconds + step.verify_seconds for step in truth) / len(truth)
        found = predict(steps, model, DraftSize(depth=depth), 1.01)
        assert found.tokens == pytest.approx(sum(1 + min(a, depth) for a in accepted) / 40)
        assert found.seconds == pytest.approx(seconds)
        assert found.speed_up == pytest.approx(found.tokens * 1.01 / seconds)
