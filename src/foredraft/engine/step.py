"""One step: propose, forward, warp, verify, commit. Nothing else in the house knows this order."""

import time
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.drafter import Drafter, Plan, View
from foredraft.core.rng import HashedRng
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import PAD, TokenTree, depths
from foredraft.core.verify import verify
from foredraft.engine.draft_check import Proposed, checked
from foredraft.model.base import TargetModel
from foredraft.model.cache import SlotCache

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes that a forward on a CPU may have; beyond, multiples of 32."""


_FINE, _LEAST = 1e6, 1e4
"""Scores are read back as whole numbers of millionths, and none below -1e4."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """What a step did for one row, on the host. ``depth`` is the length of the longest path that was drafted, and
    ``refused`` says whether the last accepted node, or the root, had children.

    ``ranks``: of each accepted node, its rank by score among all that were drafted, 1 being the likeliest; where the
    drafter scores nothing, none. ``scores``: of a chain, the logarithm of how likely the drafter held the path to each
    drafted token, where it says so.
    """

    emitted: list[int]
    drafted: int
    depth: int
    accepted: int
    healthy: bool
    ranks: tuple[int, ...] = ()
    refused: bool = False
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step's results by row, its new tokens as tensors, and where its time went (seconds, as the host saw them).

    ``logprobs[b, i]`` is the model's own law, before any warp, that new token i of row b came from. ``levels`` is how
    deep drafts were that were looked at, which is more than the longest path where its end was not good enough.
    ``host_seconds`` is the engine's own time around the step; the engine fills it in.
    ``laws[b, i]`` is the processed law that it was drawn from; None where it was not asked for, or all rows are greedy.
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


@dataclass(frozen=True, slots=True)
class Stepper:
    """What a step needs besides the rows: the target with its cache, the drafter, the rule of verification.

    ``exact_nodes``: if not 0, every forward has so many nodes, whatever was drafted, so that plain and
    speculative decoding run the same kernels and near-ties cannot flip between them.
    """

    target: TargetModel
    cache: SlotCache
    drafter: Drafter
    rule: str | None = None
    exact_nodes: int = 0

    @torch.inference_mode()
    def __call__(self, view: View, plan: Plan, logprobs: bool = False, laws: bool = False) -> StepDone:
        """Run one step for every row of ``view``. Reads back from the device once, at its end."""
        started = time.perf_counter()
        draft, proposal = self._propose(view, plan)
        proposed = time.perf_counter()
        tree = draft.tree
        bases = view.lengths - 1
        reach = max(view.extents) - 1 + tree.tokens.shape[1]
        self.cache.reserve(max(view.rows) + 1, reach)
        step = self.target.address(tree, bases, view.rows, reach)
        out = self.target.forward(step, self.cache)
        law = view.warp(out.logits, Paths(view.history, view.lengths, tree))
        coins = HashedRng(view.noise, plain=~tree.valid[:, 1:].any(1))
        verdict = verify(law, draft, coins, self.rule if tree.depth else None)  # a root alone is legal for any rule
        if not tree.linear:
            self.cache.compact(step.rows, step.slots[:, 0], verdict.path)
        self.drafter.commit(view, draft, verdict, out)
        emitted, counts = verdict.emitted(tree), verdict.accepted() + 1
        rows = _read_back(draft, proposal, emitted, counts, law, verdict)
        ended = time.perf_counter()
        return StepDone(
            rows=rows,
            emitted=emitted,
            counts=counts,
            logprobs=_on_path(out.logits, verdict).float().log_softmax(-1) if logprobs else None,
            draft_seconds=proposed - started,
            verify_seconds=ended - proposed,
            levels=tree.depth,
            laws=_on_path(law.p, verdict) if laws and law.p is not None else None,
        )

    def _propose(self, view: View, plan: Plan) -> tuple[Draft, Proposed | None]:
        proposal = None
        if plan.length:
            name = self.drafter.__class__.__name__
            draft, proposal = checked(self.drafter.propose(view, plan), view, self.target.vocab_size, name)
            if not all(plan.lengths):
                asked = torch.tensor([length > 0 for length in plan.lengths], device=view.lengths.device)
                draft = replace(draft, tree=draft.tree.only(asked))
        else:
            draft = Draft(TokenTree.root(view.roots), Law.FIXED)
        if self.exact_nodes:
            return _resized(draft, self.exact_nodes), proposal
        if view.lengths.device.type == "cpu":  # here a look at the values is no synchronisation
            used = draft.tree.valid.any(0).nonzero().flatten().tolist()
            draft = _resized(draft, round_up(used[-1] + 1 if used else 1))
        return draft, proposal


def round_up(nodes: int) -> int:
    """The next number of nodes that forwards are run with: a CPU's kernels are made for each number when it first
    comes up, which takes longer than the padding that a coarse set of them wants."""
    return next((size for size in SIZES if size >= nodes), -(-nodes // 32) * 32)


def _resized(draft: Draft, nodes: int) -> Draft:
    """The same draft with exactly so many nodes: padding is added, or nodes are cut off from the end."""
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
    return replace(draft, tree=TokenTree(tokens, parents, depth, tree.linear), q=q, scores=scores)


def _read_back(
    draft: Draft,
    proposal: Proposed | None,
    emitted: Int[Tensor, "B D"],
    counts: Int[Tensor, "B"],
    law: Target,
    verdict: Verdict,
) -> list[RowStep]:
    """The one synchronisation of a step: everything that the host wants to know, in one small tensor.

    Raises:
        DrafterError: the draft was none that could be verified.
    """
    tree = draft.tree
    drafted = tree.valid.sum(1) - 1
    depth = drafted if tree.linear else depths(tree.parents).amax(1)
    sound = torch.ones_like(tree.valid) if law.sound is None else law.sound
    fine = (sound.gather(1, verdict.path.clamp(min=0)) | (verdict.path < 0)).all(1)  # where nothing was said, no harm
    last = verdict.path.gather(1, counts[:, None] - 1)
    refused = ((tree.parents == last) & tree.valid).any(1)
    packed = torch.stack([counts, drafted, depth, fine.long(), refused.long()], dim=1)
    columns = [packed, emitted]
    if draft.scores is not None:
        columns += [_ranks(draft.scores, tree, verdict), (draft.scores.clamp(min=-_LEAST) * _FINE).round().long()]
    if proposal is not None:
        columns.append(proposal.columns)
    table = torch.cat(columns, dim=1).tolist()
    if proposal is not None:
        proposal.judge([line[-4:] for line in table], [line[2] for line in table])
    after = 5 + emitted.shape[1]
    scored = after + emitted.shape[1] if tree.linear else len(table[0])  # of trees nobody wants to know
    return [
        RowStep(
            emitted=line[5 : 5 + line[0]],
            drafted=line[1],
            depth=line[2],
            accepted=line[0] - 1,
            healthy=line[3] == 1,
            ranks=tuple(line[after + 1 : after + line[0]]),
            refused=line[4] == 1,
            scores=tuple(score / _FINE for score in line[scored + 1 : scored + 1 + line[1]]),
        )
        for line in table
    ]


def _ranks(scores: Float[Tensor, "B N"], tree: TokenTree, verdict: Verdict) -> Int[Tensor, "B D"]:
    """The rank of each node of the accepted path among the nodes of its tree, the root's being 0."""
    order = scores.masked_fill(~tree.valid, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return ranks.gather(1, verdict.path.clamp(min=0))


def _on_path(each: Float[Tensor, "B N V"], verdict: Verdict) -> Float[Tensor, "B D V"]:
    """What stands at each node of the accepted path: entry i is that of emitted token i."""
    nodes = verdict.path.clamp(min=0)[..., None].expand(-1, -1, each.shape[-1])
    return each.gather(1, nodes)
