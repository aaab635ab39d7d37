"""benchmarks/pairs.py on a few tokens: lines, going on after an interruption, the law's judgement, and the tables."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import foredraft

MODELS = Path(foredraft.__path__[0]) / "models"
PAIR = ("sample-16m", "draft-4m")


@pytest.fixture
def tool(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = script("pairs")
    monkeypatch.setattr(found, "PAIRS", {PAIR[0]: PAIR[1:]})
    return found


def test_a_prompt_is_not_run_again_and_the_target_judges_samples(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    questions = tmp_path / "gsm8k" / "question.jsonl"
    questions.parent.mkdir()
    rows = [{"question_id": number, "turns": [f"What is 2 + {number}?"]} for number in (3, 4)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "runs.jsonl"
    words = ["pairs.py", "--models", str(MODELS), "--prompts", str(questions), "--tokens", "6", "--acceptance"]
    for count in ("1", "2"):
        monkeypatch.setattr(sys, "argv", [*words, "--count", count, "--out", str(out)])
        tool.main()
    runs = tool.read(out)["run"]
    assert [(run["number"], run["temperature"]) for run in runs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(run["arms"][name][0] == 6 for run in runs for name in tool.DRAFTING)
    assert [sorted(run.get("nats", ())) for run in runs] == [[], ["hf_repaired", "hf_universal", "slem"]] * 2

    plain = foredraft.load(str(MODELS / PAIR[0]), "none", dtype="float32", device="cpu")
    prompt = plain.encode(tool.questions([str(questions)], 1)[0].prompt)
    text = plain.generate(prompt, max_new_tokens=6, min_new_tokens=6, temperature=1.0, seed=0).tokens
    scores = plain.score([*prompt, *text])[len(prompt) :]
    expected = -sum(each.logprob for each in scores) / 6
    assert runs[1]["nats"]["slem"] == pytest.approx(expected, abs=1e-3)

    mean = (runs[1]["nats"]["slem"] + runs[3]["nats"]["slem"]) / 2
    page = tool.table(out)
    assert f"| sample-16m + draft-4m | {mean:.2f} (" in page
    forwards = sum(run["arms"]["slrs"][1] for run in runs[::2])
    assert f"{12 / forwards:.2f} (" in page and "2 prompts or more" in page
