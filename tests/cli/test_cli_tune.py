"""``foredraft tune``: what it prints and writes, and that the other commands read it."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_cases import PROMPT, Run

import foredraft
from foredraft.bench.tune.predict import StepPrediction
from foredraft.bench.tune.tune import BatchPoint, Configuration, TuneConfig, Tuner, Tuning
from foredraft.engine.cost_model import CostTable
from foredraft.heads.formats.tuned import Tuned, read_tuned

CONSTANT = "num_assistant_tokens_schedule=constant"
SMALL = ("--count", "1", "--max-new-tokens", "12", "--verify", "1", "--batch-size", "1")


def spoken(text: str) -> str:
    """Without what a table's borders and line ends add."""
    return " ".join(text.split())


def test_one_json_object_and_a_file_that_generate_reads(
    run: Run, model: Path, plain: foredraft.Generator, tmp_path: Path
):
    """The model drafts for itself, so there is always a draft."""
    draft, out = f"draft_model:{model},assistant_confidence_threshold=0.0", tmp_path / "tuned.json"
    arguments = ("-d", draft, "-d", "hydra", *SMALL, "--batch-size", "2", "--out", out)
    ended = run("tune", "-m", model, *arguments, "--json")
    assert ended.status == 0 and ended.err == ""
    found = json.loads(ended.out)
    sizes = [f"{draft},num_assistant_tokens={k},{CONSTANT}" for k in (1, 2, 3, 4, 5, 6, 8, 10)]
    assert {trial["spec"] for trial in found["trials"]} == {*sizes, draft}
    assert sum(trial["measured"] is not None for trial in found["trials"]) == 2
    assert [table["rows"][0] for table in found["costs"]] == [1, 2]
    assert found["skipped"] == ["hydra: hydra needs Hydra heads: write hydra:PATH with a folder or hub name."]
    written = read_tuned(out)
    assert written.drafter == found["drafter"] and written.off_from == (found["off_from"] or 0)
    assert found["pays"] == (written.drafter != "none") == bool(found["batches"])
    assert written.facts is not None and len(written.facts["tried"]) == 2 and "/" not in written.model
    assert written.facts["provenance"]["command"].startswith("foredraft")
    said = run("generate", "-m", model, "-d", out, "--max-new-tokens", "9", "--json", "--raw", PROMPT)
    assert said.status == 0
    assert json.loads(said.out)["text"] == plain.generate(PROMPT, max_new_tokens=9).text


def test_the_bundled_model_and_its_head(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "p.txt"
    prompts.write_text("def add(a, b):\n---\nOnce upon a time\n")
    arguments = ("-d", "eagle3,nodes=7,depth=3", "--prompts", prompts, "--temperature", "0.8", *SMALL)
    ended = run("tune", *arguments)
    assert ended.status == 0 and ended.err == "", ended.err
    written = read_tuned("tuned.json")
    name = "eagle3:sample-eagle3,nodes=7,depth=3"
    assert written.drafter in (f"{name},{CONSTANT}", name, "none")
    assert written.facts is not None and written.facts["temperature"] == 0.8
    assert "tuned.json: foredraft generate --model sample --drafter tuned.json" in spoken(ended.out)


def test_a_prompt_that_is_too_long_is_one_sentence(run: Run, model: Path, tmp_path: Path):
    (tmp_path / "long.txt").write_text("word " * 5000)
    words = ("--prompts", tmp_path / "long.txt", "--out", tmp_path / "t.json")
    assert "4096" in run("tune", "-m", model, *words, *SMALL).refusal


def trial(spec: str, predicted: float, measured: float | None = None, family: str = "eagle3:[H]") -> Configuration:
    return Configuration(family, spec, StepPrediction(2.5, 1.0, predicted), measured, 2.5)


TREE = trial(f"eagle3:[H],nodes=23,depth=5,{CONSTANT}", 2.2, 2.0)
SMALLER = trial(f"eagle3:[H],nodes=11,depth=4,{CONSTANT}", 2.1, 1.8)
CHAINS = [
    trial(f"eagle3:[H],nodes={k},depth={k},top_k=1,{CONSTANT}", 1.9 - k / 100, m) for k, m in ((3, 1.4), (4, 1.5))
]
OTHERS = [trial(f"eagle3:B,nodes=2,depth=2,top_k=1,{CONSTANT}", 2.1, 2.05, family="eagle3:B")]
OWN = trial("eagle3:[H]", 2.2, 2.1)
POINTS = (BatchPoint(1, 2.0), BatchPoint(4, 1.3), BatchPoint(8, 0.9))


@pytest.fixture
def tune(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the command prints and writes where this was found."""

    def tune(chosen: Configuration | None, off_from: int | None, *arguments: str) -> tuple[str, Tuned, TuneConfig]:
        asked: list[TuneConfig] = []
        trials = (*OTHERS, TREE, SMALLER, *CHAINS, OWN)
        batches = POINTS if chosen is not None else ()
        found = Tuning(trials, chosen, batches, off_from, (CostTable((1,), (1.0,)),), ("hydra: [no] heads.",))

        def scripted(self: Tuner, question: TuneConfig) -> Tuning:
            asked.append(question)
            return found

        monkeypatch.setattr(Tuner, "run", scripted)
        ended = run("tune", "-m", model, "-d", "prompt_lookup", "--out", tmp_path / "t.json", *arguments)
        assert ended.status == 0, ended.err
        return spoken(ended.out), read_tuned(tmp_path / "t.json"), asked[0]

    return tune


def test_the_choice_is_said_in_a_line_and_by_batch(tune: Any):
    out, written, _ = tune(TREE, 8)
    assert f"Best: {TREE.spec}, 2.00x plain decoding." in out, "brackets are part of a path"
    assert "Speed-up by batch size: 2.00 at 1, 1.30 at 4, 0.90 at 8; no gain from batch size 8." in out
    assert "Not tried: hydra: [no] heads." in out
    assert "6 configurations predicted, 6 run." in out
    assert "Tried: eagle3:B in 1 size, eagle3:[H] in 4 sizes." in out
    assert (written.drafter, written.off_from) == (TREE.spec, 8)
    assert written.facts is not None and len(written.facts["tried"]) == 6
    assert written.facts["batches"][1] == {"batch": 4, "speed_up": 1.3}


def test_it_says_that_it_pays_at_all_of_them(tune: Any):
    out, written, _ = tune(TREE, None)
    assert "faster at every size." in out and written.off_from == 0


def test_it_says_plainly_that_speculation_does_not_pay(tune: Any):
    out, written, _ = tune(None, None)
    assert "No drafter is faster than plain decoding here." in out
    assert "Best:" not in out
    assert (written.drafter, written.off_from) == ("none", 0)
    record = json.loads(tune(None, None, "--json")[0])
    assert (record["pays"], record["drafter"], record["speed_up"]) == (False, "none", None)


@pytest.mark.parametrize("chosen", [TREE, CHAINS[1], OWN], ids=["a tree", "a chain", "a schedule of our own"])
def test_the_choice_is_written_as_it_is_said(tune: Any, chosen: Configuration):
    assert tune(chosen, None)[1].drafter == chosen.spec
    record = json.loads(tune(chosen, None, "--json")[0])
    assert (record["pays"], record["drafter"], record["speed_up"]) == (True, chosen.spec, chosen.measured)


def test_what_is_asked_is_what_was_given(tune: Any, tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\nthree\n")
    (tmp_path / "b.txt").write_text("four\n")
    files = ("--prompts", str(tmp_path / "a.txt"), "--prompts", str(tmp_path / "b.txt"))
    _, _, asked = tune(
        None, None, *files, "--count", "2", "--batch-size", "4", "--min-new-tokens", "5", "--verify", "7"
    )
    assert list(asked.prompts) == ["one", "two", "four"] and asked.batches == (4,) and asked.verify == 7
    assert asked.params.min_new_tokens == 5 and asked.params.temperature == 0.0
    _, _, asked = tune(None, None, "--chat", "--temperature", "0.5")
    assert len(asked.prompts) == 4 and asked.prompts[0][0]["role"] == "user" and asked.params.temperature == 0.5
    assert asked.batches == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_says_that_nothing_is_kept(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
):
    monkeypatch.setattr(Tuner, "run", lambda *_: signal.raise_signal(number))
    ended = run("tune", "-m", model, *SMALL, "--out", tmp_path / "tuned.json")
    assert ended.status == status and not (tmp_path / "tuned.json").exists()
    assert ended.sentence.startswith("Interrupted; measurements are not kept, ")
    assert ended.sentence.endswith("the same command starts over.")
