"""Targets of which each process runs a part."""

from pathlib import Path

import pytest
import torch

import foredraft
import tiny
from foredraft.core.errors import DrafterError
from foredraft.model.load import load_model
from processes import two_processes

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
    tiny.build("llama", num_hidden_layers=3).save_pretrained(tmp_path / "target")
    tiny.build("llama", seed=5).save_pretrained(tmp_path / "draft")
    (tmp_path / "both.py").write_text(BOTH)
    folders = (tmp_path / "target", tmp_path / "draft")
    printed = two_processes(tmp_path / "both.py", *folders, folder=Path(__file__).parent)
    with foredraft.load(str(tmp_path / "target"), "none", device="cpu") as g:
        expected = str([each.tokens for each in g.generate(tiny.prompts((5, 17)), max_new_tokens=16)])
    assert printed.count(expected) == printed.count("[[") == 12, printed


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
