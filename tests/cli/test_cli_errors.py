"""Bad input: one sentence on stderr, exit status 2, nothing on stdout."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import tokenizers
import torch
from cli_cases import BUNDLED, PROMPT, Run
from safetensors.torch import load_file, save_file

from foredraft.core.errors import OptionError

CASES = {
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
    "no such prompt file": (("--prompt-file", "no/such/file"), "no/such/file"),
    "prompt file is a folder": (("--prompt-file", "."), "directory"),
    "not text": (("caf\udce9",), "UTF-8"),
    "unknown drafter": (("-d", "prompt_lokup", PROMPT), "Did you mean prompt_lookup?"),
    "unknown verifier": (("--verifier", "magic", PROMPT), "target_sampling"),
    "unknown dtype": (("--dtype", "float3", PROMPT), "float32"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_status_2(run: Run, model: Path, case: str):
    arguments, part = CASES[case]
    ended = run("generate", "-m", model, *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert part in ended.sentence


def test_the_command_itself(run: Run):
    assert "No such command 'generat'" in run("generat").sentence
    assert "--verbose" in run("--verbose").sentence
    assert "--alpha" in run("theory").sentence
    assert run("theory", "--alpha", "2", "--cost", "0.1").status == 2


def test_processes_that_would_all_run_the_whole_command(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = "add --tensor-parallel 2, or leave torchrun out"
    for arguments in (("generate", PROMPT), ("generate", "--tensor-parallel", "1", PROMPT), ("bench",)):
        assert shared in run(*arguments).sentence
    for command in ("tune", "skip"):
        assert "whole command: leave torchrun out" in run(command).sentence
    assert "processes" not in run("generate", "--tensor-parallel", "2", "--dtype", "float3", PROMPT).sentence
    assert "No such option" in run("train", "eagle3", "--alpha").sentence, "training shares its work"


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
    ended = run("generate", "-m", tmp_path / "absent", PROMPT)
    assert (ended.status, ended.out) == (2, "") and "no model folder" in ended.sentence
    (tmp_path / "config.json").write_text("{")
    assert run("generate", "-m", tmp_path, PROMPT).sentence


def test_a_port_in_use_is_refused_before_the_model_is_loaded(run: Run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("serve", "--port", str(port), "-m", "./absent")
    assert (ended.status, ended.out) == (2, "")
    assert (
        f"Cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port." in ended.sentence
    )


def test_a_model_of_nan(run: Run, model: Path, tmp_path: Path):
    folder = tmp_path / "nan"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ended = run("generate", "-m", folder, PROMPT)
    assert (ended.status, ended.out) == (2, "")
    assert ended.sentence


def test_a_drafter_with_another_vocabulary(run: Run, model: Path, tmp_path: Path):
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    other = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    described = json.loads(other.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    ended = run("generate", "-m", model, "-d", f"draft_model:{folder}", PROMPT)
    assert (ended.status, ended.out) == (2, "")
    assert "another tokenizer" in ended.sentence and "prompt_lookup" in ended.sentence


def test_a_model_without_a_chat_template(run: Run, model: Path, tmp_path: Path):
    folder = tmp_path / "plain"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    assert "chat template" in run("generate", "-m", folder, "--chat", PROMPT).sentence
    assert "chat template" in run("chat", "-m", folder, stdin="hello\n").sentence


def test_debugging_raises(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREDRAFT_DEBUG", "1")
    with pytest.raises(OptionError):
        run("generate", "-m", model, "--max-new-tokens", "0", PROMPT)
