"""How prompts are read: in groups of like length, in bounded pieces, into memory that outlives the step."""

import random
from typing import Any

import pytest
import torch

import random_heads as heads
import runs
import tiny
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.prefill import CHUNK, group_by_length


def padded(lengths: list[int]) -> int:
    """Tokens that are read, padding included, group by group."""
    return sum(len(group) * max(lengths[i] for i in group) for group in group_by_length(lengths))


@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_is_in_one_group_and_little_is_padding(seed: int):
    source = random.Random(seed)
    lengths = [source.choice((0, 9, 40, 150, 700, 3000)) + source.randrange(20) for _ in range(32)]
    groups = group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(32))
    assert padded(lengths) <= 1.2 * sum(lengths) < 0.5 * len(lengths) * max(lengths)
    assert max(len(group) * min(max(lengths[i] for i in group), CHUNK) for group in groups) <= 4 * CHUNK
    assert len(groups) < 16


def test_prompts_of_like_length_are_read_together_and_long_ones_in_pieces():
    assert group_by_length([12, 9, 10, 11]) == [[0, 1, 2, 3]]
    assert group_by_length([500, 3, 490, 1]) == [[0, 2], [1, 3]]
    assert sorted(map(len, group_by_length([CHUNK] * 10))) == [2, 4, 4]
    assert group_by_length([5 * CHUNK]) == [[0]] and group_by_length([0]) == [[0]]


def test_a_ragged_batch_reads_hardly_more_than_its_tokens():
    """18,680 rows were read for 3,232 tokens once; and what is said is what each prompt says alone."""
    target = runs.model()
    prompts = tiny.prompts([1, 2, 6, 7, 9, 30, 31, 33, 60, 62, 65, 66, 120, 125, 128, 150, 228, 230, 233, 235])
    g = tiny.generator(target)
    with runs.forwards(target) as read:
        results = g.generate(prompts, max_new_tokens=1)
    tokens = sum(len(prompt) - 1 for prompt in prompts)
    assert sum(rows * nodes for rows, nodes in read) < 1.15 * tokens + len(prompts)  # each takes one step besides
    assert len(read) < 12
    assert [result.tokens for result in results] == [g.generate(p, max_new_tokens=1).tokens for p in prompts]


def test_what_outlives_a_step_is_no_inference_tensor():
    """Inductor and AOTAutograd refuse to write to tensors that were allocated under ``inference_mode``."""
    target = CausalLM(tiny.build("llama"))
    target.tap((0, 1, 2))
    drafter: Any = heads.small_drafter("eagle3", target)
    g = tiny.generator(target, drafter, Constant(2))
    with g.stream(tiny.prompts((120,))[0], max_new_tokens=80) as stream:
        next(stream)
        own = drafter._state
        kept = [*g.engine._stepper.cache.stored(0), *own._cache.stored(0), own._features]
        assert all(each.numel() and not each.is_inference() for each in kept)
    grown = target.new_cache()
    with torch.inference_mode():
        grown.reserve([0], 1)
        grown.buffers(0, torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        grown.reserve(range(2), 300)
    assert not any(each.is_inference() for each in grown.stored(0))


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_what_a_head_reads_is_fused_a_chunk_at_a_time(method: str, monkeypatch: pytest.MonkeyPatch):
    """The states of a long prompt are never held together; drafts are those of a prompt that is read at once."""
    target = CausalLM(tiny.build("llama"))
    drafter: Any = heads.small_drafter(method, target)
    target.tap((0, *drafter.needs.hidden_layers))  # another drafter may have tapped more
    sizes: list[tuple[int, int]] = []
    given: list[dict[int, torch.Size]] = []
    fuse, admit = drafter.fuse, drafter.admit

    def fused(hidden: Any) -> Any:
        assert set(hidden) == set(drafter.needs.hidden_layers)
        sizes.append(next(iter(hidden.values())).shape[:2])
        return fuse(hidden)

    def admitted(row: int, prompt: torch.Tensor, hidden: Any) -> None:
        given.append({key: states.shape for key, states in hidden.items()})
        admit(row, prompt, hidden)

    monkeypatch.setattr(drafter, "fuse", fused)
    monkeypatch.setattr(drafter, "admit", admitted)
    g = tiny.generator(target, drafter)
    prompts = tiny.prompts((30, 1, 24))
    whole = g.generate(prompts, max_new_tokens=12)
    assert max(size for _, size in sizes) == 29
    sizes.clear()
    given.clear()
    monkeypatch.setattr("foredraft.model.prefill.CHUNK", 8)
    parts = g.generate(prompts, max_new_tokens=12)
    assert sorted(sizes) == sorted([(1, 0)] * 3 + [(1, size) for size in (8, 8, 8, 5, 8, 8, 7)])
    lengths = [29, 0, 23] if method == "eagle3" else [4, 0, 3]
    assert [list(shapes.values()) for shapes in given] == [[torch.Size((1, length, 32))] for length in lengths]
    assert [r.tokens for r in parts] == [r.tokens for r in whole]
    assert [r.stats.accepted for r in parts] == [r.stats.accepted for r in whole]
