"""Steps on a fake accelerator: no mixed devices, no wait but the read-back, and the same operators in every step.

See ``fake_device``. There are more requests than rows, so rows start and end between steps, and their lengths differ.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import random_heads
import specs
import tiny
from fake_device import DEVICE, FakeDevice, Trace, moved
from foredraft.core.drafter import Plan, View
from foredraft.core.transfer import to_device
from foredraft.engine.engine import Engine
from foredraft.engine.generator import DrafterInfo, Generator
from foredraft.engine.policy import Constant
from foredraft.engine.step import Drafted, Launched, StepInputs, Stepper, StepResult
from foredraft.model.hf.causal_lm import CausalLM

NEW = 10
PROMPTS = tiny.prompts((18, 24, 17, 28))  # longer than a catch-up is wide, and within one extent of the cache
READ_BACK = ("engine/tail.py", "read_back")
"""The step's only wait, by file and function."""


def on_device(model: Any) -> CausalLM:
    return CausalLM(moved(model), verify=False)


def head(make: Callable[[CausalLM], Any]) -> Callable[[CausalLM], Any]:
    return lambda target: moved(make(target))


HEADS = {name: head(make) for name, make in random_heads.HEADS.items()}
METHODS = {
    "none": "none",
    "prompt_lookup": "prompt_lookup,prompt_lookup_num_tokens=4",
    "draft_model": "draft_model:draft,num_assistant_tokens=3",
    "draft_model tree": "draft_model:draft,branching=2x2",
    "eagle1": "eagle1:eagle,tree=3x2x1",
    "eagle2": "eagle2:eagle,nodes=6,depth=3,top_k=2",
    "eagle3": "eagle3:eagle3,nodes=6,depth=3,top_k=2",
    "medusa": "medusa:medusa,tree=2x2x1",
    "hydra": "hydra:hydra,tree=2x2x1",
    "lookahead": "lookahead,window_size=3,ngram_size=3,guess_set_size=3",
}

LOOP = ("drafters/states/nested_loop.py", "NestedLoop._catch_up")
SYNC = ("drafters/states/partial_cache.py", "PartialCacheSync.sync")
TEXT = ("drafters/universal/retokenizer.py", "Retokenizer.view")
MODEL, COPY = "[draft_model:draft,num_assistant_tokens=2]", "[max_gram,num_assistant_tokens=2]"
PARTIAL = "partial,num_assistant_tokens=3,budget=8,chunk=2,sinks=1,recent=3,room=4"
UNIVERSAL = "universal:draft,num_assistant_tokens=3"
NESTED: dict[str, tuple[str, set[tuple[str, str]]]] = {
    "cascade": (f"cascade:middle+{MODEL},num_assistant_tokens=3", {LOOP}),
    "cascade of look-ups": (f"cascade:middle+{COPY},num_assistant_tokens=3", {LOOP}),
    "relay": (f"relay:{MODEL}+{COPY}", {("drafters/relay.py", "_segment")}),
    "max_gram": ("max_gram,num_assistant_tokens=3", set()),
    "triforce": (f"triforce:{MODEL},gamma=3,inner_gamma=2,budget=8,chunk=2,room=4", {SYNC}),
    "partial retrieval": (f"{PARTIAL},cache=retrieval", {SYNC}),
    "partial window": (f"{PARTIAL},cache=window", {SYNC}),
    "partial h2o": (f"{PARTIAL},cache=h2o", {SYNC}),
    "partial whole": (f"{PARTIAL},whole_layers=1", {SYNC}),
    "universal by tokens": (f"{UNIVERSAL},method=tli", {TEXT}),
    "universal by text": (f"{UNIVERSAL},method=slem", {TEXT, ("drafters/universal/method.py", "Universal._read")}),
    "universal by texts": (f"{UNIVERSAL},method=slrs", {TEXT, ("drafters/universal/method.py", "Universal._read")}),
}
"""Methods that decide on the host how they go on, and what they read for that besides the steps' read-backs: the last
verdict, the tokens committed since, or the lengths and tokens of a draft."""

SAMPLED = {"universal by texts": {("drafters/universal/method.py", "Universal._times")}}
"""What some of them also read for sampled rows."""


class Steps:
    """A ``Stepper`` that records the waits of all steps, and the traces of steps by rows, planned length, and whether
    their draft was made ahead and whether they make the next one."""

    def __init__(self, stepper: Stepper, device: FakeDevice) -> None:
        self._stepper = stepper
        self._device = device
        self.admitted = False
        self._rows: tuple[int, ...] = ()
        self.waits: set[tuple[str, str]] = set()
        self.traces: dict[tuple[int, int, bool, bool], list[Trace]] = defaultdict(list)
        self._open = ExitStack()
        self._makes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def launch(self, inputs: StepInputs) -> Launched:
        self._trace = self._open.enter_context(self._device.record())
        self._makes = False
        return self._stepper.launch(inputs)

    def propose(self, view: View, plan: Plan) -> Drafted:
        self._makes = True
        return self._stepper.propose(view, plan)

    def read(self, launched: Launched) -> StepResult:
        done = self._stepper.read(launched)
        self._open.close()
        trace, inputs = self._trace, launched.inputs
        view, plan = inputs.view, inputs.plan
        self.waits |= {(wait.file, wait.function) for wait in trace.waits}
        changed, self.admitted = self.admitted or view.rows != self._rows, False
        self._rows = view.rows
        if not changed and (all(plan.lengths) or not plan.length):
            # else drafters may read the prompts of admitted rows, and caches move a row into a hole
            self.traces[len(view.rows), plan.length, inputs.drafted is not None, self._makes].append(trace)
        return done


def run(spec: str, temperature: float, *, new: int = NEW, ahead: bool = False) -> Steps:
    def admit(*args: Any) -> None:
        steps.admitted = True
        drafter.__class__.admit(drafter, *args)

    with FakeDevice() as device:
        target = on_device(tiny.build("llama"))
        full = target.new_cache()
        models = {"draft": on_device(tiny.build("llama", seed=8)), "middle": on_device(tiny.build("llama", seed=9))}
        drafter = specs.build(spec, target, models, HEADS, cache=full)
        target.tap(drafter.needs.hidden_layers)
        engine = Engine(target, drafter, Constant(drafter.needs.longest), max_rows=3, cache=full)
        engine.ahead.on = ahead
        steps = engine._stepper = Steps(engine._stepper, device)  # type: ignore[assignment]
        drafter.admit = admit  # type: ignore[method-assign]
        generator = Generator(engine, None, (), DrafterInfo("tiny", True))
        results = generator.batch(PROMPTS, max_new_tokens=new, temperature=temperature, seed=5)
    assert [len(result.tokens) for result in results] == [new] * len(PROMPTS)
    return steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_waits_for_the_read_back_only_and_repeats_its_operators(method: str, temperature: float):
    steps = run(METHODS[method], temperature)
    assert max(map(len, steps.traces.values())) >= 3
    check(steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"none", "lookahead"}))
def test_the_next_draft_is_launched_before_the_wait(method: str, temperature: float):
    """Most steps verify the draft that the last one has made, and make the next one; the wait still comes last."""
    steps = run(METHODS[method], temperature, new=20, ahead=True)
    both = sum(len(traces) for (*_, taken, makes), traces in steps.traces.items() if taken and makes)
    neither = sum(len(traces) for (*_, taken, makes), traces in steps.traces.items() if not taken and not makes)
    assert both > neither and both >= 8
    check(steps)


def check(steps: Steps) -> None:
    """Each step waits once, at its end, and those of a kind have the same operators."""
    assert steps.waits == {READ_BACK}
    for key, traces in steps.traces.items():
        assert {trace.operators[-1][0] for trace in traces} == {"_to_copy"}  # what can be launched before the wait is
        for trace in traces[1:]:
            changed = [pair for pair in zip(traces[0].operators, trace.operators, strict=False) if pair[0] != pair[1]]
            assert not changed[:1] and len(trace.operators) == len(traces[0].operators), key


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", NESTED)
def test_methods_that_decide_on_the_host_read_what_they_need_and_nothing_else(method: str, temperature: float):
    spec, reads = NESTED[method]
    more = SAMPLED.get(method, set()) if temperature else set()
    assert run(spec, temperature).waits == {READ_BACK} | reads | more


def test_the_fake_device_finds_waits_and_mixed_devices():
    with FakeDevice() as device:
        values = torch.arange(3, device=DEVICE)
        waits: list[Callable[[], Any]] = [
            lambda: values.tolist(),
            lambda: values[0].item(),
            lambda: bool(values.any()),
            lambda: values.nonzero(),
            lambda: values[values > 1],
            lambda: values[[0, 2]],
            lambda: torch.tensor([1, 2], device=DEVICE),
            lambda: values.cpu(),
        ]
        for wait in waits:
            with device.record() as trace:
                wait()
            assert len(trace.waits) == 1
        with device.record() as trace:
            values[:2] = to_device([1, 2], DEVICE)
        assert not trace.waits and (values + values).tolist() == [2, 4, 4]
        with pytest.raises(RuntimeError, match="on the CPU"):
            values + torch.arange(3)
