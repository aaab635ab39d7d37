"""CaPE: the chain is the draft's own likeliest one, and its siblings are as many as its confidence says."""

import pytest
import torch

import tiny
from foredraft.core.drafter import LevelPrice, Plan
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.cape import Cape, Options
from foredraft.drafters.trees.candidates import SHARPEST
from foredraft.model.hf.causal_lm import CausalLM

TEXTS = tiny.prompts((4, 11))


def warped(logits: torch.Tensor, path: list[int], params: SamplingParams) -> torch.Tensor:
    """transformers' repetition penalty, biases, and what top_k leaves, written anew."""
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*path}:
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    least = logits.topk(params.top_k).values[-1] if params.top_k else logits.min()
    return logits.masked_fill(logits < least, -torch.inf)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.3),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(temperature=1.3, top_k=5, logit_bias={7: 9.0, 8: -9.0}),
    ],
    ids=["greedy", "sampled", "penalty", "biased"],
)
def test_the_tree_is_what_the_draft_says_step_by_step(params: SamplingParams):
    model = CausalLM(tiny.build("llama", seed=5, spread=4.0))
    drafter = Cape(Options(num_assistant_tokens=4, widths=(5, 3, 2, 1)), model, tiny.VOCAB)
    tiny.admit(drafter, TEXTS)
    view = tiny.view(TEXTS, params)
    draft = drafter.propose(view, Plan((4, 4)))
    heat = SHARPEST if params.greedy else params.temperature
    widths = set()
    for row, text in enumerate(TEXTS):
        tree = draft.tree
        children: dict[int, list[int]] = {}
        for node in range(1, tree.tokens.shape[1]):
            if tree.valid[row, node]:
                children.setdefault(int(tree.parents[row, node]), []).append(node)
        at, path, total = 0, list(text), 0.0
        for level in range(4):
            logits = model.stock_logits(torch.tensor([path]))[0, -1].float().clone()
            law = (warped(logits, path, params) / heat).softmax(-1)
            if not params.greedy:  # the share of each token's q / time, at the position of this level
                law = law / view.noise.times(level, tiny.VOCAB)[row]
                law = law / law.sum()
            best = law.sort(descending=True)
            band = min(int(float(best.values[0]) * 4), 3)
            wanted = best.indices[: (5, 3, 2, 1)[band]].tolist()
            widths.add(len(wanted))
            assert [int(tree.tokens[row, node]) for node in children[at]] == wanted
            assert draft.scores is not None
            own = draft.scores[row, children[at]]
            assert torch.allclose(own, total + best.values[: len(wanted)].log(), atol=1e-4)
            at, total = children[at][0], float(own[0])
            path.append(wanted[0])
        assert len(children) == 4, "only the chain goes on"
    assert len(widths) > 1


def test_a_level_is_worth_what_the_rows_with_levels_left_make_of_it():
    target = CausalLM(tiny.build("llama"))
    drafter = Cape(Options(num_assistant_tokens=3), target, target.vocab_size)
    view = tiny.view(TEXTS, SamplingParams(), target.vocab_size)
    tiny.admit(drafter, TEXTS)
    scores = drafter.propose(view, Plan((3, 3))).scores
    assert scores is not None
    sure = scores[:, 1].exp().tolist()  # of the chain's first tokens
    worth = max(sure) + 0.5 * min(sure)
    assert drafter.propose(view, Plan((3, 2), level_price=LevelPrice(worth))).tree.depth > 1
    assert drafter.propose(view, Plan((3, 1), level_price=LevelPrice(worth))).tree.depth == 1


def test_banned_tokens_are_no_candidates():
    model = CausalLM(tiny.build("llama", seed=5, spread=4.0))
    drafter = Cape(Options(num_assistant_tokens=2, widths=(7,)), model, tiny.VOCAB)
    tiny.admit(drafter, TEXTS)
    first = drafter.propose(tiny.view(TEXTS), Plan((2, 2))).tree.tokens[0, 1]
    banned = SamplingParams(bad_words_ids=((int(first),),))
    assert int(first) not in drafter.propose(tiny.view(TEXTS, banned), Plan((2, 2))).tree.tokens[0, 1:].tolist()
