"""What goes wrong in a benchmark is noted, and what was interrupted goes on."""

import json
from pathlib import Path

import pytest
from bench_cases import SETTINGS, TEMPLATE, Fake, asks, fakes, talk, units

import tiny
from foredraft.bench.measure.arms import LoopArm
from foredraft.bench.measure.records import read_runs
from foredraft.bench.measure.run import Bench, Settings, make_groups
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.errors import DataError, OptionError, PromptError
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PromptError("It is too long."), "It is too long."),
        (RuntimeError("out of memory\nTried to allocate"), "RuntimeError: out of memory"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_arm_that_raises_is_noted_and_nobody_else_notices(
    plain: LoopArm, path: Path, error: Exception, sentence: str
):
    a, b, _ = fakes()
    a.fails = lambda prompts: error if prompts[0] == [81] else None  # q
    groups = make_groups(asks("p", "q", "r"), [0.0], [1])
    Bench([plain, a, b], SETTINGS, path).run(groups)
    file = read_runs(path)
    assert [(run.arm, run.prompts, run.error) for run in file.errors] == [("a", ("1",), sentence)]
    assert (file.errors[0].tokens, file.errors[0].outputs, file.errors[0].seconds) == (0, (), 0.0)
    assert len(file.runs) == 9 and all(run.tokens > 0 for run in file.runs if not run.error)
    a.fails = lambda prompts: None
    b.calls.clear()
    Bench([plain, a, b], SETTINGS, path).run(groups)
    assert [prompts for prompts, _ in b.calls] == [[[81]], [[81]]], "a warm-up, and the group in which one had failed"
    assert read_runs(path).errors == [] and len(read_runs(path).runs) == 9


def test_a_prompt_that_cannot_be_read_is_noted_even_if_it_is_the_first(plain: LoopArm, path: Path):
    Bench([plain, Fake("a")], SETTINGS, path).run(make_groups(asks("\ud800", "q" * 300, "r"), [0.0], [1]))
    found = {(run.arm, run.prompts[0]): run.error for run in read_runs(path).runs}
    assert "not valid Unicode" in found["none", "0"] and "not valid Unicode" in found["a", "0"]
    assert found["none", "1"] == "The prompt has 300 tokens; the model's context of 256 leaves no room for a new one."
    assert found["none", "2"] == found["a", "1"] == ""


def test_a_template_that_raises_is_noted(path: Path):
    inner = tiny.tokenizer()
    inner.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}" + TEMPLATE
    )
    arm = LoopArm("none", tiny.generator(CausalLM(tiny.build()), tokenizer=Tokenizer(inner)), 1)
    system = BenchPrompt([{"role": "system", "content": "s"}], (), "text", "0", "talks")
    Bench([arm], SETTINGS, path).run(make_groups([system, talk("1", "Hi")], [0.0], [1]))
    assert [run.error for run in read_runs(path).runs] == ["The chat template rejects these messages: No system.", ""]


def test_an_interruption_in_the_middle_of_a_group_repeats_only_that_group(plain: LoopArm, path: Path):
    a, b, log = fakes()
    groups = make_groups(asks("p", "q", "r"), [0.0, 1.0], [1, 2])
    Bench([plain, a, b], SETTINGS, path.parent / "whole.jsonl").run(groups)
    a.fails = lambda prompts: KeyboardInterrupt() if prompts == [[82]] else None
    with pytest.raises(KeyboardInterrupt):
        Bench([plain, a, b], SETTINGS, path).run(groups)
    finished = [run for run in read_runs(path).runs if "2" not in run.prompts]
    assert path.read_bytes().endswith(b"\n") and 0 < len(finished) < len(read_runs(path).runs)
    a.fails = lambda prompts: None
    log.clear()
    Bench([plain, a, b], SETTINGS, path).run(groups)
    assert units(path) == units(path.parent / "whole.jsonl")
    first = next(group.number for group in groups if group.prompts[0].name == "2")
    assert len(log) == 2 * 4 + 2 * (len(groups) - first), "four warm-ups, and what was missing"


def test_a_file_that_was_cut_off_anywhere_is_filled_up(plain: LoopArm, path: Path):
    groups = make_groups([*asks("p", "q"), talk("0", "Hi", "And")], [1.0], [1])
    Bench([plain, Fake("a")], SETTINGS, path).run(groups)
    whole, wanted = path.read_bytes(), sorted(run.outputs[0].digest for run in read_runs(path).runs)
    names, lines = units(path), whole.split(b"\n")
    starts = [sum(len(line) + 1 for line in lines[:n]) for n in range(1, len(lines))]
    for end in (3, *(start - 1 for start in starts), *(start + 20 for start in starts[:-1])):
        path.write_bytes(whole[:end])
        Bench([plain, Fake("a")], SETTINGS, path).run(groups)
        assert units(path) == names
        assert sorted(run.outputs[0].digest for run in read_runs(path).runs) == wanted
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_an_interruption_before_anything_was_measured_leaves_no_trace(plain: LoopArm, path: Path):
    fake = Fake("a")
    fake.fails = lambda prompts: KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        Bench([plain, fake], SETTINGS, path).run(make_groups(asks("p"), [0.0], [1]))
    assert not path.exists(), "a file that holds nothing would bind the next command to its settings"


def test_a_file_says_where_its_runs_come_from(plain: LoopArm, path: Path):
    Bench([plain, Fake("a")], SETTINGS, path).run(make_groups(asks("p"), [0.0], [1]))
    (origin,) = read_runs(path).provenance
    assert origin["arms"] == ["none", "a"] and origin["settings"]["max_new_tokens"] == 4
    assert {"torch", "transformers", "device", "time"} <= set(origin)
    Bench([plain, Fake("a")], SETTINGS, path).run(make_groups(asks("p", "q"), [0.0], [1]))
    assert len(read_runs(path).provenance) == 2, "each session has its own"


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (Settings("tiny", max_new_tokens=9), "has runs with max_new_tokens 4, not 9"),
        (Settings("other", max_new_tokens=4), "has runs with model 'tiny', not 'other'"),
        (Settings("tiny", max_new_tokens=4, chat=True), "has runs with chat False, not True"),
        (Settings("tiny", max_new_tokens=4, top_p=0.9), "has runs with top_p None, not 0.9"),
    ],
)
def test_other_settings_need_another_file(plain: LoopArm, path: Path, other: Settings, sentence: str):
    Bench([plain], SETTINGS, path).run(make_groups(asks("p"), [0.0], [1]))
    with pytest.raises(OptionError) as error:
        Bench([plain], other, path)
    assert sentence in str(error.value) and str(path) in str(error.value)


def test_what_cannot_be_is_refused_before_anything_runs(plain: LoopArm, path: Path, tmp_path: Path):
    with pytest.raises(OptionError, match=r"At least one arm must use foredraft's loop: add --drafter none"):
        Bench([Fake("a")], SETTINGS, path)
    with pytest.raises(DataError, match=r"Task t has prompt 0 twice"):
        make_groups([*asks("p"), *asks("p")], [0.0], [1])
    bare = LoopArm("none", tiny.generator(CausalLM(tiny.build()), tokenizer=Tokenizer(tiny.tokenizer())), 1)
    with pytest.raises(PromptError, match=r"no chat template"):
        Bench([bare], Settings("tiny", chat=True), path)
    with pytest.raises(DataError, match=r"Cannot read the run file .*: Is a directory\."):
        Bench([plain], SETTINGS, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"Cannot write the run file .*"):
        Bench([plain], SETTINGS, tmp_path / "file" / "run.jsonl").run(make_groups(asks("p"), [0.0], [1]))
