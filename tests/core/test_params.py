"""SamplingParams: every range, every kindness, and errors that say what would be right."""

import re
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from foredraft.core.errors import OptionError, UsageError
from foredraft.core.sampling.params import SamplingParams, check_count, check_known, closest, suggestion

NUMBERS = {  # name: (allowed, refused)
    "max_new_tokens": ([1, 10_000, 2**63 - 1], [0, -1, 1.5, True, 2**63]),
    "min_new_tokens": ([0, 256], [-1, 0.5]),
    "temperature": ([0, 0.0, 1, 1e-9, 50.0, 1e30], [-0.1, 1e31, 2**64, float("nan"), float("inf"), "1", True]),
    "top_k": ([None, 1, 10**9, 2**63 - 1], [0, -1, 2.0, 2**63]),
    "top_p": ([None, 1e-9, 1.0], [0.0, 1.01, -0.5]),
    "min_p": ([None, 0.0, 1.0], [-0.01, 1.01]),
    "typical_p": ([None, 1e-9, 1.0], [0.0, 1.01]),
    "epsilon_cutoff": ([None, 1e-9, 0.99], [0.0, 1.0]),
    "eta_cutoff": ([None, 1e-9, 0.99], [0.0, 1.0]),
    "eta_alpha": ([None], [0.0, -1.0, float("inf")]),
    "repetition_penalty": ([1e-9, 1, 9.0, 1e9], [0.0, -1.0, 1e-38, 1e10]),
    "presence_penalty": ([-2.0, 2], [float("inf"), "a", 1e38]),
    "frequency_penalty": ([-2.0, 2], [float("-inf"), [1.0]]),
    "no_repeat_ngram_size": ([0, 7, 100], [-1, 2.5, 101, 2**70]),
    "seed": ([0, -(2**63), 2**63 - 1], [2**63, 0.5]),
    "logprobs": ([None, 0, 20], [-1, 21, 2.5]),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (good, _) in NUMBERS.items() for v in good])
def test_a_value_within_its_range_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (_, bad) in NUMBERS.items() for v in bad])
def test_a_value_out_of_its_range_is_an_error_that_names_both(name, value):
    with pytest.raises(OptionError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name} must be ") and str(error.value).endswith(f"not {value!r}.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"min_new_tokens": 5, "max_new_tokens": 4},
            r"min_new_tokens \(5\) is larger than max_new_tokens \(4\)",
        ),
        ({"eta_alpha": 0.5}, "eta_alpha needs eta_cutoff"),
        ({"stop_strings": ["a", ""]}, "stop_strings must be non-empty"),
        ({"stop_strings": [3]}, "stop_strings must be non-empty strings"),
        ({"bad_words_ids": [[1], []]}, "bad_words_ids must be non-empty"),
        ({"bad_words_ids": 5}, "bad_words_ids must be lists of token ids, not 5"),
        ({"bad_words_ids": [5]}, "bad_words_ids must be token ids, not "),
        ({"bad_words_ids": ["a"]}, "bad_words_ids must be token ids, not 'a'"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be numbers by token id.*, not {'a': 1}"),
        ({"logit_bias": {1: None}}, "logit_bias must be numbers by token id"),
        ({"logit_bias": [1]}, r"logit_bias must be numbers by token id.*, not \[1\]"),
        ({"logits_processor": [3]}, r"logits_processor must be functions of \(input_ids, scores\), not 3"),
        ({"logits_processor": 0.5}, "logits_processor must be functions"),
        ({"eos_token_id": "a"}, "eos_token_id must be token ids"),
        ({"eos_token_id": [1, 2.5]}, "eos_token_id must be token ids"),
        ({"stop_strings": 2.5}, "stop_strings must be non-empty strings"),
        ({"speculate": "no"}, "speculate must be True or False, not 'no'"),
        ({"prediction": [1, "a"]}, "prediction must be token ids"),
        ({"prediction": [2**63]}, "prediction must be token ids, which have 64 bits at most"),
        ({"eos_token_id": [2**63]}, "eos_token_id must be token ids, which have 64 bits at most"),
        ({"eos_token_id": range(1025)}, "eos_token_id has 1025 ids; the most are 1024"),
        ({"bad_words_ids": [[1, 2]] * 4097}, "bad_words_ids has 4097 entries; the most are 4096"),
        ({"bad_words_ids": [[1] * 17]}, "bad_words_ids has an entry of 17 token ids; the most are 16"),
        ({"stop_strings": ["a"] * 257}, "stop_strings has 257 entries; the most are 256"),
        ({"stop_strings": ["a" * 1025]}, "stop_strings has an entry of 1025 characters; the most are 1024"),
        ({"logit_bias": {1: 1e31}}, r"logit_bias must be numbers from -1e\+30 to 1e\+30, or -inf"),
        ({"logit_bias": {1: 10**400}}, "logit_bias must be numbers by token id"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias must be numbers by token id"),
        ({"max_new_tokens": 2**70}, "max_new_tokens must be a whole number of 64 bits, not 11805"),
        ({"top_k": 2**63}, "top_k must be a whole number of 64 bits, not 92233"),
        ({"num_assistant_tokens": -1}, "num_assistant_tokens must be a whole number, 0 or more, not -1"),
    ],
)
def test_values_that_contradict_are_errors(options, words):
    with pytest.raises(OptionError, match=words):
        SamplingParams(**options)


@pytest.mark.parametrize("name", list(NUMBERS))
@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["400 digits", "negative", "5,000 digits"])
def test_an_integer_of_any_size_is_refused_in_one_short_sentence(name: str, value: int):
    with pytest.raises(OptionError, match=f"^{name} must be ") as error:
        SamplingParams(**{name: value})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ({}, False),
        ({"min_new_tokens": 2}, False),
        ({"min_new_tokens": 2, "eos_token_id": [1]}, True),
        ({"bad_words_ids": [[1]]}, True),
        ({"logit_bias": {1: -5.0}}, False),
        ({"logit_bias": {1: float("-inf")}}, True),
        ({"grammar": "json"}, True),
    ],
)
def test_which_requests_may_leave_no_token(options: dict, may: bool):
    assert SamplingParams(**options).may_ban_all is may


def test_an_unknown_option_lists_the_known_and_guesses():
    with pytest.raises(OptionError) as error:
        SamplingParams.from_options({"temperature": 1.0, "repetition_penality": 1.2})
    words = str(error.value)
    assert words.startswith("Unknown generation option 'repetition_penality'. Did you mean repetition_penalty? Known: ")
    assert all(field.name in words for field in fields(SamplingParams))
    for name, hint in (("stop", "Did you mean stop_strings?"), ("do_sample", "A temperature above 0 samples")):
        with pytest.raises(OptionError) as error:
            SamplingParams.from_options({name: 1})
        assert str(error.value).startswith(f"Unknown generation option {name!r}. {hint}")
    with pytest.raises(OptionError) as error:
        check_known("drafter option", {"xyzzy": 1}, ["nodes", "depth"])
    assert str(error.value) == "Unknown drafter option 'xyzzy'. Known: depth, nodes."
    assert isinstance(error.value, UsageError) and isinstance(error.value, ValueError)


@pytest.mark.parametrize("value", ["2", 2.0, 0, -1, True, None])
def test_a_count_is_a_whole_number(value):
    with pytest.raises(OptionError, match="^rows must be a whole number, 1 or more, not "):
        check_count("rows", value)


def test_from_options_is_the_constructor():
    options = {"temperature": 0.7, "top_k": 5, "stop_strings": ["a"]}
    assert SamplingParams.from_options(options) == SamplingParams(**options)
    assert SamplingParams.from_options({}) == SamplingParams()


def test_greedy_is_the_default_and_top_k_is_off():
    params = SamplingParams()
    assert params.greedy and params.temperature == 0.0 and params.top_k is None
    assert not SamplingParams(temperature=1e-9).greedy


def test_single_values_and_lists_become_tuples():
    def processor(input_ids, scores):
        return scores

    params = SamplingParams(
        stop_strings="end",
        eos_token_id=3,
        logits_processor=processor,
        bad_words_ids=[[1, 2]],
        logit_bias={"4": 1},
    )
    assert params.stop_strings == ("end",)
    assert params.eos_token_id == (3,)
    assert params.logits_processor == (processor,)
    assert params.bad_words_ids == ((1, 2),)
    assert params.logit_bias == {4: 1.0}
    assert SamplingParams(eos_token_id=[3, 4]).eos_token_id == (3, 4)
    assert SamplingParams(eos_token_id=None).eos_token_id is None
    assert SamplingParams(eos_token_id=()).eos_token_id == ()
    assert SamplingParams(bad_words_ids=None, logit_bias=None, stop_strings=None) == SamplingParams()


def test_params_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint8(7), logprobs=np.int32(2))
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=7, logprobs=2)
    assert [type(value) for value in (params.temperature, params.top_k, params.seed)] == [float, int, int]
    assert SamplingParams(temperature=np.float64(0.7)).temperature == 0.7
    check_count("rows", np.int64(3))
    for value, words in ((np.float32("nan"), "0 (greedy) or more"), (np.float32(-1), "0 (greedy) or more")):
        with pytest.raises(OptionError, match=re.escape(words)):
            SamplingParams(temperature=value)
    with pytest.raises(OptionError, match="^top_k must be a whole number"):
        SamplingParams(top_k=np.float32(2))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("batch", ["max_batch_size"]),
        ("tokens", ["max_new_tokens", "num_assistant_tokens"]),
        ("temprature", ["temperature"]),
        ("top", ["top_k"]),  # more than stop_strings and dtype, which are spelled like it
        ("assistant-tokens", ["num_assistant_tokens"]),
        ("pad", []),
        ("x" * 5000, []),
    ],
)
def test_suggestions_look_at_words_inside_names(name: str, found: list[str]):
    known = ["dtype", "max_batch_size", "max_new_tokens", "num_assistant_tokens", "stop", "temperature", "top_k"]
    assert closest(name, known) == found
    question = {0: "", 1: " Did you mean {}?", 2: " Did you mean {} or {}?"}[len(found)]
    assert suggestion(name, known) == question.format(*found)
