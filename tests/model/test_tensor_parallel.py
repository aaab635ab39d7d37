"""Targets of which each process runs a part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import foredraft
import tiny
from foredraft.core.errors import DrafterError
from foredraft.model.load import load_model

BOTH = """
import sys
import torch
import foredraft, random_heads, tiny
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.model.hf import acquire
options = {"model_options": {"tp_plan": "auto"}, "kv_cache_memory_bytes": 1 << 20}
prompts = tiny.prompts((5, 17))
constant = "num_assistant_tokens_schedule=constant"
for drafter in ("none", "prompt_lookup," + constant, f"draft_model:{sys.argv[2]}," + constant):
    with foredraft.load(sys.argv[1], drafter, device="cpu", **options) as g:
        target = g.engine.target
        assert target.ranks == 2 and target.packed_layers == 0
        print([each.tokens for each in g.generate(prompts, max_new_tokens=16)])
        head = random_heads.eagle3(target)
        with foredraft.load(g, Eagle3Drafter(Options(nodes=8, depth=3), head)) as drafting:
            print([each.tokens for each in drafting.generate(prompts, max_new_tokens=16)])
"""
"""Prints the outputs of two processes."""


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path: Path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    tiny.build("llama", num_hidden_layers=3).save_pretrained(tmp_path / "target")
    tiny.build("llama", seed=5).save_pretrained(tmp_path / "draft")
    (tmp_path / "both.py").write_text(BOTH)
    paths = os.pathsep.join(map(str, (Path(foredraft.__path__[0]).parent, Path(__file__).parent.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "both.py"), str(tmp_path / "target"), str(tmp_path / "draft")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode and "Address" in done.stderr:
        pytest.skip(f"processes cannot meet here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    with foredraft.load(str(tmp_path / "target"), "none", device="cpu") as g:
        expected = str([each.tokens for each in g.generate(tiny.prompts((5, 17)), max_new_tokens=16)])
    assert done.stdout.count(expected) == done.stdout.count("[[") == 12, done.stdout


def test_processes_that_would_draft_unlike_each_other_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny.build("llama")
    monkeypatch.setattr(type(model), "tp_size", 2)
    with pytest.raises(DrafterError, match="2 processes.*prompt_lookup.*num_assistant_tokens_schedule=constant"):
        foredraft.load(model, "prompt_lookup")
    foredraft.load(model, "prompt_lookup,num_assistant_tokens_schedule=constant").close()


@pytest.mark.parametrize("option", ["tp_plan", "distributed_config", "device_map"])
def test_weights_are_placed_once(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = {}

    class Stop(Exception):
        """Nothing is loaded."""

    def from_pretrained(path: str, **options: object) -> None:
        given.update(options)
        raise Stop

    tiny.build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("foredraft.model.load.AutoModelForCausalLM.from_pretrained", from_pretrained)
    for options in ({}, {option: "auto"}):
        given.clear()
        with pytest.raises(foredraft.ForedraftError, match="Stop"):
            load_model(str(tmp_path), device="meta", options=options)
        places = {key: value for key, value in given.items() if key in (option, "device_map")}
        assert places == (options or {"device_map": torch.device("meta")})
