"""Bad input: one sentence on stderr, exit status 2, nothing on stdout, no file."""

import gc
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from cli_cases import PROMPT, Run
from safetensors.torch import load_file, save_file

from foredraft.core.errors import OptionError

CASES: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "generate": {
        "no tokens wanted": (("--max-new-tokens", "0", PROMPT), "max_new_tokens"),
        "empty prompt": (("",), "empty"),
        "empty pipe": ((), "empty"),
        "too long": (("word " * 5000,), "4096"),
        "unknown option": (("--max-tokens", "5", PROMPT), "--max-tokens"),
        "option without a value": ((PROMPT, "--seed"), "--seed"),
        "not a number": (("--top-k", "many", PROMPT), "--top-k"),
        "out of range": (("--top-p", "1.5", PROMPT), "top_p"),
        "no room": (("--kv-cache-memory-bytes", "9", PROMPT), "Raise kv_cache_memory_bytes"),
        "no rows": (("--max-batch-size", "0", PROMPT), "max_batch_size must be a whole number, 1 or more"),
        "bad ids": (("--bad-words-ids", "1,x", PROMPT), "--bad-words-ids"),
        "no texts wanted": (("--num-return-sequences", "0", PROMPT), "--num-return-sequences must be 1 or more"),
        "logprobs without json": (("--logprobs", "1", PROMPT), "--json"),
        "two prompts": ((PROMPT, "--prompt-file", "x"), "Two prompts were given"),
        "two words": ((PROMPT, "more"), "more"),
        "model and prompt": (("sample", PROMPT), "The model is an option: -m MODEL."),
        "no such prompt file": (("--prompt-file", "no/such/file"), "no/such/file"),
        "prompt file is a folder": (("--prompt-file", "."), "directory"),
        "not text": (("caf\udce9",), "UTF-8"),
        "unknown drafter": (("-d", "prompt_lokup", PROMPT), "Did you mean prompt_lookup?"),
        "unknown verifier": (("--verifier", "magic", PROMPT), "target_sampling"),
        "unknown dtype": (("--dtype", "float3", PROMPT), "float32"),
    },
    "bench": {
        "below zero": (("--temperature", "-1"), "temperature must be 0 (greedy) or more"),
        "no texts at once": (("--batch-size", "1", "--batch-size", "0"), "--batch-size must be 1 or more"),
        "no repeats": (("--repeats", "0"), "repeats 1 or more"),
        "no prompts wanted": (("--count", "-1"), "--count must be 0 or more"),
        "nothing watched": (("--watch", "-1"), "--watch must be 0 or more"),
        "answers without texts": (("--no-texts", "--spec-bench", "answers"), "remove --no-texts"),
        "an arm twice": (("-d", "none", "-d", "none"), "Two arms are named 'none'"),
        "no arm of ours": (("-d", "transformers"), "must use foredraft's loop: add --drafter none"),
        "no such prompts": (("--prompts", "nowhere.jsonl"), "Cannot read the prompt file nowhere.jsonl"),
        "not a number": (("--max-new-tokens", "many"), "'--max-new-tokens'"),
        "unknown option": (("--colour", "red"), "--colour"),
        "a model": (("sample",), "The model is an option: -m MODEL."),
    },
    "serve": {"a model": (("sample",), "The model is an option: -m MODEL.")},
    "check": {
        "nothing sampled": (("--temperature", "0"), "The statistical test needs --temperature above 0"),
        "no prompts wanted": (("--count", "-1"), "--count must be 0 or more"),
        "no such prompts": (("--prompts", "nowhere.jsonl"), "Cannot read the prompt file nowhere.jsonl"),
    },
    "tune": {
        "no prompts wanted": (("--count", "-1"), "--count must be 0 or more"),
        "nothing verified": (("--verify", "0"), "--verify and --batch-size must be 1 or more"),
        "no texts at once": (("--batch-size", "4", "--batch-size", "0"), "must be 1 or more"),
        "no tokens": (("--max-new-tokens", "0"), "max_new_tokens"),
        "not a number": (("--batch-size", "all"), "--batch-size"),
        "another suffix": (("--out", "tuned.yaml"), "must end in .json"),
        "no such prompts": (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        "an unknown method": (("-d", "prompt_lokup"), "Did you mean prompt_lookup?"),
        "plain decoding": (("-d", "none"), "none is plain decoding"),
        "a word too many": (("prompt_lookup",), "prompt_lookup"),
    },
    "skip": {
        "no prompts wanted": (("--count", "-1"), "--count must be 0 or more"),
        "no drafts": (("--longest", "0"), "--longest must be 1 or more"),
        "no trials": (("--trials", "0"), "trials must be 1 or more"),
        "too short answers": (("--max-new-tokens", "4", "--longest", "5"), "No answer has 5 tokens"),
        "no such prompts": (("--prompts", "absent.jsonl"), "Cannot read the prompt file"),
    },
}


@pytest.mark.parametrize(("command", "case"), [(command, case) for command in CASES for case in CASES[command]])
def test_one_sentence_status_2_and_no_file(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, case: str
):
    monkeypatch.chdir(tmp_path)
    arguments, part = CASES[command][case]
    assert part in run(command, "-m", model, *arguments).refusal
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--out", "FILE"),
        ("bench", "--spec-bench", "FILE/answers"),
        ("tune", "--out", "FILE.json"),
        ("skip", "--out", "FILE"),
        ("generate", "--record", "FILE", PROMPT),
        ("batch", "absent.jsonl", "FILE"),
        ("report", "absent.jsonl", "--html", "FILE"),
        ("report", "absent.jsonl", "--figures", "FILE/figures"),
        ("viewer", "absent.jsonl", "--html", "FILE"),
        ("theory", "--run", "absent.jsonl", "--plot", "FILE"),
        ("export", "absent", "--to", "sglang", "--out", "FILE/head"),
        ("quantize", "absent", "FILE/model"),
        ("train", "eagle3", "--data", "absent.jsonl", "--out", "FILE/run"),
    ],
)
def test_paths_are_tried_before_anything_runs(run: Run, tmp_path: Path, arguments: tuple[str, ...]):
    """Neither the model nor the files to read are there: what cannot be written is said first."""
    folder = tmp_path / "folder.json"
    (folder if arguments[-1].endswith(("FILE", ".json", PROMPT)) else tmp_path).mkdir(exist_ok=True)
    taken = folder if folder.exists() else tmp_path / "file"
    if not folder.exists():
        taken.touch()
    given = [word.replace("FILE.json", str(taken)).replace("FILE", str(taken)) for word in arguments]
    model = ("-m", "./absent") if arguments[0] in ("bench", "tune", "skip", "generate", "batch", "train") else ()
    assert f"Cannot write {'to the folder ' if taken.name == 'file' else ''}{taken}" in run(*given, *model).refusal
    assert [path.name for path in tmp_path.rglob("*")] == [taken.name]


def test_the_command_itself(run: Run):
    assert "No such command 'generat'. Did you mean generate?" in run("generat").refusal
    assert "Did you mean quantize?" in run("quant").refusal and "Did you mean" not in run("zzz").refusal
    assert "No such option: --batch. Did you mean --max-batch-size? (See" in run("generate", "--batch", "3").refusal
    assert "--verbose" in run("--verbose").refusal
    assert "--alpha" in run("theory").refusal
    assert run("theory", "--alpha", "2", "--cost", "0.1").refusal


def test_processes_that_would_all_run_the_whole_command(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = "add --tensor-parallel 2, or leave torchrun out"
    for arguments in (("generate", PROMPT), ("generate", "--tensor-parallel", "1", PROMPT), ("bench",)):
        assert shared in run(*arguments).refusal
    for command in ("tune", "skip"):
        assert "whole command: leave torchrun out" in run(command).refusal
    assert "processes" not in run("generate", "--tensor-parallel", "2", "--dtype", "float3", PROMPT).refusal
    assert "No such option" in run("train", "eagle3", "--alpha").refusal, "training shares its work"


def test_commands_without_a_model_run_in_each_process(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("methods", "eagle3").status == 0
    assert run("theory", "--alpha", "0.5", "--cost", "0.1").status == 0
    monkeypatch.setenv("_FOREDRAFT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "foredraft generate -d eagle")
    monkeypatch.setenv("COMP_CWORD", "3")
    with pytest.raises(SystemExit):
        run()
    assert "eagle3" in capsys.readouterr().out


def test_models_that_are_not_there_or_broken(run: Run, tmp_path: Path):
    assert "no model folder" in run("generate", "-m", tmp_path / "absent", PROMPT).refusal
    (tmp_path / "config.json").write_text("{")
    assert run("generate", "-m", tmp_path, PROMPT).refusal


def test_a_port_in_use_is_refused_before_the_model_is_loaded(run: Run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = run("serve", "--port", str(port), "-m", "./absent").refusal
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port." in said


def test_a_server_that_does_not_start_leaves_no_objects_frozen(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    """Native code lists those on stderr at the end."""
    thresholds, handler = gc.get_threshold(), signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("FOREDRAFT_API_KEY", " , ")
    monkeypatch.setattr("foredraft.serve.logs.log_to_stderr", lambda: None)
    try:
        assert "holds no key" in run("serve", "-m", model, "--port", "0").refusal
        assert gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*thresholds)
        signal.signal(signal.SIGINT, handler)
        gc.unfreeze()


def test_a_model_of_nan(run: Run, model: Path, tmp_path: Path):
    folder = tmp_path / "nan"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert run("generate", "-m", folder, PROMPT).refusal


def test_a_model_without_a_chat_template(run: Run, model: Path, tmp_path: Path):
    folder = tmp_path / "plain"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    assert "chat template" in run("generate", "-m", folder, "--chat", PROMPT).refusal
    assert "chat template" in run("chat", "-m", folder, stdin="hello\n").refusal


def test_debugging_raises(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREDRAFT_DEBUG", "1")
    with pytest.raises(OptionError):
        run("generate", "-m", model, "--max-new-tokens", "0", PROMPT)
