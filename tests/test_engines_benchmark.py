"""benchmarks/engines.py with the arms that need no peer: both run the same model, and missing peers are told."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import foredraft

TASKS = ("edit", "code", "maths", "write", "explain", "list")
MODEL = Path(foredraft.__path__[0]) / "models" / "sample-16m"


def test_two_engines_in_turns(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(script("peers.llama_cpp"), "programs", lambda: None)
    out = tmp_path / "engines.jsonl"
    words = ["engines.py", "--model", str(MODEL), "--prompt-files", str(tmp_path / "none"), "--out", str(out)]
    words += ["--tokens", "6", "--prompts", "1", "--scored", "40", "--only", "* float32 plain @1"]
    monkeypatch.setattr(sys, "argv", words)
    script("engines").main()
    lines = script("kit.reading").read(out)
    runs = {(run["arm"], run["task"]): run for run in lines["run"]}
    assert len(runs) == len(lines["run"]) == 12
    for task in ("edit", "code"):
        ours, theirs = runs["foredraft float32 plain", task], runs["transformers float32 plain", task]
        assert ours["output"] == theirs["output"] and len(ours["output"]) == 6
        assert 0 < ours["first_seconds"] < ours["seconds"] and 0 < theirs["first_seconds"] < theirs["seconds"]
    ours_of = {task: runs["foredraft float32 plain", task]["output"] for task in TASKS}
    ours, theirs = (next(line for line in lines["quality"] if line["arm"].startswith(name)) for name in ("f", "t"))
    assert ours["kl"] < 1e-6 and ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-4)
    told = capsys.readouterr().out
    assert "Skipped llama.cpp: build it" in told and "Skipped OpenVINO" in told
    assert told.count("| foredraft float32 plain | 1 |") == 2
    words += ["transformers float32 *", "*float32 default @1", "--few", "* default @1", "--prompts", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--assistant", str(MODEL)])
    script("engines").main()
    lines = script("kit.reading").read(out)
    added = {(run["arm"], run["task"], run["prompt"]): run for run in lines["run"][12:]}
    assert [key for key in added if "default" in key[0]] == [("foredraft float32 default", t, 0) for t in TASKS]
    again = [(arm, task, number) for arm, task, number in added if arm == "transformers float32 plain"]
    assert again == [("transformers float32 plain", "edit", 1)], "what was there has run again"
    for mode in ("lookup", "assisted"):
        theirs = added[f"transformers float32 {mode}", "edit", 0]
        assert theirs["output"] == ours_of["edit"] and 1 <= theirs["first_tokens"] <= 6
    assert 0 < added["transformers float32 assisted", "edit", 0]["accepted"] < 6, "its own draft model"
    assert all(("accepted" in run) == ("plain" not in run["arm"]) for run in lines["run"])


def test_chats_are_counted_with_the_fewest_threads_and_by_engine(script: Callable[[str], ModuleType]):
    """A mode that was chosen for one task does not make its engine one that ran on few chats."""
    tables = script("engine_tables")

    def runs(arm: str, tasks: str) -> list[dict]:
        return [
            {"arm": arm, "threads": 2, "task": task, "prompt": 0, "output": [1], "accepted": 1, "drafted": 1}
            for task in tasks.split()
        ]

    found = runs("foredraft Q4_K_M plain", "edit sum qa") + runs("llama.cpp Q4_K_M plain", "edit sum qa")
    found += runs("llama.cpp Q4_K_M ngram-mod", "sum") + runs("openvino Q4_1 plain", "edit")
    assert tables.chats({"run": found}) == (3, {"openvino Q4_1": 1})


def test_defaults_against_the_best_mode_of_each_peer(script: Callable[[str], ModuleType]):
    tables = script("engine_tables")
    speeds = {
        "foredraft Q4_0 plain": (200, 200, 200),
        "foredraft Q4_0 default": (400, 300, 150),
        "llama.cpp Q4_0 plain": (100, 100, 200),
        "llama.cpp Q4_0 lookup": (200, 150, 100),
    }
    runs = []
    for arm, own in speeds.items():
        for number, speed in enumerate(own):
            run = {"arm": arm, "threads": 1, "task": "ab"[number == 2], "prompt": number, "output": [0] * 11}
            run |= {"prompt_tokens": 5, "first_tokens": 1, "first_seconds": 1, "seconds": 1 + 10 / speed}
            runs.append({**run, "accepted": number} if arm.endswith("lookup") else run)
    mine, peer, plain = tables.comparisons({"run": runs})
    assert (mine.theirs, peer.theirs) == ("foredraft Q4_0 plain", "llama.cpp Q4_0 lookup")
    assert mine.ratios == pytest.approx([2, 1.5, 0.75]) and mine.slower == pytest.approx({"b": 0.75})
    assert plain.theirs == peer.theirs and plain.ratios == pytest.approx([1, 4 / 3, 2])
    assert peer.ratio == pytest.approx(2) and peer.slower == {} and str(peer) == "2.00 (1.50 to 2.00)"
    assert tables.users({"run": runs}).splitlines()[2] == (
        "| foredraft Q4_0 default | foredraft Q4_0 plain | 1 | 1.50 (0.75 to 2.00) | b (0.75) |"
    )
    assert tables.left_out({"run": runs}) == []


@pytest.mark.parametrize("said", [{}, {"accepted": 0}])
def test_an_arm_that_never_drafted_is_left_out(script: Callable[[str], ModuleType], said: dict[str, int]):
    """llama.cpp's look-ups did not get the prompt, and their times were shown as those of drafts."""
    tables = script("engine_tables")
    runs = []
    for arm, speed in {
        "foredraft Q4_0 default": 300,
        "llama.cpp Q4_0 plain": 100,
        "llama.cpp Q4_0 lookup": 200,
    }.items():
        for number in (0, 1):
            run = {"arm": arm, "threads": 1, "task": "a", "prompt": number, "output": [0] * 11, "first_seconds": 1}
            run |= {"prompt_tokens": 5, "first_tokens": 1, "seconds": 1 + 10 / speed}
            runs.append(run | said if arm.endswith("lookup") else run)
    (peer,) = tables.comparisons({"run": runs})
    assert peer.theirs == "llama.cpp Q4_0 plain" and peer.ratio == pytest.approx(3)
    sentence = tables.sentence({"run": runs})
    assert sentence.endswith(
        "Left out since no drafted token was accepted (its look-ups were not given the prompt), llama.cpp in Q4_0 "
        "lookup; it is compared without drafts."
    )
    shown = [tables.users({"run": runs}), tables.tables({"run": runs})]
    assert not any("lookup" in each for each in shown)
    runs[-1]["accepted"] = 3
    assert [each.theirs for each in tables.comparisons({"run": runs})] == ["llama.cpp Q4_0 lookup"]
    assert "Left out" not in tables.sentence({"run": runs})


def test_a_shape_with_random_weights(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    shape = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(script("write_gguf").SHAPES, "tiny", shape)
    out = tmp_path / "shapes.jsonl"
    words = ["engines.py", "--model", str(MODEL), "--prompt-files", str(tmp_path / "none"), "--out", str(out)]
    words += ["--shape", "tiny", "--tokens", "6", "--prompts", "1", "--only", "foredraft * plain @1"]
    monkeypatch.setattr(sys, "argv", words)
    script("engines").main()
    lines = script("kit.reading").read(out)
    assert {run["arm"] for run in lines["run"]} == {"foredraft tiny-Q4_0 plain"} and "quality" not in lines
    assert lines["provenance"][0]["gguf"] == ["random.tiny-Q4_0.gguf"]
    assert len({tuple(run["output"]) for run in lines["run"]}) > 1
    theirs = [{**run, "arm": "llama.cpp tiny-Q4_0 plain", "seconds": 2 * run["seconds"]} for run in lines["run"]]
    theirs = [{**run, "first_seconds": 2 * run["first_seconds"]} for run in theirs]
    row = script("engine_tables").shapes({"run": lines["run"] + theirs}).splitlines()[2]
    assert row.startswith("| tiny-Q4_0 | 1 |") and row.endswith("| 2.00 | 2.00 |")
