"""A bandit over drafters: which of them pays most is found out while texts go on (BanditSpec, arXiv:2505.15141).

The arms are drafters, also one drafter with different options, and plain decoding. An arm is played for a few steps;
its reward is tokens a second, as the clock says. Discounted UCB chooses the next one, so a drafter that was good for
code gives way when the text turns to something else. The choice is made before anything is drawn, from the past alone,
so the law of every draft is the arm's own.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Of the choice; what each arm drafts is said in its own spec.

    hold: steps for which a chosen drafter runs; the first, in which it catches up, is not measured.
    exploration: preference for drafters that have not run for long; 0 takes the best so far.
    num_assistant_tokens_schedule: constant: each drafter follows its own options; others shorten all drafts alike.
    """

    hold: int = 4
    exploration: float = 0.1
    num_assistant_tokens_schedule: str = "constant"

    @property
    def law(self) -> Law:
        """Each arm has its own; of the rules only one is for all."""
        return Law.FIXED

    def __post_init__(self) -> None:
        if self.hold < 2:
            raise OptionError("hold must be 2 or more: the first step of an arm does not count.")
        if self.exploration < 0:
            raise OptionError("exploration must not be negative.")


class Arm(NamedTuple):
    """A drafter, the confidence below which its paths end, and the law of its drafts; None is plain decoding."""

    drafter: Drafter | None
    confidence: float = 0.0
    law: Law = Law.FIXED


class _Step(NamedTuple):
    """When it began, when the target had judged, and what was accepted."""

    started: float
    judged: float
    accepted: Int[Tensor, "B"]


class Ucb:
    """Discounted UCB (Garivier and Moulines, arXiv:0805.3415) over rewards of any scale, in a deterministic order.

    Every play fades by ``FADE`` with each later one. An arm's index is its mean reward over the best mean, plus
    ``exploration`` times sqrt(2 log n / n_i), n_i being its faded plays and n those of all.
    """

    FADE = 0.98

    def __init__(self, arms: int, exploration: float) -> None:
        self._plays = [0.0] * arms
        self._tokens = [0.0] * arms
        self._seconds = [0.0] * arms
        self._exploration = exploration

    @property
    def plays(self) -> tuple[float, ...]:
        """Of each arm, faded."""
        return tuple(self._plays)

    def best(self) -> int:
        """The arm to play: any that was never played, else the one with the highest index."""
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
        """What a play of an arm has brought."""
        for values in (self._plays, self._tokens, self._seconds):
            values[:] = [value * self.FADE for value in values]
        self._plays[arm] += 1.0
        self._tokens[arm] += tokens
        self._seconds[arm] += max(seconds, 1e-9)


@final
class Bandit(Drafter):
    """Passes everything on to all arms, and drafts with one.

    Args:
        arms: what may be played; plain decoding is always one more.
        clock: seconds; tests have one of their own.
    """

    def __init__(self, options: Options, arms: Sequence[Arm], clock: Callable[[], float] = time.perf_counter) -> None:
        if not arms:
            raise OptionError("bandit needs at least one drafter.")
        self._options = options
        self._arms = [Arm(None), *arms]
        self._drafters = [arm.drafter for arm in self._arms if arm.drafter is not None]
        self._ucb = Ucb(len(self._arms), options.exploration)
        self._clock = clock
        self._playing, self._left = self._ucb.best(), options.hold
        self._drafting = False
        self._started = 0.0
        self._step: _Step | None = None  # the one before, if it counts
        needs = [drafter.needs for drafter in self._drafters]
        self.needs = Needs(
            learns=True,
            hidden_layers=tuple(sorted({layer for each in needs for layer in each.hidden_layers})),
            max_nodes=max(each.max_nodes for each in needs),
            max_depth=max(each.longest for each in needs),
            law=next((arm.law for arm in self._arms if arm.law is not Law.FIXED), None),
        )

    @property
    def plays(self) -> tuple[float, ...]:
        """How often each arm has counted lately, plain decoding first; see ``Ucb``."""
        return self._ucb.plays

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._close()
        for drafter in self._drafters:
            own = {layer: hidden[layer] for layer in drafter.needs.hidden_layers}
            drafter.admit(row, prompt, own)

    def propose(self, view: View, plan: Plan) -> Draft:
        now = self._clock()
        self._settle(now)
        self._started, self._drafting = now, True
        drafter, confidence, _ = self._arms[self._playing]
        if drafter is None:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        lengths = tuple(min(length, drafter.needs.longest) for length in plan.lengths)
        return drafter.propose(view, replace(plan, lengths=lengths, confidence=max(confidence, plan.confidence)))

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        for drafter in self._drafters:
            own = {layer: out.hidden[layer] for layer in drafter.needs.hidden_layers}
            drafter.commit(view, draft, verdict, replace(out, hidden=own))
        if self._drafting:
            self._left -= 1
            counts = self._left < self._options.hold - 1
            self._step = _Step(self._started, self._clock(), verdict.accepted()) if counts else None
            self._drafting = False
        else:
            self._close()

    def release(self, row: int) -> None:
        self._close()
        for drafter in self._drafters:
            drafter.release(row)

    def _settle(self, now: float) -> None:
        """Count the step before, which has ended by now, and choose who plays next if its turn is over."""
        if self._drafting:  # nothing was committed in between: the same draft is asked for again
            return
        self._count(now)
        if self._left <= 0:
            before = self._playing
            self._playing, self._left = self._ucb.best(), self._options.hold
            if self._playing == before:
                self._left -= 1  # it has read everything

    def _close(self) -> None:
        """What comes next is no part of the step before: prompts, plain steps, or nobody asking for anything.

        It ends where the target had judged. Elsewhere than on a CPU that was not yet the end, and it does not count.
        """
        self._drafting = False  # what was drafted and never judged counts for nothing
        if self._step is not None and self._step.accepted.device.type == "cpu":
            self._count(self._step.judged)
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
