"""Times of a step: on CUDA the draft's come from events, since the host runs ahead of the device."""

import time

import pytest
import torch

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.tree import TokenTree
from foredraft.engine.policy import Constant
from foredraft.engine.step import StepDone, _Mark
from foredraft.model.hf import CausalLM


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


def test_draft_and_verification_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch):
    found: list[StepDone] = []

    def propose(view: View, plan: Plan) -> Draft:
        time.sleep(0.02)
        return Draft(TokenTree.chain(view.roots[:, None].expand(-1, 2).contiguous()), Law.FIXED)

    policy = Constant(1)
    monkeypatch.setattr(policy, "observe", lambda view, plan, done: found.append(done))
    tiny.generator(CausalLM(tiny.build("llama")), tiny.ScriptedDrafter(propose), policy).generate(
        [1, 2], max_new_tokens=4
    )
    assert found[0].draft_seconds >= 0.02 and found[0].verify_seconds > 0
