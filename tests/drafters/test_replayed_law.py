"""Drafters and settings of the law's tests, replayed from tapes: the texts are those of steps that run as they are."""

import pytest
from test_law import TABLE

import laws
from traced import Traced

LAWS = [(drafter, setting) for drafter, setting, _ in TABLE]
QUICK = {drafter: (drafter, setting) for drafter, setting in reversed(LAWS)}.values()
"""One setting for each drafter: the first one of the table."""
EAGER = ("glide",)
"""Drafters that are not recorded; forwards of the target are."""


@pytest.mark.parametrize(
    ("drafter", "setting"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in LAWS],
)
def test_replayed_sampled_texts_are_those_of_the_law(drafter: str, setting: str):
    found = []
    recorder = Traced()
    for g in (laws.generator(drafter), laws.generator(drafter, recorder=recorder)):
        found.append(
            [
                [
                    result.tokens
                    for result in g.generate([laws.PROMPT], laws.params(setting, seed), num_return_sequences=20)
                ]
                for seed in (1, 2)
            ]
        )
    assert found[0] == found[1]
    assert recorder.replays > len(recorder.keys) > 0
    assert {call for call, _ in recorder.fallbacks} == ({"draft", "tree"} if drafter in EAGER else set())
