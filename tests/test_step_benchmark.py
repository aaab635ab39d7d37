"""benchmarks/experiments/step.py on a few tokens: it still finds every phase of a step."""

import json
from pathlib import Path

from benchmarks.experiments import step


def test_every_phase_of_a_step_is_found(tmp_path: Path):
    out = tmp_path / "step.jsonl"
    words = ["--methods", "eagle3", "--temperatures", "1", "--new-tokens", "8", "--repeats", "1", "--out", str(out)]
    step.EXPERIMENT.run(words)
    found = json.loads(out.read_text("utf-8").splitlines()[-1])
    operators, milliseconds = found["operators"], found["milliseconds"]
    assert operators["forward"] > 100 and operators["propose"] > 100
    assert all(operators[phase] > 0 for phase in ("address", "warp", "verify", "compact", "other"))
    assert milliseconds["read back"] > 0 and found["waits"]["read back"] == 1
