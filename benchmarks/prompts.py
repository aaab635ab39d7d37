"""Prompts of the benchmarks: HumanEval bare, without its final newline; questions in the model's chat template."""

import json
from pathlib import Path

TITLES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt_bench": "MT-bench"}


def read_prompts(folder: Path, task: str, count: int) -> list:
    """The first prompts of a task, as ``Generator.generate`` takes them. ``folder`` holds human_eval/ and eagle/."""
    if task == "humaneval":
        return [row["prompt"].rstrip("\n") for row in _rows(folder / "human_eval" / "HumanEval.jsonl")][:count]
    rows = _rows(folder / "eagle" / task / "question.jsonl")
    return [[{"role": "user", "content": row["turns"][0]}] for row in rows[:count]]


def _rows(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
