"""The Triton kernel against attention over dense masks, run in the interpreter by ``test_tree_attention.py``."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import random_heads as heads
import tiny
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, View
from foredraft.core.tree import PAD, TokenTree
from foredraft.drafters.eagle3 import Eagle3Drafter, Options as Eagle3Options
from foredraft.model.attention import tree_attention as kernels
from foredraft.model.attention.slot_attention import attention_weights, runs_kernel
from foredraft.model.attention.tree_attention import tree_attention
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.masks import Layout, address


@dataclass(frozen=True)
class Case:
    """Rows with these numbers of committed tokens and a tree; None: random parents with padding."""

    bases: tuple[int, ...] = (37,)
    nodes: int = 8
    linear: bool = False
    heads: int = 2
    groups: int = 1
    width: int = 16
    out_width: int = 16
    bound: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: bool = False
    rows: tuple[int, ...] | None = None
    start: int = 0
    splits: int | None = None
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5


CASES = {
    "plain": Case((0, 130, 64), nodes=1, linear=True),
    "chain": Case((70, 3), nodes=7, linear=True),
    "chain in a window": Case((70, 3), nodes=7, linear=True, bound=5),
    "tree": Case(heads=4, groups=2),
    "ragged rows of other numbers": Case((100, 0, 63), rows=(3, 0, 2)),
    "64 nodes": Case((65,), nodes=64, heads=1),
    "two words": Case((20,), nodes=70, heads=1),
    "one head a group": Case(heads=2, groups=2),
    "two tiles": Case(heads=4, nodes=17),
    "window": Case((90, 2), bound=9),
    "window inside the tree": Case((90, 2), bound=2),
    "chunks": Case((90, 13), bound=16, chunked=True),
    "softcap": Case(softcap=3.0),
    "sinks": Case(sinks=True),
    "sinks, window, softcap": Case((140, 1), sinks=True, bound=30, softcap=2.0),
    "widths": Case(width=24, out_width=12),
    "later nodes": Case((50, 9), start=5),
    "many splits": Case((150, 1), splits=5),
    "float16": Case((80, 7), dtype=torch.float16, tolerance=2e-3),
}


def tree_of(case: Case) -> TokenTree:
    tokens = torch.zeros(len(case.bases), case.nodes, dtype=torch.long)
    if case.linear:
        return TokenTree.chain(tokens, torch.tensor([case.nodes - b % 2 for b in range(len(case.bases))]).clamp(min=1))
    parents = (torch.rand(tokens.shape) * torch.arange(case.nodes)).long()
    parents[torch.rand(parents.shape) < 0.2] = PAD
    parents = torch.where(parents.gather(1, parents.clamp(min=0)) == PAD, PAD, parents)
    parents[:, 0] = -1
    return TokenTree(tokens, parents, depth=case.nodes)


def expected(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, case: Case, sinks: Tensor | None) -> Tensor:
    weights = attention_weights(query.double(), keys.double(), mask, 0.3, case.softcap, sinks)
    return (weights @ values.double()[:, :, None]).flatten(1, 2).transpose(1, 2)


@pytest.mark.parametrize("name", CASES)
def test_equals_attention_over_a_dense_mask(name: str):
    torch.manual_seed(len(name))
    case = CASES[name]
    rows = case.rows or tuple(range(len(case.bases)))
    bases, used_slots = torch.tensor(case.bases), max(case.bases) + case.nodes
    kinds, chunked = {"all": case.bound}, frozenset({"all"} if case.chunked else ())
    layout = Layout(kinds, by_type=False, chunked=chunked)
    step = address(tree_of(case), bases, rows, used_slots, layout, max_position=1 << 30, start=case.start)
    query = torch.randn(len(rows), case.nodes - case.start, case.heads, case.width).to(case.dtype).transpose(1, 2)
    keys = torch.randn(max(rows) + 1, case.groups, step.kv_extent, case.width).to(case.dtype)
    values = torch.randn(max(rows) + 1, case.groups, step.kv_extent, case.out_width).to(case.dtype)
    sinks = torch.randn(case.heads) * 2 if case.sinks else None
    table = step.tables(torch.tensor(step.rows))["all"]
    found = tree_attention(
        query, keys, values, table, scaling=0.3, softcap=case.softcap, s_aux=sinks, splits=case.splits
    )
    assert found.is_contiguous() and found.dtype == case.dtype
    mask = step.masks(torch.float64)["all"]
    correct = expected(query, keys[list(step.rows)], values[list(step.rows)], mask, case, sinks)
    assert (found - correct).abs().max() < case.tolerance


FEW = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""The interpreter runs heads one after the other."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of nodes of each call of the kernel."""
    seen: list[int] = []

    def watched(query: Tensor, *args: Tensor, **options: object) -> Tensor:
        seen.append(query.shape[2])
        return tree_attention(query, *args, **options)

    monkeypatch.setattr(kernels, "tree_attention", watched)
    return seen


def masked(name: str, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """The same model without the kernel."""
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.model.hf.causal_lm.runs_kernel", lambda device: False)
        return CausalLM(tiny.build(name, **FEW))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_model_says_the_same_with_the_kernel(name: str, launches: list[int], monkeypatch: pytest.MonkeyPatch):
    """Rows of different lengths in other rows of the cache, after a window's end."""
    bases, rows = torch.tensor([14, 3]), (2, 0)
    tokens = torch.randint(90, (2, 15), generator=torch.Generator().manual_seed(1))
    tree = TokenTree(tokens[:, :5], torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, PAD]]), depth=3)
    logits = []
    for model in (CausalLM(tiny.build(name, **FEW)), masked(name, monkeypatch)):
        cache = model.new_cache()
        cache.reserve(range(3), 64)
        model.forward(model.address(TokenTree.chain(tokens), torch.tensor([0, 0]), rows, 15), cache)
        logits.append(model.forward(model.address(tree, bases, rows, 19), cache).logits)
    assert launches and (logits[0] - logits[1]).abs().max() < 1e-4
    assert set(launches) == {1, 12, 15, 5}  # the probe's two forwards, and these two


def test_a_head_drafts_the_same_with_the_kernel(launches: list[int], monkeypatch: pytest.MonkeyPatch):
    model, drafts, propose = masked("llama", monkeypatch), [], Eagle3Drafter.propose

    def recorded(self: Eagle3Drafter, view: View, plan: Plan) -> Draft:
        drafts.append(propose(self, view, plan))
        return drafts[-1]

    monkeypatch.setattr(Eagle3Drafter, "propose", recorded)
    net = heads.eagle3(model, block={"sliding_window": 7})
    model.tap(net.taps)
    for kernel in (True, False):
        monkeypatch.setattr("foredraft.model.ops.runs_kernel", lambda device, found=kernel: found)
        launches.clear()
        generator = tiny.generator(model, Eagle3Drafter(Eagle3Options(nodes=6, depth=3, top_k=2), net))
        generator.generate(tiny.prompts((9, 4)), max_new_tokens=3)
        assert bool(launches) == kernel
    half = len(drafts) // 2
    assert half and len({tuple(draft.tree.tokens.flatten().tolist()) for draft in drafts[:half]}) == half
    for one, other in zip(drafts[:half], drafts[half:], strict=True):
        assert torch.equal(one.tree.tokens, other.tree.tokens) and torch.equal(one.tree.parents, other.tree.parents)


def test_long_chunks_of_a_prompt_are_read_with_masks(launches: list[int]):
    model = CausalLM(tiny.build("llama"))
    launches.clear()
    cache = model.new_cache()
    cache.reserve([0], 256)
    tokens = torch.zeros(1, 129, dtype=torch.long)
    model.forward(model.address(TokenTree.chain(tokens), torch.tensor([0]), (0,), 129), cache)
    assert not launches


def test_a_model_that_the_kernel_does_not_suit_keeps_masks(monkeypatch: pytest.MonkeyPatch):
    """Say a head is too wide for the GPU's shared memory."""

    def refuse(*args: object, **options: object) -> Tensor:
        raise OutOfResources(300_000, 200_000, "shared memory")

    runs_kernel(torch.device("cpu"))
    monkeypatch.setattr(kernels, "tree_attention", refuse)
    model = CausalLM(tiny.build("llama"))
    cache = model.new_cache()
    cache.reserve([0], 16)
    model.forward(model.address(TokenTree.root(torch.tensor([1])), torch.tensor([0]), (0,), 1), cache)
