"""What a step says of its times and of the accepted path, and what the host waits for: on CUDA it runs ahead."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import random_heads as heads
import runs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.transfer import HostCopy
from foredraft.core.tree import TokenTree
from foredraft.core.worth import Features, Worth
from foredraft.drafters.eagle3 import Eagle3Drafter
from foredraft.engine.policy import Constant
from foredraft.engine.state import Batch
from foredraft.engine.step import RowStep, _Mark
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache


class Event:
    """A CUDA event whose device needs 5 ms from each to the next."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        Event.count += 1
        self.number = Event.count

    def elapsed_time(self, end: "Event") -> float:
        return 5.0 * (end.number - self.number)


def test_events_time_the_draft_on_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    begun, proposed = (_Mark(torch.device("cuda")) for _ in range(2))
    assert begun.until(proposed) == 0.005


def test_draft_and_verification_add_up_to_the_step():
    def propose(view: View, plan: Plan) -> Draft:
        time.sleep(0.02)
        return Draft(TokenTree.chain(view.roots[:, None].expand(-1, 2).contiguous()), Law.FIXED)

    policy = tiny.ScriptedPolicy(lambda view, limits: Plan((1,)))
    tiny.generator(runs.model(), tiny.ScriptedDrafter(propose), policy).generate([1, 2], max_new_tokens=4)
    _, done = policy.observed[0]
    assert done.draft_seconds >= 0.02 and done.verify_seconds > 0


def test_what_needs_no_values_is_launched_between_the_copy_and_the_wait(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def note(owner: type, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.append(name) or function(*args))

    for owner, name in ((SlotCache, "compact"), (Eagle3Drafter, "commit"), (Batch, "append"), (HostCopy, "wait")):
        note(owner, name)
    note(HostCopy, "__init__")
    target = CausalLM(tiny.build("llama"))
    drafter: Any = heads.small_drafter("eagle3", target)
    target.tap(drafter.needs.hidden_layers)
    tiny.generator(target, drafter, Constant(2)).generate(tiny.prompts((9, 12)), max_new_tokens=6)
    step = ["__init__", "compact", "commit", "append", "wait"]
    assert calls[:5] == step and calls.count("compact") > 2
    assert [call for call in calls if call != "compact"] == [*step[:1], *step[2:]] * calls.count("wait")


def test_a_copy_from_cuda_waits_for_what_was_launched_before_it_alone(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    class Event:
        def record(self, stream: str) -> None:
            calls.append(stream)

        def synchronize(self) -> None:
            calls.append("synchronize")

    def to(device: str, *, non_blocking: bool) -> torch.Tensor:
        calls.append((device, non_blocking))
        return torch.ones(2)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    copy = HostCopy(SimpleNamespace(device=torch.device("cuda:1"), to=to))  # type: ignore[arg-type]
    assert calls == [("cpu", True), "stream of cuda:1"]
    assert copy.wait().tolist() == [1, 1] and calls[2:] == ["synchronize"]


# What it says of the accepted path, for those who size trees.

PROMPT = [3, 1, 4, 1, 5]


def ranked_step(right: int, scores: list[float]) -> RowStep:
    """A step of a tree of root, two children, and two children of the first: ``right`` of nodes 1 and 3 are right."""
    target = runs.model(vocab_size=16)
    truth = tiny.generator(target).generate(PROMPT, max_new_tokens=2).tokens
    wrong = [(token + 1) % 16 for token in truth]
    tokens = [truth[0] if right > 0 else wrong[0], (truth[0] + 2) % 16]
    tokens += [truth[1] if right > 1 else wrong[1], (truth[1] + 2) % 16]

    def propose(view: View, plan: Plan) -> Draft:
        filled = torch.tensor([[int(view.roots), *tokens, 0]])
        parents = torch.tensor([[-1, 0, 0, 1, 1, -2]])
        return Draft(TokenTree(filled, parents, depth=2), Law.FIXED, scores=torch.tensor([[0.0, *scores, 9.0]]))

    policy = tiny.ScriptedPolicy(lambda view, limits: Plan((2,)))
    tiny.generator(target, tiny.ScriptedDrafter(propose), policy).generate(PROMPT, max_new_tokens=4)
    _, done = policy.observed[0]
    return done.rows[0]


def test_the_host_learns_the_accepted_path_and_the_nodes_with_their_scores():
    """Scores are rounded to millionths; padding keeps its place."""
    for right, path in ((2, [1, 3]), (1, [1]), (0, [])):
        done = ranked_step(right, [-1.0, -2.5, -3.0000004, -4e9])
        assert done.accepted == len(path) and list(done.path) == path
        assert done.nodes.parents == [-1, 0, 0, 1, 1, -2]
        assert done.nodes.scores == [0.0, -1.0, -2.5, -3.0, -1e4, 9.0]


# The nodes that pay.


def test_a_draft_is_cut_to_the_nodes_that_pay_and_the_output_stays():
    """All nodes of the tree but the right ones go, and parents are numbered anew."""
    target = runs.model(vocab_size=16)
    truth = tiny.generator(target).generate(PROMPT, max_new_tokens=8).tokens
    tokens = [(truth[0] + 1) % 16, truth[0], (truth[1] + 1) % 16, truth[1], truth[2]]
    scores = torch.tensor([[0.0, -3.0, -0.01, -4.0, -0.02, -0.03, 0.0]])
    worth = Worth(Features(0.0, 1.0, 0.0, 0.0), 0.5, (0.5,), {1: 0.0, 4: 0.5, 8: 5.0})

    def propose(view: View, plan: Plan) -> Draft:
        filled = torch.tensor([[int(view.roots), *tokens, 0]])
        parents = torch.tensor([[-1, 0, 0, 1, 2, 4, -2]])
        return Draft(TokenTree(filled, parents, depth=3), Law.FIXED, scores=scores)

    plans = iter([Plan((3,), worth=worth)])
    policy = tiny.ScriptedPolicy(lambda view, limits: next(plans, Plan((0,))))
    generator = tiny.generator(target, tiny.ScriptedDrafter(propose), policy)
    assert generator.generate(PROMPT, max_new_tokens=8).tokens == truth
    (row,) = policy.observed[0][1].rows
    assert row.nodes.parents == [-1, 0, 1, 2] and list(row.path) == [1, 2, 3] and row.emitted == truth[:4]
