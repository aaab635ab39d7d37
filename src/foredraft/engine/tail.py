"""The tail of a step: from the target's logits to the tokens of each row, on the device or by the host.

On the device: ``tail`` warps all logits and verifies the draft, and a small table is read back.
On a host that may read the logits: ``walk`` follows each row's draft, one token after another. The verdicts are those
of target sampling. A token is needed only at the nodes that are reached, and the race that draws it needs no law but
scores, so ``Ops.choose`` finds it, and nothing has to be read back. ``engine.lockstep`` does the same for choices that
see all rows.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Target, Verdict
from foredraft.core.drafter import View
from foredraft.core.rng import HashedRng, target_bits
from foredraft.core.sampling.warp import Paths
from foredraft.core.transfer import HostCopy, on_host, to_device
from foredraft.core.tree import PAD, ROOT, host_depths
from foredraft.core.verify import DEFAULT, rule_of, verify
from foredraft.core.worth import DraftNodes
from foredraft.engine.draft_check import Proposed
from foredraft.model.ops import Ops

_SCORE_SCALE, _MIN_SCORE = 1e6, -1e4
"""Scores are read back as integers (millionths), clamped from below."""
_CPU = torch.device("cpu")
_NO_DRAFT = DraftNodes((ROOT,), None)


@dataclass(frozen=True, slots=True)
class RowStep:
    """Result of a step for one row, on the host. ``depth`` is the length of the longest drafted path.

    ``path``: the accepted nodes after the root. ``nodes``: those of the verified draft. ``copied``: the draft is a copy
    (``Drafter.copies``) from the request's prediction.
    """

    emitted: list[int]
    drafted: int
    depth: int
    accepted: int
    healthy: bool
    path: Seq[int] = ()
    nodes: DraftNodes = _NO_DRAFT
    copied: bool = False

    def of_copy(self, *, predicted: bool) -> "RowStep":
        """The result of a row whose draft is a copy, perhaps from the request's prediction."""
        return replace(self, nodes=DraftNodes(self.nodes.parents, None), copied=predicted)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How a step ends: the accepted paths and the new tokens, D wide, of each row.

    As in ``Verdict``, what the host knows may be given as lists. ``rows``: the results, if the host has them.
    ``table``: of results on the device, what the host reads. ``laws``: the processed laws on the path, if asked for and
    if some row is sampled.
    """

    verdict: Verdict
    _emitted: Int[Tensor, "B D"] | list[list[int]]
    _counts: Int[Tensor, "B"] | list[int]
    rows: list[RowStep] | None = None
    table: Int[Tensor, "B C"] | None = None
    laws: Float[Tensor, "B D V"] | None = None

    @classmethod
    def known(cls, rows: list[RowStep], width: int, device: torch.device = _CPU) -> "StepEnd":
        """Of results on the host, for tensors on this device; ``width`` is D."""
        in_order = all(row.path == list(range(1, 1 + len(row.path))) for row in rows)
        paths = [_padded([0, *row.path], width) for row in rows]
        bonus, counts = [row.emitted[-1] for row in rows], [len(row.emitted) for row in rows]
        emitted = [_padded(row.emitted, width) for row in rows]
        if device.type == "cpu":
            return cls(Verdict(paths, bonus, in_order), emitted, counts, rows)
        verdict = Verdict(to_device(paths, device), to_device(bonus, device), in_order)
        return cls(verdict, to_device(emitted, device), to_device(counts, device), rows)

    @property
    def emitted(self) -> Int[Tensor, "B D"]:
        """The new tokens of each row, padded with -1."""
        return self._emitted if isinstance(self._emitted, Tensor) else on_host(self._emitted)

    @property
    def counts(self) -> Int[Tensor, "B"]:
        """Their numbers."""
        return self._counts if isinstance(self._counts, Tensor) else on_host(self._counts)

    def reading(self, draft: Draft, proposal: Proposed | None) -> Callable[[], list[RowStep]]:
        """Begin to copy the results to the host; what is returned waits for them."""
        if self.table is None:
            rows = self.rows or []
            return lambda: rows
        copy, width = HostCopy(self.table), self.emitted.shape[1]
        return lambda: read_back(draft, proposal, copy, width)


def _padded(numbers: list[int], width: int) -> list[int]:
    return (numbers + [-1] * (width - len(numbers)))[:width]


def tail(
    view: View,
    draft: Draft,
    logits: Float[Tensor, "B N V"],
    rule: str | None,
    columns: Int[Tensor, "B 4"] | None,
    keep_law: bool,
) -> StepEnd:
    """Warp the logits and verify the draft.

    Args:
        rule: of verification; None for the best one for the draft's law.
        columns: of ``Proposed``.
        keep_law: return the laws on the path.
    """
    tree, noise = draft.tree, view.noise
    law = view.warp(logits, Paths(view.history, noise.positions, tree))
    verdict = verify(law, draft, HashedRng(noise, plain=~tree.valid[:, 1:].any(1)), rule)
    emitted, counts = verdict.emitted(tree), verdict.accepted() + 1
    table = _table(draft, law, verdict, emitted, counts)
    if columns is not None:
        table = torch.cat([table, columns], dim=1)
    laws = verdict.on_path(law.p) if keep_law and law.p is not None else None
    return StepEnd(verdict, emitted, counts, table=table, laws=laws)


def _table(
    draft: Draft, law: Target, verdict: Verdict, emitted: Int[Tensor, "B D"], counts: Int[Tensor, "B"]
) -> Int[Tensor, "B C"]:
    """What the host needs of a step: counts, the new tokens, the accepted path, and the draft's shape and scores."""
    tree = draft.tree
    drafted = tree.valid.sum(1) - 1
    depth = drafted if tree.linear else tree.depths.amax(1)
    sound = torch.ones_like(tree.valid) if law.sound is None else law.sound
    healthy = (sound.gather(1, verdict.path.clamp(min=0)) | (verdict.path < 0)).all(1)  # only accepted nodes matter
    columns = [torch.stack([counts, drafted, depth, healthy.long()], dim=1), emitted, verdict.path, tree.parents]
    if draft.scores is not None:
        columns.append((draft.scores.clamp(min=_MIN_SCORE) * _SCORE_SCALE).round().long())
    return torch.cat(columns, dim=1)


def read_back(draft: Draft, proposal: Proposed | None, copy: HostCopy, width: int) -> list[RowStep]:
    """Read everything the host needs back in one small tensor: the only synchronisation of a step.

    Args:
        copy: of ``StepEnd.table``.
        width: D, the most new tokens of a row.

    Raises:
        DrafterError: the draft cannot be verified.
    """
    table = copy.wait().tolist()
    if proposal is not None:
        proposal.judge([line[-4:] for line in table], [line[2] for line in table], draft.tree.depth)
    path, parents = 4 + width, 4 + 2 * width
    scores = parents + draft.tree.tokens.shape[1]
    scored = draft.scores is not None
    return [
        RowStep(
            emitted=line[4 : 4 + line[0]],
            drafted=line[1],
            depth=line[2],
            accepted=line[0] - 1,
            healthy=line[3] == 1,
            path=line[path + 1 : path + line[0]],
            nodes=DraftNodes(
                line[parents:scores],
                [score / _SCORE_SCALE for score in line[scores : 2 * scores - parents]] if scored else None,
            ),
        )
        for line in table
    ]


def can_walk(view: View, rule: str | None) -> bool:
    """Whether ``walk`` has the verdicts of this rule."""
    return rule in (None, DEFAULT) or (view.warp.greedy and not rule_of(rule).relaxed)


def walk(ops: Ops, view: View, draft: Draft, logits: Float[Tensor, "B N V"], proposal: Proposed | None) -> StepEnd:
    """Choose the next tokens of each row, as far as they are in its draft, and one more.

    Raises:
        DrafterError: the draft cannot be verified.
    """
    scores, temperatures = _scores(view, draft, logits)
    tree, noise = draft.tree, view.noise
    tokens, parents = tree.lists
    chances = [None] * len(parents) if draft.scores is None else draft.scores.tolist()
    bits = ([0] * len(parents),) * 2 if view.warp.greedy else (noise.seeds.tolist(), noise.positions.tolist())
    given = zip(*bits, temperatures, strict=True)
    rows = [
        _row(_Race(ops, scores, row, *each), tokens, DraftNodes(above, chance), linear=tree.linear)
        for row, (each, tokens, above, chance) in enumerate(zip(given, tokens, parents, chances, strict=True))
    ]
    if proposal is not None:
        proposal.judge(proposal.columns.tolist(), [each.depth for each in rows], tree.depth)
    return StepEnd.known(rows, tree.depth + 1)


def _scores(view: View, draft: Draft, logits: Float[Tensor, "B N V"]) -> tuple[Float[Tensor, "B N V"], Seq[float]]:
    """What tokens are chosen by, and the temperature of each row by which it is still to be divided; 0 if greedy."""
    warp = view.warp
    if warp.truncation.cuts and not warp.greedy:
        scores = warp.scores(logits, Paths(view.history, view.noise.positions, draft.tree))
        return scores.float(), [float(each > 0) for each in warp.host_temperatures]
    if warp.processes:
        logits = warp.processed(logits, Paths(view.history, view.noise.positions, draft.tree)).float()
    return logits, warp.host_temperatures


class _Race(NamedTuple):
    """The choices of a row. ``position``: of its next token."""

    ops: Ops
    scores: Float[Tensor, "B N V"]
    row: int
    seed: int
    position: int
    temperature: float

    def token(self, node: int, depth: int) -> int:
        """The token after a node of this depth; -1 if there is no law."""
        bits = target_bits(self.seed, self.position + depth) if self.temperature else 0
        return self.ops.choose(self.scores, self.row, node, self.temperature, bits)


def _row(race: _Race, tokens: Seq[int], nodes: DraftNodes, *, linear: bool) -> RowStep:
    """The step of a row with these nodes."""
    here, end, emitted, healthy = [0], 0, list[int](), True  # several nodes if siblings are equal
    while here and healthy:
        end, token = here[0], race.token(here[0], len(emitted))
        emitted.append(max(token, 0))
        healthy = token >= 0
        here = [node for node, parent in enumerate(nodes.parents) if parent in here and tokens[node] == token]
    return step_of(emitted, end, nodes, healthy=healthy, linear=linear)


def step_of(emitted: list[int], end: int, nodes: DraftNodes, *, healthy: bool, linear: bool) -> RowStep:
    """The step of a row whose accepted path ends at a node of its draft."""
    path = []
    while end:
        path.append(end)
        end = nodes.parents[end]
    drafted = len(nodes.parents) - 1 - nodes.parents.count(PAD)
    depth = drafted if linear else max(host_depths(nodes.parents))
    return RowStep(emitted, drafted, depth, len(path), healthy, path[::-1], nodes)
