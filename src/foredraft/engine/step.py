"""One decoding step: propose, forward, warp, verify, commit. Only this module knows the order."""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.choices import Choices
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Plan, StepOut, View
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import rule_of
from foredraft.engine.draft_check import Proposed, checked
from foredraft.engine.fitting import fitted
from foredraft.engine.grammar_masks import HostTree, Matchers, masked
from foredraft.engine.lockstep import walk_together
from foredraft.engine.state import Batch
from foredraft.engine.tail import RowStep as RowStep, StepEnd, can_walk, tail, walk
from foredraft.engine.trace import StepTrace
from foredraft.model.base import TargetModel, widened
from foredraft.model.kv.cache import SlotCache
from foredraft.model.recording.recorder import Recorder
from foredraft.model.recording.segment import Segment, SegmentRows


@dataclass(slots=True)
class StepResult:
    """A step's results by row, and as tensors in its ``end``, and its times in seconds.

    ``draft_seconds`` is the device's time for the draft, ``verify_seconds`` the rest of the step on the host's clock.
    ``logits[b, i]`` are the model's before any warp at new token i of row b. ``levels``: levels drafted; may
    exceed the depth kept after pruning. ``host_seconds`` is the engine's time around the step, filled in by the engine.
    ``tree`` is on the device, and valid until the next draft. ``errors``: of rows whose grammar failed, by
    index; their results mean nothing.
    """

    rows: list[RowStep]
    end: StepEnd
    logits: Float[Tensor, "B D V"] | None
    draft_seconds: float
    verify_seconds: float
    levels: int = 0
    host_seconds: float = 0.0
    tree: TokenTree | None = None
    errors: Mapping[int, Exception] = field(default_factory=dict)

    def trace(self, index: int, kept: int) -> StepTrace:
        """The trace of this step for one row, whose output has ``kept`` of its tokens; reads its tree back from the
        device."""
        assert self.tree is not None
        tokens, parents = self.tree.tokens[index].tolist(), self.tree.parents[index].tolist()
        nodes = [node for node, parent in enumerate(parents) if parent != PAD]
        places = {node: place for place, node in enumerate(nodes)}
        result = self.rows[index]
        return StepTrace(
            tokens=[tokens[node] for node in nodes],
            parents=[places.get(parents[node], -1) for node in nodes],
            path=[places[node] for node in result.path[:kept]],
            emitted=result.emitted[:kept],
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
    They cost another read-back; see ``grammar_masks``. ``choices``: choose the tokens of all rows together, in place of
    warp and verification. ``batch``: gets the new tokens, which may change what ``view`` shows. ``logits``,
    ``laws``: what else to return; see ``StepResult`` and ``StepEnd``.
    """

    view: View
    plan: Plan
    drafted: Drafted | None = None
    matchers: Matchers | None = None
    choices: Choices | None = None
    batch: Batch | None = None
    logits: bool = False
    laws: bool = False


class Launched(NamedTuple):
    """A step on the device. ``errors``: see ``StepResult``. ``read``: waits for its rows' results. ``width``: the most
    new tokens of a row."""

    inputs: StepInputs
    errors: Mapping[int, Exception]
    drafted: Drafted
    end: StepEnd
    read: Callable[[], list[RowStep]]
    logits: Float[Tensor, "B D V"] | None
    start: "_Mark"

    @property
    def width(self) -> int:
        return 1 + self.drafted.draft.tree.depth


@dataclass(slots=True, eq=False)
class Stepper:
    """Runs steps: holds the target with its cache, the drafter and the verification rule.

    A step is launched and then read back. Between the two, the next draft can be launched (``engine.ahead``): then the
    device drafts while the host ends the step.

    ``exact_nodes``: if not 0, every forward has this many nodes, whatever was drafted. Plain and speculative decoding
    then run the same kernels, so near-ties cannot flip between them. ``recorder``: records the forward, the tail and
    parts of drafts; None: they run as they are. ``vocab_size``: to which logits are padded or cut, if not 0; NaN and
    infinities are then replaced. ``free_rows``: rows of the cache that hold nothing, which may be padding.
    """

    target: TargetModel
    cache: SlotCache
    drafter: Drafter
    rule: str | None = None
    exact_nodes: int = 0
    recorder: Recorder | None = None
    vocab_size: int = 0
    free_rows: Callable[[], Container[int]] = tuple
    _forward: Segment[StepOut] = field(init=False)
    _tail: Segment[StepEnd] = field(init=False)

    def __post_init__(self) -> None:
        rows = SegmentRows(self.cache, lambda: self.target.version, self._are_free)
        self._forward = Segment("forward", self._compute, rows, model=self.target, of_view=False)
        self._tail = Segment("tail", tail, rows)

    def __call__(self, inputs: StepInputs) -> StepResult:
        """Run one step for every row, with a single read-back from the device at its end."""
        return self.read(self.launch(inputs))

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> Launched:
        """Propose, forward, warp, verify and commit."""
        start, view = _Mark(self.target.device), self._recorded(inputs.view)
        self.cache.reserve(view.rows, view.host_lengths)
        self.cache.arrange(view.rows)
        drafted = inputs.drafted or self._propose(view, inputs.plan)
        errors: dict[int, Exception] = {}
        out, end = self._verify(inputs, view, drafted, errors)
        read = end.reading(drafted.draft, drafted.proposal)
        self._commit(view, drafted.draft, out, end, inputs.batch)
        logits = end.verdict.on_path(out.logits) if inputs.logits else None
        return Launched(inputs, errors, drafted, end, read, logits, start)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Drafted:
        """Launch a draft for a step that comes later."""
        return self._propose(self._recorded(view), plan)

    def read(self, launched: Launched) -> StepResult:
        """Wait for a step's results."""
        inputs, errors, drafted, end, read, logits, start = launched
        results = read()
        if copies := inputs.plan.copies:
            rows_of = zip(results, copies, inputs.view.params, strict=True)
            results = [row.of_copy(predicted=bool(own.prediction)) if copy else row for row, copy, own in rows_of]
        seconds, drafting = start.host_seconds(), drafted.start.until(drafted.end)
        return StepResult(
            rows=results,
            end=end,
            logits=logits,
            draft_seconds=min(drafting, seconds),
            verify_seconds=max(seconds - drafting, 0.0),
            levels=drafted.levels,
            tree=drafted.draft.tree,
            errors=errors,
        )

    def _verify(
        self, inputs: StepInputs, view: View, drafted: Drafted, errors: dict[int, Exception]
    ) -> tuple[StepOut, StepEnd]:
        """The target's forward and the step's tail."""
        draft, tree = drafted.draft, drafted.draft.tree
        if view.recorder is not self.recorder:  # of the loop around a nested one, for the drafter alone
            view = replace(view, recorder=self.recorder)
        bases, nodes = view.root_slots, tree.tokens.shape[1]
        used_slots = max(view.host_lengths) - 1 + nodes
        self.cache.reserve(view.rows, [length - 1 + nodes for length in view.host_lengths])
        read = None if inputs.matchers is None else HostTree.of(tree)
        kv_extent = self.target.kv_extent(used_slots, nodes, self.cache.slots)
        with self.target.running():
            out = self._forward(view, tree, bases, kv_extent)
        logits = out.logits
        if inputs.matchers is not None and read is not None:
            logits = masked(logits, read, inputs.matchers, errors)

        if inputs.choices is not None and inputs.batch is not None:
            sequences = inputs.batch.sequences
            return out, walk_together(inputs.choices, sequences, view, draft, logits, drafted.proposal)
        ops = self.target.ops
        if ops.walks and self.recorder is None and not inputs.laws and can_walk(view, drafted.rule):
            return out, walk(ops, view, draft, logits, drafted.proposal)
        columns = None if drafted.proposal is None else drafted.proposal.columns
        return out, self._tail(view, draft, logits, drafted.rule, columns, inputs.laws)

    def _recorded(self, view: View) -> View:
        """The view for the drafter."""
        return view if self.recorder is None else replace(view, recorder=self.recorder)

    def _are_free(self, rows: Sequence[int]) -> bool:
        free = self.free_rows()
        return all(row in free for row in rows)

    def _compute(self, tree: TokenTree, bases: Int[Tensor, "B"], kv_extent: int) -> StepOut:
        """The target's forward; the rows are in the first lines of the cache."""
        step = self.target.address(tree, bases, self.cache.first(len(bases)), kv_extent)
        if not self.vocab_size:
            return self.target.compute(step, self.cache)
        step = replace(step, tokens=step.tokens.clamp(max=self.target.vocab_size - 1))
        out = self.target.compute(step, self.cache)
        return replace(out, logits=widened(out.logits, self.vocab_size))

    def _commit(self, view: View, draft: Draft, out: StepOut, end: StepEnd, batch: Batch | None) -> None:
        """Launch what needs the verdict on the device only: so the device does it while the host goes on."""
        verdict = end.verdict
        if not (draft.tree.linear or verdict.in_order):
            self.cache.compact(view.rows, self.target.root_slots(view.lengths - 1, view.rows), verdict.path)
        if self.drafter.commits:
            self.drafter.commit(view, draft, verdict, out)
        if batch is not None:
            batch.append(end)

    def _propose(self, view: View, plan: Plan) -> Drafted:
        """Launch a draft, which the device may make later."""
        start, proposal, levels = _Mark(self.target.device), None, 0
        if plan.drafts:
            if self.rule is not None and not rule_of(self.rule).lossless:
                view = view.as_greedy()  # a lossy rule accepts likely tokens, more of them than follow the noise
            proposed = self.drafter.propose(view, plan)
            vocab_size = self.vocab_size or self.target.vocab_size
            draft, proposal = checked(proposed, view, vocab_size, self.drafter.name)
            levels = draft.tree.depth
        else:
            draft = Draft(view.root_tree, Law.FIXED)
        wide, recorded = self.target.any_width, self.recorder is not None
        draft = fitted(draft, plan, any_width=wide, exact=self.exact_nodes, recorded=recorded)
        rule = self.rule if plan.length and draft.tree.depth else None  # roots and copies are legal for any rule
        return Drafted(plan, draft, proposal, rule, levels, start, _Mark(self.target.device))


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
