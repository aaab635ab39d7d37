"""Commands that write: nothing is lost that another program, user or command wrote, and one run works at a time."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import foredraft
import tiny
from foredraft.bench.measure.records import Run
from foredraft.bench.measure.run import Settings, read_existing
from foredraft.cli import main
from foredraft.core.errors import OptionError, UsageError
from foredraft.drafters.layer_skip.trials import TrialLog
from foredraft.files.outputs import (
    continued_file,
    files_in_folder,
    generator_tag,
    locked,
    output_file,
    output_folder,
    replaced_folder,
    written_by,
)
from foredraft.files.write import partial_name
from foredraft.train.checkpoint import check_resume
from native import needs_compiler

RUNS = [
    {"kind": "provenance", "settings": {"model": "m"}},
    *(
        Run(arm, "t", ("1",), tokens=9, decoded=9, forwards=f, seconds=f / 4).line()
        for arm, f in (("none", 9), ("a", 3))
    ),
]
FOREIGN = {
    "a note": b"my notes",
    "a line": b"my notes\n",
    "half a line of JSON": b'{"kind": "run", "ar',
    "JSON": b'{"drafter": "mine"}',
    "binary": bytes(range(256)) * 9,
    "another command's": json.dumps(written_by("tune")).encode(),
    "another command's page": generator_tag("demo").encode(),
    "long": b"x" * 200_000 + b"\n",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "run.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in RUNS))
    return path


def writers(runs: Path) -> dict[str, Callable[[Path], list[str]]]:
    record = runs.with_name("record.jsonl")
    fields = ("model", "drafter", "lossless", "prompt", "finish_reason", "stats", "pieces", "steps")
    record.write_text(json.dumps(dict.fromkeys(fields, "x")) + "\n")
    return {
        "report": lambda out: ["report", str(runs), "--html", str(out)],
        "viewer": lambda out: ["viewer", str(record), "--html", str(out)],
        "theory": lambda out: ["theory", "--alpha", ".8", "--cost", ".05", "--plot", str(out)],
    }


@pytest.mark.parametrize(("command", "suffix"), [("report", "html"), ("viewer", "html"), ("theory", "svg")])
def test_a_page_or_plot_replaces_its_own_kind_alone(runs: Path, tmp_path: Path, command: str, suffix: str):
    out = tmp_path / "out" / f"file.{suffix}"
    arguments = writers(runs)[command](out)
    assert main(arguments) == 0
    own = out.read_bytes()
    out.write_bytes(own + b"<!-- edited -->")
    assert main(arguments) == 0 and out.read_bytes() == own
    out.write_bytes(b"")
    assert main(arguments) == 0 and contents(out.parent) == {out.name: own}
    for content in FOREIGN.values():
        out.write_bytes(content)
        assert main(arguments) == 2 and contents(out.parent) == {out.name: content}


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_plot_is_known_by_its_metadata(runs: Path, tmp_path: Path, suffix: str):
    arguments = writers(runs)["theory"](tmp_path / f"plot.{suffix}")
    assert [main(arguments), main(arguments)] == [0, 0]
    other = ["report", str(runs), "--html", arguments[-1]]
    assert main(other) == 2


def test_figures_of_a_report_replace_its_own_alone(runs: Path, tmp_path: Path):
    folder = tmp_path / "figures"
    arguments = ["report", str(runs), "--figures", str(folder), "--format", "png"]
    assert [main(arguments), main(arguments)] == [0, 0]
    (folder / "mine.png").write_bytes(b"mine")
    first = min(folder.glob("s*.png"))
    first.write_bytes(b"mine too")
    before = contents(folder)
    assert main(arguments) == 2 and contents(folder) == before
    first.unlink()
    assert main(arguments) == 0 and (folder / "mine.png").read_bytes() == b"mine"


def test_one_run_at_a_time_and_no_trace_of_its_lock(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new" / "page.html"
    with locked(out):
        assert main(writers(runs)["report"](out)) == 2
    assert f"Another run uses {out}: wait until it ends" in capsys.readouterr().err
    assert not out.parent.exists()
    with output_file(out, "report"), pytest.raises(OptionError, match="Another run uses"), output_file(out, "report"):
        pass
    with locked(tmp_path), pytest.raises(OptionError, match="or use another folder"), locked(tmp_path):
        pass
    link = tmp_path / "link.html"
    link.symlink_to(out)
    with locked(out), pytest.raises(OptionError), locked(link):
        pass
    assert not list(tmp_path.rglob(".*"))


def test_devices_and_pipes_are_written_and_never_read(runs: Path, tmp_path: Path):
    assert main(writers(runs)["report"](Path(os.devnull))) == 0
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (Path("/dev/zero"), pipe):
        for command in (["batch", str(runs), str(out)], ["bench", "--out", str(out)]):
            assert main(command) == 2
    assert main(["batch", "/dev/zero", str(tmp_path / "out")]) == 2 and main(["report", "/dev/zero"]) == 2
    with output_file(pipe, "report"):
        pass


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_continued_is_its_own(tmp_path: Path, content: bytes):
    for name in ("run.jsonl", "skips.json.trials.jsonl"):
        (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(UsageError), continued_file(tmp_path / "run.jsonl"):
        read_existing(tmp_path / "run.jsonl", Settings("m"))
    with pytest.raises(UsageError):
        TrialLog(tmp_path / "skips.json.trials.jsonl", {"model": "m"})
    assert contents(tmp_path) == before


@pytest.mark.parametrize("cut", [0, 1, 7, 17])
def test_half_a_first_line_of_ones_own_is_begun_again(tmp_path: Path, cut: int):
    about = {"model": "m", "seed": 3}
    path = tmp_path / "trials.jsonl"
    path.write_text(json.dumps(about)[:cut])
    TrialLog(path, about)
    assert path.read_text() == json.dumps(about) + "\n"
    out = tmp_path / "run.jsonl"
    out.write_text('{"kind": "provenance", "time": "2026-01-01'[: 3 * cut])
    assert not read_existing(out, Settings("m")).runs


def test_a_new_training_replaces_no_foreign_settings_or_log(tmp_path: Path):
    for name, content in (("run.json", '{"recipe": "soup"}'), ("log.jsonl", '{"step": 3}\n')):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(OptionError, match="use another folder"):
            check_resume(folder, {"recipe": "eagle3"}, write=True)
        assert contents(folder) == {name: content.encode()}
    check_resume(tmp_path, {"recipe": "eagle3"}, write=True)
    (tmp_path / "log.jsonl").write_text("{}\n")
    check_resume(tmp_path, {"recipe": "medusa"}, write=True)  # of a run that saved nothing
    assert json.loads((tmp_path / "run.json").read_text())["recipe"] == "medusa"


def write(folder: Path, *names: str, **about: str) -> None:
    with output_folder(folder, "quantize", about), replaced_folder(folder, "quantize", about) as partial:
        for name in names:
            (partial / name).write_text(f"new {name}")


def test_a_folder_is_replaced_by_the_command_that_wrote_it(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    write(folder, "config.json", "old", model="m")
    (folder / "README.md").write_text("mine")
    write(folder, "config.json", "weights", model="m")
    assert sorted(contents(folder)) == ["README.md", "config.json", "provenance.json", "weights"]
    record = json.loads((folder / "provenance.json").read_text())
    assert record == {
        "model": "m",
        "written_by": "foredraft quantize",
        "files": ["config.json", "provenance.json", "weights"],
    }
    before = contents(folder)
    with pytest.raises(OptionError, match="was written with model 'm', not 'other'"):
        write(folder, "config.json", model="other")
    with pytest.raises(OptionError, match=r"README.md was not written by this command"):
        write(folder, "README.md", model="m")
    with pytest.raises(OptionError, match="foredraft export did not write"), output_folder(folder, "export"):
        pass
    assert contents(folder) == before and not list(tmp_path.rglob("*.partial"))


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path):
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(OptionError, match="config.json was not written by this command"),
        replaced_folder(tmp_path / "out", "quantize") as partial,
    ):
        (partial / "config.json").write_text("ours")
        (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(OptionError), files_in_folder(tmp_path / "out", "report") as partial:
        (partial / "config.json").write_text("ours")
    assert contents(tmp_path) == {"out/config.json": b"mine"}


@needs_compiler
def test_quantize_leaves_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Another model, notes, a folder of code, a model quantised otherwise: as they were, byte for byte."""
    source = tiny.save(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    other = tiny.save(tmp_path / "other", hidden_size=64, intermediate_size=96, head_dim=16)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    foredraft.quantize(source, tmp_path / "int8", "int8")
    before = contents(tmp_path)
    for out in (other, source, notes, tmp_path / "file", tmp_path / "int8", Path(foredraft.__file__).parent):
        assert main(["quantize", str(source), str(out)]) == 2
        assert contents(tmp_path) == before, out
    assert "was written with weights 'int8', not 'int4'" in " ".join(capsys.readouterr().err.split())
    assert main(["quantize", str(other), str(tmp_path / "int8"), "--weights", "int8"]) == 2
    (tmp_path / "int8" / "calibration.json").write_text("{}")
    before = contents(tmp_path)
    foredraft.quantize(str(source), str(tmp_path / "int8"), "int8")
    assert contents(tmp_path) == before
    (notes / "a.txt").rename(notes / ".hidden")
    foredraft.quantize(source, notes)
    assert (notes / ".hidden").read_text() == "mine" and foredraft.load(notes, "none")


def test_a_temporary_file_has_no_name_of_others(tmp_path: Path, runs: Path):
    for name in ("page.html.partial", ".partial", "page.html.lock"):
        (tmp_path / name).write_text("mine")
    assert main(writers(runs)["report"](tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html.partial").read_text() == "mine" == (tmp_path / ".partial").read_text()
    assert not (tmp_path / partial_name("page.html")).exists()
