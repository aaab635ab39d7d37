"""Conventions that are easy to get wrong, and that each of them would be seen: off by one costs speed and no more."""

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from slow_nets import DraftRunner, Faults, Path, grow, slow_of
from watched_nets import CLOSE, FAR, LAYERS, Proposal, doubled, every_row, frequencies, gap, target, truth, watch

import random_heads as heads
from foredraft.core.target_parts import FINAL
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.heads.formats.block import block_like, rotary_of
from foredraft.heads.formats.vocabulary import member_mask, offsets_of, vocabulary_of
from foredraft.heads.nets.eagle import Eagle3

DEPTH, TOP_K = 3, 3


@functools.cache
def seen() -> tuple[Eagle3, list[Proposal]]:
    """A plain EAGLE-3 head, and what it said while it drafted."""
    net = doubled(heads.eagle3(target(), taps=(1, 2, 3)))
    return net, watch(Eagle3Drafter(Options(nodes=8, depth=DEPTH, top_k=TOP_K), net), net)


def reader(text: Path, **faults: Any) -> DraftRunner:
    return DraftRunner(slow_of(seen()[0], target().model, Faults(**faults)), text, truth(text))


@functools.cache
def frontiers(text: Path) -> list[list[Path]]:
    return grow(reader(text), DEPTH, TOP_K, 1).frontiers


def off(proposal: Proposal, b: int, **faults: Any) -> list[float]:
    """How far the drafter's logits are from the slow ones, by level; the right paths, looked at in a faulty way."""
    text = proposal.texts[b]
    slow, levels = reader(text, **faults), zip(proposal.calls, frontiers(text), strict=False)
    return [gap(call.out[b], [slow.logits(path) for path in paths]) for call, paths in levels]


def test_all_positions_may_be_shifted_together():
    """Rotary positions are relative: some trainers count from 1."""
    every_row(seen()[1], lambda proposal, b: check(max(off(proposal, b, shift=1)) < CLOSE))


def check(holds: bool) -> None:
    assert holds


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ({"tokens_not_shifted": True}, 0),
        ({"taps_reversed": True}, 0),
        ({"other_residual": True}, 0),
        ({"other_carried": True}, 1),
        ({"base": 100.0}, 1),
        ({"tree_shift": 1}, 1),
        ({"tree_shift": -1}, 1),
        ({"sees_siblings": True}, 1),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_planted_fault_is_seen(fault: dict[str, Any], first: int):
    """In every row of every step, from the level on where it begins to matter."""

    def found(proposal: Proposal, b: int) -> None:
        gaps = off(proposal, b, **fault)
        assert all(far > FAR for far in gaps[first:]), gaps
        if first and "base" not in fault:
            assert max(gaps[:first]) < CLOSE

    every_row(seen()[1], found)


def test_what_a_tree_leaves_behind_would_be_seen():
    """After a draft was accepted in part, rows read the target's features and not what the draft had carried."""
    proposals, count = seen()[1], 0
    for now, then in pairwise(proposals):
        for row, text in zip(now.rows, now.texts, strict=True):
            after = dict(zip(then.rows, then.texts, strict=True)).get(row, ())
            new = after[len(text) :]
            if after[: len(text)] != text or len(new) < 2 or len(text) < 2:
                continue
            logits = reader(text).logits_of_kept(new, truth(after))
            assert gap(then.calls[0].out[then.rows.index(row)], [logits]) > FAR
            count += 1
    assert count > 0


def test_a_tap_is_the_state_after_so_many_layers():
    text = torch.tensor([[3, 1, 4, 1, 5, 9]])
    found = target().read(text, (*range(LAYERS + 1), FINAL))
    with torch.no_grad():
        output = target().model(input_ids=text, output_hidden_states=True)
        last = target().model.model(input_ids=text).last_hidden_state
    for tap in range(LAYERS):  # what stands behind the last one depends on the version of transformers
        assert torch.equal(found[tap], output.hidden_states[tap])
    assert torch.equal(found[FINAL], last)
    mine = truth(tuple(text[0].tolist()))
    for tap, states in found.items():
        assert (states[0] - torch.stack(mine[tap])).abs().max() < CLOSE
    states = [found[tap] for tap in (*range(LAYERS + 1), FINAL)]
    assert min(float((a - b).abs().max()) for i, a in enumerate(states) for b in states[:i]) > FAR


def test_d2t_holds_offsets():
    d2t = torch.tensor([2, 2, 5, 5, 6])
    ids = [i + int(offset) for i, offset in enumerate(d2t)]
    assert vocabulary_of(d2t).tolist() == ids == [2, 3, 7, 8, 10]
    assert offsets_of(vocabulary_of(d2t)).tolist() == d2t.tolist()
    assert vocabulary_of(torch.zeros(4, dtype=torch.long)).tolist() == [0, 1, 2, 3], "all zeros: the same ids"
    assert member_mask(vocabulary_of(d2t), 12).tolist() == [token in ids for token in range(12)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_theta": 500000.0, "head_dim": 64}, {"rope_scaling": {"type": "linear", "factor": 4.0}}],
    ids=["plain", "base", "linear"],
)
def test_rotary_frequencies(changes: dict[str, Any]):
    """The tests beside this one use exact ones."""
    block = block_like(target().config, **changes)
    made, exact = rotary_of(block).frequencies.double(), frequencies(block)
    assert ((made - exact).abs() / exact).max() < 1e-6
    positions = torch.tensor([[0, 1, 7, 2000]])
    cos, sin = rotary_of(block)(positions)
    half = block.head_dim // 2
    for n, position in enumerate(positions[0].tolist()):
        for i in range(block.head_dim):
            angle = exact[i % half] * position * (1 if i >= half else -1)
            assert abs(cos[0, 0, n, i] - angle.cos()) < 1e-3 and abs(sin[0, 0, n, i] - angle.sin()) < 1e-3
