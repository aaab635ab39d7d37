"""One decoding step: propose, forward, warp, verify, commit. Only this module knows the order."""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Plan, StepOut, View
from foredraft.core.transfer import to_device
from foredraft.core.tree import PAD, ROOT, TokenTree, host_depths
from foredraft.core.verify import rule_of
from foredraft.core.worth import DraftNodes, Worth
from foredraft.engine.draft_check import Proposed, checked
from foredraft.engine.grammar_masks import HostTree, Matchers, masked
from foredraft.engine.host_tail import HostOut, can_walk, walk
from foredraft.engine.isolation import Isolation
from foredraft.engine.recording import RecordedStep
from foredraft.engine.state import Batch
from foredraft.engine.tail import RowStep as RowStep, Tail, TailOut
from foredraft.model.base import TargetModel, widened
from foredraft.model.kv.cache import SlotCache
from foredraft.model.recording.replay import EAGER, Replay
from foredraft.model.recording.replay_rows import replay_for

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Node counts used for forwards on a CPU; larger ones are multiples of 32."""
_ROOT_ALONE = DraftNodes((ROOT,), None)


@dataclass(slots=True)
class StepResult:
    """A step's results by row, and as tensors in its ``tail``, and its times in seconds.

    ``draft_seconds`` is the device's time for the draft, ``verify_seconds`` the rest of the step on the host's clock.
    ``logits[b, i]`` are the model's before any warp at new token i of row b. ``levels``: levels drafted; may
    exceed the depth kept after pruning. ``host_seconds`` is the engine's time around the step, filled in by the engine.
    ``tree`` is on the device, and valid until the next draft. ``errors``: of the rows that failed, by index; their
    results mean nothing.
    """

    rows: list[RowStep]
    tail: TailOut | HostOut
    logits: Float[Tensor, "B D V"] | None
    draft_seconds: float
    verify_seconds: float
    levels: int = 0
    host_seconds: float = 0.0
    tree: TokenTree | None = None
    errors: Mapping[int, Exception] = field(default_factory=dict)

    def recorded(self, index: int) -> RecordedStep:
        """The record of this step for one row; reads its tree back from the device."""
        assert self.tree is not None
        tokens, parents = self.tree.tokens[index].tolist(), self.tree.parents[index].tolist()
        nodes = [node for node, parent in enumerate(parents) if parent != PAD]
        places = {node: place for place, node in enumerate(nodes)}
        result = self.rows[index]
        return RecordedStep(
            tokens=[tokens[node] for node in nodes],
            parents=[places.get(parents[node], -1) for node in nodes],
            path=[places[node] for node in result.path],
            emitted=result.emitted,
            copied=result.copied,
            draft_seconds=self.draft_seconds,
            seconds=self.draft_seconds + self.verify_seconds,
            rows=len(self.rows),
        )


class Drafted(NamedTuple):
    """A draft of this plan, what is left to judge, the rule that verifies it, and the device's time for it. ``levels``:
    see ``StepResult``."""

    plan: Plan
    draft: Draft
    proposal: Proposed | None
    rule: str | None
    levels: int
    start: "_Mark"
    end: "_Mark"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step reads: the rows as tensors, in ``view``, and records of single rows, in the same order.

    ``plan``: how much to draft. ``drafted``: the draft of this plan, if the last step has launched it. ``matchers``: of
    the rows' grammars; None if no row has one.
    They cost another read-back; see ``grammar_masks``. ``free_rows``: rows of the cache that hold nothing, which
    recordings may use as padding. ``batch``: gets the new tokens, which may change what ``view`` shows, and contains
    errors of single rows; see ``Isolation``. ``logits``, ``laws``: what else to return; see ``StepResult`` and
    ``TailOut``.
    """

    view: View
    plan: Plan
    drafted: Drafted | None = None
    matchers: Matchers | None = None
    free_rows: Container[int] = ()
    batch: Batch | None = None
    logits: bool = False
    laws: bool = False


class Launched(NamedTuple):
    """A step on the device. ``read``: waits for its rows' results. ``width``: the most new tokens of a row."""

    inputs: StepInputs
    rows: Isolation
    drafted: Drafted
    tail: TailOut | HostOut
    read: Callable[[], list[RowStep]]
    logits: Float[Tensor, "B D V"] | None
    start: "_Mark"

    @property
    def width(self) -> int:
        return 1 + self.drafted.draft.tree.depth


@dataclass(frozen=True, slots=True)
class Stepper:
    """Runs steps: holds the target with its cache, the drafter and the verification rule.

    A step is launched and then read back. Between the two, the next draft can be launched (``engine.ahead``): then the
    device drafts while the host ends the step.

    ``exact_nodes``: if not 0, every forward has this many nodes, whatever was drafted. Plain and speculative decoding
    then run the same kernels, so near-ties cannot flip between them. ``replay``: how the forward and the tail run.
    ``vocab_size``: to which logits are padded or cut, if not 0; NaN and infinities are then replaced.
    """

    target: TargetModel
    cache: SlotCache
    drafter: Drafter
    rule: str | None = None
    exact_nodes: int = 0
    replay: Replay = EAGER
    vocab_size: int = 0

    def __call__(self, inputs: StepInputs) -> StepResult:
        """Run one step for every row, with a single read-back from the device at its end."""
        return self.read(self.launch(inputs))

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> Launched:
        """Propose, forward, warp, verify and commit."""
        start, view = _Mark(self.target.device), inputs.view
        self.cache.reserve(view.rows, view.host_lengths)
        self.cache.arrange(view.rows)
        rows = Isolation(view, inputs.batch)
        drafted = inputs.drafted or rows.run(lambda seen: self._propose(seen, inputs.plan))
        out, tail = self._verify(inputs, rows, drafted)
        read = tail.reading(drafted.draft, drafted.proposal)
        self._commit(rows.view, drafted.draft, out, tail, inputs.batch)
        logits = tail.verdict.on_path(out.logits) if inputs.logits else None
        return Launched(inputs, rows, drafted, tail, read, logits, start)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Drafted:
        """Launch a draft for a step that comes later."""
        return self._propose(view, plan)

    def read(self, launched: Launched) -> StepResult:
        """Wait for a step's results."""
        inputs, rows, drafted, tail, read, logits, start = launched
        results = read()
        if copies := inputs.plan.copies:
            rows_of = zip(results, copies, inputs.view.params, strict=True)
            results = [row.of_copy(predicted=bool(own.prediction)) if copy else row for row, copy, own in rows_of]
        seconds, drafting = start.host_seconds(), drafted.start.until(drafted.end)
        return StepResult(
            rows=results,
            tail=tail,
            logits=logits,
            draft_seconds=min(drafting, seconds),
            verify_seconds=max(seconds - drafting, 0.0),
            levels=drafted.levels,
            tree=drafted.draft.tree,
            errors=rows.errors,
        )

    def _verify(self, inputs: StepInputs, rows: Isolation, drafted: Drafted) -> tuple[StepOut, TailOut | HostOut]:
        """The target's forward and the step's tail."""
        draft, tree, view = drafted.draft, drafted.draft.tree, rows.view
        bases, nodes = view.root_slots, tree.tokens.shape[1]
        used_slots = max(view.host_lengths) - 1 + nodes
        self.cache.reserve(view.rows, [length - 1 + nodes for length in view.host_lengths])
        read = None if inputs.matchers is None else HostTree.of(tree)
        replay, sizes = replay_for(self.replay, self.cache, self.target.version, len(view.rows), inputs.free_rows)
        kv_extent = self.target.kv_extent(used_slots, nodes, self.cache.slots)
        with self.target.running():
            out = replay("forward", sizes, self._forward, tree, bases, kv_extent, why_eager=self.target.why_eager)
        logits = out.logits
        if inputs.matchers is not None and read is not None:
            logits = masked(logits, read, inputs.matchers, rows.errors)

        choose = None if replay.records or inputs.laws else self.target.choose

        def judge(seen: View) -> TailOut | HostOut:
            if choose is not None and can_walk(seen, drafted.rule):
                return walk(choose, seen, draft, logits, drafted.proposal)
            given = seen, draft, logits, drafted.rule, drafted.proposal
            tail = Tail.of(*given, keep_law=inputs.laws, recorded=replay.records)
            return replay("tail", sizes, Tail.run, tail) if seen is view else tail.run()

        return out, rows.run(judge)

    def _forward(self, tree: TokenTree, bases: Int[Tensor, "B"], kv_extent: int) -> StepOut:
        """The target's forward; the rows are in the first lines of the cache."""
        step = self.target.address(tree, bases, self.cache.first(len(bases)), kv_extent)
        if not self.vocab_size:
            return self.target.compute(step, self.cache)
        step = replace(step, tokens=step.tokens.clamp(max=self.target.vocab_size - 1))
        out = self.target.compute(step, self.cache)
        return replace(out, logits=widened(out.logits, self.vocab_size))

    def _commit(self, view: View, draft: Draft, out: StepOut, end: TailOut | HostOut, batch: Batch | None) -> None:
        """Launch what needs the verdict on the device only: so the device does it while the host goes on."""
        moves = not draft.tree.linear and not (isinstance(end, HostOut) and end.in_order)
        if moves or self.drafter.commits:
            verdict = end.verdict
            if moves:
                self.cache.compact(view.rows, self.target.root_slots(view.lengths - 1, view.rows), verdict.path)
            self.drafter.commit(view, draft, verdict, out)
        if batch is None:
            return
        if isinstance(end, TailOut):
            batch.append(end.emitted, end.counts)
        else:
            batch.append_known([row.emitted for row in end.rows])

    def _propose(self, view: View, plan: Plan) -> Drafted:
        """Launch a draft, which the device may make later."""
        start, proposal, levels = _Mark(self.target.device), None, 0
        if plan.drafts:
            if self.rule is not None and not rule_of(self.rule).lossless:
                view = view.as_greedy()  # a lossy rule accepts likely tokens, more of them than follow the noise
            try:
                proposed = self.drafter.propose(view, plan)
            except Exception:
                self.target.reset_hooks()  # it may be repeated
                raise
            vocab_size = self.vocab_size or self.target.vocab_size
            draft, proposal = checked(proposed, view, vocab_size, self.drafter.name)
            levels = draft.tree.depth
            if not all(map(max, plan.lengths, plan.copies) if plan.copies else plan.lengths):
                drafting = to_device(plan.lengths, view.lengths.device) > 0
                drafting = drafting if draft.copied is None else drafting | draft.copied
                draft = replace(draft, tree=draft.tree.only(drafting))
            if plan.worth is not None and plan.worth.prices and draft.law is Law.FIXED:
                draft = selected(draft, worthwhile(draft, plan.worth))
        else:
            draft = Draft(view.root_tree, Law.FIXED)
        draft = self._sized(draft)
        draft = _shaped(draft) if self.replay.records else draft
        rule = self.rule if plan.length and draft.tree.depth else None  # roots and copies are legal for any rule
        return Drafted(plan, draft, proposal, rule, levels, start, _Mark(self.target.device))

    def _width(self, nodes: int) -> int:
        """The node count of a forward of this many nodes on a CPU."""
        return nodes if self.target.any_width else round_up(nodes)

    def _sized(self, draft: Draft) -> Draft:
        """The draft with a node count that forwards are made for."""
        if self.exact_nodes:
            return resized(draft, self.exact_nodes)
        if draft.tree.tokens.shape[1] == 1:
            return draft
        if draft.tree.tokens.device.type == "cpu":  # reading values does not synchronise here
            draft = resized(draft, self._width(draft.tree.used))
            if draft.tree.linear or self.replay.records:
                return draft
            if draft.q is not None:
                return replace(draft, tree=draft.tree.counted(without=draft.copied))
            chain = draft.tree.as_chain()
            return replace(draft, tree=chain) if chain.linear else draft
        return resized(draft, round_up(draft.tree.tokens.shape[1])) if self.replay.records else draft


class _Mark:
    """A point in a device's work. CUDA runs it after the calls that enqueue it have returned, so an event marks it."""

    def __init__(self, device: torch.device) -> None:
        self._host = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def host_seconds(self) -> float:
        """Seconds since then on the host's clock."""
        return time.perf_counter() - self._host

    def until(self, end: "_Mark") -> float:
        """Seconds between two marks that the device has reached."""
        if self._event is None or end._event is None:
            return end._host - self._host
        return self._event.elapsed_time(end._event) / 1000


def round_up(nodes: int) -> int:
    """The next larger node count used for forwards. CPU kernels are compiled for each new node count, which costs
    more than padding to a coarse set of counts."""
    return next((size for size in SIZES if size >= nodes), -(-nodes // 32) * 32)


def worthwhile(draft: Draft, worth: Worth) -> list[list[int]]:
    """The nodes of each row that pay, and all of copies, whose lengths the drafter has chosen."""
    rows = nodes_of(draft)
    if draft.copied is None:
        return worth.keep(rows)
    copied = draft.copied.tolist()
    kept = worth.keep([_ROOT_ALONE if copy else row for copy, row in zip(copied, rows, strict=True)])
    whole = [[node for node, parent in enumerate(row.parents) if parent != PAD] for row in rows]
    return [own if copy else nodes for copy, own, nodes in zip(copied, whole, kept, strict=True)]


def nodes_of(draft: Draft) -> list[DraftNodes]:
    """The nodes of each row, read from the device."""
    scores = [None] * len(draft.tree.tokens) if draft.scores is None else draft.scores.tolist()
    return [DraftNodes(*row) for row in zip(draft.tree.lists[1], scores, strict=True)]


def selected(draft: Draft, kept: Sequence[list[int]]) -> Draft:
    """The draft with these nodes of each row alone, in rising order; each comes with its parent."""
    tree, width = draft.tree, max(map(len, kept))
    if width == tree.tokens.shape[1]:
        return draft
    if width == 1:
        return Draft(TokenTree.root(tree.tokens[:, 0]), draft.law)
    index, parents, depth = [], [], 0
    for old, nodes in zip(tree.lists[1], kept, strict=True):
        places = {node: place for place, node in enumerate(nodes)}
        index.append(nodes + [0] * (width - len(nodes)))
        parents.append([places.get(old[node], ROOT) for node in nodes] + [PAD] * (width - len(nodes)))
        depth = max(depth, *host_depths(parents[-1]))
    chosen = to_device(index, tree.tokens.device)
    kept_tree = TokenTree(tree.tokens.gather(1, chosen), to_device(parents, chosen.device), depth, tree.linear)
    return replace(draft, tree=kept_tree, scores=None if draft.scores is None else draft.scores.gather(1, chosen))


def resized(draft: Draft, nodes: int) -> Draft:
    """The draft padded or cut at the end to exactly this many nodes."""
    tree, q, scores = draft.tree, draft.q, draft.scores
    missing = nodes - tree.tokens.shape[1]
    if missing == 0:
        return draft
    pad = torch.nn.functional.pad
    tokens, parents = pad(tree.tokens, (0, missing)), pad(tree.parents, (0, missing), value=PAD)
    if q is not None:
        q = pad(q, (0, 0, 0, missing))
    if scores is not None:
        scores = pad(scores, (0, missing))
    depth = min(tree.depth, nodes - 1)
    return replace(draft, tree=TokenTree(tokens, parents, depth, tree.linear, tree.turns), q=q, scores=scores)


def _shaped(draft: Draft) -> Draft:
    """The draft with the depth of a chain as long as its nodes, so that chains of one node count have one shape."""
    tree = draft.tree
    if not tree.linear:
        return draft
    return replace(draft, tree=replace(tree, depth=tree.tokens.shape[1] - 1))
