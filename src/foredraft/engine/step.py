"""One decoding step: propose, forward, warp, verify, commit. Only this module knows the order."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.drafter import Drafter, Plan, View
from foredraft.core.rng import HashedRng
from foredraft.core.sampling.warp import Paths
from foredraft.core.stats import StepStats
from foredraft.core.transfer import to_device
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.verify import verify
from foredraft.engine.draft_check import Proposed, checked
from foredraft.engine.grammar_masks import HostTree, Matchers, masked
from foredraft.engine.prediction import Chains, with_copies
from foredraft.model.base import TargetModel
from foredraft.model.cache import SlotCache

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Node counts used for forwards on a CPU; larger ones are multiples of 32."""
COPIED_NODES, COPIED_NODES_GPU = 64, 256
"""Most nodes of a batch that is as wide as its longest copy, on a CPU and elsewhere."""

_SCORE_SCALE, _MIN_SCORE = 1e6, -1e4
"""Scores are read back as integers (millionths), clamped from below."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """Result of a step for one row, on the host. ``depth`` is the length of the longest drafted path; ``refused`` is
    True if the last accepted node (or the root) had children.

    ``ranks``: the rank of each accepted node by score among all drafted nodes, 1 the likeliest; empty if the drafter
    gives no scores. ``scores``: for chains with scores, the log-probability of the path to each drafted token.
    ``copied``: the draft is a copy of the request's prediction.
    """

    emitted: list[int]
    drafted: int
    depth: int
    accepted: int
    healthy: bool
    ranks: tuple[int, ...] = ()
    refused: bool = False
    scores: tuple[float, ...] = ()
    copied: bool = False


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step's results by row, its new tokens as tensors, and its times in seconds.

    ``draft_seconds`` is the device's time for the draft, ``verify_seconds`` the rest of the step on the host's clock.
    ``logprobs[b, i]`` is the model's law before any warp at new token i of row b. ``laws[b, i]`` is the processed law
    that the token was drawn from; None if not requested or if all rows are greedy. ``levels``: levels drafted; may
    exceed the depth kept after pruning. ``host_seconds`` is the engine's time around the step, filled in by the engine.
    """

    rows: list[RowStep]
    emitted: Int[Tensor, "B D"]
    counts: Int[Tensor, "B"]
    logprobs: Float[Tensor, "B D V"] | None
    draft_seconds: float
    verify_seconds: float
    levels: int = 0
    laws: Float[Tensor, "B D V"] | None = None
    host_seconds: float = 0.0

    def stats(self, rows: tuple[int, ...], kept: Sequence[int], seconds: float) -> StepStats:
        """The step's statistics.

        Args:
            kept: tokens added to each output.
            seconds: wall time of the step.
        """
        return StepStats(
            rows=rows,
            depths=tuple(result.depth for result in self.rows),
            drafted=tuple(result.drafted for result in self.rows),
            accepted=tuple(result.accepted for result in self.rows),
            emitted=tuple(kept),
            copied=tuple(result.copied for result in self.rows),
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            other_seconds=seconds - self.draft_seconds - self.verify_seconds,
        )


@dataclass(frozen=True, slots=True)
class Stepper:
    """Runs steps: holds the target with its cache, the drafter and the verification rule.

    ``exact_nodes``: if not 0, every forward has this many nodes, whatever was drafted. Plain and speculative decoding
    then run the same kernels, so near-ties cannot flip between them.
    """

    target: TargetModel
    cache: SlotCache
    drafter: Drafter
    rule: str | None = None
    exact_nodes: int = 0

    def copied_nodes(self, view: View) -> int:
        """The most nodes of a row with a copy: more would exceed the cache, or take the other rows too much time, since
        all rows of a forward have the same width."""
        most = (COPIED_NODES if view.lengths.device.type == "cpu" else COPIED_NODES_GPU) // len(view.rows)
        most = min(most, self.cache.slots - max(view.extents) + 1, self.exact_nodes or most)
        return max((size for size in SIZES if size <= most), default=1)

    @torch.inference_mode()
    def __call__(
        self,
        view: View,
        plan: Plan,
        chains: Chains = (),
        *,
        logprobs: bool = False,
        laws: bool = False,
        matchers: Matchers | None = None,
    ) -> StepDone:
        """Run one step for every row of ``view``, with a single read-back from the device at its end.

        ``chains``: see ``with_copies``; if none is given, nothing is copied. ``matchers`` of the rows' grammars, None
        if no row has one, cost another read-back; see ``grammar_masks``.
        """
        begun = _Mark(self.target.device)
        self.cache.reserve(max(view.rows) + 1, max(view.extents))
        self.cache.arrange(view.rows)
        draft, proposal = self._propose(view, plan)
        rule = self.rule if draft.tree.depth else None  # a root alone is legal for any rule
        if any(chains):
            draft = with_copies(draft, chains)
            draft = _resized(draft, max(self.exact_nodes, round_up(draft.tree.tokens.shape[1])))
        proposed = _Mark(self.target.device)
        tree = draft.tree
        bases = view.lengths - 1
        reach = max(view.extents) - 1 + tree.tokens.shape[1]
        self.cache.reserve(max(view.rows) + 1, reach)
        step = self.target.address(tree, bases, view.rows, reach)
        drafted = None if matchers is None else HostTree.of(tree)
        out = self.target.forward(step, self.cache)
        logits = out.logits if matchers is None or drafted is None else masked(out.logits, drafted, matchers)
        law = view.warp(logits, Paths(view.history, view.lengths, tree))
        rng = HashedRng(view.noise, plain=~tree.valid[:, 1:].any(1))
        verdict = verify(law, draft, rng, rule)
        if not tree.linear:
            self.cache.compact(step.rows, step.slots[:, 0], verdict.path)
        self.drafter.commit(view, draft, verdict, out)
        emitted, counts = verdict.emitted(tree), verdict.accepted() + 1
        rows = _read_back(draft, proposal, emitted, counts, law, verdict)
        if any(chains):
            rows = [
                replace(row, ranks=(), scores=(), copied=True) if chain else row
                for row, chain in zip(rows, chains, strict=True)
            ]
        seconds, draft_seconds = begun.host_seconds(), begun.until(proposed)
        return StepDone(
            rows=rows,
            emitted=emitted,
            counts=counts,
            logprobs=verdict.on_path(out.logits).float().log_softmax(-1) if logprobs else None,
            draft_seconds=draft_seconds,
            verify_seconds=seconds - draft_seconds,
            levels=tree.depth,
            laws=verdict.on_path(law.p) if laws and law.p is not None else None,
        )

    def _propose(self, view: View, plan: Plan) -> tuple[Draft, Proposed | None]:
        proposal = None
        if plan.length:
            name = self.drafter.__class__.__name__
            draft, proposal = checked(self.drafter.propose(view, plan), view, self.target.vocab_size, name)
            if not all(plan.lengths):
                drafting = to_device(plan.lengths, view.lengths.device) > 0
                draft = replace(draft, tree=draft.tree.only(drafting))
        else:
            draft = Draft(TokenTree.root(view.roots), Law.FIXED)
        if self.exact_nodes:
            return _resized(draft, self.exact_nodes), proposal
        if view.lengths.device.type == "cpu":  # reading values does not synchronise here
            used = draft.tree.valid.any(0).nonzero().flatten().tolist()
            draft = _resized(draft, round_up(used[-1] + 1 if used else 1))
            if draft.q is not None and not draft.tree.linear:
                draft = replace(draft, tree=draft.tree.counted())
        return draft, proposal


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


def _resized(draft: Draft, nodes: int) -> Draft:
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


def _read_back(
    draft: Draft,
    proposal: Proposed | None,
    emitted: Int[Tensor, "B D"],
    counts: Int[Tensor, "B"],
    law: Target,
    verdict: Verdict,
) -> list[RowStep]:
    """Read everything the host needs back in one small tensor: the only synchronisation of a step.

    Raises:
        DrafterError: the draft cannot be verified.
    """
    tree = draft.tree
    drafted = tree.valid.sum(1) - 1
    depth = drafted if tree.linear else tree.depths.amax(1)
    sound = torch.ones_like(tree.valid) if law.sound is None else law.sound
    healthy = (sound.gather(1, verdict.path.clamp(min=0)) | (verdict.path < 0)).all(1)  # only accepted nodes matter
    last = verdict.path.gather(1, counts[:, None] - 1)
    refused = ((tree.parents == last) & tree.valid).any(1)
    packed = torch.stack([counts, drafted, depth, healthy.long(), refused.long()], dim=1)
    columns = [packed, emitted]
    if draft.scores is not None:
        scores = (draft.scores.clamp(min=_MIN_SCORE) * _SCORE_SCALE).round().long()
        columns += [_ranks(draft.scores, tree, verdict), scores]
    if proposal is not None:
        columns.append(proposal.columns)
    table = torch.cat(columns, dim=1).tolist()
    if proposal is not None:
        proposal.judge([line[-4:] for line in table], [line[2] for line in table], tree.depth)
    after = 5 + emitted.shape[1]
    scored = after + emitted.shape[1] if tree.linear else len(table[0])  # scores of trees are not reported
    return [
        RowStep(
            emitted=line[5 : 5 + line[0]],
            drafted=line[1],
            depth=line[2],
            accepted=line[0] - 1,
            healthy=line[3] == 1,
            ranks=tuple(line[after + 1 : after + line[0]]),
            refused=line[4] == 1,
            scores=tuple(score / _SCORE_SCALE for score in line[scored + 1 : scored + 1 + line[1]]),
        )
        for line in table
    ]


def _ranks(scores: Float[Tensor, "B N"], tree: TokenTree, verdict: Verdict) -> Int[Tensor, "B D"]:
    """Rank of each node of the accepted path among the nodes of its tree; the root has rank 0."""
    order = scores.masked_fill(~tree.valid, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return ranks.gather(1, verdict.path.clamp(min=0))
