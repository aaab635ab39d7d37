"""A bandit over drafters, which finds the fastest one while decoding (BanditSpec, arXiv:2505.15141).

The arms are drafters, which may differ in options only, and plain decoding. An arm is played for a few steps; its
reward is the measured tokens per second. Discounted UCB chooses the next arm, so the choice adapts when the text
changes. It is made before anything is drawn, from past steps alone, so the law of every draft is the arm's own.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Fused, KVSize, Needs, Plan, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.tree import TokenTree
from foredraft.drafters.context import BuildContext


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Choice of the drafter; each drafter has its options in its own spec."""

    hold: int = option(4, "steps for which a chosen drafter runs; the first, in which it catches up, is not measured.")
    exploration: float = option(0.1, "preference for drafters that have not run recently; 0 takes the best so far.")

    def __post_init__(self) -> None:
        check_bounds(self, least={"hold": 2, "exploration": 0})


class Arm(NamedTuple):
    """A drafter, the confidence below which its paths end, and the law of its drafts; None is plain decoding."""

    drafter: Drafter | None
    confidence: float = 0.0
    law: Law = Law.FIXED


class _Step(NamedTuple):
    """When the step began, when the target had verified, and the accepted counts."""

    started: float
    verified: float
    accepted: Int[Tensor, "B"]


class Ucb:
    """Discounted UCB (Garivier and Moulines, arXiv:0805.3415) over rewards of any scale; deterministic.

    The weight of a play decays by ``FADE`` with each later one. An arm's index is its mean reward over the best mean,
    plus ``exploration`` times sqrt(2 log n / n_i), where n_i is its discounted plays and n the sum over arms.
    """

    FADE = 0.98

    def __init__(self, arms: int, exploration: float) -> None:
        self._plays = [0.0] * arms
        self._tokens = [0.0] * arms
        self._seconds = [0.0] * arms
        self._exploration = exploration

    @property
    def plays(self) -> tuple[float, ...]:
        """The discounted plays of each arm."""
        return tuple(self._plays)

    def best(self) -> int:
        """The arm to play: the first that was never played, else the one with the highest index."""
        fresh = [arm for arm, plays in enumerate(self._plays) if not plays]
        if fresh:
            return fresh[0]
        rates = [tokens / seconds for tokens, seconds in zip(self._tokens, self._seconds, strict=True)]
        total, top = max(sum(self._plays), math.e), max(rates)
        indices = [
            rate / top + self._exploration * math.sqrt(2 * math.log(total) / plays)
            for rate, plays in zip(rates, self._plays, strict=True)
        ]
        return max(range(len(indices)), key=indices.__getitem__)

    def add(self, arm: int, tokens: float, seconds: float) -> None:
        for values in (self._plays, self._tokens, self._seconds):
            values[:] = [value * self.FADE for value in values]
        self._plays[arm] += 1.0
        self._tokens[arm] += tokens
        self._seconds[arm] += max(seconds, 1e-9)


@final
class Bandit(Drafter):
    """Keeps all arms up to date, and drafts with one of them.

    Args:
        arms: the drafters; plain decoding is added as another arm.
        clock: returns seconds; replaceable in tests.
    """

    def __init__(self, options: Options, arms: Sequence[Arm], clock: Callable[[], float] = time.perf_counter) -> None:
        if not arms:
            raise OptionError("bandit needs at least one drafter.")
        self._options = options
        self._arms = [Arm(None), *arms]
        drafters = [arm.drafter for arm in arms if arm.drafter is not None]
        needs = [drafter.needs for drafter in drafters]
        own = Needs(
            learns=True,
            scored=all(each.scored for each in needs),
            max_nodes=max(each.max_nodes for each in needs),
            max_depth=max(each.longest for each in needs),
            law=next((arm.law for arm in self._arms if arm.law is not Law.FIXED), None),
        )
        super().__init__(own, *drafters)
        self._ucb = Ucb(len(self._arms), options.exploration)
        self._clock = clock
        self._playing, self._left = self._ucb.best(), options.hold
        self._drafting = False
        self._started = 0.0
        self._step: _Step | None = None  # the previous step, if it is to be measured

    @property
    def plays(self) -> tuple[float, ...]:
        """Discounted number of measured steps of each arm, plain decoding first; see ``Ucb``."""
        return self._ucb.plays

    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused, kv_size: KVSize) -> None:
        self._close()
        super().read_ahead(row, prompt, hidden, kv_size)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        self._close()
        super().admit(row, prompt, hidden)

    def propose(self, view: View, plan: Plan) -> Draft:
        now = self._clock()
        self._finish_step(now)
        self._started, self._drafting = now, True
        drafter, confidence, _ = self._arms[self._playing]
        if drafter is None:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        lengths = tuple(min(length, drafter.needs.longest) for length in plan.lengths)
        return drafter.propose(view, replace(plan, lengths=lengths, confidence=max(confidence, plan.confidence)))

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        super().commit(view, draft, verdict, out)
        if self._drafting:
            self._left -= 1
            counts = self._left < self._options.hold - 1 and draft.copied is None
            self._step = _Step(self._started, self._clock(), verdict.accepted()) if counts else None
            self._drafting = False
        else:
            self._close()

    def release(self, row: int) -> None:
        self._close()
        super().release(row)

    def _finish_step(self, now: float) -> None:
        """Measure the previous step, and choose the next arm if the current one's turn is over."""
        if self._drafting:  # no commit since the last proposal: the draft is requested again
            return
        self._count(now)
        if self._left <= 0:
            before = self._playing
            self._playing, self._left = self._ucb.best(), self._options.hold
            if self._playing == before:
                self._left -= 1  # it does not need to catch up

    def _close(self) -> None:
        """End the previous step before something that is not part of it: prompts, plain steps or idle time.

        It ends when the target had verified. On other devices than a CPU the forward had not finished by then, so the
        step is not measured.
        """
        self._drafting = False  # a draft that was never verified is not measured
        if self._step is not None and self._step.accepted.device.type == "cpu":
            self._count(self._step.verified)
        self._step = None

    def _count(self, ended: float) -> None:
        if self._step is not None:
            tokens = len(self._step.accepted) + int(self._step.accepted.sum())
            self._ucb.add(self._playing, float(tokens), ended - self._step.started)
        self._step = None


def build(options: Options, context: BuildContext) -> Bandit:
    """bandit:SPEC+[SPEC,option=value]"""
    arms = []
    for text in context.paths_like("bandit:prompt_lookup+[draft_model:PATH,num_assistant_tokens=4]"):
        if text != "none":
            built = context.drafter(text)
            arms.append(Arm(built.drafter, built.confidence, built.law))
    return Bandit(options, arms)
