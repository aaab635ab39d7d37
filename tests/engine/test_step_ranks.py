"""What a step says of the accepted path for those who size trees: ranks by score, and whether more was refused."""

import torch

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.tree import TokenTree
from foredraft.engine.step import RowStep
from foredraft.model.hf import CausalLM

PROMPT = [3, 1, 4, 1, 5]


def step(right: int, scores: list[float]) -> RowStep:
    """A step of a tree of root, two children, and two children of the first: ``right`` of nodes 1 and 3 are right."""
    target = CausalLM(tiny.build("llama", vocab_size=16))
    truth = tiny.generator(target).generate(PROMPT, max_new_tokens=2).tokens
    wrong = [(token + 1) % 16 for token in truth]
    tokens = [truth[0] if right > 0 else wrong[0], (truth[0] + 2) % 16]
    tokens += [truth[1] if right > 1 else wrong[1], (truth[1] + 2) % 16]

    def propose(view: View, plan: Plan) -> Draft:
        filled = torch.tensor([[int(view.roots), *tokens, 0]])
        parents = torch.tensor([[-1, 0, 0, 1, 1, -2]])
        return Draft(TokenTree(filled, parents, depth=2), Law.FIXED, scores=torch.tensor([[0.0, *scores, 9.0]]))

    policy = tiny.ScriptedPolicy(lambda view, limits: Plan((2,)))
    tiny.generator(target, tiny.ScriptedDrafter(propose), policy).generate(PROMPT, max_new_tokens=4)
    _, done = policy.observed[0]
    return done.rows[0]


def test_ranks_count_from_the_likeliest():
    """Ties go to the node that stands first; padding has no rank, whatever its score."""
    for right, scores, ranks, refused in (
        (2, [-1.0, -2.0, -3.0, -4.0], (1, 3), False),
        (2, [-2.0, -1.0, -2.0, -4.0], (2, 3), False),
        (2, [-1.0, -1.0, -1.0, -1.0], (1, 3), False),
        (2, [-3.0, -1.0, -4.0, -3.5], (2, 4), False),
        (1, [-1.5, -1.0, -2.0, -4.0], (2,), True),
        (0, [-1.0, -2.0, -3.0, -4.0], (), True),
    ):
        done = step(right, scores)
        assert (done.accepted, done.ranks, done.refused) == (right, ranks, refused)
