"""A run that is killed, refused, or out of disk: what is on disk is whole, and a run goes on as if nothing had been."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from trainees import SHORT, Killed, assert_same_run, log_of, stop_at, train_draft, train_head, weights_of

from foredraft.core.errors import DataError, OptionError
from foredraft.files.outputs import locked
from foredraft.model.loading.contents import contents_of_files
from foredraft.train.checkpoint import Checkpoints, Log, RunState, check_resume
from foredraft.train.heads.eagle3 import Options
from foredraft.train.options import HeadShape
from processes import disk_for, killed_after

KILLED = """
import sys
from pathlib import Path
from trainees import SHORT, Killed, train_head
def report(line):
    print(line["step"], flush=True)
    if line["step"] == 5:
        sys.stdin.read()  # until it is killed
train_head(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), report=report, store=1.0)
"""


LONG = replace(SHORT, tokens=45 * 64, checkpoint=3, validate=20)
"""45 steps: the texts are read more than once."""


@pytest.fixture(scope="module")
def steady(place: Path) -> Path:
    """A Medusa head whose training nobody has disturbed; no states were kept."""
    train_head("medusa", place, place / "steady", LONG)
    return place / "steady"


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """An EAGLE-3 head whose training nobody has disturbed."""
    train_head("eagle3", place, place / "whole", store=1.0)
    return place / "whole"


@pytest.mark.slow
def test_a_killed_run_ends_where_it_would_have_ended(place: Path, whole: Path):
    out = place / "killed"
    steps = ["1", "2", "3", "4", "4", "5"]  # the second line of step 4 is its validation
    killed_after(steps, KILLED, "eagle3", place, out, folder=Path(__file__).parent)
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 4
    assert log_of(out)[-1]["step"] == 5, "this line is to be written once more"
    (out / ".checkpoint.pt.foredraft.partial").write_bytes(b"half a checkpoint")
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')
    assert train_head("eagle3", place, out, store=1.0) == out / "head"
    assert_same_run(out, whole)
    assert [line["step"] for line in log_of(out) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    heads = [(folder / "head" / "model.safetensors").read_bytes() for folder in (out, whole)]
    assert heads[0] == heads[1]


KILLED_AT_OR_BEFORE = [3, 6, 12, 15, 18, 24, 27, 30, 36, 39]


@pytest.mark.parametrize(("store", "by"), [(0.0, Killed), (1.0, Killed), (1.0, KeyboardInterrupt)])
def test_runs_that_are_interrupted_often_end_in_the_same_weights(
    place: Path, steady: Path, tmp_path: Path, store: float, by: type[BaseException]
):
    """And so with a store and without: lessons are the same, in the second pass over the texts, too."""
    for step in range(5, 45, 4):
        with pytest.raises(by):
            train_head("medusa", place, tmp_path, LONG, store=store, report=stop_at(step, by=by))
    train_head("medusa", place, tmp_path, LONG, store=store)
    assert_same_run(tmp_path, steady)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    resumed = [line["step"] for line in log if "resumed" in line]
    assert resumed == (KILLED_AT_OR_BEFORE if by is Killed else list(range(5, 45, 4))), (
        "an interrupted one loses nothing"
    )


def test_checkpoints_come_by_time_as_well_as_by_steps(place: Path, steady: Path, tmp_path: Path):
    """A run that is killed two minutes after its last checkpoint does not exist, however slow its steps are."""
    rare = replace(LONG, checkpoint=1000, checkpoint_seconds=1e-9)
    for step in (7, 20):
        with pytest.raises(Killed):
            train_head("medusa", place, tmp_path, rare, report=stop_at(step, by=Killed))
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == step - 1
    with pytest.raises(Killed):
        train_head("medusa", place, tmp_path, replace(LONG, checkpoint=1000), report=stop_at(25, by=Killed))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 19, "no two minutes have passed"
    train_head("medusa", place, tmp_path, rare)
    assert_same_run(tmp_path, steady)


def test_an_interrupted_validation_is_made_up_for(place: Path, whole: Path, tmp_path: Path):
    told: list[dict[str, Any]] = []
    validating = patch("foredraft.train.heads.run.validation_length", side_effect=KeyboardInterrupt)
    with validating, pytest.raises(KeyboardInterrupt):
        train_head("eagle3", place, tmp_path, store=1.0, report=told.append)
    assert told[-1] == {"kept": 4, "steps": 6, "folder": tmp_path.name}
    train_head("eagle3", place, tmp_path, store=1.0)
    assert_same_run(tmp_path, whole)


def test_what_only_reports_may_change(place: Path, whole: Path, tmp_path: Path):
    with pytest.raises(Killed):
        train_head("eagle3", place, tmp_path, report=stop_at(3, by=Killed))
    told: list[dict[str, Any]] = []
    loop = replace(SHORT, validate=5, checkpoint=50, report=3)
    train_head("eagle3", place, tmp_path, loop, report=told.append)
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(tmp_path)[name], weight), name
    assert [(line["step"], "resumed" in line, "validation" in line) for line in told] == [
        (2, True, False), (3, False, False), (5, False, True), (6, False, False), (6, False, True)
    ]  # fmt: skip
    told.clear()
    train_head("eagle3", place, tmp_path, loop, report=told.append)
    assert [(line["step"], line["resumed"]) for line in told] == [(6, True)], "it is over, and says so"


def test_the_log_and_the_head_tell_of_acceptance(place: Path, whole: Path):
    validations = [line["validation"] for line in log_of(whole) if "validation" in line]
    assert len(validations) == 2 and all(1.0 <= each["acceptance_length"] <= 6.0 for each in validations)
    provenance = json.loads((whole / "head" / "provenance.json").read_text())
    assert provenance["validation"] == validations[-1]
    assert provenance["target_contents"] == contents_of_files(str(place / "target"))


def test_a_run_that_is_over_ends_in_the_same_head(place: Path, whole: Path):
    before, log = (whole / "head" / "model.safetensors").read_bytes(), (whole / "log.jsonl").read_text()
    train_head("eagle3", place, whole, store=1.0)
    assert (whole / "head" / "model.safetensors").read_bytes() == before
    assert (whole / "log.jsonl").read_text() == log


@pytest.mark.parametrize("method", ["hydra++", "blockwise"])
def test_what_is_random_in_a_new_head_is_decided_by_the_seed(place: Path, method: str):
    """So a run that is killed before its first checkpoint begins as it began."""
    outs = [place / f"{method}-{number}" for number in range(2)]
    for number, out in enumerate(outs):
        torch.manual_seed(number)
        train_head(method, place, out, replace(SHORT, tokens=64))
    assert_same_run(*outs)


def test_other_options_are_refused(place: Path, whole: Path):
    def refused(loop: Any = SHORT, method: str = "eagle3", **options: Any) -> str:
        with pytest.raises(OptionError, match="started with another .*; use the same options to resume it") as info:
            train_head(method, place, whole, loop, **options)
        return str(info.value)

    assert "another lr, seed;" in refused(replace(SHORT, lr=1e-4, seed=5))
    assert "another loss;" in refused(recipe_options=Options(loss="lk"))
    assert "another vocabulary;" in refused(shape=HeadShape(vocabulary=50))
    assert "recipe" in refused(method="medusa")
    (whole / "run.json").unlink()  # as in a folder from before it was written
    with pytest.raises(OptionError, match="was written with recipe 'eagle3', not 'medusa'"):
        train_head("medusa", place, whole)
    train_head("eagle3", place, whole)


@pytest.mark.parametrize("damaged", [b"", b'{"recipe": "eag', b"[]", b'"eagle3"', b"\xff\xfe"])
def test_terms_that_cannot_be_read(tmp_path: Path, damaged: bytes):
    path = tmp_path / "run.json"
    check_resume(tmp_path, {"recipe": "eagle3"}, write=True)
    (tmp_path / "checkpoint.pt").touch()
    check_resume(tmp_path, {"recipe": "eagle3"}, write=True)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="delete it to resume with the current options") as info:
        check_resume(tmp_path, {"recipe": "eagle3"}, write=True)
    assert str(path) in str(info.value) and "\n" not in str(info.value)
    path.unlink()
    check_resume(tmp_path, {"recipe": "eagle3"}, write=True)


def test_a_second_run_in_a_folder_is_refused(place: Path, whole: Path, tmp_path: Path):
    refused: list[str] = []

    def report(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            for begin in (
                lambda: train_head("medusa", place, tmp_path),
                lambda: train_draft("draft", place, tmp_path, drafts=("x",)),
            ):
                with pytest.raises(OptionError) as info:
                    begin()
                refused.append(str(info.value))

    train_head("eagle3", place, tmp_path, report=report)
    assert_same_run(tmp_path, whole)
    sentence = f"Another run uses {tmp_path}: wait until it ends, or use another folder."
    assert refused == [sentence] * 2


def test_a_folder_is_free_after_an_error(place: Path, tmp_path: Path):
    with pytest.raises(OptionError, match="too short for"):
        train_head("eagle3", place, tmp_path, replace(SHORT, length=4))
    with locked(tmp_path, ".lock"), pytest.raises(OptionError, match="Another run uses"), locked(tmp_path, ".lock"):
        pass
    with locked(tmp_path, ".lock"), locked(tmp_path, ".other"):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(OptionError, match=r"Cannot write to the folder .*file: File exists"),
        locked(tmp_path / "file", ".lock"),
    ):
        pass


# The file alone.


def small(folder: Path, options: dict[str, Any] | None = None) -> tuple[Checkpoints, nn.Module]:
    net = nn.Linear(200, 200)
    return Checkpoints(folder / "checkpoint.pt", net, torch.optim.AdamW(net.parameters()), options or {"a": 1}), net


def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path: Path):
    checkpoints, net = small(tmp_path)
    assert checkpoints.resume() == RunState()
    checkpoints.save(3, 1.5)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with disk_for(50_000), pytest.raises(DataError, match="Cannot write the checkpoint to"):
        checkpoints.save(4, 2.0)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    again, other = small(tmp_path)
    assert again.resume() == RunState(3, 1.5)
    assert torch.equal(other.get_parameter("weight"), net.get_parameter("weight"))


def test_an_interrupt_leaves_the_checkpoint_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints, _ = small(tmp_path)
    checkpoints.save(3, 1.5)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    class Interrupting:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    options: Any = {"a": 1, "b": Interrupting()}
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, options)[0].save(4, 2.0)
    monkeypatch.setattr(os, "fsync", lambda number: Interrupting().__reduce__())
    for write in (lambda: checkpoints.save(4, 2.0), lambda: check_resume(tmp_path / "new", {"a": 1}, write=True)):
        (tmp_path / "new").mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt):
            write()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_half_a_checkpoint_is_not_taken(tmp_path: Path):
    checkpoints, _ = small(tmp_path)
    (tmp_path / ".checkpoint.pt.foredraft.partial").write_bytes(b"x" * 100)
    assert checkpoints.resume() == RunState()
    checkpoints.save(3, 1.5)
    path = tmp_path / "checkpoint.pt"
    for damaged in (path.read_bytes()[:5000], b"", b"no checkpoint"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="; delete it to start over"):
            checkpoints.resume()
    whole = {"net": {}, "optimizer": {}, "options": {"a": 1}, "step": 1, "seconds": 1.0}
    for other in ({"net": {}}, [1], *({**whole, name: [1]} for name in whole)):
        torch.save(other, path)
        with pytest.raises(DataError, match="; delete it to start over"):
            checkpoints.resume()


def test_the_log_keeps_what_is_before_the_checkpoint(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "validation": {}}\n{"step": 3}\n\n[4]\n{"step": 4')
    reported: list[dict] = []
    log = Log(path, {"step": 2, "steps": 2}, reported.append)
    log.write({"step": 3, "loss": 1.0})
    assert reported == [{"resumed": True, "step": 2, "steps": 2}, {"step": 3, "loss": 1.0}]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "validation": {}}\n{"step": 3, "loss": 1.0}\n'
