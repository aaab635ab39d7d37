"""The file of a benchmark: what is written is read again, and what is broken is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import Write

import tiny
from foredraft.bench.measure.arms import LoopArm
from foredraft.bench.measure.records import (
    Cost,
    OutputRecord,
    Run,
    RunFile,
    Watched,
    digest,
    merge,
    read_runs,
    repair_end,
)
from foredraft.core.errors import DataError
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.hf.causal_lm import CausalLM

PROVENANCE = {"kind": "provenance", "device": "CPU", "settings": {"model": "tiny"}, "arms": ["none"]}
FULL = Run(
    arm="eagle3",
    task="qa",
    prompts=("1", "2"),
    turn=1,
    repeat=2,
    temperature=0.7,
    batch=2,
    category="math",
    lossless=False,
    tokens=9,
    forwards=4,
    drafted=12,
    accepted=5,
    drafted_by_depth=(4, 4, 4),
    accepted_by_depth=(3, 2),
    seconds=2.5,
    prefill_seconds=0.5,
    draft_seconds=0.25,
    verify_seconds=1.0,
    decoded=8,
    outputs=(
        OutputRecord("1", 3, 5, "abc", (4, 5, 6, 7, 8), "a b"),
        OutputRecord("2", 7, 4, "def", (1, 2, 3, 4), "c"),
    ),
    model="tiny",
)
COST = Cost(2, 128, (1, 2, 4), (0.5, 0.6, 0.7), weight_bytes=100, bandwidth=1e9, model="tiny")
WATCHED = Watched("eagle3", "qa", "1", 0.7, {"1-1-2": (5, 2)}, {"93": (4, 3)}, model="tiny")


def run(**given: Any) -> Run:
    return Run(**{"arm": "none", "task": "qa", "prompts": ("1",), **given})


def test_every_kind_of_line_is_read_as_it_was_written(write: Write):
    found = read_runs(write(PROVENANCE, FULL.line(), COST.line(), WATCHED.line()))
    assert found.runs == [FULL] and found.costs == [COST]
    assert found.provenance == [{key: value for key, value in PROVENANCE.items() if key != "kind"}]
    (watched,) = found.watched
    assert watched.line() == json.loads(json.dumps(WATCHED.line())) and watched.model == "tiny"
    assert tuple(watched.places["1-1-2"]) == (5, 2)


def test_the_record_of_another_program_is_named(write: Write):
    other = {"kind": "provenance", "command": "python benchmarks/triforce.py"}
    with pytest.raises(DataError, match=r"is a record of 'python benchmarks/triforce.py', not of foredraft bench"):
        read_runs(write(other, {"kind": "run", "cache_bytes": 3}))


def test_a_sentence_of_an_error_is_read_again(write: Write):
    failed = run(error="no room", model="tiny")
    assert read_runs(write(PROVENANCE, failed.line())).runs == [failed]


def test_what_is_as_usual_is_left_out():
    assert run().line() == {"kind": "run", "arm": "none", "task": "qa", "prompts": ("1",)}
    said = run(outputs=(OutputRecord("1", 3, 0, "abc"),)).line()["outputs"]
    assert said == [{"prompt": "1", "prompt_tokens": 3, "tokens": 0, "digest": "abc"}]


def test_the_model_stands_in_the_provenance_alone(write: Write):
    other = {"kind": "provenance", "settings": {"model": "other"}}
    path = write(PROVENANCE, run(model="ignored").line(), other, run(task="math").line(), COST.line(), WATCHED.line())
    found = read_runs(path)
    assert "ignored" not in path.read_text() and '"model": "tiny"' in path.read_text()
    assert [each.model for each in found.runs] == ["tiny", "other"]
    assert found.costs[0].model == found.watched[0].model == "other"


def test_any_cut_leaves_the_lines_before_it(write: Write):
    path = write(PROVENANCE, run().line(), FULL.line())
    whole = path.read_bytes()
    second = whole.rindex(b"\n", 0, -1) + 1
    for end in (second + 1, second + 40, len(whole) - 2):
        path.write_bytes(whole[:end])
        assert [each.arm for each in read_runs(path).runs] == ["none"]
        repair_end(path)
        assert path.read_bytes() == whole[:second]
    path.write_bytes(whole[:-1])  # only its end is missing
    assert [each.arm for each in read_runs(path).runs] == ["none", "eagle3"]
    repair_end(path)
    assert path.read_bytes() == whole
    repair_end(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ('{"kind": "run", "ar', "invalid JSON"),
        ("[1, 2]", "expected a JSON object"),
        ({"kind": "dance"}, "not a line of a benchmark or of a training log"),
        ({"loss": "high", "tokens": 8}, "loss is not a number"),
        ({"loss": 1.0}, "not a line of a training log"),
        ({"validation": [1], "tokens": 8}, "not a line of a training log"),
        ({"arm": "none", "task": "qa", "prompts": ["1"]}, "not a line of a benchmark"),
        ({**FULL.line(), "colour": 1}, "unknown field colour"),
        ({**COST.line(), "model_name": "x"}, "unknown field model_name"),
        ({"kind": "run", "arm": "none", "task": "qa"}, "prompts"),
        ({**FULL.line(), "prompts": 3}, ""),
        ({**FULL.line(), "outputs": [{"prompt": "1"}]}, "prompt_tokens"),
        (
            {**FULL.line(), "outputs": [{"prompt": "1", "prompt_tokens": 1, "tokens": 1, "digest": "", "mood": 1}]},
            "mood",
        ),
        ({"kind": "cost", "batch": 1}, "cached"),
        ("[" * 100_000, "nested too deep"),
        ('{"kind": "run", "tokens": ' + "9" * 5000 + "}", "a number is too long"),
        ({**FULL.line(), "tokens": "5"}, "tokens has the wrong type"),
        ({**FULL.line(), "tokens": 10**30}, "tokens has the wrong type"),
        ({**FULL.line(), "tokens": True}, "tokens has the wrong type"),
        ({**FULL.line(), "arm": ["a"]}, "arm has the wrong type"),
        ({**FULL.line(), "seconds": float("nan")}, "no finite number"),
        ({**FULL.line(), "seconds": float("inf")}, "no finite number"),
        ({**FULL.line(), "prompts": [1]}, "prompts has the wrong type"),
        ({**FULL.line(), "prompts": None}, "not iterable"),
        ({**FULL.line(), "drafted_by_depth": [1.5]}, "drafted_by_depth has the wrong type"),
        ({**FULL.line(), "outputs": [{"prompt": 1, "prompt_tokens": 1, "tokens": 1, "digest": ""}]}, "outputs has"),
        ({**COST.line(), "nodes": [1]}, "nodes and seconds"),
        ({**WATCHED.line(), "places": {"1": [3]}}, "pairs of counts"),
        ({**WATCHED.line(), "places": {"first": [3, 1]}}, "pairs of counts"),
        ({**WATCHED.line(), "confidence": [3]}, "confidence has the wrong type"),
        ({"kind": "provenance", "settings": ["x"]}, "settings is not an object"),
        ({"kind": ["x"]}, "not a line of a benchmark"),
    ],
)
def test_a_broken_line_is_named_with_its_file(write: Write, broken: Any, sentence: str):
    path = write(PROVENANCE, run().line(), "", broken, FULL.line())
    with pytest.raises(DataError) as error:
        read_runs(path)
    assert str(error.value).startswith(f"{path}, line 4: ") and sentence in str(error.value)


def test_what_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"Cannot read the run file .*: No such file or directory\."):
        read_runs(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"Cannot read the run file .*: Is a directory\."):
        read_runs(tmp_path)
    (tmp_path / "run.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"Cannot read the run file .*run\.jsonl: "):
        read_runs(tmp_path / "run.jsonl")


def test_an_empty_file_is_an_empty_run(write: Write):
    assert read_runs(write("")) == RunFile()


def test_the_later_of_two_tries_counts(write: Write):
    first, failed, again = run(seconds=1.0), run(arm="x", error="broken"), run(arm="x", seconds=2.0)
    later = run(seconds=3.0)
    found = read_runs(write(first.line(), failed.line(), again.line(), later.line()))
    assert sorted((each.arm, each.seconds) for each in found.runs) == [("none", 3.0), ("x", 2.0)]
    assert found.errors == []


@pytest.mark.parametrize(
    "change",
    [{"task": "b"}, {"prompts": ("1", "2")}, {"turn": 1}, {"repeat": 1}, {"temperature": 1.0}, {"batch": 2}],
    ids=str,
)
def test_runs_of_other_units_stay_apart(write: Write, change: dict[str, Any]):
    assert run().unit != run(**change).unit
    assert len(read_runs(write(run().line(), run(**change).line())).runs) == 2
    assert run(category="b", seconds=9.0, arm="x").unit == run().unit, "no part of what was asked"


def test_the_log_of_a_training_run_is_read_as_well(write: Write):
    lines = [
        {"step": 1, "tokens": 8, "loss": 2.0},
        {"step": 1, "tokens": 8, "resumed": True},
        {"step": 1, "tokens": 8, "validation": {"acceptance_length": 2.5}},
    ]
    path = write(*lines)
    assert read_runs(path).training == [{**line, "run": path.parent.name} for line in lines]


def test_several_files_become_one():
    parts = [RunFile(runs=[run()], costs=[COST]), RunFile(runs=[FULL, run(error="e")], watched=[WATCHED])]
    whole = merge(parts)
    assert whole.runs == [run(), FULL, run(error="e")] and (whole.costs, whole.watched) == ([COST], [WATCHED])
    assert whole.errors == [run(error="e")] and len(parts[0].runs) == 1


def test_speed_is_that_of_decoding():
    assert FULL.speed == 8 / 2.0 and FULL.whole_speed == 9 / 2.5
    assert run().speed == run().whole_speed == 0.0
    assert run(decoded=5, seconds=1.0, prefill_seconds=1.0).speed == 0.0, "nothing came after prefill"


def test_lengths_by_hand():
    assert FULL.lengths == [3, 3, 2, 1]
    assert run(forwards=3).lengths == [1, 1, 1] and run().lengths == []


@pytest.mark.parametrize("new", [3, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lengths_of_the_loop_add_up_to_its_tokens(new: int, temperature: float):
    """Also where the last draft is cut at the end of the text."""
    target = CausalLM(tiny.build())
    params = SamplingParams(max_new_tokens=new, temperature=temperature, eos_token_id=(), seed=0)
    prompts = tiny.prompts((4, 9))
    plain = LoopArm("none", tiny.generator(target), 2).run(prompts, params)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
    call = LoopArm("liar", tiny.generator(target, tiny.liar(texts)), 2).run(prompts, params)
    assert call.tokens == plain.tokens and call.stats.accepted > 0
    made = run(
        forwards=call.stats.target_forwards,
        tokens=call.stats.tokens,
        accepted_by_depth=call.stats.accepted_by_depth,
    )
    assert len(made.lengths) == made.forwards and max(made.lengths) > 1
    assert sum(made.lengths) == made.tokens == 2 * new == call.decoded


def test_an_end_of_text_inside_a_draft_is_the_last_token_that_counts():
    target = CausalLM(tiny.build())
    prompt = tiny.prompts((9,))[0]
    plain = LoopArm("none", tiny.generator(target), 1)
    text = plain.run([prompt], SamplingParams(max_new_tokens=12)).tokens[0]
    end = next(place for place in range(4, 12) if text[place] not in text[:place])
    truth = [prompt + text]
    arm = LoopArm("liar", tiny.generator(target, tiny.liar(truth, nodes=6, honesty=1.0), eos=(text[end],)), 1)
    call = arm.run([prompt], SamplingParams(max_new_tokens=12))
    made = run(forwards=call.stats.target_forwards, accepted_by_depth=call.stats.accepted_by_depth)
    assert call.tokens == [text[: end + 1]] and call.decoded == call.stats.tokens == end + 1
    assert sum(made.lengths) == made.forwards + call.stats.accepted > end + 1, "lengths know nothing of ends"


def test_digests_tell_texts_apart():
    assert digest([1, 23]) == digest((1, 23)) and len({digest(t) for t in ([1, 23], [12, 3], [1, 2, 3], [])}) == 4
