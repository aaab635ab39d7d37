"""benchmarks/experiments/gpu.py at tiny size on a CPU: every part has records, one that fails stops nothing."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.experiments import gpu
from foredraft.bench.check import Difference, IdentityCheck, SampledCheck
from processes import environment

ROOT = Path(__file__).parent.parent


def test_a_part_that_fails_or_takes_too_long_is_recorded_and_the_next_one_begins(monkeypatch: pytest.MonkeyPatch):
    def fails(bench: Any) -> Iterator[dict[str, Any]]:
        yield {"kind": "good", "number": 1}
        raise ValueError("broken")

    def sleeps(bench: Any) -> Iterator[dict[str, Any]]:
        yield {"kind": "good", "number": 2}
        time.sleep(60)

    def works(bench: Any) -> Iterator[dict[str, Any]]:
        yield {"kind": "good", "number": 3}

    monkeypatch.setattr(gpu, "PARTS", {"fails": (fails, 1.0), "sleeps": (sleeps, 1.0), "works": (works, 1.0)})
    lines = list(gpu.run(SimpleNamespace(free=lambda: None), ["fails", "sleeps", "works"], 3.0))
    found = [line.get("number", line.get("error", "")[:12]) for line in lines]
    assert found == [1, "ValueError: ", 2, "TimeoutError", 3]
    assert [line["part"] for line in lines] == ["fails", "fails", "sleeps", "sleeps", "works"]


def test_a_greedy_difference_is_recorded(monkeypatch: pytest.MonkeyPatch):
    found = IdentityCheck(outputs=3, tokens=60, differences=(Difference(1, 7, 0.5, False),), exact=False)
    passed = SampledCheck(tokens=200, accepted=80, contexts=2, p_value=0.5, shift=0.1)
    monkeypatch.setattr(gpu, "check_identity", lambda *args: found)
    monkeypatch.setattr(gpu, "check_sampled", lambda *args: passed)
    sizes = replace(gpu.TINY, lawful=("prompt_lookup",))
    (record,) = gpu.laws(SimpleNamespace(device="cpu", sizes=sizes, options=[{}]))
    assert not record["greedy_passed"]
    assert record["differences"] == [{"output": 1, "place": 7, "gap": 0.5, "tied": False}]


def run_script(folder: Path, *options: str, **variables: str) -> list[dict[str, Any]]:
    out = folder / "gpu.jsonl"
    words = ["--out", str(out), "--device", "cpu", "--tiny", *options]
    command = [sys.executable, "-m", "benchmarks", "gpu", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_the_kernel_in_its_interpreter(tmp_path: Path):
    pytest.importorskip("triton")
    _, *lines = run_script(tmp_path, "--parts", "kernel", TRITON_INTERPRET="1")
    assert len(lines) == 8 and all(line["error"] < 1e-5 for line in lines), lines


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path):
    lines = run_script(tmp_path)
    kinds = {line["kind"] for line in lines}
    assert kinds == {"provenance", "machine", "kernel", "law", "forward", "arm", "profile", "baseline"}, kinds
    assert all(line["greedy_passed"] and line["sampled_passed"] for line in lines if line["kind"] == "law")
    lengths = {line["method"]: line["acceptance_length"] for line in lines if line["kind"] == "arm"}
    assert lengths["none"] == 1 and lengths["eagle3 tree"] > lengths["eagle3 chain"] > 1.8
    assert lengths["draft_model"] > 1.8
