"""benchmarks/experiments/fixed_sizes.py: speeds of methods from run files."""

import json
from pathlib import Path
from typing import Any

from benchmarks.experiments import fixed_sizes
from foredraft.bench.measure.records import OutputRecord, Run


def provenance(model: str, weights: str | None) -> dict[str, Any]:
    origin = {"kind": "provenance", "commit": "0" * 40, "device": "a processor", "threads": 2, "torch": "2"}
    origin |= {"transformers": "5", "time": "2026-01-01"}
    return origin | {"settings": {"model": model, "weights": weights, "dtype": None, "max_new_tokens": 64}}


def run(arm: str, prompt: str, seconds: float, forwards: int, digest: str = "a") -> dict[str, Any]:
    outputs = (OutputRecord(prompt, 9, 60, digest),)
    facts: dict[str, Any] = {"tokens": 60, "decoded": 60, "forwards": forwards, "seconds": seconds}
    return Run(arm, "task", (prompt,), outputs=outputs, **facts).line()


def test_speeds_are_those_of_the_pages_own_arms_beside_plain_decoding_of_the_same_model(tmp_path: Path):
    lines = [provenance("one", "int4")]
    for prompt, seconds in (("a", 2.0), ("b", 2.5), ("c", 4.0)):
        lines += [run("none", prompt, 4.0, 60), run("cape 4", prompt, seconds, 30), run("glide 4", prompt, 1.0, 20)]
    lines += [provenance("build/two", None), run("none", "a", 1.0, 60), run("cape 4", "a", 2.0, 40, "b")]
    path = tmp_path / "some_speed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    one, two = fixed_sizes.speeds("cape", [path]).split("| cape on two |")
    assert "| 4 | 1.60 (1.00 to 2.00) | 2.00 (2.00 to 2.00) |" in one and "3 of 3" in one and "int4" in one
    assert "| 4 | 0.50 (0.50 to 0.50) | 1.50 (1.50 to 1.50) |" in two and "0 of 1" in two and "float32" in two
    assert "glide" not in one
    assert fixed_sizes.speeds("cap", [path]) == "" == fixed_sizes.speeds("cape", [tmp_path / "absent.jsonl"])


def test_several_temperatures_are_columns(tmp_path: Path):
    lines = [provenance("one", None)]
    for heat, seconds in ((0.0, 2.0), (1.0, 3.0)):
        lines += [{**run(arm, "a", s, 30), "temperature": heat} for arm, s in (("none", 6.0), ("some 4", seconds))]
    path = tmp_path / "shapes.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = fixed_sizes.speeds("shapes", [path])  # the page's own file: all arms
    assert "| some 4 | 3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) |" in text
    assert "tokens per forward, T = 1" in text and "Medians over 1 prompts" in text and "2 of 2" in text
