"""What is kept of rows: loops over states, each with its own part of a prompt, and what they need together."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import EMPTY_KV, ByRow, Drafter, Needs, Plan, Rewindable, RowState, StepOut, View
from foredraft.core.errors import DrafterError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree


class Sums(RowState):
    """Reads some layers and keeps their sums; notes what it is called with."""

    def __init__(self, *layers: int) -> None:
        self.needs = Needs(layers, ahead=True)
        self.calls: list[tuple[Any, ...]] = []

    def fuse(self, hidden: Any) -> dict[int, Tensor]:
        return {layer: states.sum(2, keepdim=True) + layer for layer, states in hidden.items()}

    def admit(self, row: int, prompt: Tensor, hidden: Any) -> None:
        self.calls.append(("admit", row, {key: each.flatten().tolist() for key, each in hidden.items()}))

    def read_ahead(self, row: int, prompt: Tensor, hidden: Any, kv_size: Any) -> None:
        self.calls.append(("read_ahead", row, sorted(hidden)))

    def fork(self, row: int, source: int, length: int) -> None:
        self.calls.append(("fork", row, source, length))

    def commit(self, view: Any, draft: Any, verdict: Any, out: StepOut) -> None:
        self.calls.append(("commit", sorted(out.hidden)))

    def rewind(self, row: int, length: int) -> None:
        self.calls.append(("rewind", row, length))

    def release(self, row: int) -> None:
        self.calls.append(("release", row))


class Rooted(Rewindable):
    def propose(self, view: View, plan: Plan) -> Draft:
        return Draft(TokenTree.root(view.roots), Law.FIXED)


def hidden(length: int) -> dict[int, Tensor]:
    source = torch.Generator().manual_seed(length)
    return {layer: torch.randint(9, (1, length, 3), generator=source).float() for layer in (-1, 0, 2, 5)}


def test_each_state_gets_its_own_part_of_a_prompt_however_deep_it_lies():
    """Keys of one state are its own: a drafter around another passes them on unchanged."""
    one, two, three, text = Sums(2, -1), Sums(2), Sums(5, 0), ByRow[str]()
    inner = Rooted(Needs(max_nodes=3), one, two)
    outer = Rooted(Needs(max_nodes=3), inner, text, three)
    states, own = hidden(4), Sums(2, -1)
    alone = Rooted(Needs(), own)
    assert alone.fuse(states).keys() == own.fuse({2: states[2], -1: states[-1]}).keys()
    parts = [outer.fuse({key: each[:, part] for key, each in states.items()}) for part in (slice(3), slice(3, 4))]
    fused = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
    assert len(fused) == 5 and all(isinstance(key, int) for key in fused)
    outer.admit(1, torch.tensor([1, 2, 3, 4]), fused)
    for state in (one, two, three):
        wanted = {layer: (states[layer].sum(2) + layer).flatten().tolist() for layer in state.needs.hidden_layers}
        assert state.calls == [("admit", 1, wanted)]


def test_a_rows_life_is_told_to_all_states_in_order():
    one, two, text = Sums(2), Sums(5), ByRow({3: "a", 4: "b"})
    outer = Rooted(Needs(), Rooted(Needs(), one, text), two)
    outer.fork(3, 1, 7)
    outer.read_ahead(3, torch.tensor([1, 2]), outer.fuse(hidden(2)), EMPTY_KV)
    tree = TokenTree.root(torch.tensor([1]))
    verdict, out = Verdict(torch.tensor([[0]]), torch.tensor([2])), StepOut(torch.rand(1, 1, 4), hidden(1))
    outer.commit(tiny.view([[1]], SamplingParams()), Draft(tree, Law.FIXED), verdict, out)
    outer.rewind(3, 5)
    outer.release(3)
    assert text == {4: "b"}
    for state, layer in ((one, 2), (two, 5)):
        told = [("fork", 3, 1, 7), ("read_ahead", 3, [layer]), ("commit", [layer]), ("rewind", 3, 5), ("release", 3)]
        assert state.calls == told
    outer.release(8)  # one that never began
    assert outer.commits and not Rooted(Needs(), text).commits


def test_needs_are_a_drafters_and_those_of_its_states():
    shared = RowState()
    shared.needs = Needs(learns=True, shares_text=True, target_cache=True, whole=True, ahead=True)
    together = Rooted(Needs((5,), max_nodes=4, max_depth=2, scored=True, ahead=True), Sums(2, 5), shared).needs
    assert together == Needs((5, 2), 4, 2, True, None, True, True, True, True, True)
    assert not Rooted(Needs(ahead=True), RowState()).needs.ahead, "a state must say that it can do with it"
    assert Rooted().needs == Needs() and Rooted().states == ()


def test_a_drafter_of_others_keeps_its_own_needs_and_its_errors_are_named():
    class Own(Drafter):
        needs = Needs(max_nodes=7)

        def __init__(self) -> None:
            super().__init__()

        def admit(self, row: int, prompt: Tensor, hidden: Any) -> None:
            raise ValueError("no room")

        def propose(self, view: View, plan: Plan) -> Draft:
            raise NotImplementedError

    class Table(RowState):
        def release(self, row: int) -> None:
            raise KeyError(row)

    assert Own().needs.max_nodes == 7
    with pytest.raises(DrafterError, match=r"Own\.admit failed with ValueError: no room"):
        Rooted(Needs(), Own()).admit(0, torch.tensor([1]), {})
    with pytest.raises(DrafterError, match=r"Table\.release failed with KeyError"):
        Rooted(Needs(), Table()).release(0)
