"""benchmarks/experiments/stopping.py: its replays do what decoding does, its oracle is one, it continues its files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foredraft
from benchmarks.experiments import stopping
from benchmarks.kit.reading import read
from foredraft.core.drafter import Plan, View
from foredraft.engine.policy import Policy
from foredraft.engine.step import StepResult

PROMPTS = ["def add(a, b):", "Count: 1, 2, 3, 4,"]
TOKENS = 40


class Modelled(Policy):
    """The inner policy in a real loop, with the times of the cost model, and what came of it."""

    def __init__(self, inner: Policy, ratio: float) -> None:
        self.inner, self.ratio = inner, ratio
        self.counts = np.zeros(3, dtype=int)

    def plan(self, view: View, limits: Any) -> Plan:
        return replace(self.inner.plan(view, limits), chain=True)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        self.counts += (1, step.levels, step.rows[0].accepted)
        timed = replace(step, draft_seconds=self.ratio * step.levels, verify_seconds=1.0, host_seconds=0.0)
        self.inner.observe(view, plan, timed)

    def release(self, row: int) -> None:
        self.inner.release(row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_drafts_and_accepts_what_decoding_does(temperature: float):
    """Of both prompts together, so that what was learned on the first counts."""
    with stopping.Pair("sample", "sample-draft", TOKENS) as pair:
        found = [pair.record("x", prompt, seed, temperature) for seed, prompt in enumerate(PROMPTS)]
        made = stopping.policies(pair.needs, any_width=pair.any_width)
        spec = f"draft_model:sample-draft,num_assistant_tokens={stopping.LONGEST}"
        generator = foredraft.load(pair._plain, spec)
        names = ["constant 3", "constant 16, threshold 0.6", "heuristic, threshold 0.4", "calibrated", "auto"]
        for name in names:
            policy = Modelled(made[name](), 0.2)
            generator.engine.policy = policy
            for seed, prompt in enumerate(PROMPTS):
                pair.decode(generator, prompt, seed, temperature)
            own = made[name]()
            texts = [stopping.replay(own, each, temperature, 0.2, any_width=pair.any_width) for each in found]
            counts = [sum(text[key] for text in texts) for key in ("forwards", "drafted", "accepted")]
            assert counts == policy.counts.tolist(), name
        generator.close()


def test_an_oracle_drafts_what_is_accepted():
    right = [2, 1, 0, 3, 2, 1, 0, 0]
    scores = [[-0.1 * (i + 1) for i in range(min(4, 7 - place))] for place in range(8)]
    recording = stopping.Recording("x", right, scores)
    counts = stopping.replay(stopping.Known(), recording, 0.0, 0.1, any_width=True)
    assert counts == {"task": "x", "tokens": 8, "forwards": 3, "drafted": 5, "accepted": 5}


def test_a_classifier_ends_chains_by_token_or_by_path():
    """Before it has learned, the draft's own probabilities are right: 0.9, 0.9, 0.9, 0.3."""
    nodes = stopping.chain(np.log([0.9, 0.9**2, 0.9**3, 0.9**3 * 0.3]).tolist())
    for path, threshold, length in ((False, 0.5, 4), (False, 0.95, 1), (True, 0.5, 4), (True, 0.75, 3), (True, 0.1, 4)):
        policy = stopping.Classifier(threshold, path=path)
        worth = policy.plan(stopping.view_of(0.0, []), [16]).worth
        assert policy.end(worth, nodes) == length


def test_a_classifier_learns_what_its_draft_does_not_know():
    """Drafts are sure and always wrong: soon one token is drafted, which is needed to find out."""
    wrong = stopping.Recording("x", [0] * 400, [[-0.01 * (i + 1) for i in range(min(16, 399 - p))] for p in range(400)])
    policy = stopping.Classifier(0.5, path=False)
    first, second = (stopping.replay(policy, wrong, 0.0, 0.1, any_width=True)["drafted"] for _ in range(2))
    assert first > 450 and second == 399


def test_a_finished_schedule_is_not_run_again_and_the_table_reads_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    task, out, work = tmp_path / "talk" / "question.jsonl", tmp_path / "runs.jsonl", tmp_path / "work.jsonl"
    task.parent.mkdir()
    task.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in PROMPTS), encoding="utf-8")
    command = ["--prompts", str(task), "--new-tokens", "24", "--out", str(out), "--work", str(work)]
    for heats in (["0"], ["0", "1"], ["0", "1"]):
        stopping.EXPERIMENT.run([*command, "--temperatures", *heats])
    kinds = read(out)
    cells = {(cell["temperature"], cell["schedule"], cell["c"]): cell["texts"] for cell in kinds["cell"]}
    (timed,) = kinds["ratio"]
    ratios = sorted({*stopping.RATIOS, timed["ratio"]})
    assert len(cells) == len(kinds["cell"]) and len(read(work)["recording"]) == 4
    assert {c for _, name, c in cells if name == "auto"} == set(ratios)
    assert all([text["tokens"] for text in texts] == [24, 24] for texts in cells.values())
    first = kinds["cell"][0]
    oracle = {heat: stopping.Counts.of({**first, "texts": cells[heat, "oracle", 0.0]}) for heat in (0.0, 1.0)}
    for cell in kinds["cell"]:
        assert all(stopping.Counts.of(cell).speed(c) <= oracle[cell["temperature"]].speed(c) for c in ratios)

    page = stopping.table(out)
    texts = cells[1.0, "constant 4", 0.0]
    tokens, forwards, drafted = (sum(text[key] for text in texts) for key in ("tokens", "forwards", "drafted"))
    part = page[page.index("| T = 1:") :]
    line = next(line for line in part.splitlines() if line.startswith("| constant 4 |"))
    assert line.startswith(f"| constant 4 | {tokens / forwards:.2f} | {drafted / tokens:.2f} | ")
    assert f"{tokens / (forwards + ratios[-1] * drafted):.2f}" in line.split("|")[-2]
    assert stopping.table(tmp_path / "none.jsonl") == ""
