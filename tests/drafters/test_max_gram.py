"""Max-Gram against the slow way of looking: every run of last tokens, every place where it stands earlier."""

import random

import pytest
import torch

import tiny
from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Plan, StepOut, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.max_gram import MaxGram, Options, longest_match


def slow(text: list[int]) -> tuple[int, int]:
    """Size of the longest run, and the latest place where it ends."""
    for size in range(len(text) - 1, 0, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends:
            return size, ends[-1]
    return 0, -1


def texts(count: int, vocab: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    made = [[source.randrange(vocab) for _ in range(source.randrange(1, 40))] for _ in range(count)]
    for text in made[::3]:  # long runs, and runs that overlap themselves
        text += text[: source.randrange(len(text)) + 1] * source.randrange(1, 4)
    return made


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rubbish beyond each row's end is what stands at its beginning, so that looking there would show."""
    longest = max(map(len, rows)) + 3
    history = [row + [row[i % len(row)] for i in range(longest - len(row))] for row in rows]
    return torch.tensor(history), torch.tensor([len(row) for row in rows])


def view_of(rows: list[list[int]]) -> View:
    return tiny.view(rows, vocab=50)


def said(draft: Draft) -> list[list[int]]:
    return [tokens[valid][1:].tolist() for tokens, valid in zip(draft.tree.tokens, draft.tree.valid, strict=True)]


@pytest.mark.parametrize("vocab", [1, 2, 5, 30])
def test_the_match_is_the_longest_and_of_these_the_latest(vocab: int):
    rows = [[3], [3, 3], *texts(120, vocab, seed=vocab)]
    match = longest_match(*padded(rows))
    for row, size, end in zip(rows, match.size.tolist(), match.end.tolist(), strict=True):
        expected = slow(row)
        assert size == expected[0]
        if size:
            assert end == expected[1]


def test_a_run_as_long_as_a_long_text_is_found():
    half = random.Random(0).choices(range(100), k=3000)
    match = longest_match(torch.tensor([half + half]), torch.tensor([6000]))
    assert (match.size.item(), match.end.item()) == (3000, 3000)


def test_what_followed_is_copied_and_goes_on_with_itself():
    rows = [[1, 2, 3, 9, 8, 7, 2, 3, 5, 1, 2, 3], [4, 1, 2, 1, 2], [6, 6], [1, 2, 3]]
    draft = MaxGram(Options(num_assistant_tokens=4), 50).propose(view_of(rows), Plan((4, 4, 3, 4)))
    assert draft.law is Law.FIXED and draft.tree.linear
    # the longer run wins over the later one; where nothing matches, one token
    assert said(draft) == [[9, 8, 7, 2], [1, 2, 1, 2], [6, 6, 6], [3]]


def test_a_short_run_may_be_no_match():
    drafter = MaxGram(Options(num_assistant_tokens=3, min_matching_ngram_size=2), 50)
    assert said(drafter.propose(view_of([[5, 1, 7, 1], [5, 1, 7, 5, 1]]), Plan((3, 3)))) == [[1], [7, 5, 1]]


def test_something_is_proposed_wherever_it_was_asked_for():
    for bigrams in (False, True):
        drafter = MaxGram(Options(bigrams=bigrams), 50)
        rows = texts(50, 30, seed=9)
        tiny.admit(drafter, rows)
        lengths = tuple(i % 3 for i in range(50))
        found = [len(line) for line in said(drafter.propose(view_of(rows), Plan(lengths)))]
        assert all(min(length, 1) <= count <= length for count, length in zip(found, lengths, strict=True))


def test_bigrams_are_of_all_texts_in_flight_and_are_forgotten_with_the_last():
    drafter = MaxGram(Options(num_assistant_tokens=4, bigrams=True), 50)
    drafter.admit(0, torch.tensor([10, 11, 12, 13]), {})
    drafter.admit(1, torch.tensor([40]), {})
    view = view_of([[10, 11, 12, 13, 14], [40, 11]])
    assert said(drafter.propose(view, Plan((4, 4)))) == [[14], [12, 13]]
    tree = TokenTree.chain(torch.tensor([[14, 15], [11, 12]]))
    verdict = Verdict(torch.tensor([[0, 1], [0, -1]]), torch.tensor([16, 20]))
    drafter.commit(view, Draft(tree, Law.FIXED), verdict, StepOut(torch.zeros(2, 2, 50)))
    # 13 -> 14 stood before the root, 14 -> 15 was accepted, 15 -> 16 is the bonus; 11 -> 20 is later than 11 -> 12
    assert said(drafter.propose(view_of([[13], [11]]), Plan((4, 4)))) == [[14, 15, 16], [20]]
    drafter.release(0)
    assert said(drafter.propose(view_of([[13]]), Plan((1,)))) == [[14]]
    drafter.release(1)
    drafter.admit(0, torch.tensor([7]), {})
    assert said(drafter.propose(view_of([[13]]), Plan((4,)))) == [[13]]
