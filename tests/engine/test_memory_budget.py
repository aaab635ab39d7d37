"""What does not fit into memory is refused when a model is loaded or a request is made, never in the middle of one."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foredraft
import runs
import tiny
from foredraft.compose.load import load
from foredraft.core.errors import ModelError, PromptError
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import BUCKET, SlotCache, bucket, persistent_zeros
from foredraft.model.memory import available_bytes, format_bytes

TOKEN = 2 * 2 * 2 * 8 * 4
"""Of a tiny Llama: keys and values of two layers with two heads of width 8, in float32."""


def test_a_token_takes_what_its_keys_and_values_take():
    assert CausalLM(tiny.build("llama")).token_bytes == TOKEN
    assert CausalLM(tiny.build("gpt2").bfloat16()).token_bytes == 2 * 2 * 32 * 2


def test_requests_wait_until_there_is_room_and_say_what_they_say_alone():
    model, prompts = tiny.build("llama"), tiny.prompts((5, 17, 9, 30, 3), seed=2)
    with load(model, "prompt_lookup") as free:
        wanted = [each.tokens for each in free.batch(prompts, max_new_tokens=12)]
    with load(model, "prompt_lookup", kv_cache_memory_bytes=BUCKET * TOKEN) as g:
        engine = g.engine
        sequences = g.submit(prompts, foredraft.SamplingParams(max_new_tokens=12))
        together = []
        while not all(each.finished for each in sequences):
            engine.step()
            together.append(sum(bool(each.tokens) and not each.finished for each in sequences))
            assert engine._stepper.cache.nbytes <= BUCKET * TOKEN
        assert max(together) == 3
        assert [each.tokens for each in sequences] == wanted


def test_rows_have_the_length_of_the_longest_where_buffers_are_allocated_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotCache, "lazy", False)
    with load(tiny.build("llama"), "none", kv_cache_memory_bytes=2 * BUCKET * TOKEN) as g:
        sequences = g.submit(tiny.prompts((30,) * 5), foredraft.SamplingParams(max_new_tokens=40))
        together = 0
        while not all(each.finished for each in sequences):
            g.engine.step()
            together = max(together, g.engine.running)
            assert g.engine.cache.nbytes <= 2 * BUCKET * TOKEN
        assert together == 2 and g.engine.preemptions == 0 and all(len(each.tokens) == 40 for each in sequences)


def test_a_request_that_does_not_fit_alone_is_refused_when_it_is_made():
    model = tiny.build("llama", max_position_embeddings=1024)
    with load(model, "none", kv_cache_memory_bytes=BUCKET * TOKEN) as g:
        with pytest.raises(PromptError, match="256 tokens: shorten the prompt, lower max_new_tokens, or raise kv_"):
            g.generate([1] * 100, max_new_tokens=200)
        assert len(g.generate([1] * 100, max_new_tokens=100).tokens) == 100


def test_a_budget_counts_the_draft_model_and_must_hold_something(tmp_path: Path):
    tiny.build("llama", seed=5).save_pretrained(tmp_path / "draft")
    model, draft = tiny.build("llama"), f"draft_model:{tmp_path / 'draft'}"
    with pytest.raises(ModelError, match="not enough for 256 tokens. Raise kv_cache_memory_bytes"):
        load(model, draft, kv_cache_memory_bytes=BUCKET * TOKEN)
    load(model, draft, kv_cache_memory_bytes=2 * BUCKET * TOKEN).close()


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    model = tiny.build("llama")
    model.save_pretrained(tmp_path)
    size = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr("foredraft.model.loading.placement.available_bytes", lambda device: size)
    load(str(tmp_path), "none", device="cpu").close()
    load(str(tmp_path), "none", device="cpu", dtype="bfloat16").close()
    monkeypatch.setattr("foredraft.model.loading.placement.available_bytes", lambda device: size - 1)
    load(str(tmp_path), "none", device="cpu", dtype="bfloat16").close()
    with pytest.raises(ModelError, match=r"take \S+ kB in float32, and \S+ kB are free on cpu"):
        load(str(tmp_path), "none", device="cpu")
    with pytest.raises(ModelError, match="are free on cpu"):  # a draft's, too
        load(model, f"draft_model:{tmp_path}")


def test_packed_copies_must_leave_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foredraft.model.linear.packed.available_bytes", lambda device: 1000)
    with load(tiny.build("llama"), "none") as g:
        assert g.engine.target.packed_layers == 0 and len(g.generate([1, 2], max_new_tokens=3).tokens) == 3


def test_available_memory_and_readable_sizes():
    free = available_bytes(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50
    assert available_bytes(torch.device("meta")) is None
    assert [format_bytes(size) for size in (7, 65_536, 16_100_000_000)] == ["7 B", "65.5 kB", "16.1 GB"]


def test_a_model_in_several_places_is_refused():
    model = tiny.build("llama")
    layer: Any = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to("meta"))
    with pytest.raises(ModelError, match=r"several devices or are offloaded \(cpu, offloaded\).*device_map"):
        load(model, "none")


def test_drafts_have_options_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, seed in (("target", 3), ("draft", 5)):
        tiny.build("llama", seed=seed).save_pretrained(tmp_path / name)
    given = {}
    before = foredraft.compose.load.load_model  # type: ignore[attr-defined]

    def watched(name: str, **options: Any) -> Any:
        given[Path(name).name] = options
        return before(name, **{**options, "options": {}})

    for module in ("load", "drafters"):
        monkeypatch.setattr(f"foredraft.compose.{module}.load_model", watched)
    own = {"revision": "abc", "trust_remote_code": True, "device_map": {"": 0}, "token": "t", "cache_dir": "c"}
    with load(
        str(tmp_path / "target"),
        f"draft_model:{tmp_path / 'draft'}",
        model_options=own,
        draft_options={"revision": "def", "cache_dir": "d"},
        device="cpu",
    ):
        assert given["target"]["options"] == own
        assert given["draft"]["options"] == {"revision": "def", "token": "t", "cache_dir": "d"}
        assert given["draft"]["dtype"] == torch.float32 and given["draft"]["device"] == torch.device("cpu")


@pytest.mark.parametrize("kind", ["none", "draft model", "eagle3"])
def test_nothing_is_allocated_while_requests_run_nor_when_others_follow(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Caches of target, draft and head are made when requests are admitted, for all that these may need."""
    made: list[torch.Size] = []

    def spy(like: torch.Tensor, *shape: int) -> torch.Tensor:
        if 0 not in shape:
            made.append(torch.Size(shape))
        return persistent_zeros(like, *shape)

    for module in ("model.kv.cache", "engine.state", "drafters.states.feature_cache"):
        monkeypatch.setattr(f"foredraft.{module}.persistent_zeros", spy)
    g = runs.small(kind)
    new = 40
    assert bucket(250) < bucket(250 + new)
    sequences = g.submit(tiny.prompts((250, 3)), foredraft.SamplingParams(max_new_tokens=new))
    while not all(each.tokens for each in sequences):  # the short prompt is read first
        g.engine.step()
    first = len(made)
    while not all(each.finished for each in sequences):
        g.engine.step()
    assert first and len(made) == first and all(len(each.tokens) == new for each in sequences)
    later = g.batch(tiny.prompts((3, 250)), max_new_tokens=20)
    assert len(made) == first
    alone = runs.small("none")
    assert [each.tokens for each in later] == [
        alone.generate(prompt, max_new_tokens=20).tokens for prompt in tiny.prompts((3, 250))
    ]


def test_an_idle_cache_stays_allocated_where_it_does_not_limit_the_next_requests(monkeypatch: pytest.MonkeyPatch):
    """Where buffers are allocated whole, as on a GPU."""
    monkeypatch.setattr(SlotCache, "lazy", False)
    model, short, long = tiny.build("llama", max_position_embeddings=1024), [1] * 3, [1] * 400
    with load(model, "none", kv_cache_memory_bytes=4 * BUCKET * TOKEN, max_batch_size=2) as g:
        cache = g.engine._stepper.cache
        for prompt, rows, slots in ((short, 1, 1), (long, 1, 2), (short, 1, 2), ([1] * 600, 0, 0), (short, 1, 1)):
            g.generate(prompt, max_new_tokens=5)
            assert (cache.rows, cache.slots, cache.nbytes) == (rows, slots * BUCKET, rows * slots * BUCKET * TOKEN)
        g.batch([short] * 2, max_new_tokens=5)
        assert (cache.rows, cache.slots) == (2, BUCKET)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory that Linux reports")
def test_a_short_output_commits_no_memory_for_the_tokens_that_it_might_have_had():
    target = CausalLM(tiny.build("llama", max_position_embeddings=1 << 20))
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
    g = tiny.generator(target)
    g.generate([1, 2, 3], max_new_tokens=3)
    before = resident()
    [sequence] = g.submit([[1, 2, 3]], foredraft.SamplingParams(max_new_tokens=1 << 19))
    for _ in range(20):
        g.engine.step()
    cache, committed = g.engine._stepper.cache, resident() - before
    size = cache.rows * cache.slots * cache.slot_bytes
    g.engine.cancel([sequence])
    assert size > (1 << 19) * TOKEN and committed < size / 4
