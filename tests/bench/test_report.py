"""A report's numbers against numbers by hand, its files, and what is told where something is missing or broken."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_cases import write_lines
from made_runs import ARMS, PROVENANCE, TASKS, made, page_of, run

from foredraft.bench.measure.records import OutputRecord, Run, RunFile, Watched, read_runs
from foredraft.bench.measure.steps import Depth, by_depth, step_times
from foredraft.bench.measure.summary import (
    Key,
    Mean,
    Setting,
    Share,
    Spread,
    acceptance_length,
    spread,
    summarise,
)
from foredraft.bench.report import tables
from foredraft.cli import main
from foredraft.core.errors import OptionError

PLACE = Setting("", 0.0, 1)


def said(text: str) -> tuple[OutputRecord, ...]:
    return (OutputRecord("1", 5, 10, text),)


def small() -> RunFile:
    """Two tasks, three prompts; the third of medusa failed, the third of qa is nobody's pair."""
    runs = []
    for task, seconds in (("qa", (1.0, 2.0, 4.0)), ("code", (2.0, 2.0, 2.0))):
        for prompt, slow in enumerate(seconds):
            unit = {"task": task, "prompts": (str(prompt),)}
            if (task, prompt) != ("qa", 2):
                runs.append(run("none", slow + 1, prefill_seconds=1.0, outputs=said("a"), **unit))
            fast = slow / (2 + prompt)
            runs.append(run("eagle", fast + 1, prefill_seconds=1.0, forwards=4, outputs=said("a"), **unit))
            failed = {"error": "out of memory"} if prompt == 2 else {"outputs": said("b" if prompt else "a")}
            runs.append(run("medusa", slow, **failed, **unit))
    return RunFile(runs=runs)


def test_speed_up_is_the_median_of_pairs():
    found = summarise([small()])
    assert found.baseline == "none" and found.settings == [PLACE] and found.tasks(PLACE) == ["qa", "code"]
    eagle = found.cell(PLACE, "code", "eagle")
    assert eagle is not None and eagle.speed_up == pytest.approx((3.0, 2.5, 3.5, 3))
    assert eagle.whole_speed_up == pytest.approx((1.8, 1.65, 1.9, 3))
    assert eagle.total_speed_up == pytest.approx(6 / (1 + 2 / 3 + 1 / 2))
    assert eagle.acceptance_length == 2.5 and eagle.tokens_per_second == pytest.approx(15.0)
    assert eagle.same == Share(3, 3) and eagle.lossless
    qa = found.cell(PLACE, "qa", "eagle")
    assert qa is not None and qa.speed_up == pytest.approx((2.5, 2.25, 2.75, 2)) and qa.runs == 3
    assert found.mean(PLACE, "eagle") == pytest.approx((2.75, 2.5)) and found.best(PLACE) == "eagle"
    assert found.mean(PLACE, "none") == Mean(1.0, 1.0)


def test_errors_count_nowhere_but_as_errors():
    found = summarise([small()])
    medusa = found.cell(PLACE, "code", "medusa")
    assert medusa is not None and (medusa.runs, medusa.errors) == (3, 1)
    assert medusa.speed_up is not None and medusa.speed_up.size == 2
    assert medusa.same == Share(1, 2)
    assert found.agreement == {PLACE: Share(3, 5)}, "medusa differs on two; one unit has eagle alone"
    assert "2 of 17 runs failed" in " ".join(tables.sentences(found, PLACE))


def test_what_is_lossy_neither_wins_nor_has_to_agree():
    file = small()
    file.runs = [replace(each, lossless=each.arm != "eagle") for each in file.runs if each.arm != "medusa"]
    found = summarise([file])
    assert found.best(PLACE) is None and found.agreement == {}
    row = tables.short(found, PLACE)[1]
    assert row.arm == "eagle (lossy)" and not any(entry.best for entry in row.entries)


def test_runs_of_different_files_are_no_pairs():
    plain, fast = RunFile(runs=[run("none", 2.0)]), RunFile(runs=[run("eagle", 1.0)])
    assert summarise([plain, fast]).mean(PLACE, "eagle").speed_up is None
    both = RunFile(runs=[run("none", 3.0), run("eagle", 1.0)])
    assert summarise([plain, fast, both]).mean(PLACE, "eagle").speed_up == 3.0


def test_the_baseline_is_plain_decoding_unless_it_is_said():
    file = RunFile(runs=[run("transformers", 2.0), run("eagle", 1.0)])
    assert summarise([file]).baseline == "transformers"
    assert summarise([file], "eagle").mean(PLACE, "transformers").speed_up == 0.5
    assert summarise([RunFile(runs=[run("eagle")])]).baseline is None
    with pytest.raises(OptionError, match="'medusa'. Known: transformers, eagle"):
        summarise([file], "medusa")


def test_the_share_of_drafting_is_of_our_own_time_after_prefill():
    ours = run("eagle", 3.0, prefill_seconds=1.0, draft_seconds=0.5, verify_seconds=1.25)
    file = RunFile(runs=[run("none", 3.0), ours, run("transformers", 3.0)])
    summary = summarise([file])
    shares = {arm: summary.cells[Key("", 0.0, 1, "qa", arm)].draft_share for arm in ("eagle", "transformers")}
    assert shares == {"eagle": 0.25, "transformers": None}
    table = tables.full(summary, PLACE)
    assert [row[table.head.index("draft")] for row in table.rows] == ["", "25%", ""]


def test_in_how_many_steps_was_drafted():
    """Of our own loop, over all tasks: what it drafts in a tenth of its steps is not what it drafts in all."""
    seldom = {"verify_seconds": 1.0, "forwards": 400, "drafted_by_depth": (1, 1)}
    ours = [run("eagle", task=task, **seldom) for task in ("qa", "code")]
    plain = run("none", verify_seconds=1.0, forwards=9)
    always = run("medusa", verify_seconds=1.0, forwards=9, drafted_by_depth=(9, 3))
    summary = summarise([RunFile(runs=[plain, *ours, always, run("transformers")])])
    assert summary.drafted(PLACE, "eagle") == Share(2, 800)
    assert {row.arm: row.drafted for row in tables.short(summary, PLACE)} == {
        "none": ("0%",),
        "eagle": ("1%",),
        "medusa": ("100%",),
        "transformers": ("",),
    }
    assert tables.columns(summary, PLACE)[-1] == "drafted" and "drafted: the share of steps" in tables.reading(summary)
    assert Share(999, 1000).percent == "99%" and Share(1, 3).percent == "33%"
    unknown = summarise([RunFile(runs=[run("transformers")])])
    assert tables.columns(unknown, PLACE) == ["qa"] and "drafted" not in tables.reading(unknown)


def test_a_figure_says_whom_it_leaves_out():
    from foredraft.bench.report.figures import draw_figures, left_out

    steps = {"verify_seconds": 1.0, "forwards": 40}
    drafting = run("eagle", drafted_by_depth=(40, 20), accepted_by_depth=(30, 9), **steps)
    seldom = run("medusa", drafted_by_depth=(9,), **steps)
    alone = run("hydra", prompts=("of no pair",), drafted_by_depth=(40,), **steps)
    found = draw_figures(
        summarise([RunFile(runs=[run("none", **steps), drafting, seldom, alone, run("transformers")])])
    )
    said = {each.kind.name: left_out(each) for each in found}
    (depth,), (speed,), (time,) = said["depth"], said["speed-up"], said["time"]
    assert depth.startswith("Accepted by depth (greedy) leaves out medusa, transformers: needs 10 steps of an arm")
    assert " leaves out hydra: needs successful runs of a method and of the baseline" in speed
    assert " leaves out transformers: needs runs of foredraft's loop" in time


def test_few_numbers():
    assert spread([]) is None and spread([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    assert acceptance_length([run(forwards=0)]) is None
    assert acceptance_length([run(tokens=30), run(), run(tokens=5, forwards=0)]) == 2.0
    found = summarise([RunFile(runs=[run(), run("eagle"), run("eagle", task="code")])])
    assert found.mean(PLACE, "none") == Mean(None, None), "a mean of other tasks is no mean"
    nothing = summarise([RunFile(runs=[run(), run("eagle", seconds=0.0)])]).cell(PLACE, "qa", "eagle")
    assert nothing is not None and nothing.speed_up is None and nothing.tokens_per_second is None


def test_step_times_and_depths():
    chain = {"drafted_by_depth": (10, 10), "accepted_by_depth": (8, 4), "forwards": 10, "tokens": 22, "decoded": 22}
    fast = run("draft", 1.2, prefill_seconds=0.2, draft_seconds=0.4, verify_seconds=0.5, **chain)
    plain = run("none", 1.0, verify_seconds=0.9)
    assert by_depth([fast, plain]) == [Depth(8, 10), Depth(4, 10)]
    times = step_times([fast])
    assert times == (pytest.approx(0.04), pytest.approx(0.05), pytest.approx(0.01))
    batch = replace(fast, prompts=("1", "2"), forwards=20)
    assert step_times([batch]) == pytest.approx(times), "two rows of ten forwards are ten steps"


def test_markdown():
    assert tables.markdown(summarise([small()])).splitlines()[:6] == [
        "### greedy, batch 1",
        "",
        "| method | qa | code | mean |",
        "| --- | ---: | ---: | ---: |",
        "| none | 1.00x / 1.00 | 1.00x / 1.00 | 1.00x / 1.00 |",
        "| eagle | **2.50x** / 2.50 | **3.00x** / 2.50 | **2.75x** / 2.50 |",
    ]
    text = tables.markdown(summarise([small()]), complete=True)
    assert "| code | eagle | 3.00x (2.50-3.50) | 3 | 1.80x | 2.77x | 2.50 | 15.0 |  | 3/3 | 0 |" in text
    odd = tables.markdown(summarise([RunFile(runs=[run("a|b<script>", task="x\ny")])]))
    assert "| a\\|b&lt;script> |" in odd and "| x y |" in odd


def test_provenance_is_a_sentence():
    assert tables.provenance(PROVENANCE) == (
        "foredraft 0.1.0 at commit 0c3194c+, torch 2.13.0+cpu, transformers 5.23.0, python 3.11.7, "
        "1 thread on AMD EPYC, 2026-11-21. Command: foredraft bench --model sample --watch 8 "
        "Settings: model sample, max_new_tokens 128, batch_sizes [1, 4]."
    )
    assert tables.provenance({}) == "foredraft (version unknown)."


def saved(path: Path, file: RunFile) -> Path:
    lines = [{"kind": "provenance", **record} for record in file.provenance]
    lines += [each.line() for part in (file.runs, file.costs, file.watched) for each in part]
    return write_lines(path, lines)


def test_a_broken_line_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"kind": "provenance"}\n{"kind": "run"\n{"loss": 1}\n')
    assert main(["report", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("foredraft: ") and "broken.jsonl, line 2: invalid JSON" in told and told.count("\n") == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("report") / "runs.jsonl", made())


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("full", [False, True])
def test_the_tables_fit_the_screen(
    runs: Path, width: int, full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["report", str(runs), *(["--full"] if full else [])]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width and "…" not in out and "\x1b" not in out
    assert all(task in out for task in TASKS) and all(arm.split(":")[0] in out for arm in ARMS)
    assert ("errors" in out.split()) is full


def test_the_command_prints_markdown_and_json(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(runs), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out == tables.markdown(summarise([read_runs(runs)]))
    assert main(["report", str(runs), "--json", "--baseline", "transformers"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baseline"] == "transformers" and len(found["cells"]) == 12 * 6 * 2 * 2
    first = found["cells"][0]
    assert first["arm"] == "none" and set(first["speed_up"]) == {"median", "low", "high", "size"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--format", "png"], "--figures FOLDER"),
        (["--format", "gif", "--figures", "x"], "svg, png, pdf"),
        (["--json", "--markdown"], "--markdown or --json, not both"),
        (["--baseline", "nobody"], "No run has the arm 'nobody'. Known: none"),
        ([], "no measurements found"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    path = saved(tmp_path / "runs.jsonl", RunFile(provenance=[PROVENANCE], runs=[run()] if options else []))
    assert main(["report", str(path), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_figures_for_papers(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from foredraft.bench.report.figures import draw_figures, write_figures

    found = draw_figures(summarise([made(prompts=2)]))
    counts = {each.kind.name: len(each.panels) for each in found}
    per_setting, per_law = {"speed-up": 4, "time": 4}, {"depth": 2, "batch": 2}
    assert counts == {**per_setting, **per_law, "position": 3, "calibration": 1, "cost": 1, "loss": 2, "training": 1}
    some = [each for each in found if each.kind.name in ("training", "depth")]
    written = write_figures(some, tmp_path / "new")
    assert [path.name for path in written] == ["depth-sample-greedy.svg", "depth-sample-t-1.svg", "training.svg"]
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in written)
    (png,) = write_figures(some[1:], tmp_path, "png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_missing_data_are_named_with_the_option_that_makes_them():
    _, text = page_of(RunFile(runs=[run(), run("eagle", 0.5)]))
    assert '<figure id="speed-up">' in text and text.count("<figure") == 1
    absent = text.partition('id="absent"')[2]
    assert all(what in absent for what in ("--watch N", "--costs", "--batch-size")) and "log.jsonl" not in absent
    _, text = page_of(RunFile(training=made(prompts=1).training))
    assert "These files have no runs" not in text and "Missing figures" not in text and '<figure id="training">' in text


LOG = [{"run": "a", "step": n, "tokens": 8 * n, "loss": 4.0 / n} for n in (1, 2)]


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("speed-up", RunFile(runs=[run("eagle")])),
        ("speed-up", RunFile(runs=[run(), run("eagle", error="out of memory")])),
        ("batch", RunFile(runs=[run(), run("eagle"), run(batch=2)])),
        ("depth", RunFile(runs=[run(drafted_by_depth=(9,), accepted_by_depth=(5,), forwards=9)])),
        ("time", RunFile(runs=[run("transformers")])),
        ("position", RunFile(watched=[Watched("eagle", "qa", "1", 0.0, {"1": (2, 1)})])),
        ("calibration", RunFile(watched=[Watched("eagle", "qa", "1", 0.0, {"1": (2, 1)})])),
        ("cost", RunFile()),
        ("loss", RunFile(training=[{"run": "a", "tokens": 8, "resumed": True}])),
        ("training", RunFile(training=[{**LOG[0], "validation": {"loss": 1.0}}])),
    ],
)
def test_a_report_names_the_data_that_a_missing_figure_needs(kind: str, file: RunFile):
    pytest.importorskip("matplotlib")
    from foredraft.bench.report.figures import draw_figures, missing_figures

    file = file if file.training else replace(file, runs=file.runs or [run("none")])
    summary = summarise([file])
    found = [each for each in draw_figures(summary) if each.kind.name == kind]
    assert missing_figures(found, summary) == [f"{found[0].kind.title}: needs {found[0].kind.needs}."]


def test_the_log_of_a_training_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    from foredraft.bench.report.figures import draw_figures
    from foredraft.bench.report.figures_training import smoothed

    assert smoothed([(float(n), float(n)) for n in range(1, 91)])[-1] == (90.0, 89.0), "of the last three"
    assert smoothed([(1.0, 2.0), (2.0, 4.0)]) == [(1.0, 2.0), (2.0, 4.0)]
    for number, more in enumerate(([{"step": 1, "steps": 2, "tokens": 8, "resumed": True}], [])):
        held = {"step": 2, "tokens": 16, "validation": {"loss": 2.5, "acceptance_length": 1.5}}
        lines = [LOG[0], *more, LOG[1], held]
        write_lines(tmp_path / str(number) / "head" / "log.jsonl", lines)
    paths = [str(tmp_path / number / "head" / "log.jsonl") for number in "01"]
    found = summarise([read_runs(path) for path in paths])
    table = tables.training(found)
    assert table is not None and table.rows == (
        ("head", "2 of 2", "16", "2.000", "2.500", "1.50", "once"),
        ("head (2)", "2", "16", "2.000", "2.500", "1.50", ""),
    )
    (losses,) = (each.panels for each in draw_figures(found) if each.kind.name == "loss")
    assert [panel.label for panel in losses] == ["head", "head (2)"]
    drawings = [{tuple(line.get_ydata()) for line in panel.figure.axes[0].lines} for panel in losses]
    assert {(4.0, 2.0), (2.5,)} < drawings[0]
    assert [len(panel.figure.axes[0].lines) for panel in losses] == [4, 3], "one has been resumed"
    assert main(["report", *paths, "--figures", str(tmp_path / "figures")]) == 0
    said = capsys.readouterr()
    assert "Training" in said.out and "once" in said.out and "Wrote 3 figures to " in said.err
    assert "Missing figure" not in said.err, "a training log has no figures of a benchmark"
    assert main(["report", *paths, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["training"]["head"]) == 4


def test_everything_from_a_file_is_escaped():
    bad = '<script>alert("1")</script>&$x_$|"'
    model = {"settings": {"model": bad, bad: [bad]}, "command": bad, "commit": bad}
    units = [{"prompts": (str(n),), "task": bad, "model": bad, "batch": batch} for n in range(3) for batch in (1, 2)]
    parts = {"draft_seconds": 0.1, "verify_seconds": 0.3, "drafted_by_depth": (10,), "accepted_by_depth": (5,)}
    both: list[Run] = [run(arm, outputs=said(bad), **unit, **parts) for unit in units for arm in ("none", bad)]
    watched = [Watched(bad, bad, bad, 0.0, {"1": (9, 5)}, {"50": (9, 5)}, model=bad) for _ in range(3)]
    lines = [{"run": bad, "tokens": 2**n, "validation": {"acceptance_length": 1.5}} for n in range(9)]
    file = RunFile(provenance=[model], runs=both, watched=watched, training=lines)
    summary, text = page_of(file)
    assert "<script" not in text and summary.best(summary.settings[0]) is None
    assert text.count("<figure") == 7, "all but the cost of a forward and the loss"


def test_the_page_needs_nothing_else():
    _, text = page_of(made(prompts=1, temperatures=(0.0,)))
    assert text.startswith("<!doctype html>") and "<title>foredraft report: sample</title>" in text
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and "<script" not in text
    links = set(re.findall(r'(?:src|href)="([^"#][^"]*)"', text))
    assert links == {"data:,"}
    assert "#010203" not in text and "currentColor" in text
