"""Targets of which each process runs a part."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foredraft
import laws
import random_heads
import tiny
from foredraft.core.drafter import Plan
from foredraft.core.errors import DrafterError, OptionError
from foredraft.drafters.prompt_lookup import Options, PromptLookup
from foredraft.engine.generator import DrafterInfo, Generator
from foredraft.engine.parallel import ParallelEngine, _Digests
from foredraft.engine.policy import Constant
from foredraft.heads.formats import save_head
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.support import why_eager
from foredraft.model.loading.load import load_model
from processes import environment, two_processes

DRAFTERS = ("none", "prompt_lookup", "draft_model:{draft}", "eagle3:{eagle3}", "medusa:{medusa}")
LEAD = """
import json, sys, time
import foredraft
from foredraft.engine.policy import throughput
rank, asked = int(__import__("os").environ["RANK"]), json.loads(sys.argv[1])
plan = throughput.Throughput.plan
def late(*args):
    time.sleep(0.003 * rank)  # the ranks' clocks differ
    return plan(*args)
throughput.Throughput.plan = late
generators = foredraft.load_many(asked["model"], asked["drafters"], device="cpu", tensor_parallel=2)
assert rank == 0, "the others follow"
assert generators[0].engine.target.ranks == 2
prompts, found = asked["prompts"], []
for g in generators:
    greedy = [each.tokens for each in g.generate(prompts, max_new_tokens=24)]
    stream = g.stream(prompts[0], max_new_tokens=64)
    next(stream)
    stream.close()  # a request that ends early leaves all ranks
    seeded = [each.tokens for each in g.generate(prompts, max_new_tokens=12, temperature=1.0, seed=5)]
    drafted = g.generate(prompts[1], max_new_tokens=24).stats.drafted
    found.append({"greedy": greedy, "seeded": seeded, "drafted": drafted})
for g in generators:
    g.close()
print(json.dumps(found))
"""
"""Runs in two processes and prints the outputs of each drafter, once."""


def printed(tmp_path: Path, script: str, *arguments: Path | str) -> Any:
    """The last line that a script prints in two processes."""
    (tmp_path / "script.py").write_text(script)
    lines = two_processes(tmp_path / "script.py", *arguments, folder=Path(__file__).parent).splitlines()
    return json.loads(lines[-1])


def compare(tmp_path: Path, model: str, drafters: list[str], prompts: list[list[int]]) -> None:
    found = printed(tmp_path, LEAD, json.dumps({"model": model, "drafters": drafters, "prompts": prompts}))
    with foredraft.load(model, "none", device="cpu") as g:
        wanted = [each.tokens for each in g.generate(prompts, max_new_tokens=24)]
        seeded = [each.tokens for each in g.generate(prompts, max_new_tokens=12, temperature=1.0, seed=5)]
    for drafter, mine in zip(drafters, found, strict=True):
        assert mine["greedy"] == wanted, drafter
        picked = drafter.partition(":")[0] in ("none", "prompt_lookup", "eagle3", "medusa")
        assert not picked or mine["seeded"] == seeded, drafter
        assert drafter in ("none", "prompt_lookup") or mine["drafted"] > 0, drafter


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_two_processes_write_what_one_writes(name: str, tmp_path: Path):
    raw = tiny.build(name, num_hidden_layers=4)
    raw.save_pretrained(tmp_path / "target")
    tiny.build("llama", seed=5).save_pretrained(tmp_path / "draft")
    target = CausalLM(raw)
    for method, net in (("eagle3", random_heads.eagle3(target)), ("medusa", random_heads.medusa(target))):
        save_head(net, tmp_path / method, to="foredraft", target_name="", target_config=raw.config.to_dict())
    target.release()
    places = {each: tmp_path / each for each in ("draft", "eagle3", "medusa")}
    drafters = [each.format(**places) for each in DRAFTERS]
    compare(tmp_path, str(tmp_path / "target"), drafters, tiny.prompts((5, 17, 40)))


@pytest.mark.slow
def test_two_processes_serve_the_bundled_model(tmp_path: Path):
    with foredraft.load("sample", "none") as g:
        prompts = [g.encode("def fibonacci(n):"), g.encode("Once upon a time")]
    drafters = ["none", "prompt_lookup", "draft_model:sample-draft", "eagle3:sample-eagle3", "medusa:sample-medusa"]
    compare(tmp_path, "sample", drafters, prompts)


COUNTS = """
import json, sys
import foredraft, laws
model, drafter, outputs = sys.argv[1], sys.argv[2], int(sys.argv[3])
g, = foredraft.load_many(model, [drafter], device="cpu", tensor_parallel=2, max_batch_size=1000)
found = g.generate([laws.PROMPT], laws.params("temperature", 3), num_return_sequences=outputs)
g.close()
counts, drafted = laws.tally(each.tokens for each in found), sum(each.stats.drafted for each in found)
print(json.dumps([counts.tolist(), drafted]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["num_assistant_tokens=2", "branching=2x1"])
def test_sampled_outputs_of_two_processes_have_the_law_of_the_target(options: str, tmp_path: Path):
    """A chain, and a tree of siblings drawn without replacement, from a draft that ranks tokens in reverse."""
    for name, each in zip(("target", "draft"), laws.pair(heads=2), strict=True):
        each.model.save_pretrained(tmp_path / name)
    schedule = "num_assistant_tokens_schedule=constant,assistant_confidence_threshold=0"
    drafter, outputs = f"draft_model:{tmp_path / 'draft'},{options},{schedule}", 10_000
    counts, drafted = printed(tmp_path, COUNTS, tmp_path / "target", drafter, str(outputs))
    found = torch.tensor(counts)
    assert drafted > outputs == found.sum()
    assert laws.p_value(found, laws.law("temperature", heads=2)) > 1e-3


DIES = """
import os, signal, sys
import foredraft
from foredraft.engine.parallel import ParallelEngine
dying, steps, step = int(sys.argv[2]), [0], ParallelEngine._step
def some(self):
    steps[0] += 1
    if steps[0] == 8 and int(os.environ["RANK"]) == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self)
ParallelEngine._step = some
g = foredraft.load(sys.argv[1], "prompt_lookup", device="cpu", tensor_parallel=2)
g.generate([1, 2, 3], max_new_tokens=200)
"""
"""One of two processes is killed in its eighth step."""


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_a_process_that_dies_ends_the_other(dying: int, tmp_path: Path):
    tiny.build("llama").save_pretrained(tmp_path / "target")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    both = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        variables = {**environment(Path(__file__).parent), **place, "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-c", DIES, str(tmp_path / "target"), str(dying)]
        both.append(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
    with both[0], both[1]:
        assert both[dying].wait(240) == -signal.SIGKILL
        _, said = both[1 - dying].communicate(timeout=10)
    assert both[1 - dying].returncode not in (0, -signal.SIGKILL)
    assert "Another process of this tensor-parallel target has ended" in said.splitlines()[-1]


OWN_GROUP = """
import os, sys, torch
import foredraft
from foredraft.engine.parallel import ParallelEngine
torch.distributed.init_process_group("gloo")
plan = ParallelEngine._plan
def fails(self, view, limits):
    if self._ranks.leads and max(view.host_lengths) > 9:
        raise RuntimeError("one step fails")
    return plan(self, view, limits)
ParallelEngine._plan = fails
said = ""
try:
    g = foredraft.load(sys.argv[1], "prompt_lookup", device="cpu", tensor_parallel=2)
    g.generate([1, 2, 3], max_new_tokens=200)
except (SystemExit, foredraft.ForedraftError) as error:
    said = str(error)
ranks = torch.ones(1)
torch.distributed.all_reduce(ranks)
found = [None, None]
torch.distributed.all_gather_object(found, said)
if os.environ["RANK"] == "0":
    print(__import__("json").dumps([ranks.item(), found]))
"""
"""A program with a group of its own, in which a step of rank 0 fails."""


@pytest.mark.slow
def test_a_failed_step_leaves_the_groups_of_the_program(tmp_path: Path):
    tiny.build("llama").save_pretrained(tmp_path / "target")
    ranks, (lead, other) = printed(tmp_path, OWN_GROUP, tmp_path / "target")
    assert ranks == 2
    assert "has failed" in lead and "one step fails" in lead
    assert other.startswith("foredraft: rank 1: Another process of this tensor-parallel target has ended")


def test_the_hash_of_an_output_takes_its_new_tokens():
    here, there, outputs = _Digests(), _Digests(), {4: [1, 2], 7: [5]}
    for tokens in ([3], [], [8, 9]):
        outputs[4] += tokens
        assert here.of(outputs) == there.of(outputs)
    read: list[slice] = []

    class Watched(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    found = here.of({4: Watched([*outputs[4], 6])})
    assert read == [slice(5, None)] and found == there.of({4: [*outputs[4], 6]})
    assert found != _Digests().of({4: [*outputs[4], 5]}) and here.of({4: [*outputs[4], 6, 1]}) != found


def test_every_step_takes_the_plan_of_rank_0():
    """Without more processes: what rank 0 sends, and that a step follows what was sent."""
    target, sent = CausalLM(tiny.build("llama")), list[Any]()
    none = Plan((0,))

    def share(value: Any) -> Any:
        sent.append(value)
        return none if isinstance(value, Plan) else value

    ranks: Any = SimpleNamespace(leads=True, share=share)
    engine = ParallelEngine(target, PromptLookup(Options()), Constant(3), ranks=ranks, place=0)
    generator = Generator(engine, None, (), DrafterInfo("prompt_lookup", True))
    found = generator.generate([1, 2, 3, 1, 2, 3], max_new_tokens=8)
    plans = [each for each in sent if isinstance(each, Plan)]
    assert len(plans) == 8 and plans[0].lengths == (3,) and found.stats.drafted == 0


def test_a_target_in_parts_needs_as_many_processes():
    with pytest.raises(OptionError, match="torchrun --nproc-per-node 2 -m foredraft"):
        foredraft.load("sample", tensor_parallel=2)


@pytest.mark.parametrize("started", ["3", "two", ""])
def test_another_number_of_processes_is_named(started: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", started)
    with pytest.raises(OptionError, match=f"tensor_parallel=2 needs as many processes, and WORLD_SIZE is {started!r}"):
        foredraft.load_many("sample", [None], tensor_parallel=2)


def test_processes_that_would_draft_unlike_each_other_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny.build("llama")
    monkeypatch.setattr(type(model), "tp_size", 2)
    monkeypatch.setattr(
        "foredraft.compose.load.Ranks", lambda **_: SimpleNamespace(least=lambda free: free, leads=True)
    )
    with pytest.raises(DrafterError, match="2 processes.*Bandit"):
        foredraft.load(model, "bandit:prompt_lookup+max_gram")


def test_a_part_of_a_target_is_not_recorded():
    raw = tiny.build("llama")
    assert why_eager(raw) is None
    raw._tp_size = 2
    assert "exchange states" in (why_eager(raw) or "")


@pytest.mark.parametrize("option", ["tp_plan", "distributed_config", "device_map"])
def test_weights_are_placed_once(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = {}

    class Stop(Exception):
        """Nothing is loaded."""

    def from_pretrained(path: str, **options: object) -> None:
        given.update(options)
        raise Stop

    tiny.build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("foredraft.model.loading.load.AutoModelForCausalLM.from_pretrained", from_pretrained)
    for options in ({}, {option: "auto"}):
        given.clear()
        with pytest.raises(foredraft.ForedraftError, match="Stop"):
            load_model(str(tmp_path), device="meta", options=options)
        places = {key: value for key, value in given.items() if key in (option, "device_map")}
        assert places == (options or {"device_map": torch.device("meta")})


@pytest.mark.slow
def test_bench_in_two_processes_writes_each_call_once(tmp_path: Path):
    out = tmp_path / "run.jsonl"
    options = ["-d", "none", "-d", "prompt_lookup", "--max-new-tokens", "8", "--count", "2", "--device", "cpu"]
    two_processes("-m", "foredraft", "bench", *options, "--tensor-parallel", "2", "--out", out, folder=tmp_path)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["arm"] for line in lines if "arm" in line) == ["none", "none", "prompt_lookup", "prompt_lookup"]
