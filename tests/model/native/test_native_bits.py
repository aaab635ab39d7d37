"""On the native engine a node's logits are the same bits in trees, chains, batches and with any number of threads."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foredraft.core.tree import PAD, TokenTree
from foredraft.model.kv.cache import SlotCache
from foredraft.model.native.model import NativeLM
from native import native, needs_compiler
from slots import bases, read
from tiny import build, prompts

pytestmark = needs_compiler

WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "head_dim": 24, "vocab_size": 203}
"""Sizes that are no multiples of vectors, tiles and groups."""
KV_CACHE = pytest.mark.parametrize("kv_cache_dtype", ["float16", "int8"])


@pytest.fixture
def threads():
    """Sets torch's number of threads; back to the old one after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def plain(model: NativeLM, text: Sequence[int]) -> Tensor:
    """[T, V]: logits after each token of a text, one forward per token."""
    cache = model.new_cache()
    cache.reserve([0], len(text))
    found = [_one(model, cache, token, place) for place, token in enumerate(text)]
    return torch.stack(found)


def _one(model: NativeLM, cache: SlotCache, token: int, place: int) -> Tensor:
    step = model.address(TokenTree.chain(torch.tensor([[token]])), torch.tensor([place]), (0,), place + 1)
    return model.forward(step, cache).logits[0, 0]


def random_tree(source: random.Random, root: int, nodes: int, vocab: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of any shape: siblings of different branches are interleaved."""
    parents = [-1, *(source.randrange(max(i - 6, 0), i) for i in range(1, nodes))]
    return [root, *(source.randrange(vocab) for _ in range(nodes - 1))], parents


def path_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def check_trees(model: NativeLM, texts: Sequence[list[int]], nodes: int, seed: int) -> int:
    """Compare the nodes of a batch of random trees with plain decoding of their paths; return how many."""
    source = random.Random(seed)
    made = [random_tree(source, text[-1], nodes, model.vocab_size) for text in texts]
    tree = TokenTree(torch.tensor([t for t, _ in made]), torch.tensor([p for _, p in made]), depth=nodes - 1)
    rows = tuple(range(len(texts)))
    cache = read(model, texts, rows)
    used_slots = max(map(len, texts)) + nodes
    cache.reserve(range(len(texts)), used_slots)
    logits = model.forward(model.address(tree, bases(texts), rows, used_slots), cache).logits
    for row, (text, (tokens, parents)) in enumerate(zip(texts, made, strict=True)):
        for node in range(nodes):
            expected = plain(model, [*text[:-1], *path_to(node, tokens, parents)])[-1]
            assert same_bits(logits[row, node], expected), (row, node)
    return len(texts) * nodes


@pytest.mark.parametrize(("weights", "kv_cache_dtype"), [("int4", "float16"), ("int8", "float16"), ("int8", "int8")])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2"])
def test_nodes_of_trees_have_the_bits_of_plain_decoding(name, weights, kv_cache_dtype):
    check_trees(native(name, weights, kv_cache_dtype, seed=2), prompts((1, 12, 30)), 9, seed=1)


@KV_CACHE
def test_nodes_of_trees_have_the_bits_of_plain_decoding_at_odd_sizes(kv_cache_dtype):
    check_trees(native("llama", "int4", kv_cache_dtype, seed=2, **WIDE), prompts((2, 75)), 17, seed=2)


@pytest.mark.parametrize(("weights", "kv_cache_dtype"), [("int4", "float16"), ("int8", "float16"), ("int4", "int8")])
def test_a_chain_read_at_once_in_parts_or_one_by_one_has_the_same_bits(weights, kv_cache_dtype):
    model = native("llama", weights, kv_cache_dtype, seed=2, **WIDE, max_position_embeddings=512)
    (text,) = prompts((300,))
    expected = plain(model, text)
    for width in (300, 256, 31, 8, 5):
        cache = model.new_cache()
        cache.reserve([0], len(text))
        for begin in range(0, len(text), width):
            piece = torch.tensor([text[begin : begin + width]])
            step = model.address(TokenTree.chain(piece), torch.tensor([begin]), (0,), begin + piece.shape[1])
            logits = model.forward(step, cache).logits[0]
            assert same_bits(logits, expected[begin : begin + width]), (width, begin)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 17, 32])
def test_rows_of_a_batch_have_the_bits_of_each_alone(count):
    model = native("llama", "int4", seed=2)
    texts = prompts([1 + 3 * i for i in range(count)])
    cache = read(model, texts, tuple(range(count)))
    roots = TokenTree.chain(torch.tensor([text[-1:] for text in texts]))
    step = model.address(roots, bases(texts), tuple(range(count)), 128)
    logits = model.forward(step, cache).logits[:, 0]
    for row, text in enumerate(texts):
        assert same_bits(logits[row], plain(model, text)[-1]), row


@KV_CACHE
def test_two_threads_have_the_bits_of_one(threads, kv_cache_dtype):
    model = native("llama", "int4", kv_cache_dtype, seed=2, **WIDE, max_position_embeddings=512)
    (text,) = prompts((80,))
    ids = torch.tensor([text, text[::-1]])
    threads(1)
    alone, one = plain(model, text), model.stock_logits(ids)
    for count in (2, 3):
        threads(count)
        assert same_bits(model.stock_logits(ids), one)
        assert same_bits(plain(model, text), alone)


def test_only_kept_nodes_get_logits_and_padding_changes_nothing():
    model = native("llama", "int8", seed=2)
    (text,) = prompts((12,))
    tokens, parents = torch.tensor([[text[-1], 4, 5, 0, 0]]), torch.tensor([[-1, 0, 0, PAD, PAD]])
    cache = read(model, [text], (0,))
    step = model.address(TokenTree(tokens, parents, depth=1), bases([text]), (0,), 32)
    all_logits = model.forward(step, cache).logits
    kept = model.forward(step, cache, keep=torch.tensor([2, 0, 2])).logits
    assert same_bits(kept, all_logits[:, [2, 0, 2]])
    assert same_bits(all_logits[0, 2], plain(model, [*text, 5])[-1])


@pytest.mark.slow
def test_ten_thousand_positions(threads):
    from native import on_native

    model = on_native(build("llama", seed=2, **WIDE, max_position_embeddings=512), "int4")
    source, checked, seed = random.Random(3), 0, 0
    while checked < 10_000:
        threads(1 + seed % 2)
        lengths = [source.randrange(1, 60) for _ in range(source.choice([1, 2, 4, 8]))]
        checked += check_trees(model, prompts(lengths, seed=seed), source.choice([2, 4, 8, 16, 32]), seed)
        seed += 1
