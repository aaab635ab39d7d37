"""benchmarks/experiments/ablation.py: GLIDE's heads beside EAGLE's."""

import json
from pathlib import Path
from typing import Any

from benchmarks.experiments import ablation

ORIGIN = {"kind": "provenance", "commit": "0" * 40, "device": "a processor", "threads": 1, "torch": "2"}
ORIGIN |= {"transformers": "5", "date": "2026-01-01", "passes": 3, "new_tokens": 64}


def head(method: str, size: float, forwards: list[int]) -> dict[str, Any]:
    arm = {"tokens": [60] * len(forwards), "forwards": forwards}
    arm |= {"drafted_by_depth": [100], "accepted_by_depth": [50]}
    names = [f"{shape}, task" for shape in ("chain, T=0", "chain, T=1", "tree, T=0")]
    names += ["CaPE, T=0, task"] if method == "glide" else []
    about = {"kind": "head", "question": "size", "method": method, "size": size, "tokens": 10**6}
    return {**about, "validation": {"hit_0": 0.5, "acceptance_length": 1.5}, "trial": dict.fromkeys(names, arm)}


def written(path: Path, count: int, heads: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in [{**ORIGIN, "count": count}, *heads]))
    return path


def test_glide_is_compared_with_heads_of_as_much_data_on_the_same_prompts(tmp_path: Path):
    """EAGLE's third prompt, which GLIDE did not see, and its head of other data do not count."""
    own = written(tmp_path / "glide.jsonl", 2, [head("glide", 0.25, [20, 40])])
    others = [head("eagle", 0.25, [30, 60, 1]), head("eagle", 1, [1, 1, 1])]
    text = ablation.real_glide(own, written(tmp_path / "ablation.jsonl", 3, others))
    assert "| EAGLE-1 | 0.25M | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) |" in text
    assert "| GLIDE | 1.00M | 0.50 | 1.50 |" in text and "the first 2 prompts of a task" in text
    assert "same head's chains 1.00 (1.00 to 1.00), trees 1.00 (1.00 to 1.00)." in text
    assert "| 1M |" not in text


def test_a_head_without_a_trial_has_its_validation_alone(tmp_path: Path):
    own = written(tmp_path / "glide.jsonl", 2, [{**head("glide", 0.25, []), "trial": {}}])
    text = ablation.real_glide(own, written(tmp_path / "ablation.jsonl", 3, [head("eagle", 0.25, [30])]))
    assert "| EAGLE-1 | 1.00M |" in text and "CaPE" not in text
