"""``foredraft bench`` from the command line to the file, the tables and the exit status."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Run

import foredraft
from foredraft.bench.measure.arms import StockArm
from foredraft.bench.measure.compare import FEWEST
from foredraft.bench.measure.records import Run as Call, read_runs
from foredraft.cli.exit_status import UNJUDGED
from foredraft.compose.calibration import CALIBRATION
from foredraft.core.errors import DrafterError
from foredraft.model.loading.bundled import resolve

ARMS = ("none", "prompt_lookup", "transformers")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "mt_bench" / "question.jsonl"
    path.parent.mkdir()
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Hello there", "Go on"]},
        {"question_id": 82, "category": "math", "turns": ["1 + 1 =", "and 2 + 2?"], "reference": ["2", "4"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "bench.jsonl"


def command(model: Path, questions: Path, out: Path, *more: str | Path, arms: Sequence[str] = ARMS) -> list[str | Path]:
    """The shortest that there is."""
    chosen = [word for arm in arms for word in ("-d", arm)]
    usual = ("--prompts", questions, "--max-new-tokens", "4", "--device", "cpu", "--out", out)
    return ["bench", "-m", model, *chosen, *usual, *more]


def test_it_measures_says_what_it_found_and_goes_on_where_it_was(run: Run, model: Path, questions: Path, out: Path):
    ended = run(*command(model, questions, out))
    assert (ended.status, ended.err) == (0, "")
    assert all(arm in ended.out for arm in ARMS) and "greedy" in ended.out and out.name in ended.out
    runs = read_runs(out).runs
    assert sorted((each.arm, each.prompts) for each in runs) == sorted(
        (arm, (n,)) for arm in ARMS for n in ("81", "82")
    )
    assert {each.task for each in runs} == {"mt_bench"} and {each.category for each in runs} == {"writing", "math"}
    assert len({each.outputs[0].digest for each in runs}) == 2, "greedy arms say the same"
    assert {each.tokens for each in runs} == {4} and {each.model for each in runs} == {model.name}
    before = out.read_bytes()
    again = run(*command(model, questions, out, "--json"))
    assert again.status == 0 and out.read_bytes() == before
    found = json.loads(again.out)
    assert found["baseline"] == "none" and {cell["arm"] for cell in found["cells"]} == set(ARMS)
    more = run(*command(model, questions, out, "--temperature", "0", "--temperature", "1"))
    assert more.status == 0 and out.read_bytes().startswith(before)
    assert [each.temperature for each in read_runs(out).runs] == [0.0] * 6 + [1.0] * 6


def test_every_option_reaches_the_file(run: Run, model: Path, questions: Path, out: Path, tmp_path: Path):
    text = tmp_path / "plain.txt"
    text.write_text("one two\n---\nthree\n---\nfour\n")
    more = ("--chat", "--prompts", text, "--count", "2", "--batch-size", "2", "--batch-size", "1", "--repeats", "2")
    more += ("--top-k", "5", "--seed", "7", "--watch", "1", "--costs", "--spec-bench", tmp_path / "answers")
    ended = run(*command(model, questions, out, *more, "--temperature", "0.5", arms=["none", "look=prompt_lookup"]))
    assert ended.status == 0, ended.err
    file = read_runs(out)
    settings = file.provenance[0]["settings"]
    assert (settings["top_k"], settings["seed"], settings["chat"], settings["max_new_tokens"]) == (5, 7, True, 4)
    talks = {(each.batch, each.prompts, each.turn, each.repeat) for each in file.runs if each.task == "mt_bench"}
    names = [(2, ("81", "82")), (1, ("81",)), (1, ("82",))]
    assert talks == {(batch, some, turn, repeat) for batch, some in names for turn in (0, 1) for repeat in (0, 1)}
    assert {each.prompts for each in file.runs if each.task == "plain"} == {("0", "1"), ("0",), ("1",)}
    assert [(each.arm, each.task, each.prompt) for each in file.watched] == [
        ("look", "mt_bench", "81"),
        ("look", "plain", "0"),
    ]
    assert {(each.batch, each.cached) for each in file.costs} == {(2, 128), (2, 1024), (1, 128), (1, 1024)}
    answers = sorted((tmp_path / "answers").iterdir())
    assert len(answers) == 2 and all(len(path.read_text().splitlines()) == 4 for path in answers)


def test_texts_can_be_left_out(run: Run, model: Path, out: Path, tmp_path: Path):
    asked = tmp_path / "p.jsonl"
    asked.write_text('{"prompt": "1 + 1 ="}\n')
    assert run(*command(model, asked, out, "--no-texts", arms=["none"])).status == 0
    (said,) = read_runs(out).runs[0].outputs
    assert (said.output, said.text) == ((), "") and said.digest


def test_an_error_is_shown_and_the_rest_is_measured(run: Run, model: Path, out: Path, tmp_path: Path):
    asked = tmp_path / "p.jsonl"
    asked.write_text(json.dumps({"text": "word " * 5000}) + "\n" + json.dumps({"text": "Hello"}) + "\n")
    ended = run(*command(model, asked, out, "--watch", "2"))
    assert ended.status == 0 and ended.err.count("\n") == 3
    assert "prompt_lookup on p 0: The prompt has 5" in ended.err and "transformers on p 0: " in ended.err
    file = read_runs(out)
    assert [each.prompt for each in file.watched] == ["1"]
    assert len(file.runs) == 6 and len(file.errors) == 3 and all(each.tokens == 4 for each in file.runs[3:])


def test_where_everything_fails_it_still_says_so(run: Run, model: Path, out: Path, tmp_path: Path):
    asked = tmp_path / "p.jsonl"
    asked.write_text(json.dumps({"text": "word " * 5000}) + "\n")
    ended = run(*command(model, asked, out, arms=["none"]))
    assert ended.status == 0 and "none on p 0: The prompt has 5" in ended.err and "Traceback" not in ended.err


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(
    run: Run, model: Path, questions: Path, out: Path, monkeypatch: pytest.MonkeyPatch
):
    before, calls = StockArm.run, []

    def interrupted(self: StockArm, prompts: Any, params: Any) -> Any:
        calls.append(prompts)
        if len(calls) == 3:  # a warm-up, the first prompt, the second
            raise KeyboardInterrupt
        return before(self, prompts, params)

    monkeypatch.setattr(StockArm, "run", interrupted)
    ended = run(*command(model, questions, out))
    assert ended.status == 130
    assert ended.sentence == f"Interrupted; {out} keeps what was measured, and the same command continues it."
    kept = read_runs(out).runs
    assert {each.prompts for each in kept} >= {("81",)} and 3 <= len(kept) < 6
    ended = run(*command(model, questions, out))
    assert ended.status == 0 and len(read_runs(out).runs) == 6 and len(calls) == 5


def test_the_same_prompts_twice_are_refused(run: Run, model: Path, questions: Path, out: Path):
    again = run(*command(model, questions, out, "--prompts", questions))
    assert "Task mt_bench has prompt 81 twice" in again.refusal and not out.exists()


@pytest.mark.parametrize("kind", ["folder", "text", "other settings"])
def test_a_file_that_is_no_run_of_this_kind_is_refused_before_anything_is_loaded(
    run: Run, questions: Path, out: Path, kind: str
):
    if kind == "folder":
        out.mkdir()
    elif kind == "text":
        out.write_text("Dear diary\nall is well\n")
    else:
        out.write_text('{"kind": "provenance", "settings": {"model": "other"}}\n')
    said = run(*command(Path("./nowhere"), questions, out)).refusal
    assert str(out) in said and "There is no model" not in said


def made(path: Path, speed_up: float, units: int = 10) -> Path:
    """A file in which one arm is so many times as fast as plain decoding."""
    lines = [{"kind": "provenance", "settings": {"model": "m"}}]
    for number in range(units):
        for arm, factor in (("none", 1.0), ("eagle3", speed_up)):
            seconds = (1 + number / 10) / factor
            call = Call(arm, "t", (str(number),), tokens=10, forwards=5, decoded=10, seconds=seconds)
            lines.append(call.line())
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("speed_up", "status", "sentence"), [(1.6, 1, "Slower: eagle3."), (2.0, 0, "Nothing is slower beyond noise.")]
)
def test_two_files_are_compared_in_words_and_in_the_exit_status(
    run: Run, tmp_path: Path, speed_up: float, status: int, sentence: str
):
    pair = [made(tmp_path / "a.jsonl", 2.0), made(tmp_path / "b.jsonl", speed_up)]
    ended = run("bench", "--compare", *pair)
    assert (ended.status, ended.err) == (status, "") and sentence in ended.out
    assert "eagle3" in ended.out and f"{speed_up / 2:.2f} ({speed_up / 2:.2f} to {speed_up / 2:.2f})" in ended.out
    ended = run("bench", "--compare", *pair, "--json")
    found = json.loads(ended.out)
    assert ended.status == status and found["slower"] == bool(status)
    assert found["changes"][0]["setting"] == {"model": "m", "temperature": 0.0, "batch": 1}
    assert found["changes"][0]["ratio"] == pytest.approx(speed_up / 2)
    assert run("bench", "--compare", *pair, "--tolerance", "0.3").status == 0


def test_a_comparison_with_too_few_units_has_an_exit_status_of_its_own(run: Run, tmp_path: Path):
    few = made(tmp_path / "few.jsonl", 2.0, units=FEWEST - 1), made(tmp_path / "slower.jsonl", 1.0)
    ended = run("bench", "--compare", *few)
    assert (ended.status, ended.err) == (UNJUDGED, "") and UNJUDGED not in (0, 1, 2)
    assert f"Cannot compare: an arm needs {FEWEST} units" in ended.out
    found = json.loads((ended := run("bench", "--compare", *few, "--json")).out)
    assert (ended.status, found["slower"], found["judged"]) == (UNJUDGED, False, 0)
    made(few[0], 2.0, units=FEWEST)
    assert run("bench", "--compare", *few).status == 1
    assert f"{UNJUDGED} if no arm can be judged" in " ".join(run("bench", "--help").out.split())


def test_files_that_cannot_be_compared_are_one_sentence(run: Run, tmp_path: Path):
    a, empty = made(tmp_path / "a.jsonl", 2.0), tmp_path / "empty.jsonl"
    empty.touch()
    assert "share no arm" in run("bench", "--compare", a, empty).refusal
    assert "nowhere.jsonl" in run("bench", "--compare", a, tmp_path / "nowhere.jsonl").refusal
    assert "--tolerance must be at least 0" in run("bench", "--compare", a, a, "--tolerance", "2").refusal


def test_calibrate_stores_what_was_learned_with_the_head_and_load_begins_with_it(
    run: Run, questions: Path, out: Path, tmp_path: Path
):
    head = tmp_path / "head"
    shutil.copytree(resolve("sample-eagle3"), head, ignore=shutil.ignore_patterns(CALIBRATION))
    spec = f"eagle3:{head}"
    usual = ("--prompts", questions, "--max-new-tokens", "48", "--device", "cpu", "--out", out)
    measure = ("bench", "-m", "sample", "-d", "none", "-d", spec, *usual)
    assert run(*measure).status == 0
    assert not (head / CALIBRATION).exists(), "nothing is written unless it is asked for"
    out.unlink()
    ended = run(*measure, "--temperature", "0", "--temperature", "1", "--calibrate")
    assert ended.status == 0 and CALIBRATION in ended.out
    stored = json.loads((head / CALIBRATION).read_text())
    assert stored.keys() == {"eagle3"} and stored["eagle3"].keys() == {"0", "2"}
    assert all(weights != [0, 1, 0, 0] for weights in stored["eagle3"].values())
    assert foredraft.load("sample", spec, device="cpu").engine.policy.state()["weights"] == stored["eagle3"]
    other = foredraft.load("sample", f"{spec},nodes=3", device="cpu").engine.policy
    assert other.state()["weights"] == stored["eagle3"]


@pytest.mark.parametrize("content", ['{"eagle3": {"0": [1, 2]}}', '{"eagle3": 3}'])
def test_a_damaged_calibration_is_named(content: str, tmp_path: Path):
    head = tmp_path / "head"
    shutil.copytree(resolve("sample-eagle3"), head, ignore=shutil.ignore_patterns(CALIBRATION))
    (head / CALIBRATION).write_text(content)
    with pytest.raises(DrafterError, match=f"{CALIBRATION} holds no valid state of a policy; delete it"):
        foredraft.load("sample", f"eagle3:{head}", device="cpu")


def test_calibrate_needs_a_folder_that_can_be_written_to(
    run: Run, model: Path, questions: Path, out: Path, tmp_path: Path
):
    ended = run(*command(model, questions, out, "--calibrate"))
    assert ended.status == 2 and "--calibrate needs an arm with a head or draft model in a folder" in ended.err
    head = tmp_path / "head"
    (head / CALIBRATION).mkdir(parents=True)
    ended = run(*command(model, questions, out, "--calibrate", arms=["none", f"eagle3:{head}"]))
    assert ended.status == 2 and "Cannot write" in ended.err and not out.exists()
