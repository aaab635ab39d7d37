"""benchmarks/engines.py: peers' answers, the choice of their modes on other chats, and arms that do not draft."""

import argparse
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

import foredraft

PEERS = Path(__file__).parent.parent / "benchmarks" / "peers"
MODEL = Path(foredraft.__path__[0]) / "models" / "sample-16m"
TIMINGS = {"prompt_ms": 250.0, "predicted_n": 5, "predicted_ms": 100.0, "predicted_per_second": 50.0}
STUB = """
import json, sys
options = json.loads(sys.argv[1])
print(json.dumps({"load_seconds": 0.1, "pid": 1}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    output = list(range(request["tokens"]))
    answer = {"output": output, "first_seconds": 1, "first_tokens": 1, "seconds": 2, **options["told"]}
    print(json.dumps(answer), flush=True)
"""


def run_of(arm: str, task: str, number: int, speed: float, threads: int = 1, **more: Any) -> dict[str, Any]:
    run = {"arm": arm, "threads": threads, "task": task, "prompt": number, "output": [0] * 11, "first_tokens": 1}
    return {**run, "prompt_tokens": 5, "first_seconds": 1, "seconds": 1 + 10 / speed, **more}


@pytest.fixture
def server(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    script("engine_arms")
    monkeypatch.syspath_prepend(PEERS)
    return script("llama_server_worker")


def test_an_answer_of_llama_cpps_server(server: ModuleType):
    found = server.parsed({"tokens": [3, 1, 4, 1, 5], "timings": {**TIMINGS, "draft_n": 6, "draft_n_accepted": 2}})
    assert (found.output, found.drafted, found.accepted) == ([3, 1, 4, 1, 5], 6, 2)
    assert (found.first_seconds, found.seconds) == pytest.approx((0.25, 0.35))
    plain = server.parsed({"tokens": [3], "timings": TIMINGS})
    assert (plain.drafted, plain.accepted) == (0, 0), "the server names no drafts where there were none"
    asked = server.request([7, 8], 9)
    assert asked["prompt"] == [7, 8] and asked["n_predict"] == 9 and not asked["cache_prompt"] and asked["ignore_eos"]
    words = server.command({"server": "S", "model": "M", "threads": 2, "arguments": ["--spec-type", "ngram-mod"]}, 81)
    assert words[0] == "S" and words[words.index("-t") + 1] == words[words.index("-tb") + 1] == "2"
    assert words[-2:] == ["--spec-type", "ngram-mod"] and words[words.index("--port") + 1] == "81"


def test_llama_cpps_modes(script: Callable[[str], ModuleType], tmp_path: Path):
    arms = script("engine_arms")
    types = {"ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"}
    modes = arms.llama_modes()
    assert modes["plain"] == [] and types < modes.keys() and not any("draft" in mode for mode in modes)
    assert {words[1] for mode, words in modes.items() if words} == types
    short = modes["ngram-mod-short"]
    assert short[short.index("--spec-ngram-mod-n-match") + 1] == "8"
    more = arms.llama_modes("folder/draft.gguf", tmp_path / "head.gguf")
    assert more.keys() - modes.keys() == {
        "draft-1",
        "draft-2",
        "draft-3",
        "draft-5",
        "draft-sure",
        "eagle3-2",
        "eagle3-4",
    }
    assert more["draft-3"] == ["-md", "folder/draft.gguf", "--spec-type", "draft-simple", "--spec-draft-n-max", "3"]
    assert arms.llama_modes("a/folder").keys() == modes.keys(), "llama.cpp cannot read folders"
    assert arms.Arm("a", [], {"arguments": more["draft-3"]}).told.startswith("-md draft.gguf --spec-type")


def test_a_mode_is_chosen_on_other_chats_for_each_task(script: Callable[[str], ModuleType]):
    tables = script("engine_tables")
    peer = "llama.cpp Q4_K_M"
    speeds = {  # on the other chats, on the measured ones
        f"{peer} plain": ({"a": 20, "edit": 20}, {"edit": 21, "humaneval": 21}),
        f"{peer} ngram-mod": ({"edit": 40, "humaneval": 10}, {"edit": 30, "humaneval": 50}),
        f"{peer} draft-3": ({"edit": 30, "humaneval": 35}, {"edit": 60, "humaneval": 42}),
        f"{peer} ngram-cache": ({"edit": 90, "humaneval": 90}, {"edit": 99, "humaneval": 99}),
    }
    lines: dict[str, list[dict]] = {"choice": [], "run": []}
    for arm, (before, measured) in speeds.items():
        told = {} if arm.endswith("plain") else {"accepted": 0 if arm.endswith("cache") else 3}
        for kind, own in (("choice", before), ("run", measured)):
            lines[kind] += [
                run_of(arm, task, number, speed, **told) for task, speed in own.items() for number in (0, 1)
            ]
    lines["run"] += [run_of("foredraft Q4_K_M plain", task, n, 42) for task in ("edit", "humaneval") for n in (0, 1)]
    lines["run"] += [run_of("foredraft Q4_K_M default", task, n, 84) for task in ("edit", "humaneval") for n in (0, 1)]
    picked = tables.chosen(lines, 1)
    assert picked[peer, "edit"] == f"{peer} ngram-mod" and picked[peer, "humaneval"] == f"{peer} draft-3"
    assert tables.chosen(lines, 2) == {}
    default = next(each for each in tables.comparisons(lines) if each.theirs == f"{peer} best")
    assert default.ours == "foredraft Q4_K_M default"
    assert default.by_task == {"edit": pytest.approx([2.8] * 2), "humaneval": pytest.approx([2.0] * 2)}
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in tables.by_kind(lines).splitlines()]
    shown = {row[0]: row[1:] for row in rows}
    assert shown["Q4_K_M, 1 thread"] == ["edits", "code"]
    assert shown["best mode of llama.cpp Q4_K_M"] == ["ngram-mod", "draft-3"]
    assert shown["foredraft default over llama.cpp best"] == ["2.80 (2.80 to 2.80)", "2.00 (2.00 to 2.00)"]
    assert shown["foredraft plain over llama.cpp plain"] == ["2.00 (2.00 to 2.00)"] * 2
    assert shown["llama.cpp best"] == ["30.00 (30.00 to 30.00)", "42.00 (42.00 to 42.00)"]
    assert "foredraft plain over llama.cpp best" not in shown
    assert not any("ngram-cache" in name for name in shown), "it accepted nothing"
    assert tables.by_kind({"run": lines["run"]}) == "", "nothing was chosen"


def test_tokens_per_forward_where_texts_are_equal(script: Callable[[str], ModuleType]):
    accepted = {"foredraft Q4_0 eagle3:head,nodes=4": (6, 1, 6), "llama.cpp Q4_0 eagle3-4": (6, 7, 0)}
    runs = [
        run_of(arm, "edit", number, 5, accepted=count) | {"output": [number, number == 2 and arm[0] == "f"] + [7] * 10}
        for arm, own in accepted.items()
        for number, count in enumerate(own)
    ]
    runs.append(run_of("llama.cpp Q4_0 eagle3-4", "sum", 0, 5, accepted=9))
    head, _, ours, theirs = (
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in script("engine_tables").heads({"run": runs}).splitlines()
    )
    assert head == ["tokens per forward", "edits", "all", "2 of 3 equal texts"]
    assert ours[0] == "foredraft Q4_0 eagle3:head" and theirs[0] == "llama.cpp Q4_0 eagle3-4"
    assert ours[1].startswith("1.57 (") and theirs[1].startswith("1.57 ("), "36 tokens, 23 forwards"
    assert ours[3].startswith("1.41 (") and theirs[3].startswith("2.18 ("), "24 tokens, 17 and 11 forwards"


@pytest.mark.parametrize(
    ("arm", "told", "found"),
    [
        ("llama.cpp Q4_0 ngram-mod", {"drafted": 0, "accepted": 0}, True),
        ("llama.cpp Q4_0 ngram-mod", {"drafted": 9, "accepted": 0}, False),
        ("transformers float32 lookup", {"accepted": 0}, False),  # it may have drafted; see the tables
        ("openvino Q4_1 lookup", {}, False),  # not told
        ("foredraft Q4_0 default", {"accepted": 0}, False),  # the policy may decide so
        ("llama.cpp Q4_0 plain", {"drafted": 0}, False),
    ],
)
def test_whether_an_arm_is_idle(script: Callable[[str], ModuleType], arm: str, told: dict[str, int], found: bool):
    assert script("engine_tables").idle(arm, told) is found


def test_a_peer_that_drafts_nothing_is_refused(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    engines = script("engines")
    stub, out = tmp_path / "stub.py", tmp_path / "out.jsonl"
    stub.write_text(STUB)
    told = {"plain": {}, "good": {"drafted": 4, "accepted": 1}, "idle": {"drafted": 0, "accepted": 0}}
    arms = [
        engines.Arm(f"llama.cpp Q4_0 {mode}", [sys.executable, str(stub)], {"threads": 1, "told": own})
        for mode, own in told.items()
    ]
    prompts = [engines.Prompt(task, [1, 2], number) for task in ("edit", "sum") for number in (0, 1)]
    args = argparse.Namespace(tokens=6, threads=[1], wait=False, few=[])

    def measured(modes: dict[tuple[str, str], str]) -> list[dict]:
        with out.open("a") as file:
            found = engines.read(out)
            refused = engines.refused(found, 1)
            engines.turn(
                engines.Run(args, 1, file, engines.done(out), modes=modes, refused=refused), arms, prompts, [1]
            )
        return engines.read(out)["run"]

    modes = {("llama.cpp Q4_0", "edit"): "llama.cpp Q4_0 good", ("llama.cpp Q4_0", "sum"): "llama.cpp Q4_0 plain"}
    runs = [(run["arm"], run["task"]) for run in measured(modes)]
    assert runs.count(("llama.cpp Q4_0 good", "edit")) == 2 and ("llama.cpp Q4_0 good", "sum") not in runs
    assert len(runs) == 6, "plain decoding runs on all"
    again = engines.read(out)
    assert len(again["check"]) == 1 and "llama.cpp Q4_0 idle" not in {line["arm"] for line in again["check"]}
    everything = measured({})
    assert len(everything) == 8 and {run["arm"].split()[-1] for run in everything} == {"plain", "good"}
    assert "Skipped llama.cpp Q4_0 idle: it drafts nothing" in capsys.readouterr().out
    checks = engines.read(out)["check"]
    assert [(line["arm"].split()[-1], line["drafted"]) for line in checks] == [("good", 4), ("idle", 0)]
    fewer = argparse.Namespace(**{**vars(args), "few": ["llama.cpp * good @1"]})
    for kind, runs in (("run", False), ("choice", True)):
        assert engines.Run(fewer, 1, sys.stdout, set(), kind).runs("llama.cpp Q4_0 good", "edit", 1) is runs
    before = out.read_text()
    assert len(measured({})) == 8 and out.read_text() == before, "nothing is run or checked again"


def test_types_of_files(script: Callable[[str], ModuleType]):
    arms = script("engine_arms")
    assert arms.type_of(Path("SmolLM2.Q4_0.gguf")) == "Q4_0"
    assert arms.type_of(Path("random.1b-Q4_0.gguf")) == "1b-Q4_0"


def test_the_archive_is_checked_and_unpacked_whole(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    llama = script("peers.llama_cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(llama.subprocess, "run", lambda *_, **__: argparse.Namespace(returncode=0))
    archive = llama.folder() / "llama_cpp_python-0.3.36.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as file:
        info = tarfile.TarInfo("llama_cpp_python-0.3.36/vendor/llama.cpp/CMakeLists.txt")
        info.size = 4
        file.addfile(info, io.BytesIO(b"text"))
    with pytest.raises(SystemExit, match="checksum"):
        llama.unpacked()
    assert not llama.source().exists()
    monkeypatch.setattr(llama, "SHA256", llama._digest(archive))
    assert (llama.unpacked() / "CMakeLists.txt").read_bytes() == b"text" and llama.programs() is None
    for name in llama.PROGRAMS:
        (llama.source() / "build" / "bin" / name).parent.mkdir(parents=True, exist_ok=True)
        (llama.source() / "build" / "bin" / name).touch()
    assert llama.programs() == llama.source() / "build" / "bin"


def test_llama_cpps_server_drafts_and_writes_the_text_of_plain_decoding(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    if script("peers.llama_cpp").programs() is None:
        pytest.skip("llama.cpp is not built: python benchmarks/peers/llama_cpp.py")
    model, tokenizer = (
        auto.from_pretrained(MODEL) for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    file, out = tmp_path / "sample.F32.gguf", tmp_path / "out.jsonl"
    script("write_gguf").write(file, model.float(), tokenizer, kind="F32", split="smollm")
    words = ["engines.py", "--model", str(MODEL), "--prompt-files", str(tmp_path / "none"), "--out", str(out)]
    words += ["--gguf", str(file), "--tokens", "24", "--prompts", "1", "--scored", "0"]
    words += ["--only", "llama.cpp * plain @1", "* ngram-cache @1"]
    monkeypatch.setattr(sys, "argv", words)
    script("engines").main()
    lines = script("kit.reading").read(out)
    texts = {(run["arm"].split()[-1], run["task"]): run["output"] for run in lines["run"] if "llama" in run["arm"]}
    assert all(texts["ngram-cache", task] == text for (mode, task), text in texts.items() if mode == "plain")
    (check,) = lines["check"]
    assert check["drafted"] > 0 and check["arguments"] == "--spec-type ngram-cache"
    assert all(len(text) == 24 for text in texts.values()) and len(texts) == 12
    assert all(line["mebibytes"] > 10 for line in lines["memory"]), "of the server, not of what waits for it"
