"""Requests in lockstep: their next tokens are chosen together, once a position, from the first to the last.

For choices that see all rows of a batch at a time, or remember what they have seen: whatever a user's logits processor
and stopping criterion of transformers do. Drafts are verified by the same choices, so these are asked for each position
of the outputs once, as without drafts. All rows advance as far as each of them can.
"""

from collections.abc import Sequence as Seq
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.choices import Choices
from foredraft.core.draft import Draft
from foredraft.core.drafter import View
from foredraft.core.rng import Noise, first
from foredraft.core.worth import DraftNodes
from foredraft.engine.draft_check import Proposed
from foredraft.engine.request import Sequence
from foredraft.engine.tail import StepEnd, step_of


def walk_together(
    choices: Choices,
    sequences: Seq[Sequence],
    view: View,
    draft: Draft,
    logits: Float[Tensor, "B N V"],
    proposal: Proposed | None,
) -> StepEnd:
    """Choose the next tokens of all rows, as far as each of them is in its draft, and one more.

    Raises:
        DrafterError: the draft cannot be verified.
    """
    tree = draft.tree
    tokens, parents = tree.lists
    members = [each.member for each in sequences]
    going, depth = list(range(len(members))), 0
    here, ends, emitted = [[0] for _ in going], [0 for _ in going], [list[int]() for _ in going]
    while going:
        for row in going:
            ends[row] = here[row][0]
        given = logits.new_zeros((len(choices.open), logits.shape[2]), dtype=torch.float32)
        given[[members[row] for row in going]] = logits[going, [ends[row] for row in going]].float()
        chosen = choices.choose(given, partial(_draw, view.noise, depth, members))
        for row in going:
            emitted[row].append(chosen[members[row]])
        if any(emitted[row][-1] < 0 for row in going):
            break
        going = [row for row in going if choices.open[members[row]]]
        for row in going:  # several nodes if siblings are equal
            above, token = here[row], emitted[row][-1]
            children = enumerate(zip(tokens[row], parents[row], strict=True))
            here[row] = [node for node, (own, parent) in children if parent in above and own == token]
        if not all(here[row] for row in going):
            break
        depth += 1
    chances = [None] * len(parents) if draft.scores is None else draft.scores.tolist()
    rows = []
    for new, end, above, chance in zip(emitted, ends, parents, chances, strict=True):
        nodes, healthy = DraftNodes(above, chance), new[-1] >= 0
        rows.append(step_of([max(token, 0) for token in new], end, nodes, healthy=healthy, linear=tree.linear))
    if proposal is not None:
        proposal.judge(proposal.columns.tolist(), [each.depth for each in rows], tree.depth)
    return StepEnd.known(rows, tree.depth + 1, logits.device)


def _draw(noise: Noise, depth: int, members: Seq[int], laws: Float[Tensor, "R V"]) -> list[int]:
    """See ``DrawAll``; requests that have ended have no noise."""
    laws = laws.to(noise.seeds.device)
    own = laws[list(members)]
    sound = (own.isfinite().all(-1) & (own.sum(-1) > 0)).tolist()
    drawn = first(own, noise.times(depth, laws.shape[-1])).tolist()
    found = [0] * len(laws)
    for member, token, law in zip(members, drawn, sound, strict=True):
        found[member] = token if law else -1
    return found
