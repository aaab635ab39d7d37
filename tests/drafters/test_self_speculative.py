"""early_exit and layer_skip: what they draft is what the rest of the target would say, and its cache stays its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
import tiny
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.common.self_speculative import SelfSpeculativeDrafter
from foredraft.drafters.early_exit import EarlyExit, Options as ExitOptions
from foredraft.drafters.layer_skip.config import SkipConfig, read_skip_config, write_skip_config
from foredraft.drafters.layer_skip.method import LayerSkip, Options as SkipOptions
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.taps import decoder_layers
from foredraft.model.kv.cache import SlotCache
from reference import reference

NEW = 16
K = 4


def exit_at(target: CausalLM, layers: int, **options: Any) -> EarlyExit:
    chosen = ExitOptions(num_assistant_tokens=K, assistant_early_exit=layers, **options)
    return EarlyExit(chosen, target, target.new_cache(), target.vocab_size)


def skipping(target: CausalLM, attention: tuple[int, ...], mlp: tuple[int, ...]) -> LayerSkip:
    options = SkipOptions(num_assistant_tokens=K, skip_attention=attention, skip_mlp=mlp)
    return LayerSkip(options, target, target.new_cache(), target.vocab_size)


def generator(target: CausalLM, drafter: SelfSpeculativeDrafter, **options: Any) -> Generator:
    """Of chains without siblings."""
    return tiny.generator(target, drafter, Constant(K, confidence=1e-9), cache=drafter.cache, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["early_exit", "layer_skip"])
def test_a_draft_that_leaves_nothing_out_is_accepted_whole(method: str, temperature: float):
    """Steps of four drafted tokens and the bonus, in rows of different lengths; one root or position off would show."""
    target = CausalLM(tiny.four())
    drafter = exit_at(target, 4) if method == "early_exit" else skipping(target, (), ())
    results = generator(target, drafter).generate(
        tiny.prompts(), max_new_tokens=5 * (K + 1), temperature=temperature, seed=0
    )
    assert [r.stats.target_forwards for r in results] == [5] * 4
    assert [r.stats.drafted for r in results] == [r.stats.accepted for r in results] == [5 * K] * 4


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "opt", "qwen3_moe", "llama4_text", "gpt_oss", "phi"])
def test_texts_are_the_targets(name: str):
    target, oracle = CausalLM(tiny.four(name)), CausalLM(tiny.four(name), fast=False)
    prompts = tiny.prompts((1, 5, 17))
    expected = [reference(oracle, prompt, SamplingParams(max_new_tokens=NEW)) for prompt in prompts]
    drafters: list[SelfSpeculativeDrafter] = [exit_at(target, 2), skipping(target, (1,), (1, 2))]
    if name in ("llama", "gemma2"):  # the others differ in their layers, not in where these are cut
        drafters += [exit_at(target, 3), skipping(target, (0,), ())]
    for drafter in drafters:
        results = generator(target, drafter, max_rows=2).generate(prompts, max_new_tokens=NEW)
        assert [result.tokens for result in results] == expected
        assert sum(result.stats.drafted for result in results) > 0


def drafts(
    target: CausalLM, drafter: SelfSpeculativeDrafter, prompts: list[list[int]]
) -> list[tuple[list[int], list[int]]]:
    """Texts up to the root, and what was drafted after them, over some steps of a ragged batch."""
    found = []
    propose = drafter.propose

    def watched(view: Any, plan: Any) -> Any:
        draft = propose(view, plan)
        for row, length in enumerate(view.host_lengths):
            drafted = draft.tree.tokens[row, 1:][draft.tree.valid[row, 1:]].tolist()
            found.append((view.history[row, :length].tolist(), drafted))
        return draft

    drafter.propose = watched
    generator(target, drafter).generate(prompts, max_new_tokens=10)
    return found


def continued(raw: Any, text: list[int], count: int) -> list[int]:
    """What a stock model says next, without a cache."""
    tokens = list(text)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(raw(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(text) :]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_early_exit_drafts_what_the_model_says_that_is_cut_off_there(name: str):
    raw = tiny.four(name)
    short = tiny.build(name)
    short.load_state_dict({key: value for key, value in raw.state_dict().items() if key in short.state_dict()})
    target = CausalLM(raw)
    seen = drafts(target, exit_at(target, 2), tiny.prompts((3, 12)))
    assert len(seen) > 8
    for text, drafted in seen:
        assert drafted == continued(short, text, len(drafted))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layer_skip_drafts_on_the_keys_and_values_of_the_whole_model(name: str):
    """The slow truth lets the parts be silent from the root on, and only there."""
    raw, silent = tiny.four(name), tiny.four(name)
    target = CausalLM(raw)
    seen = drafts(target, skipping(target, (1,), (0, 2)), tiny.prompts((3, 12)))
    alone = 0
    for text, drafted in seen:
        expected = _silenced(silent, text, len(drafted), len(text) - 1)
        assert drafted == expected
        alone += expected != _silenced(silent, text, len(drafted), 0)
    assert alone, "reading all of the text with the parts left out is something else"


def _silenced(raw: Any, text: list[int], count: int, start: int) -> list[int]:
    def hook(module: Any, args: tuple, output: Any) -> Any:
        states = (output if isinstance(output, Tensor) else output[0]).clone()
        states[:, start:] = 0
        return states if isinstance(output, Tensor) else (states, *output[1:])

    layers: Any = decoder_layers(raw)
    modules = [layers[1].self_attn, layers[0].mlp, layers[2].mlp]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        return continued(raw, text, count)
    finally:
        for handle in handles:
            handle.remove()


def stored(cache: SlotCache, row: int, start: int, end: int) -> list[Tensor]:
    layers = [layer for layer in range(4) if cache.holds(layer)]
    buffers = [buffer for layer in layers for buffer in cache.stored(layer)]
    return [buffer[cache.buffer_row(row), :, start:end].clone() for buffer in buffers]


@pytest.mark.parametrize("method", ["early_exit", "layer_skip"])
def test_drafting_leaves_what_is_committed_as_it_was(method: str):
    """Bit for bit; it writes from the root's slot on, and no further than the last token that it had to read."""
    target = CausalLM(tiny.four())
    drafter = exit_at(target, 2) if method == "early_exit" else skipping(target, (1,), (2,))
    propose, steps = drafter.propose, 0

    def watched(view: Any, plan: Any) -> Any:
        nonlocal steps
        before = {row: stored(drafter.cache, row, 0, 64) for row in view.rows}
        draft = propose(view, plan)
        for row, length in zip(view.rows, view.host_lengths, strict=True):
            after = stored(drafter.cache, row, 0, 64)
            changed = [(a != b).any(-1).any(0) for a, b in zip(after, before[row], strict=True)]
            touched = torch.stack(changed).any(0).nonzero()[:, 0].tolist()
            assert set(touched) <= set(range(length - 1, length - 1 + plan.length)) and length - 1 in touched
        steps += 1
        return draft

    drafter.propose = watched
    generator(target, drafter).generate(tiny.prompts((5, 11)), max_new_tokens=12)
    assert steps > 2


def test_after_its_steps_the_cache_is_that_of_plain_decoding():
    target = CausalLM(tiny.four())
    prompt = tiny.prompts((9,))[0]
    kept = []
    for drafter in (exit_at(target, 2), skipping(target, (1,), (0, 1)), None):
        cache = drafter.cache if drafter else target.new_cache()
        g = tiny.generator(target, drafter, Constant(K if drafter else 0), cache=cache)
        sequence = g.submit([prompt], SamplingParams(max_new_tokens=20))[0]
        while len(sequence.tokens) < 12:
            g.engine.step()
        kept.append(stored(cache, 0, 0, 9 + 11))
        g.engine.cancel([sequence])
    for mine in kept[:2]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, kept[2], strict=True))


def test_by_spec_and_by_file(tmp_path: Path):
    path = tmp_path / "skips.json"
    write_skip_config(path, SkipConfig("sample", 8, (3,), (2, 3)))
    assert read_skip_config(path) == SkipConfig("sample", 8, (3,), (2, 3))
    plain = foredraft.load("sample", "none")
    prompt = "def add(a, b):"
    expected = plain.generate(prompt, max_new_tokens=12).tokens
    drafted = []
    for spec in (f"layer_skip:{path}", "layer_skip,skip_attention=3,skip_mlp=2x3", "early_exit,assistant_early_exit=7"):
        constant = f"{spec},num_assistant_tokens_schedule=constant"  # no clock decides how much is drafted
        found = foredraft.load(plain.engine.target, constant, tokenizer=plain.tokenizer)
        result = found.generate(prompt, max_new_tokens=12)
        assert result.tokens == expected and result.stats.accepted > 0
        drafted.append((result.stats.drafted, result.stats.accepted))
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("layer_skip:{good},skip_mlp=2", OptionError, "given twice"),
        ("layer_skip:{other}", DrafterError, "a model of 4 layers .small.; this one has 8"),
        ("layer_skip:{absent}", DrafterError, "Cannot read"),
        ("layer_skip:{text}", DrafterError, "is not JSON"),
        ("layer_skip:{list}", DrafterError, "is not a JSON object; run foredraft skip again"),
        ("layer_skip:{wide}", DrafterError, "from 0 to 7"),
    ],
)
def test_files_of_layers_to_skip_that_cannot_be_used(spec: str, error: type[Exception], said: str, tmp_path: Path):
    shapes = {"good": (8, 1), "other": (4, 1), "wide": (8, 8)}
    files = {name: SkipConfig("small", layers, (number,), ()) for name, (layers, number) in shapes.items()}
    for name, skips in files.items():
        write_skip_config(tmp_path / f"{name}.json", skips)
    (tmp_path / "text.json").write_text("no")
    (tmp_path / "list.json").write_text("[]")
    names = {name: tmp_path / f"{name}.json" for name in (*files, "text", "list", "absent")}
    with pytest.raises(error, match=said):
        foredraft.load("sample", spec.format(**names))
