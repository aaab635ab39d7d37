"""Several processes train together."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from trainees import SHORT, log_of, save_target, save_texts, stop_at, train_draft, train_head, weights_of

from foredraft.core.errors import OptionError
from foredraft.train import devices
from processes import environment, torchrun, two_processes

HEADS = ("eagle", "eagle3", "medusa", "medusa2", "hydra++", "blockwise", "glide")
TWO = """
import shutil, sys
from dataclasses import replace
from pathlib import Path
from trainees import SHORT, train_draft, train_head
place, loop = Path(sys.argv[1]), replace(SHORT, batch=1)
for method in sys.argv[2:]:
    store = 0.0 if method == "medusa2" else 1.0
    train_head(method, place, place / f"{method}-two", loop, store=store)
train_draft("draft", place, place / "draft-two", loop, drafts=(str(place / "target"),))
train_draft("early_exit", place, place / "early_exit-two", loop)
train_head("eagle3", place, place / "resumed", loop)
"""
"""Each process computes one of the two batches of a step."""


@pytest.mark.slow
def test_two_processes_do_what_one_does_that_accumulates_twice_as_much(tmp_path: Path):
    save_target(tmp_path / "target")
    save_texts(tmp_path / "texts.jsonl")
    loop = replace(SHORT, batch=1, accumulate=2)
    with pytest.raises(KeyboardInterrupt):
        train_head("eagle3", tmp_path, tmp_path / "resumed", loop, report=stop_at(5))
    (tmp_path / "two.py").write_text(TWO)
    two_processes(tmp_path / "two.py", tmp_path, *HEADS, folder=Path(__file__).parent)
    for method in HEADS:
        train_head(method, tmp_path, tmp_path / f"{method}-one", loop)
    train_draft("draft", tmp_path, tmp_path / "draft-one", loop, drafts=(str(tmp_path / "target"),))
    train_draft("early_exit", tmp_path, tmp_path / "early_exit-one", loop)
    methods = (*HEADS, "draft", "early_exit")
    pairs = {method: (tmp_path / f"{method}-one", tmp_path / f"{method}-two") for method in methods}
    pairs["a run that one process began"] = (tmp_path / "eagle3-one", tmp_path / "resumed")
    for name, (one, two) in pairs.items():
        alone, together = weights_of(one), weights_of(two)
        for part, weight in alone.items():
            torch.testing.assert_close(together[part], weight, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        losses = [[line["loss"] for line in log_of(each) if "loss" in line] for each in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 6, (name, "of all processes")
    assert (tmp_path / "eagle3-two" / "head" / "config.json").exists()


@pytest.mark.slow
def test_the_command_of_the_docs_on_the_bundled_model(tmp_path: Path):
    """Answers, states on disk and the training are spread over the processes, and the result is one head."""
    texts = [f"def add_{number}(a, b):\n    return a + b + {number}\n" for number in range(24)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--model", "sample", "--data", str(tmp_path / "texts.jsonl"), "--max-new-tokens", "60"]
    words += ["--temperature", "0", "--device", "cpu"]
    command = [*torchrun("-m", "foredraft"), "answers", str(tmp_path / "answers"), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stderr.count("Wrote ") == 1, done.stderr[-3000:]
    common = ["--model", "sample", "--data", str(tmp_path / "answers"), "--tokens", "64", "--length", "16"]
    common += ["--vocabulary", "500", "--store", "1"]
    common += ["--precision", "fp32", "--report", "1", "--device", "cpu", "--batch", "1"]
    said = {}
    for name, run, more in (
        ("two", torchrun("-m", "foredraft"), ["--accumulate", "1"]),
        ("one", [sys.executable, "-m", "foredraft"], ["--accumulate", "2"]),
    ):
        command = [*run, "train", "eagle3", *common, *more, "--out", str(tmp_path / name)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        said[name] = done.stderr
    assert all(text.count("The head is in") == 1 == text.count("step 2 of 2") for text in said.values())
    answers = [json.loads(line) for line in (tmp_path / "answers" / "T0.jsonl").read_text().splitlines()]
    assert len(answers) == 24 == len({tuple(each["ids"][: each["prompt_length"]]) for each in answers})
    assert not list((tmp_path / "answers").glob(".T0.jsonl.*-*")), "the parts are gone"
    alone, together = (weights_of(tmp_path / name) for name in ("one", "two"))
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-3, atol=1e-4)
    (stored,) = (tmp_path / "two").rglob("there.bin")
    assert sum(stored.read_bytes()) >= 4, "both processes keep what they have read in one store"


DIES = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
import foredraft.train.loop as loop
from foredraft.cli.exit_status import status_of
from trainees import SHORT, train_head
computed = loop._step
def some(model, batches, step, *rest):
    if step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return computed(model, batches, step, *rest)
loop._step = some
sys.exit(status_of(lambda: train_head("medusa", Path(sys.argv[1]), Path(sys.argv[2]), replace(SHORT, batch=1)) and 0))
"""


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(place: Path, tmp_path: Path):
    (tmp_path / "dies.py").write_text(DIES)
    command = torchrun(tmp_path / "dies.py", place, tmp_path / "out")
    done = subprocess.run(command, env=environment(Path(__file__).parent), capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and "SIGKILL" in done.stderr
    assert torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["step"] in (2, 3)
    train_head("medusa", place, tmp_path / "out", replace(SHORT, batch=1, accumulate=2))
    assert log_of(tmp_path / "out")[-1]["step"] == 6


def test_another_product_of_batches_and_processes_is_refused(place: Path, tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        train_head("medusa", place, tmp_path, report=stop_at(3))
    with pytest.raises(OptionError, match="another product of accumulate and the number of processes; use the same"):
        train_head("medusa", place, tmp_path, replace(SHORT, accumulate=2))


def test_weights_in_parts_are_refused(monkeypatch: pytest.MonkeyPatch):
    made = SimpleNamespace(distributed_type=DistributedType.FSDP)
    monkeypatch.setattr("accelerate.Accelerator", lambda **options: made)
    with pytest.raises(OptionError, match="accelerate is set to FSDP: start it with torchrun"):
        devices.accelerator(cpu=True)


@pytest.mark.parametrize(("world", "local", "suffix"), [(None, None, ""), ("8", "8", ""), ("16", "8", "-machine1")])
def test_machines_keep_states_apart(world: str | None, local: str | None, suffix: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local), ("GROUP_RANK", world and "1")):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert devices.machine() == suffix
