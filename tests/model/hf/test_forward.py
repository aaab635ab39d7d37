"""The forward over slots: trees, ragged rows, windows, chunks and taps give what the stock model gives."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from foredraft.core.errors import ModelError
from foredraft.core.tree import PAD, TokenTree
from foredraft.model import prefill as prefill_module
from foredraft.model.attention import slot_attention
from foredraft.model.attention.slot_attention import NoCudnn, masked_attention
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache, SlotView
from foredraft.model.prefill import prefill
from slots import bases, read, whole

TOLERANCE = 1e-4


def random_tree(roots: list[int], nodes: int, seed: int) -> TokenTree:
    """A tree a row: random parents, random tokens, padding anywhere, the last row a chain."""
    source = random.Random(seed)
    tokens, parents = [], []
    for row, root in enumerate(roots):
        line = [root] + [source.randrange(tiny.VOCAB) for _ in range(nodes - 1)]
        up = [-1]
        for node in range(1, nodes):
            real = [i for i in range(node) if up[i] != PAD]
            chain = row == len(roots) - 1
            up.append(node - 1 if chain else PAD if source.random() < 0.2 else source.choice(real))
        tokens.append(line)
        parents.append(up)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), depth=nodes - 1)


def path_to(tree: TokenTree, row: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path[::-1]


def stock(model: CausalLM, text: list[int]) -> torch.Tensor:
    return model.stock_logits(torch.tensor([text]))[0]


def after(model: CausalLM, texts: list[list[int]]) -> torch.Tensor:
    """[R, V]: what the stock model says after each text."""
    return torch.stack([stock(model, text)[-1] for text in texts])


def after_roots(model: CausalLM, cache: SlotCache, texts: list[list[int]], rows: tuple[int, ...]) -> torch.Tensor:
    """[R, V]: what we say there, with a cache that holds all but the last token of each text."""
    roots = TokenTree.chain(torch.tensor([[text[-1]] for text in texts]))
    return model.forward(model.address(roots, bases(texts), rows, max(map(len, texts))), cache).logits[:, 0]


@pytest.mark.parametrize(
    ("name", "fast"), [*[(name, True) for name in [*tiny.MODELS, *tiny.MORE]], *[(name, False) for name in tiny.MODELS]]
)
def test_a_tree_gives_each_node_the_logits_of_its_path(name: str, fast: bool):
    """Windows of 8 and texts of 5 to 20: borders lie before, inside and behind the drafts."""
    model = CausalLM(tiny.build(name), fast=fast)
    texts = tiny.prompts((6, 20, 5), seed=3)
    for rows in ((0, 1, 2), (3, 1, 4)):
        tree = random_tree([text[-1] for text in texts], nodes=12, seed=sum(rows))
        step = model.address(tree, bases(texts), rows, 32)
        logits = model.forward(step, read(model, texts, rows)).logits
        for row, text in enumerate(texts):
            for node in tree.valid[row].nonzero()[:, 0].tolist():
                expected = stock(model, text[:-1] + path_to(tree, row, node))[-1]
                assert (logits[row, node] - expected).abs().max() < TOLERANCE, (rows, row, node)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "llama4_text"])
def test_after_keep_the_accepted_branch_is_the_text(name: str):
    model = CausalLM(tiny.build(name))
    texts, rows = tiny.prompts((9, 6), seed=4), (3, 1)
    tree = TokenTree(
        torch.tensor([[t[-1], 11, 12, 13, 14, 15, 16] for t in texts]), torch.tensor([[-1, 0, 0, 1, 2, 4, 4]] * 2), 3
    )
    cache = read(model, texts, rows)
    step = model.address(tree, bases(texts), rows, 16)
    model.forward(step, cache)
    with torch.inference_mode():
        cache.compact(step.rows, bases(texts), torch.tensor([[0, 2, 4, 6], [0, 1, -1, -1]]))
    accepted = [texts[0] + [12, 14, 16, 50], texts[1] + [11, 51]]
    assert (after_roots(model, cache, accepted, rows) - after(model, accepted)).abs().max() < TOLERANCE


def test_a_part_of_a_tree_sees_the_part_that_is_in_the_cache():
    """Levels of a tree, forwarded one after another, equal the tree at once."""
    model = CausalLM(tiny.build("gemma2"))
    texts, rows = tiny.prompts((12, 7), seed=5), (1, 0)
    tree = random_tree([text[-1] for text in texts], nodes=9, seed=1)
    at_once = model.forward(model.address(tree, bases(texts), rows, 24), read(model, texts, rows)).logits
    cache, parts = read(model, texts, rows), []
    for start, end in ((0, 1), (1, 4), (4, 9)):
        part = TokenTree(tree.tokens[:, :end], tree.parents[:, :end], depth=8)
        parts.append(model.forward(model.address(part, bases(texts), rows, 24, start=start), cache).logits)
    assert (torch.cat(parts, 1) - at_once).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "llama4_text"])
def test_prefill_in_chunks_is_prefill(name: str, monkeypatch: pytest.MonkeyPatch):
    model = CausalLM(tiny.build(name))
    model.tap([0, 1, 2])
    texts, rows = tiny.prompts((23, 1, 11), seed=6), (2, 0, 1)
    results = []
    for size in (512, 5):
        monkeypatch.setattr(prefill_module, "CHUNK", size)
        parts: list[Mapping[int, torch.Tensor]] = []
        cache = read(model, texts, rows, lambda begin, hidden, parts=parts: parts.append(hidden))
        hidden = {tap: torch.cat([part[tap] for part in parts], 1) for tap in parts[0]}
        results.append((after_roots(model, cache, texts, rows), hidden))
    (at_once, states), (chunked, chunked_states) = results
    assert (at_once - chunked).abs().max() < TOLERANCE
    assert states.keys() == chunked_states.keys() == {0, 1, 2}
    for layer, state in states.items():
        assert state.shape == (3, 22, 32)
        for row, text in enumerate(texts):
            own = slice(0, len(text) - 1)
            assert torch.allclose(state[row, own], chunked_states[layer][row, own], atol=TOLERANCE)
    assert (at_once - after(model, texts)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_scores_that_no_fused_kernel_keeps_to_itself_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch):
    """Soft caps and sinks: a prompt's scores would else take memory as its length squared."""
    model = CausalLM(tiny.build(name))
    logits, most, softmax = [], [], slot_attention._softmax
    monkeypatch.setattr(slot_attention, "_softmax", lambda *args: most.append(args[0].numel()) or softmax(*args))
    for bound in (1 << 25, 3000):
        monkeypatch.setattr(slot_attention, "_MOST_SCORES", bound)
        most.clear()
        logits.append(model.forward(*whole(model, tiny.prompts((40,)))).logits)
        assert 2000 < max(most) <= bound and (len(most) > 2) == (bound == 3000)
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE


def test_a_mask_is_repeated_once_a_forward():
    """Heads that share keys need it repeated, if it does not fit small products; all layers get the same one."""

    class Repeats(TorchDispatchMode):
        sizes: ClassVar[list[torch.Size]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.repeat.default and args[0].ndim == 4:
                self.sizes.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    model = CausalLM(tiny.build("llama"))
    with Repeats() as seen:
        model.forward(*whole(model, [[0] * 40]))
    assert seen.sizes == [(1, 1, 40, 64)]


def test_prefill_continues_where_a_row_stands():
    """Rows that start at different places, as a draft that catches up does."""
    model = CausalLM(tiny.build("mistral"))
    texts, rows = tiny.prompts((14, 18), seed=8), (1, 2)
    cache = model.new_cache()
    for ends in ((4, 11), (13, 17)):
        starts = (0, 0) if ends[0] == 4 else (4, 11)
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        tokens = torch.zeros(2, width, dtype=torch.long)
        for line, (start, end) in enumerate(zip(starts, ends, strict=True)):
            tokens[line, : end - start] = torch.tensor(texts[line][start:end])
        prefill(model, cache, rows, tokens, starts)
    cache.reserve(range(3), 32)
    assert (after_roots(model, cache, texts, rows) - after(model, texts)).abs().max() < TOLERANCE


def test_only_the_wanted_nodes_get_logits():
    for name in ("llama", "gptj"):
        model = CausalLM(tiny.build(name))
        text = tiny.prompts((9,))[0]
        for keep in ([2, 7], None):
            logits = model.forward(*whole(model, [text]), None if keep is None else torch.tensor(keep)).logits[0]
            assert torch.allclose(logits, stock(model, text)[keep or slice(None)], atol=TOLERANCE)


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "gpt_neox", "opt", "qwen3_moe", "gptj"])
def test_taps_are_the_hidden_states_of_transformers(name: str):
    raw = tiny.build(name)
    before = hooks(raw)
    model = CausalLM(raw)
    text = tiny.prompts((13,))[0]
    with torch.inference_mode():
        expected = raw(torch.tensor([text]), output_hidden_states=True).hidden_states
    resident = hooks(raw)
    model.tap([2, 0, 1])
    out = model.forward(*whole(model, [text]))
    assert set(out.hidden) == {0, 1, 2}
    for layer in (0, 1):  # the last one of transformers went through the final norm
        assert torch.allclose(out.hidden[layer], expected[layer], atol=TOLERANCE)
    with torch.inference_mode():
        logits = from_last(raw, out.hidden[2])
    assert torch.allclose(logits, out.logits, atol=TOLERANCE), "the last layer is what the final norm reads"
    tapped = hooks(raw)
    model.tap([1])
    assert hooks(raw) == tapped, "whoever shares the target keeps what it asked for"
    model.close()
    assert hooks(raw) == before or hooks(raw) == resident  # transformers keeps hooks of its own once asked


def from_last(raw, state: torch.Tensor) -> torch.Tensor:
    """Logits of the state after the last layer, by the model's own final norm and head."""
    base = raw.base_model
    base = getattr(base, "decoder", base)
    norm = next(
        module for name in ("norm", "ln_f", "final_layer_norm") if (module := getattr(base, name, None)) is not None
    )
    head = raw.get_output_embeddings()
    return head(norm(state))


def test_taps_are_handed_out_once_and_must_exist():
    model = CausalLM(tiny.build("llama"))
    with pytest.raises(ModelError, match="layers 0 to 2"):
        model.tap([3])
    model.tap([1])
    model._taps.take()
    assert set(model.forward(*whole(model, [[1, 2]])).hidden) == {1}
    assert model._taps.take() == {}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16(name: str):
    """Close to the stock model in the same type: its own two kernels differ as much."""
    model = CausalLM(tiny.build(name).bfloat16())
    assert model.dtype == torch.bfloat16 and model.packed_layers == 0
    texts, rows = tiny.prompts((12, 5), seed=2), (0, 1)
    logits = after_roots(model, read(model, texts, rows), texts, rows).float()
    for found, expected in zip(logits, after(model, texts).float(), strict=True):
        assert (found - expected).abs().max() < 0.15 * expected.std()


def test_rows_in_order_are_not_copied_from_the_host(monkeypatch: pytest.MonkeyPatch):
    """A copy of a list waits for all that runs on a GPU, and there is an address for every forward."""
    model, tree, ends = CausalLM(tiny.build("llama")), TokenTree.root(torch.tensor([1, 2, 3])), torch.tensor([4, 5, 6])
    cache = model.new_cache()
    cache.reserve(range(4), 7)
    view = SlotView(cache, model.address(tree, ends, [2, 0, 1], 7))
    assert view.buffer_rows.tolist() == [2, 0, 1] and view.adjacent is None
    monkeypatch.setattr(torch, "tensor", None)
    view = SlotView(cache, model.address(tree, ends, (1, 2, 3), 7))
    assert (
        view.buffer_rows.tolist() == [1, 2, 3] and view.adjacent == slice(1, 4) and view.buffer_rows.dtype == torch.long
    )


@pytest.fixture
def enabled() -> Iterator[Callable[[], bool]]:
    """Whether cuDNN may be used for attention; it may at first."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnn_comes_back_when_the_last_of_several_has_left(
    enabled: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(NoCudnn, "__init__", lambda self, device: vars(self).update(_applies=True))
    a, b = NoCudnn(torch.device("cuda")), NoCudnn(torch.device("cuda"))
    a.__enter__()
    b.__enter__()
    a.__exit__()
    a.off()
    assert not enabled(), "b still runs"
    b.__exit__()
    assert enabled()
    a.__enter__()
    del a  # it was interrupted, and nobody holds it
    with b:
        pass
    assert enabled()


def test_on_cuda_the_model_and_heads_attend_without_cudnn_and_nowhere_else(
    enabled: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
):
    seen, attend = [], F.scaled_dot_product_attention

    def watched(*args: torch.Tensor, **given: object) -> torch.Tensor:
        seen.append(enabled())
        return attend(*args, **given)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    x, mask = torch.randn(1, 2, 80, 8), torch.zeros(1, 1, 80, 80)
    with NoCudnn(torch.device("cpu")):
        masked_attention(x, x, x, mask)
    monkeypatch.setattr(NoCudnn, "__init__", lambda self, device: vars(self).update(_applies=True))
    masked_attention(x, x, x, mask)  # as heads do
    assert seen == [True, False] and enabled()
    raw = tiny.build("falcon")
    raw.transformer.ln_f.register_forward_hook(lambda *args: seen.append(enabled()))
    model = CausalLM(raw, verify=False)
    assert seen[2:] and not any(seen[2:]) and enabled()
    step, _ = whole(model, [[1, 2]])
    with pytest.raises(IndexError):
        model.forward(step, SlotCache(0))
    assert enabled(), "also after a forward that failed"
