"""The policy that drafts and verifies what pays: values of nodes against what they cost in tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.worth import Features, Worth
from foredraft.engine.policy.base import Policy
from foredraft.engine.policy.estimates import AcceptanceModel, Pace
from foredraft.engine.step import StepDone

NEUTRAL = 0.65
"""Default prior for the acceptance rate of the first drafted token."""


@final
class Throughput(Policy):
    """Drafts and verifies what has the most tokens per second.

    Seconds become tokens at the rate reached so far. A draft has another level if the expected tokens of its children
    exceed the level's price, and a step verifies the nodes whose values exceed the price of their forward (see
    ``Worth``). Values are acceptance probabilities, calibrated online. Where reading a draft would wait for the device,
    and for drawn drafts, whose size must not depend on what was drawn, the size is chosen before the draft, from the
    mean values of earlier ones.

    Steps do not draft while that pays less than plain decoding. Then, and the other way round, trials are as far apart
    as keeps their expected loss below ``SHARE`` of the time.

    Args:
        needs: of the drafter.
        prior: expected acceptance rate of the first drafted token.
    """

    ahead = True
    SHARE = 0.006  # of the time that trials may lose
    FIRST, TRIAL = 6, 3  # steps that draft at first, and in a trial
    LEARN, SHOWN = 3, 7  # the first of them, and the nodes that these verify
    OFTEN, SOON = 16, 4  # least steps between trials; SOON where they cost the draft alone
    SWITCH = 0.02  # least gain for which drafting starts or stops
    RECENT = 0.8  # decay of ``Worth.recent``

    def __init__(self, needs: Needs, prior: float = NEUTRAL) -> None:
        self._needs = needs
        self._prior = min(max(prior, 0.05), 0.95)
        self._paces: dict[tuple[int, int], Pace] = {}  # by row and temperature bucket
        self._models: dict[int, AcceptanceModel] = {}  # by temperature bucket
        self._recent: dict[int, float] = {}  # by row: how often its latest drafts were accepted
        self._most = needs.max_nodes + 1

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        pace, model = self._records(view)
        active = sum(limit > 0 for limit in limits)
        picked = (view.warp.greedy or not view.draws) and not self._needs.whole
        cheap = picked and view.lengths.device.type == "cpu"  # what does not pay is dropped after it was drafted
        if not active or not self._drafts(pace, len(limits), cheap):
            return Plan((0,) * len(limits))
        rate = self._rate(pace, len(limits))
        times = pace.forward.table(self._most)
        prices = {size: rate * (seconds - times[1]) for size, seconds in times.items()}
        learning = pace.step.count < self.LEARN  # guesses are verified whatever they are worth, to see which are right
        cuts = cheap and not learning
        recent = tuple(self._recent.get(row, 0.5) for row in view.rows)
        worth = Worth(model.weights, self._prior, recent, prices if cuts else {})
        length, nodes = self._needs.longest, 0
        if not cuts:
            price, by_nodes = rate * pace.level.value, self._by_nodes(view)
            size = self.SHOWN if learning else self._size(pace, prices, active, by_nodes, price)
            length, nodes = (length, size) if by_nodes else (min(size, length), 0)
        level = 0.0 if learning else min(rate * pace.level.value * pace.tried / pace.passed, 0.9 * active)
        return Plan(tuple(min(length, limit) for limit in limits), nodes=nodes, level_worth=level, worth=worth)

    def observe(self, view: View, plan: Plan, done: StepDone) -> None:
        if any(result.copied for result in done.rows):  # copies have their own width
            return
        pace, model = self._records(view)
        width = 1 if done.tree is None else done.tree.tokens.shape[1]
        pace.forward.add(width, done.verify_seconds + done.host_seconds)
        if plan.worth is None:
            return
        seconds = done.draft_seconds + done.verify_seconds + done.host_seconds
        tokens = sum(len(result.emitted) for result in done.rows)
        fresh = any(row not in self._recent for row, length in zip(view.rows, plan.lengths, strict=True) if length)
        if fresh:  # the drafter has read a prompt
            pace.count(tokens, seconds)
        else:
            pace.drafted(tokens, seconds, done.levels, done.draft_seconds, counts=pace.step.count >= self.LEARN)
        features: list[Features] = []
        accepted: list[bool] = []
        for number, (row, length, result) in enumerate(zip(view.rows, plan.lengths, done.rows, strict=True)):
            if not length:
                continue
            path, parents = [0, *result.path], result.nodes.parents
            tried = [node for node, parent in enumerate(parents) if parent in path]
            for node in tried:
                features.append(plan.worth.features(number, result.nodes, node, 1 + path.index(parents[node])))
                accepted.append(node in path)
            pace.tested(result.accepted, refused=path[-1] in parents)
            if not plan.worth.prices:  # else the curve has no use
                by_length = [float(result.accepted > depth) for depth in range(length)]
                pace.valued(plan.worth.values(number, result.nodes)[1:] if self._by_nodes(view) else by_length)
            self._recent[row] = self.RECENT * self._recent.get(row, 0.5) + (1 - self.RECENT) * bool(result.accepted)
        if features:
            model.learn(features, accepted)
        if not pace.pays and any(result.accepted for result in done.rows):
            pace.trial = max(pace.trial, 1)  # a trial goes on while it gains

    def release(self, row: int) -> None:
        self._recent.pop(row, None)

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON types: weights of the acceptance model, seconds of forwards and rates."""
        return {
            "weights": {str(heat): list(model.weights) for heat, model in self._models.items()},
            "paces": {
                f"{rows}/{heat}": {
                    "forward": {str(size): seconds for size, seconds in pace.forward.measured().items()},
                    "level": pace.level.value,
                    "tokens": pace.tokens,
                    "seconds": pace.seconds,
                    "curve": pace.curve,
                }
                for (rows, heat), pace in self._paces.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for heat, weights in state.get("weights", {}).items():
            self._models[int(heat)] = AcceptanceModel([float(weight) for weight in Features(*weights)])
        for key, saved in state.get("paces", {}).items():
            rows, heat = (int(number) for number in key.split("/"))
            self._paces[rows, heat] = Pace.restored(saved)

    def _records(self, view: View) -> tuple[Pace, AcceptanceModel]:
        """Of this step's buckets."""
        heat = 0 if view.warp.greedy else 1 + (view.warp.hottest > 0.5)
        key = 1 << (len(view.rows) - 1).bit_length(), heat  # up to 1, 2, 4, 8 rows and so on
        return self._paces.setdefault(key, Pace()), self._models.setdefault(heat, AcceptanceModel())

    def _rate(self, pace: Pace, rows: int) -> float:
        """Tokens per second of the better of plain and drafting steps."""
        return max(rows / pace.forward.plain if pace.forward.plain else 0.0, pace.rate)

    def _drafts(self, pace: Pace, rows: int, cheap: bool) -> bool:
        """Whether this step drafts: if that pays, or for a trial. ``cheap``: a trial of one step tells enough."""
        plain, pace.since = pace.forward.plain, pace.since + 1
        if not plain or not pace.seconds or 0 < pace.step.count < self.FIRST:
            return plain > 0
        gain = pace.rate * plain / rows  # over plain decoding
        pays = gain > 1 + self.SWITCH * (-1 if pace.pays else 1)
        if pays != pace.pays:
            pace.pays, pace.since = pays, 0
        if pace.trial:
            pace.trial -= 1
            return not pays
        steps, loss, least = 1, 1 - 1 / gain, self.OFTEN
        if not pays:
            steps, loss = self.TRIAL, 1 - gain
            if cheap:
                steps, loss, least = 1, pace.draft.value / plain, self.SOON
        if pace.since < max(steps * loss / self.SHARE, least):
            return pays
        pace.since, pace.trial = 0, steps - 1
        return not pays

    def _by_nodes(self, view: View) -> bool:
        """Whether a draft is limited by its number of nodes, not by its length: of guesses with scores."""
        return self._needs.scored and (view.warp.greedy or not view.draws)

    def _size(self, pace: Pace, prices: Mapping[int, float], active: int, by_nodes: bool, level: float) -> int:
        """The number of drafted nodes, or the length, with the largest mean value less its price. All if nothing is
        known yet, and now and then, since a draft shows what smaller ones would bring, but no larger ones. ``level``:
        the price of a draft level.
        """
        most = self._needs.max_nodes if by_nodes else self._needs.longest
        if len(pace.curve) <= most or pace.since == self.OFTEN // 2:
            return most

        def gain(size: int) -> float:
            nodes = 1 + size * self._needs.max_nodes // most
            forward = min(price for forward, price in prices.items() if forward >= nodes)
            return active * pace.curve[size] - forward - (0.0 if by_nodes else size * level)

        return max(range(most + 1), key=gain)
