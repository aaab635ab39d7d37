"""The tail of a step: from the target's logits to the tokens of each row, and their read-back."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Target, Verdict
from foredraft.core.drafter import View
from foredraft.core.rng import HashedRng, Noise
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.transfer import HostCopy
from foredraft.core.tree import TokenTree
from foredraft.core.verify import verify
from foredraft.engine.draft_check import Proposed

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

    def of_copy(self) -> "RowStep":
        """The result of a row whose draft is a copy."""
        return replace(self, ranks=(), scores=(), copied=True)


@dataclass(frozen=True, slots=True)
class TailOut:
    """The tail's results. ``table``: what the host reads of them. ``laws``: the processed laws on the path, if asked
    for and if some row is sampled."""

    verdict: Verdict
    emitted: Int[Tensor, "B D"]
    counts: Int[Tensor, "B"]
    table: Int[Tensor, "B C"]
    laws: Float[Tensor, "B D V"] | None


@dataclass(frozen=True, slots=True)
class Tail:
    """Warp and verification of one step as a function of tensors and of few numbers on the host.

    ``history``: the roots alone if the warp does not read paths. ``rule``: of verification; None for the best one for
    the draft's law. ``columns``: of ``Proposed``. ``keep_law``: return the laws on the path.
    """

    draft: Draft
    logits: Float[Tensor, "B N V"]
    warp: Warp
    noise: Noise
    history: Int[Tensor, "B L"]
    rule: str | None
    columns: Int[Tensor, "B 4"] | None
    keep_law: bool

    @classmethod
    def of(
        cls,
        view: View,
        draft: Draft,
        logits: Float[Tensor, "B N V"],
        rule: str | None,
        proposal: Proposed | None,
        *,
        keep_law: bool,
        recorded: bool,
    ) -> "Tail":
        """The tail of a step; ``recorded``: only what it needs, and the history in few widths."""
        read = view.recordable(history=view.warp.needs_paths) if recorded else view
        columns = None if proposal is None else proposal.columns
        return cls(draft, logits, read.warp, read.noise, read.history, rule, columns, keep_law)

    def run(self) -> TailOut:
        """Warp the logits and verify the draft."""
        draft, tree = self.draft, self.draft.tree
        law = self.warp(self.logits, Paths(self.history, self.noise.positions, tree))
        rng = HashedRng(self.noise, plain=~tree.valid[:, 1:].any(1))
        verdict = verify(law, draft, rng, self.rule)
        emitted, counts = verdict.emitted(tree), verdict.accepted() + 1
        table = _table(draft, law, verdict, emitted, counts)
        if self.columns is not None:
            table = torch.cat([table, self.columns], dim=1)
        laws = verdict.on_path(law.p) if self.keep_law and law.p is not None else None
        return TailOut(verdict, emitted, counts, table, laws)


def _table(
    draft: Draft, law: Target, verdict: Verdict, emitted: Int[Tensor, "B D"], counts: Int[Tensor, "B"]
) -> Int[Tensor, "B C"]:
    """What the host needs of a step: counts, the new tokens, and ranks and scores where there are scores."""
    tree = draft.tree
    drafted = tree.valid.sum(1) - 1
    depth = drafted if tree.linear else tree.depths.amax(1)
    sound = torch.ones_like(tree.valid) if law.sound is None else law.sound
    healthy = (sound.gather(1, verdict.path.clamp(min=0)) | (verdict.path < 0)).all(1)  # only accepted nodes matter
    last = verdict.path.gather(1, counts[:, None] - 1)
    refused = ((tree.parents == last) & tree.valid).any(1)
    columns = [torch.stack([counts, drafted, depth, healthy.long(), refused.long()], dim=1), emitted]
    if draft.scores is not None:
        scores = (draft.scores.clamp(min=_MIN_SCORE) * _SCORE_SCALE).round().long()
        columns += [_ranks(draft.scores, tree, verdict), scores]
    return torch.cat(columns, dim=1)


def _ranks(scores: Float[Tensor, "B N"], tree: TokenTree, verdict: Verdict) -> Int[Tensor, "B D"]:
    """Rank of each node of the accepted path among the nodes of its tree; the root has rank 0."""
    order = scores.masked_fill(~tree.valid, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return ranks.gather(1, verdict.path.clamp(min=0))


def read_back(draft: Draft, proposal: Proposed | None, copy: HostCopy, width: int) -> list[RowStep]:
    """Read everything the host needs back in one small tensor: the only synchronisation of a step.

    Args:
        copy: of ``TailOut.table``.
        width: D, the most new tokens of a row.

    Raises:
        DrafterError: the draft cannot be verified.
    """
    table = copy.wait().tolist()
    if proposal is not None:
        proposal.judge([line[-4:] for line in table], [line[2] for line in table], draft.tree.depth)
    after = 5 + width
    scored = after + width if draft.tree.linear else len(table[0])  # scores of trees are not reported
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
