"""Is B slower than A? Asked about made-up files of which the answer is known."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from scipy import stats

from foredraft.bench.measure.compare import Change, compare, interval
from foredraft.bench.measure.records import Run, RunFile
from foredraft.core.errors import OptionError


def made(seed: int, *, units: int = 20, noise: float = 0.02, first: int = 0, **speed_ups: float) -> RunFile:
    """Arms that are so many times as fast as plain decoding, on a machine that drifts by a factor of three."""
    dice, file = random.Random(seed), RunFile()
    for number in range(first, first + units):
        minute = dice.uniform(1, 3)
        for arm, speed_up in {"none": 1.0, **speed_ups}.items():
            seconds = minute * dice.uniform(1 - noise, 1 + noise) / speed_up
            file.runs.append(run(arm, number, seconds))
    return file


def run(arm: str, number: int, seconds: float, **given: Any) -> Run:
    """Ten tokens in ten forwards after a second of prefill."""
    usual = {"task": "t", "prompts": (str(number),), "tokens": 10, "forwards": 10, "decoded": 10, "model": "m"}
    return Run(arm, **{**usual, "seconds": 1.0 + seconds, "prefill_seconds": 1.0, **given})


def only(changes: Sequence[Change]) -> Change:
    (change,) = changes
    return change


def test_a_slower_arm_is_found_whatever_the_machine_does():
    change = only(compare(made(1, eagle=2.0), made(2, eagle=1.7)))
    assert change.verdict == "slower" and (change.arm, change.baseline, change.units) == ("eagle", "none", 20)
    assert change.low is not None and change.high is not None
    assert change.low < change.ratio < change.high < 0.95
    assert change.ratio == pytest.approx(0.85, abs=0.02)


def test_a_faster_arm_is_found():
    change = only(compare(made(1, eagle=2.0), made(2, eagle=2.4)))
    assert change.verdict == "faster" and change.ratio == pytest.approx(1.2, abs=0.03)


def test_noise_is_no_change():
    for seed in range(20):
        assert (
            only(compare(made(seed, noise=0.1, eagle=2.0), made(100 + seed, noise=0.1, eagle=2.0))).verdict
            == "the same"
        )


def test_a_file_is_the_same_as_itself():
    file = made(1, eagle=2.0, lookup=1.1)
    assert [(change.arm, change.ratio, change.verdict) for change in compare(file, file, 0.0)] == [
        ("eagle", 1.0, "the same"),
        ("lookup", 1.0, "the same"),
    ]


@pytest.mark.parametrize(("tolerance", "verdict"), [(0.05, "slower"), (0.12, "slower"), (0.2, "the same")])
def test_a_change_within_the_tolerance_is_none(tolerance: float, verdict: str):
    assert only(compare(made(1, eagle=2.0), made(2, eagle=1.7), tolerance)).verdict == verdict


def test_both_directions_have_the_same_tolerance():
    """What is slower from A to B is faster from B to A."""
    words = {"slower": "faster", "faster": "slower", "the same": "the same"}
    for factor in (0.85, 0.93, 0.95, 0.96, 1.0):
        a, b = made(1, noise=1e-9, eagle=2.0), made(2, noise=1e-9, eagle=2.0 * factor)
        there, back = only(compare(a, b)), only(compare(b, a))
        assert there.verdict == words[back.verdict] and (there.verdict == "slower") == (factor < 0.95 - 1e-6)


def test_five_units_are_too_few_however_clear_it_looks():
    change = only(compare(made(1, units=5, eagle=2.0), made(2, units=5, eagle=1.0)))
    assert (change.verdict, change.low, change.high, change.units) == ("too few", None, None, 5)
    assert only(compare(made(1, units=6, eagle=2.0), made(2, units=6, eagle=1.0))).verdict == "slower"


def test_only_units_that_both_have_are_compared():
    a, b = made(1, units=12, eagle=2.0), made(2, units=12, first=4, eagle=2.0)
    b.runs[:] = [each for each in b.runs if each.prompts != ("5",) or each.arm != "none"]
    b.runs[:] = [run("eagle", 6, 0, error="e") if each.unit[2] == ("6",) else each for each in b.runs]
    b.runs[:] = [run("none", 7, 0.0) if (each.prompts, each.arm) == (("7",), "none") else each for each in b.runs]
    assert only(compare(a, b)).units == 8 - 3, "one without plain decoding, one with an error, one without a speed"


def test_temperatures_batches_and_models_are_compared_apart():
    a, b = (
        RunFile(
            runs=[
                run(arm, number, 1.0 / speed_up, **place)
                for place in ({"temperature": 1.0}, {"batch": 2}, {"model": "other"}, {})
                for number in range(8)
                for arm, speed_up in (("none", 1.0), ("eagle", 1.5 if slow and "batch" in place else 2.0))
            ]
        )
        for slow in (False, True)
    )
    found = {change.setting: (change.verdict, change.units) for change in compare(a, b)}
    assert len(found) == 4
    assert {(setting.model, setting.temperature, setting.batch): verdict for setting, verdict in found.items()} == {
        ("m", 1.0, 1): ("the same", 8),
        ("m", 0.0, 2): ("slower", 8),
        ("other", 0.0, 1): ("the same", 8),
        ("m", 0.0, 1): ("the same", 8),
    }


def test_plain_decoding_is_compared_with_transformers_and_transformers_with_nobody():
    a = made(1, eagle=2.0, transformers=0.8, transformers_assisted=0.9)
    b = made(2, eagle=2.0, transformers=1.2, transformers_assisted=0.9)
    found = [(change.arm, change.baseline, change.verdict) for change in compare(a, b)]
    assert found == [("eagle", "none", "the same"), ("none", "transformers", "slower")]


def test_acceptance_lengths_are_those_of_the_units_compared():
    a, b = made(1, units=8, eagle=2.0), made(2, units=7, eagle=2.0)
    a.runs[:] = [
        run("eagle", 9, 1.0, forwards=4 if int(each.prompts[0]) < 7 else 1, prompts=each.prompts)
        if each.arm == "eagle"
        else each
        for each in a.runs
    ]
    assert only(compare(a, b)).lengths == (2.5, 1.0)


@pytest.mark.parametrize(
    "other",
    [made(2, first=50, eagle=2.0), made(2, medusa=2.0), RunFile(), RunFile(runs=[run("eagle", 1, 1.0)])],
    ids=["other prompts", "other arms", "nothing", "no baseline"],
)
def test_files_with_nothing_in_common_are_a_sentence(other: RunFile):
    for pair in ((made(1, eagle=2.0), other), (other, made(1, eagle=2.0))):
        with pytest.raises(OptionError, match=r"^The two files share no arm on the same prompts with a baseline.*\.$"):
            compare(*pair)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_is_a_share(tolerance: float):
    with pytest.raises(OptionError, match="--tolerance must be at least 0"):
        compare(made(1, eagle=2.0), made(2, eagle=2.0), tolerance)


def test_the_interval_is_the_narrowest_that_the_binomial_allows():
    """From the r-th smallest to the r-th largest: with 2.5 % at most, fewer than r values lie below the median."""
    assert [interval([1.0] * count) for count in range(6)] == [None] * 6
    for count in range(6, 80):
        values = [float(value) for value in range(1, count + 1)]
        random.Random(count).shuffle(values)
        found = interval(values)
        assert found is not None
        rank = int(found[0])
        assert found == (rank, count + 1 - rank)
        assert stats.binom.cdf(rank - 1, count, 0.5) <= 0.025 < stats.binom.cdf(rank, count, 0.5)


def test_the_interval_holds_the_median_as_often_as_it_says():
    """Also of a law that leans to one side."""
    dice, inside = random.Random(0), 0
    for _ in range(2000):
        found = interval([dice.expovariate(1.0) for _ in range(15)])
        assert found is not None
        inside += found[0] <= 0.6931471805599453 <= found[1]
    assert 0.95 < inside / 2000 < 0.985
