"""The tail of a step on a host that may read the logits: the host walks each row's draft, one token after another.

The verdicts are those of target sampling. A token is needed only at the nodes that are reached, and the race that draws
it needs no law but scores, so ``Ops.choose`` finds it, and nothing has to be read back.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft
from foredraft.core.drafter import View
from foredraft.core.rng import target_bits
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import PAD, host_depths
from foredraft.core.verify import DEFAULT, rule_of
from foredraft.core.worth import DraftNodes
from foredraft.engine.draft_check import Proposed
from foredraft.engine.tail import RowStep, StepEnd
from foredraft.model.ops import Ops


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


def _scores(view: View, draft: Draft, logits: Float[Tensor, "B N V"]) -> tuple[Float[Tensor, "B N V"], Sequence[float]]:
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


def _row(race: _Race, tokens: Sequence[int], nodes: DraftNodes, *, linear: bool) -> RowStep:
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
