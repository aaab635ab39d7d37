"""benchmarks/experiments/pairs.py on a few tokens: lines, going on, the law's judgement, and the tables."""

import json
from pathlib import Path

import pytest

import foredraft
from benchmarks.experiments import pairs
from benchmarks.kit.reading import read

MODELS = Path(foredraft.__path__[0]) / "models"
PAIR = ("sample-16m", "draft-4m")


def test_a_prompt_is_not_run_again_and_the_target_judges_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(pairs, "PAIRS", {PAIR[0]: PAIR[1:]})
    questions = tmp_path / "gsm8k" / "question.jsonl"
    questions.parent.mkdir()
    rows = [{"question_id": number, "turns": [f"What is 2 + {number}?"]} for number in (3, 4)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "runs.jsonl"
    words = ["--models", str(MODELS), "--prompts", str(questions), "--tokens", "6", "--acceptance"]
    for count in ("1", "2"):
        pairs.EXPERIMENT.run([*words, "--count", count, "--out", str(out)])
    runs = read(out)["run"]
    assert [(run["number"], run["temperature"]) for run in runs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(run["arms"][name][0] == 6 for run in runs for name in pairs.DRAFTING)
    assert [sorted(run.get("nats", ())) for run in runs] == [[], ["hf_repaired", "hf_universal", "slem"]] * 2

    plain = foredraft.load(str(MODELS / PAIR[0]), "none", dtype="float32", device="cpu")
    prompt = plain.encode(pairs.questions([questions], 1)[0].prompt)
    text = plain.generate(prompt, max_new_tokens=6, min_new_tokens=6, temperature=1.0, seed=0).tokens
    scores = plain.score([*prompt, *text])[len(prompt) :]
    expected = -sum(each.logprob for each in scores) / 6
    assert runs[1]["nats"]["slem"] == pytest.approx(expected, abs=1e-3)

    mean = (runs[1]["nats"]["slem"] + runs[3]["nats"]["slem"]) / 2
    page = pairs.table(out)
    assert f"| sample-16m + draft-4m | {mean:.2f} (" in page
    forwards = sum(run["arms"]["slrs"][1] for run in runs[::2])
    assert f"{12 / forwards:.2f} (" in page and "2 prompts or more" in page
