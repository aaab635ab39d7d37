"""Records of decoding: what is counted, and that records add up."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, strategies as st

from foredraft.core.stats import DecodeStats
from foredraft.engine.request import RequestStats
from foredraft.engine.tail import RowStep


def row(depth: int, accepted: int, drafted: int | None = None, copied: bool = False) -> RowStep:
    return RowStep([], depth if drafted is None else drafted, depth, accepted, True, copied=copied)


STEPS = (
    # request 0 is done after two steps; the second draft of request 1 is cut by a stop behind its first token
    ((row(3, 3), 4), (row(3, 0), 1)),
    ((row(3, 1), 2), (row(2, 2), 1)),
)


def request(index: int) -> DecodeStats:
    counters = RequestStats(prefill_seconds=0.125)
    for step in STEPS:
        result, kept = step[index]
        counters.add(result, kept, draft_seconds=0.25, verify_seconds=0.5, seconds=0.75)
    return counters.stats(10, "draft_model")


def test_a_request_is_the_sum_of_its_prefill_and_steps():
    stats = request(0)
    assert stats == DecodeStats(
        method="draft_model",
        prompt_tokens=10,
        tokens=6,
        target_forwards=2,
        drafted=6,
        accepted=4,
        drafted_by_depth=(2, 2, 2),
        accepted_by_depth=(2, 1, 1),
        seconds=1.625,
        prefill_seconds=0.125,
        draft_seconds=0.5,
        verify_seconds=1.0,
    )
    assert stats.acceptance_length == 3.0  # 6 tokens in two forwards
    assert stats.acceptance_rate == pytest.approx(4 / 6)
    assert stats.acceptance_by_depth == (1.0, 0.5, 0.5)
    assert stats.tokens_per_second == 6 / 1.5
    assert stats.other_seconds == 0.0


def test_what_is_accepted_behind_a_stop_is_not_counted():
    stats = request(1)
    assert (stats.tokens, stats.accepted, stats.drafted) == (2, 1, 5)
    assert stats.acceptance_length == 1.0
    assert stats.drafted_by_depth == (2, 2, 1)
    assert stats.accepted_by_depth == (1,)
    assert stats.acceptance_by_depth == (0.5, 0.0, 0.0)


def test_a_batch_counts_each_second_once_and_each_row():
    one, two = request(0), request(1)
    batch = DecodeStats.together([one, two])
    assert batch.tokens == 8 and batch.target_forwards == 4
    assert batch.acceptance_length == 2.0
    assert (batch.seconds, batch.prefill_seconds) == (1.625, 0.125)
    assert (batch.draft_seconds, batch.verify_seconds) == (0.5, 1.0)
    assert batch.tokens_per_second == 8 / 1.5
    assert (one + two).seconds == 3.25
    assert DecodeStats.together([]) == DecodeStats()


def test_times_of_a_step():
    counters = RequestStats()
    counters.add(row(0, 0), 1, draft_seconds=1.0, verify_seconds=2.0, seconds=7.0)
    stats = counters.stats(0)
    assert (stats.seconds, stats.other_seconds) == (7.0, 4.0)
    assert stats.acceptance_length == 1.0
    assert stats.drafted_by_depth == ()


def test_a_tree_has_more_tokens_than_depth():
    counters = RequestStats()
    counters.add(row(2, 1, drafted=6), 2, 0.0, 0.0, 0.0)
    stats = counters.stats(0)
    assert (stats.drafted, stats.drafted_by_depth, stats.accepted_by_depth) == (6, (1, 1), (1,))
    assert stats.acceptance_by_depth == (1.0, 0.0)


def test_copies_of_the_prediction_are_counted_apart():
    counters = RequestStats()
    counters.add(row(3, 1, copied=True), 2, 0.0, 0.0, 0.0)
    counters.add(row(2, 2), 3, 0.0, 0.0, 0.0)
    stats = counters.stats(0)
    assert (stats.accepted, stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (3, 1, 2)


def test_nothing_done_is_zero_not_an_error():
    empty = DecodeStats()
    for name in ("acceptance_length", "acceptance_rate", "tokens_per_second", "other_seconds"):
        assert getattr(empty, name) == 0.0
    assert empty.acceptance_by_depth == ()
    prefill_only = DecodeStats(prompt_tokens=9, seconds=0.5, prefill_seconds=0.5)
    assert prefill_only.acceptance_length == prefill_only.tokens_per_second == 0.0


def test_method_and_lossless_in_sums():
    eagle, lookup = DecodeStats(method="eagle3"), DecodeStats(method="prompt_lookup", lossless=False)
    assert (eagle + DecodeStats()).method == (DecodeStats() + eagle).method == (eagle + eagle).method == "eagle3"
    assert (eagle + lookup).method == "mixed"
    assert (eagle + lookup + eagle).method == (eagle + (lookup + eagle)).method == "mixed"
    assert (eagle + eagle).lossless
    assert not (eagle + lookup).lossless and not (lookup + eagle).lossless


def test_as_dict_is_json_and_complete():
    values = request(0).as_dict()
    assert json.loads(json.dumps(values)) == values
    assert {field.name for field in fields(DecodeStats)} < set(values)
    assert values["acceptance_length"] == 3.0 and values["accepted_by_depth"] == [2, 1, 1]


counts = st.integers(0, 100)
depths = st.lists(counts, max_size=4).map(tuple)
COUNTS = (
    *("prompt_tokens", "cached_tokens", "tokens", "target_forwards", "drafted", "accepted"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens"),
)
TIMES = ("seconds", "prefill_seconds", "draft_seconds", "verify_seconds")
records = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["", "a", "b"]),
        "lossless": st.booleans(),
        "accepted_by_depth": depths,
        "drafted_by_depth": depths,
        **dict.fromkeys(COUNTS, counts),
        **dict.fromkeys(TIMES, counts.map(float)),  # whole seconds, so that sums of floats are exact
    }
)


@given(records, records, records)
def test_sums_do_not_depend_on_their_order(one: dict, two: dict, three: dict):
    a, b, c = DecodeStats(**one), DecodeStats(**two), DecodeStats(**three)
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + DecodeStats() == DecodeStats() + a == a


@given(records, records)
def test_every_number_is_in_the_sum(one: dict, two: dict):
    total = DecodeStats(**one) + DecodeStats(**two)
    assert {field.name for field in fields(total)} == set(one)
    for name in COUNTS + TIMES:
        assert getattr(total, name) == one[name] + two[name]
    for name in ("accepted_by_depth", "drafted_by_depth"):
        assert sum(getattr(total, name)) == sum(one[name]) + sum(two[name])
        assert len(getattr(total, name)) == max(len(one[name]), len(two[name]))
