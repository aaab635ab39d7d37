"""Prompt lookup: two searches with one result, and how likely a copy is."""

import math

import pytest
import torch

import tiny
from foredraft.core.drafter import Plan
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD
from foredraft.drafters.prompt_lookup import LONGEST_MATCH, ODDS, Options, PromptLookup


@pytest.mark.parametrize("continuations", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 3), (1, 5)])
def test_the_search_on_the_host_finds_what_the_operators_on_a_device_find(continuations, sizes):
    options = Options(continuations=continuations, min_matching_ngram_size=sizes[0], max_matching_ngram_size=sizes[1])
    drafter = PromptLookup(options)
    for _ in range(60):
        rows, kinds = int(torch.randint(1, 4, ())), int(torch.randint(2, 7, ()))
        histories = [torch.randint(kinds, (int(torch.randint(1, 40, ())),)).tolist() for _ in range(rows)]
        view = tiny.view(histories)
        paths, matches = map(torch.from_numpy, drafter._find_on_host(view, 5))
        others, lengths = drafter._find(view, 5)
        assert torch.equal(matches, lengths), histories
        found = matches[..., None] > 0
        assert torch.equal(torch.where(found, paths, 0), torch.where(found, others, 0)), histories


def right(match: int, heat: int = 0) -> float:
    """The probability that the token after a match is right."""
    return 1 / (1 + math.exp(-ODDS[heat][0] - ODDS[heat][1] * math.log(match)))


@pytest.mark.parametrize(("temperature", "heat"), [(0.0, 0), (0.4, 0), (1.0, 1)])
def test_a_copy_is_as_likely_as_its_match_is_long(temperature, heat):
    drafter = PromptLookup(Options(prompt_lookup_num_tokens=3))
    texts = [[5, 1, 2, 3, 4, 9, 9, 1, 2, 3], [7, 8, 6]]
    draft = drafter.propose(tiny.view(texts, SamplingParams(temperature=temperature)), Plan((3, 3)))
    assert draft.tree.tokens[0].tolist() == [3, 4, 9, 9] and draft.tree.parents[1].tolist() == [-1, PAD, PAD, PAD]
    assert draft.scores is not None
    wanted = [0.0, *(sum(math.log(right(3 + n, heat)) for n in range(tokens)) for tokens in (1, 2, 3))]
    assert draft.scores[0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_branches_that_share_a_node_have_the_score_of_the_longest_match():
    drafter = PromptLookup(Options(prompt_lookup_num_tokens=2, continuations=2, max_matching_ngram_size=2))
    draft = drafter.propose(tiny.view([[1, 2, 3, 4, 6, 2, 3, 5, 1, 2]]), Plan((2,)))
    assert draft.tree.tokens[0].tolist() == [2, 3, 4, 5, 0][: draft.tree.tokens.shape[1]]
    assert draft.tree.parents[0].tolist() == [-1, 0, 1, 1, PAD][: draft.tree.tokens.shape[1]]
    assert draft.scores is not None

    def score(match: int, tokens: int) -> float:
        return sum(math.log(right(match + n)) for n in range(tokens))

    assert draft.scores[0, :4].tolist() == pytest.approx([0.0, score(2, 1), score(2, 2), score(1, 2)], abs=1e-5)


def test_a_match_counts_up_to_a_length():
    drafter = PromptLookup(Options(prompt_lookup_num_tokens=1))
    text = list(range(10, 10 + LONGEST_MATCH + 9))
    draft = drafter.propose(tiny.view([[*text, 1, *text]]), Plan((1,)))
    assert draft.scores is not None
    assert draft.scores[0, 1].item() == pytest.approx(math.log(right(LONGEST_MATCH)))
