"""Rules that change the output distribution by design. Never a default; marked ``lossless=False`` in the table.

They read the whole ``Target``, and have options (``typical,epsilon=0.2``).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.core.draft import Draft, Target, Verdict
from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds
from foredraft.core.rng import VerifierRng
from foredraft.core.verify.parts import at, of_tokens, path_from, reached


@dataclass(frozen=True, slots=True)
class Typical:
    """Options of typical acceptance.

    epsilon: tokens above this probability pass.
    delta: less likely tokens pass above delta exp(-H), where H is the entropy of the target's law.
    """

    epsilon: float = 0.09
    delta: float | None = field(default=None, metadata={"unset": "sqrt(epsilon)"})

    def __post_init__(self) -> None:
        check_bounds(self, least={"epsilon": 0, "delta": 0}, most={"epsilon": 1})


def typical(target: Target, draft: Draft, rng: VerifierRng, options: Typical) -> Verdict:
    """Accept the longest path of typical tokens (on ties the likeliest); then y ~ p.

    Medusa's typical acceptance (2401.10774, section 2.3.1), by default with the paper's delta = sqrt(epsilon). A token
    is accepted if p(x) > min(epsilon, delta exp(-H(p))), so less likely tokens pass where the target's entropy is high.
    Accepted tokens are not drawn from p, so the output distribution changes. A one-hot target is followed exactly.
    """
    p, tree = target.p, draft.tree
    assert p is not None, "a greedy batch is verified without rules"
    delta = math.sqrt(options.epsilon) if options.delta is None else options.delta
    chance, _ = of_tokens(p, p, tree)
    entropy = torch.special.entr(p).sum(-1).gather(1, tree.parents.clamp(min=0))  # the parent's
    accepted = chance > (delta * torch.exp(-entropy)).clamp(max=options.epsilon)
    chance[:, 0], accepted[:, 0] = 1.0, True
    likelihood = torch.where(tree.on_path, chance[:, None, :], 1.0).prod(-1)
    end = torch.where(reached(tree, accepted), tree.depths + 1 + 0.5 * likelihood, 0.0).argmax(1)
    return Verdict(path_from(at(tree.on_path, end), tree), rng.residual(at(p, end)))


@dataclass(frozen=True, slots=True)
class Approximate:
    """Options of blockwise parallel decoding's approximate acceptance. At least one criterion is set.

    top_k: a token passes if it is among so many best tokens of the target.
    distance: a token passes if its id is at most so far from that of the target's token, both being ``ordered``.
    ordered: first and last id of the tokens whose ids are ordered, such as 3x258 for bytes.
    min_block: the least tokens that a step emits, as far as its draft goes.
    """

    top_k: int = 1
    distance: int = 0
    ordered: tuple[int, ...] | None = None
    min_block: int = 1

    def __post_init__(self) -> None:
        check_bounds(self, least={"top_k": 1, "distance": 0, "min_block": 1})
        if self.distance and self.ordered is None:
            raise OptionError(
                "distance compares token ids, whose order means nothing in a text vocabulary: set ordered to the first "
                "and last id of tokens that are ordered, such as ordered=3x258."
            )
        if self.ordered is not None and (len(self.ordered) != 2 or not 0 <= self.ordered[0] < self.ordered[1]):
            raise OptionError(f"ordered must be the first and the last id, such as 3x258, not {self.ordered}.")
        if self.ordered is not None and not self.distance:
            raise OptionError("ordered is for distance: set distance, or leave ordered out.")
        if self.top_k == self.min_block == 1 and not self.distance:
            raise OptionError(
                "approximate needs top_k or min_block above 1, or a distance, such as approximate,top_k=2: else it "
                "accepts what the default rule accepts."
            )


def approximate(target: Target, draft: Draft, rng: VerifierRng, options: Approximate) -> Verdict:
    """Walk down as in target sampling, but descend to other children, too, that pass a criterion.

    Blockwise parallel decoding's approximate acceptance (Stern et al. 1811.03115, section 5): of the target's k best
    tokens (5.1), near the target's token (5.2), and in any case until the step emits ``min_block`` tokens (5.3; the
    paper's block begins with what is here the bonus token of the step before). The paper decodes greedily. Here the
    target's token of a sampled row is its draw, and the k best are those of p; of a greedy row both follow the
    processed logits. The child that equals the target's token comes first, then the likeliest that passes; a token of
    probability 0 (banned, cut, not in the grammar) never does.
    """
    tree = draft.tree
    law = target.p if target.scores is None else _softmax(target.scores)
    assert law is not None
    chance, _ = of_tokens(law, law, tree)
    top = torch.zeros_like(tree.valid)
    if options.top_k > 1:  # else the best token is the target's own
        best = law.topk(min(options.top_k, law.shape[-1])).values[..., -1]  # the k-th at each node
        top = chance >= best.gather(1, tree.parents.clamp(min=0))
    node, going = torch.zeros_like(tree.tokens[:, 0]), tree.valid[:, 0]
    bonus = node
    for depth in range(tree.depth + 1):
        drawn = at(target.best, node) if target.p is None else rng.target(at(target.p, node), depth, going)
        bonus = torch.where(going, drawn, bonus)
        child = (tree.parents == node[:, None]) & (chance > 0)
        equal = tree.tokens == drawn[:, None]
        forced = int(depth + 1 < options.min_block)
        grade = child * torch.where(equal, 3, torch.where(top | _near(tree.tokens, drawn, options), 2, forced))
        most = grade.amax(1)
        going = going & (most > 0)
        chosen = torch.where(child & (grade == most[:, None]), chance, -1.0).argmax(1)
        node = torch.where(going, chosen, node)
        if rng.reads and not bool(going.any()):
            break
    return Verdict(path_from(at(tree.on_path, node), tree), bonus)


def _softmax(scores: Tensor) -> Tensor:
    """Of scores in any precision, in float32 at least."""
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _near(tokens: Tensor, drawn: Tensor, options: Approximate) -> Tensor:
    """Whether tokens (B N) are within the distance of the target's (B)."""
    if options.ordered is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    (first, last), drawn = options.ordered, drawn[:, None]
    inside = (tokens >= first) & (tokens <= last) & (drawn >= first) & (drawn <= last)
    return inside & ((tokens - drawn).abs() <= options.distance)
