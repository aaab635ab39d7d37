"""The policy that drafts and verifies what pays: values of nodes against what they cost in tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from foredraft.core.drafter import FREE, LevelPrice, Needs, Plan, View
from foredraft.core.worth import Features, Worth
from foredraft.engine.fitting import SIZES
from foredraft.engine.policy.base import Policy
from foredraft.engine.policy.estimates import DROPPED, EVERY, AcceptanceModel, Drafting, ForwardTimes, Pace
from foredraft.engine.step import StepResult

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
    as keeps their expected loss below ``SHARE`` of the time. An output begins with what is usual for others.

    Args:
        needs: of the drafter.
        prior: expected acceptance rate of the first drafted token.
        any_width: of the target.
    """

    ahead = True
    SHARE = 0.006  # of the time that trials may lose
    TRIAL, PLAIN = 4, 2  # steps that draft in a trial, and plain ones in theirs
    LEARN, SHOWN = 3, 7  # the first of them, and the nodes that these verify, for all rows together
    OFTEN, SOON = 16, 4  # least steps between trials; SOON where they cost the draft alone
    SWITCH = 0.02  # more than nothing that drafting must gain to start
    RECENT = 0.8  # decay of ``Worth.recent``
    DEAREST = 0.9  # price of a level and its node, in parents of a row
    YOUNG = 4  # tokens: steps of rows with shorter outputs take longer, and count where nothing else is known

    def __init__(self, needs: Needs, prior: float = NEUTRAL, *, any_width: bool = False) -> None:
        self._needs = needs
        self._sizes = EVERY if any_width else SIZES
        self._prior = min(max(prior, 0.05), 0.95)
        self._paces: dict[tuple[int, int], Pace] = {}  # by row and temperature bucket
        self._models: dict[int, AcceptanceModel] = {}  # by temperature bucket
        self._rows: set[int] = set()  # whose output has begun
        self._recent: dict[int, float] = {}  # by row: how often its latest drafts were accepted

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        pace, model = self._records(view)
        active = sum(limit > 0 for limit in limits)
        if begun := [row for row in view.rows if row not in self._rows]:
            pace.opened(len(begun) / len(view.rows))
            self._rows.update(begun)
        by_nodes = self._by_nodes(view)
        cheap = _picked(view) and not self._needs.whole and view.lengths.device.type == "cpu"
        fresh = sum([row not in self._recent for row in view.rows])
        if not active or not self._drafts(pace, len(limits), fresh, cheap):
            return Plan((0,) * len(limits))
        times = pace.forward.table(self._needs.max_nodes + 1)
        rate = max(len(limits) / times[1], pace.rate)
        prices = {size: rate * (seconds - times[1]) for size, seconds in times.items()}
        learning = pace.steps < self.LEARN  # guesses are verified whatever they are worth, to see which are right
        cuts = cheap and not learning  # what does not pay is dropped after it was drafted
        recent = tuple([self._recent.get(row, 0.5) for row in view.rows])
        worth = Worth(model.weights, self._prior, recent, prices if cuts else {})
        length, nodes, level = self._needs.longest, 0, rate * pace.level.value
        if not cuts:
            size = max(self.SHOWN // active, 1) if learning else self._size(pace, prices, active, by_nodes, level)
            length, nodes = (length, size) if by_nodes else (min(size, length), 0)
        node = rate * pace.forward.node if cuts else 0.0  # another level is of use with another node
        price = FREE if learning else self._in_parents(LevelPrice(level, node), pace, active)
        lengths = tuple([min(length, limit) for limit in limits])
        return Plan(lengths, 0.0, nodes, price, worth)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        pace, model = self._records(view)
        if plan.copies:  # they have their own width
            pace.paused = not plan.length
        else:
            self._timed(pace, view, plan, step)
        if plan.worth is None:
            return
        for number, (row, length, result) in enumerate(zip(view.rows, plan.lengths, step.rows, strict=True)):
            if not length:
                continue
            depths = {node: depth for depth, node in enumerate((0, *result.path), start=1)}
            parents = result.nodes.parents
            for node, parent in enumerate(parents):
                if parent in depths:
                    features = plan.worth.features(number, result.nodes, node, depths[parent])
                    model.learn(features, accepted=node in depths)
            pace.tested(result.accepted, refused=(result.path[-1] if result.path else 0) in parents)
            if not plan.worth.prices:  # else the curve has no use
                by_length = [float(result.accepted > depth) for depth in range(length)]
                pace.valued(plan.worth.values(number, result.nodes)[1:] if self._by_nodes(view) else by_length)
            self._recent[row] = self.RECENT * self._recent.get(row, 0.5) + (1 - self.RECENT) * bool(result.accepted)
        if not pace.pays and any(result.accepted for result in step.rows):
            pace.trial = max(pace.trial, 1)  # a trial goes on while it gains

    def _timed(self, pace: Pace, view: View, plan: Plan, step: StepResult) -> None:
        """Add a step's times and, if it drafted, its tokens."""
        width = 1 if step.tree is None else step.tree.tokens.shape[1]
        width = DROPPED if width == 1 and plan.worth is not None else width
        timed = not view.outputs or max(map(len, view.outputs)) >= self.YOUNG
        pace.forward.add(width, step.verify_seconds + step.host_seconds, timed=timed)
        resumed, pace.paused = pace.paused, plan.worth is None
        if plan.worth is None:
            return
        drafted = zip(view.rows, plan.lengths, strict=True)
        fresh = sum([length > 0 and row not in self._recent for row, length in drafted])
        if not fresh and not resumed and step.levels and (timed or not pace.level.count):
            pace.level.add(step.draft_seconds / step.levels)
        more = max(step.draft_seconds - step.levels * pace.level.value, 0.0)
        if fresh:
            pace.reading.add(more / fresh)
        elif resumed:
            pace.resumption.add(more)
        extra = more if fresh and pace.steps else 0.0
        if pace.steps >= self.LEARN:
            pace.drafted(Drafting(self._tokens(plan.worth, step), step.levels, 0.0, {width: 1.0}), extra)
        pace.steps += 1

    def release(self, row: int) -> None:
        self._recent.pop(row, None)
        self._rows.discard(row)

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON types: weights of the acceptance model, seconds of forwards and rates."""
        weights = {str(heat): list(model.weights) for heat, model in self._models.items()}
        paces = {f"{rows}/{heat}": pace.state() for (rows, heat), pace in self._paces.items()}
        return {"weights": weights, "paces": paces}

    def restore(self, state: Mapping[str, Any]) -> None:
        for heat, weights in state.get("weights", {}).items():
            self._models[int(heat)] = AcceptanceModel(Features(*map(float, Features(*weights))))
        for key, saved in state.get("paces", {}).items():
            rows, heat = (int(number) for number in key.split("/"))
            self._paces[rows, heat] = Pace.restored(saved, self._sizes)

    def _records(self, view: View) -> tuple[Pace, AcceptanceModel]:
        """Of this step's buckets."""
        heat = 0 if view.warp.greedy else 1 + (view.warp.hottest > 0.5)
        key = 1 << (len(view.rows) - 1).bit_length(), heat  # up to 1, 2, 4, 8 rows and so on
        if key not in self._paces:
            self._paces[key] = self._new(*key)
        if heat not in self._models:
            self._models[heat] = AcceptanceModel()
        return self._paces[key], self._models[heat]

    def _new(self, rows: int, heat: int) -> Pace:
        """The pace of a batch size that has not occurred. One of many rows, where a step that learns is dear, has what
        others have shown: which guesses are right, and what a node of one row adds to a forward."""
        pace = Pace(ForwardTimes(sizes=self._sizes))
        known = {n: other for (n, own), other in self._paces.items() if own == heat and other.steps >= Pace.CLEAR}
        if known and rows > self.SHOWN:
            nearest = min(known, key=lambda n: max(n, rows) // min(n, rows))
            pace.steps, pace.forward.hint = self.LEARN, known[nearest].forward.slope * rows / nearest
        return pace

    def _drafts(self, pace: Pace, rows: int, fresh: int, cheap: bool) -> bool:
        """Whether this step drafts: if that pays, or for a trial. ``fresh``: rows that were not drafted for. ``cheap``:
        a trial costs its drafts alone, since what does not pay is not verified."""
        plain, pace.since = pace.forward.plain, pace.since + 1
        gain = pace.rate * plain / rows  # over plain decoding
        bad = gain < pace.BAD or pace.dropped
        if pace.steps < (pace.CLEAR if bad else pace.KNOWN):
            return plain > 0
        pays = gain > 1 + self.SWITCH * (not pace.pays)
        if pays != pace.pays:
            pace.pays, pace.since, pace.wait = pays, 0, self.OFTEN
        if pace.trial:
            pace.trial -= 1
            return not pays
        steps, loss, least = self.PLAIN, 1 - 1 / gain, self.OFTEN
        if not pays:
            steps, loss = self.TRIAL, 1 - gain
            if cheap:
                loss, least = pace.latest.levels * pace.level.value / pace.latest.steps / plain, self.SOON
                steps = 1 if bad else steps
        start = 0.0 if pays else (pace.reading.value * fresh if fresh else pace.resumption.value) / plain
        loss = steps * loss + start
        if pace.since < min(max(loss / self.SHARE, least), pace.wait * max(start, 1.0)):
            return pays
        pace.since, pace.trial, pace.wait = 0, steps - 1, 2 * pace.wait
        return not pays

    def _tokens(self, worth: Worth, step: StepResult) -> float:
        """What a step brought: between its tokens and what was to be expected, which varies less."""
        emitted = sum([len(result.emitted) for result in step.rows])
        if not worth.prices or step.tree is None or step.tree.tokens.shape[1] == 1:
            return emitted
        expected = sum([sum(worth.values(number, result.nodes)) for number, result in enumerate(step.rows)])
        return (emitted + expected) / 2

    def _in_parents(self, price: LevelPrice, pace: Pace, active: int) -> LevelPrice:
        """A price in accepted parents, since that of a child is in tokens; not too high for sure ones."""
        level, node = (each * pace.tried / pace.passed for each in price)
        node = min(node, self.DEAREST / 2)
        return LevelPrice(min(level, (self.DEAREST - node) * active), node)

    def _by_nodes(self, view: View) -> bool:
        """Whether a draft is limited by its number of nodes, not by its length: of guesses with scores."""
        return self._needs.scored and _picked(view)

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


def _picked(view: View) -> bool:
    """Whether drafts of these rows are guesses, which may be cut, and not drawn ones of a ratio rule."""
    return view.warp.greedy or not view.draws
