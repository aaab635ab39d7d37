"""The bandit: it finds the arm that pays, goes over to another when that changes, and leaves the law alone."""

import itertools
import random
from collections.abc import Sequence

import pytest

import laws
import tiny
from foredraft.compose.load import load
from foredraft.core.drafter import Plan, View
from foredraft.drafters.bandit import Arm, Bandit, Options, Ucb
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.prompt_lookup import Options as LookupOptions, PromptLookup
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant, Policy
from foredraft.model.hf.causal_lm import CausalLM


def plays(ucb: Ucb, rates: list[float], count: int, chance: random.Random) -> list[int]:
    """Which arms are played when arm i brings about ``rates[i]`` tokens a second."""
    played = []
    for _ in range(count):
        arm = ucb.best()
        played.append(arm)
        ucb.add(arm, rates[arm] * chance.uniform(0.8, 1.2), 1.0)
    return played


def test_ucb_plays_each_arm_then_mostly_the_best_and_follows_a_change():
    chance, ucb = random.Random(1), Ucb(3, exploration=0.1)
    first = plays(ucb, [100.0, 200.0, 120.0], 200, chance)
    assert set(first[:3]) == {0, 1, 2} and first[50:].count(1) > 120
    after = plays(ucb, [100.0, 60.0, 120.0], 200, chance)
    assert after[100:].count(2) > 60


def test_ucb_without_exploration_takes_the_best_so_far():
    ucb = Ucb(2, exploration=0.0)
    assert plays(ucb, [1.0, 2.0], 20, random.Random(2)) == [0, *[1] * 19]


class Clock:
    """Time that passes from one look to the next, as a test says."""

    def __init__(self, *steps: float) -> None:
        self._steps = itertools.cycle(steps)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += next(self._steps)
        return self._now

    def wait(self, seconds: float) -> None:
        """Nobody looks meanwhile."""
        self._now += seconds


def bandit(lengths: tuple[int, ...], clock: Clock, hold: int, exploration: float) -> Bandit:
    target = laws.pair()[0]
    arms = [Arm(DraftModel(DraftOptions(num_assistant_tokens=k), laws.pair()[1], target.vocab_size)) for k in lengths]
    return Bandit(Options(hold, exploration), arms, clock)


def test_texts_follow_the_law_whoever_plays():
    """Arms that draw, of different lengths, and a clock that makes turns of all of them."""
    drafter = bandit((1, 2), Clock(1.0, 3.0, 2.0, 7.0, 1.0), hold=2, exploration=1.0)
    g = tiny.generator(laws.pair()[0], drafter, Constant(2), max_rows=500)
    found = laws.sample(g, "temperature", 5_000, seed=77)
    assert min(drafter.plays) > 1, "all of them have played"
    assert 0 < found.accepted < found.drafted
    assert laws.p_value(found.counts, laws.law("temperature")) > 1e-3


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float, float]]:
    """What is counted from now on: arm, tokens, seconds."""
    counted: list[tuple[int, float, float]] = []
    add = Ucb.add

    def watched(self: Ucb, arm: int, tokens: float, seconds: float) -> None:
        counted.append((arm, tokens, seconds))
        add(self, arm, tokens, seconds)

    monkeypatch.setattr(Ucb, "add", watched)
    return counted


def test_a_turn_is_held_and_only_its_later_steps_count(monkeypatch: pytest.MonkeyPatch):
    target = CausalLM(tiny.build("llama"))
    lookups = [PromptLookup(LookupOptions(prompt_lookup_num_tokens=k)) for k in (2, 3)]
    counted = watch(monkeypatch)
    drafter = Bandit(Options(hold=3, exploration=0.0), [Arm(each) for each in lookups], Clock(2.0))
    tiny.generator(target, drafter, Constant(3)).generate(tiny.prompts((9,))[0] * 3, max_new_tokens=40)
    assert [arm for arm, _, _ in counted][:6] == [0, 0, 1, 1, 2, 2], "of three steps a turn the first does not count"
    assert {seconds for _, _, seconds in counted[:-1]} == {4.0}, (
        "from one proposal to the next, with one look in between"
    )
    assert 6 <= sum(tokens for _, tokens, _ in counted) < 40


class Resting(Constant):
    """Drafts for three steps, then not for as many: plain steps, of which each takes long."""

    def __init__(self, length: int, clock: Clock) -> None:
        super().__init__(length)
        self._clock, self._steps = clock, 0

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        self._steps += 1
        if (self._steps - 1) // 3 % 2:
            self._clock.wait(1000.0)
            return Plan((0,) * len(limits))
        return super().plan(view, limits)


def timed(clock: Clock, hold: int, policy: Policy) -> Generator:
    """Look-ups as the only arm."""
    drafter = Bandit(Options(hold=hold, exploration=0.0), [Arm(PromptLookup(LookupOptions()))], clock)
    return tiny.generator(CausalLM(tiny.build("llama")), drafter, policy)


def test_time_between_two_texts_is_nobodys(monkeypatch: pytest.MonkeyPatch):
    """One text after another, each in row 0: what the reader of the first does meanwhile is not the arm's time."""
    counted, clock = watch(monkeypatch), Clock(2.0)
    g = timed(clock, 3, Constant(3))
    for _ in range(4):
        g.generate(tiny.prompts((9,))[0] * 3, max_new_tokens=8)
        clock.wait(1000.0)
    assert {seconds for _, _, seconds in counted} == {2.0, 4.0}, "a text's last step ends where the target has judged"


def test_a_rest_is_nobodys_time(monkeypatch: pytest.MonkeyPatch):
    counted, clock = watch(monkeypatch), Clock(2.0)
    g = timed(clock, 4, Resting(3, clock))
    g.generate(tiny.prompts((9,))[0] * 3, max_new_tokens=60)
    assert len(counted) > 6 and {seconds for _, _, seconds in counted} == {2.0, 4.0}


def test_a_draft_that_was_never_judged_is_forgotten_with_its_text(monkeypatch: pytest.MonkeyPatch):
    """A step fails after it was drafted; the next text begins with a plain one."""
    counted, clock = watch(monkeypatch), Clock(2.0)
    g = timed(clock, 2, Constant(3))
    prompt = tiny.prompts((9,))[0] * 3
    assert isinstance(g.engine.drafter, Bandit)
    g.engine.drafter._left = 1  # every step counts
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.engine.tail.verify", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            g.generate(prompt, max_new_tokens=8)
    clock.wait(1000.0)
    g.generate(prompt, max_new_tokens=8, speculate=False)
    assert not counted


def test_by_spec_with_plain_decoding_among_the_arms():
    g = load(
        "sample", drafter="bandit:prompt_lookup+[draft_model:sample-draft,num_assistant_tokens=3]+eagle3:sample-eagle3"
    )
    drafter = g.engine.drafter
    assert isinstance(drafter, Bandit)
    assert [arm.drafter.__class__.__name__ for arm in drafter._arms] == [
        "NoneType",
        "PromptLookup",
        "DraftModel",
        "Eagle3Drafter",
    ]
    assert drafter._arms[2].confidence == 0.4
    plain = load(g.engine.target, tokenizer=g.tokenizer, drafter=None)
    prompts = ["def add(a, b):", "1, 2, 3, 1, 2, 3, 1, 2,"]
    expected = [result.tokens for result in plain.generate(prompts, max_new_tokens=60)]
    results = g.generate(prompts, max_new_tokens=60)
    assert [result.tokens for result in results] == expected
    assert sum(result.stats.accepted for result in results) > 0
    g.close()
