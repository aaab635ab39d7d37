"""``speculative(...)`` inside transformers' ``generate``: what it hands over, what it drops, and what cannot be."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import foredraft
import tiny
from foredraft.core.errors import DrafterError, ModelError, OptionError, PromptError

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny.build()
    made.generation_config.update(eos_token_id=94, pad_token_id=94)
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny.tokenizer(eos="~")
    made.pad_token, made.padding_side = "~", "left"
    return made


@pytest.fixture(scope="module")
def one(tokenizer: Any) -> Any:
    return tokenizer(["ABC"], return_tensors="pt")


@pytest.fixture(scope="module")
def batch(tokenizer: Any) -> Any:
    return tokenizer(["AB", "ABCDE"], return_tensors="pt", padding=True)


@pytest.fixture(scope="module")
def said(model: Any, tokenizer: Any, one: Any) -> str:
    """What the model says after "ABC"."""
    return tokenizer.decode(model.generate(**one, **OPTIONS)[0, 3:])


@pytest.fixture
def spec() -> Any:
    return foredraft.speculative("prompt_lookup")


def test_streamers(spec: Any, model: Any, tokenizer: Any, one: Any, said: str, capsys: pytest.CaptureFixture[str]):
    wanted = model.generate(**one, **OPTIONS)
    assert torch.equal(spec.generate(model, **one, **OPTIONS, streamer=TextStreamer(tokenizer)), wanted)
    assert capsys.readouterr().out == f"ABC{said}\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    for _ in range(2):  # it can be used again
        assert torch.equal(spec.generate(model, one["input_ids"], **OPTIONS, streamer=streamer), wanted)
        assert "".join(streamer) == said

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
        task = asyncio.to_thread(spec.generate, model, **one, **OPTIONS, streamer=streamer)
        running = asyncio.create_task(task)
        text = "".join([piece async for piece in streamer])
        await running
        return text

    assert asyncio.run(read()) == said


class Log(BaseStreamer):
    """Writes down what a streamer is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


def test_a_streamer_hears_the_same_from_transformers_and_from_us(spec: Any, model: Any, one: Any):
    theirs, ours, fixed = Log(), Log(), Log()
    model.generate(**one, **OPTIONS, streamer=theirs)
    spec.generate(model, **one, **OPTIONS, streamer=ours)
    model.generate(**one, **OPTIONS, custom_generate=foredraft.speculative("prompt_lookup", streamer=fixed))
    assert ours.told == fixed.told == theirs.told and len(ours.told) == 14


def test_a_streamer_hears_of_the_end_even_when_there_was_no_beginning(spec: Any, model: Any, one: Any, batch: Any):
    for inputs, options, kind in (
        (one, {"num_beams": 2}, OptionError),
        (one, {"nothing": 1}, ValueError),
        (batch, {}, OptionError),
    ):
        streamer = Log()
        with pytest.raises(kind):
            spec.generate(model, **inputs, **OPTIONS, **options, streamer=streamer)
        assert streamer.told == ["end"]
    streamer = Log()
    with pytest.raises(OptionError, match=r"does not pass streamer to a custom_generate: pass it to spec.generate"):
        model.generate(**one, **OPTIONS, streamer=streamer, custom_generate=spec)
    assert streamer.told[-1] == "end"


@pytest.mark.parametrize("place", [0, 3, 5])
def test_stop_strings(place: int, model: Any, tokenizer: Any, one: Any, batch: Any, said: str):
    stop, spec = said[place : place + 2], foredraft.speculative("prompt_lookup")
    own = foredraft.speculative("prompt_lookup", tokenizer=tokenizer)
    fixed = foredraft.speculative("prompt_lookup", tokenizer=tokenizer, stop_strings=[stop])
    for inputs in (one, batch):
        wanted = model.generate(**inputs, **OPTIONS, stop_strings=stop, tokenizer=tokenizer)
        assert torch.equal(spec.generate(model, **inputs, **OPTIONS, stop_strings=[stop], tokenizer=tokenizer), wanted)
        assert torch.equal(own.generate(model, **inputs, **OPTIONS, stop_strings=stop), wanted)
        assert torch.equal(model.generate(**inputs, **OPTIONS, stop_strings=stop, custom_generate=own), wanted)
        assert torch.equal(model.generate(**inputs, **OPTIONS, custom_generate=fixed), wanted)
        config = GenerationConfig(**OPTIONS, stop_strings=stop)
        assert torch.equal(own.generate(model, **inputs, generation_config=config), wanted)
        assert config.stop_strings == stop
    assert model.generate(**one, **OPTIONS, stop_strings=stop, tokenizer=tokenizer).shape[1] == 3 + place + 2


def test_stop_strings_need_a_tokenizer(spec: Any, model: Any, one: Any):
    for call in (
        lambda: spec.generate(model, **one, **OPTIONS, stop_strings="x"),
        lambda: spec.generate(model, **one, generation_config=GenerationConfig(**OPTIONS, stop_strings="x")),
        lambda: model.generate(**one, **OPTIONS, stop_strings="x", custom_generate=spec),
        lambda: foredraft.speculative(stop_strings="x"),
    ):
        with pytest.raises(
            OptionError, match="stop_strings need the model's tokenizer, which transformers does not pass to"
        ):
            call()


@pytest.mark.parametrize("inputs", [{"inputs": "hello"}, {"input_ids": [1, 2]}])
def test_inputs_are_a_tensor(inputs: dict[str, Any], spec: Any, model: Any):
    with pytest.raises(PromptError, match=r"inputs must be a tensor of token ids \[B, T\], not a"):
        spec.generate(model, **inputs, **OPTIONS)


SYNTHID = SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)
GUIDANCE = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, tiny.build())
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2 .*load\\(model\\).beam_search"),
    "forced words": ({"force_words_ids": [[3]]}, "force_words_ids"),
    "contrastive": ({"penalty_alpha": 0.5, "top_k": 4}, "penalty_alpha=0.5 .*greedily or by sampling"),
    "dola": ({"dola_layers": "low"}, "dola_layers='low' .*greedily or by sampling"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static' .*its own KV cache"),
    "no cache": ({"use_cache": False}, "use_cache=False .*its own KV cache"),
    "chunks": ({"prefill_chunk_size": 2}, "prefill_chunk_size=2 .*its own prefill chunks"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale=2.0 .*classifier-free guidance"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 .*belong to the drafter"),
    "length": ({"num_assistant_tokens": 3}, "num_assistant_tokens=3 .*belong to the drafter"),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1 .*belong to the drafter"),
    "mtp": ({"use_mtp": True}, "use_mtp=True .*belong to the drafter"),
    "lossy": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True .*only the sequences"),
    "states": ({"output_hidden_states": True}, "output_hidden_states=True .*only the sequences"),
    "guidance by hand": ({"logits_processor": [GUIDANCE]}, "classifier-free guidance runs the model"),
    "positions": ({"position_ids": torch.tensor([[3, 4, 5]])}, "positions are counted from the first token"),
    "assistant": ({"assistant_model": tiny.build(seed=5)}, "assistant_model .*pass it to speculative as the drafter"),
    "processes": ({"synced_gpus": True}, "synced_gpus .*accept the same tokens"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_ignored_is_refused(kind: str, spec: Any, model: Any, one: Any):
    options, said = REFUSED[kind]
    attention = model.config._attn_implementation
    for call in (
        lambda: model.generate(**one, **OPTIONS, **options, custom_generate=spec),
        lambda: spec.generate(model, **one, **OPTIONS, **options),
    ):
        with pytest.raises(OptionError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == attention


def test_inputs_that_are_no_token_ids_are_refused(spec: Any, model: Any, one: Any):
    embeddings = model.get_input_embeddings()(one["input_ids"])
    filled = DynamicCache()
    model(one["input_ids"][:, :2], past_key_values=filled)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"inputs_embeds": embeddings}, "inputs_embeds is not available while drafting: foredraft runs the model on"),
        ({**one, "past_key_values": filled}, "past_key_values.* its own KV cache"),
        ({**one, "past_key_values": DynamicCache()}, "past_key_values.* its own KV cache"),
    ]
    for inputs, said in cases:
        for call in (
            lambda given: model.generate(**given, **OPTIONS, custom_generate=spec),
            lambda given: spec.generate(model, **given, **OPTIONS),
        ):
            with pytest.raises(OptionError, match=said):
                call(inputs)
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation  # as PEFT does for learned prompts
    try:
        with pytest.raises(OptionError, match="prepare_inputs_for_generation of this model was replaced"):
            model.generate(**one, **OPTIONS, custom_generate=spec)
    finally:
        del model.prepare_inputs_for_generation


def test_what_the_models_own_config_says_of_costs_is_no_question(spec: Any, one: Any):
    model = tiny.build()
    model.generation_config.update(num_assistant_tokens=3, prefill_chunk_size=2)
    wanted = model.generate(**one, **OPTIONS)
    assert torch.equal(spec.generate(model, **one, **OPTIONS), wanted)


def test_processors_that_ask_for_the_row_and_limits_of_time(spec: Any, model: Any, batch: Any):
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [3 + row, 10 + row] if len(ids) % 2 else [5 + row, 20 + row, 30]

    cases: list[dict[str, Any]] = [
        {"prefix_allowed_tokens_fn": allowed},
        {"watermarking_config": WatermarkingConfig(bias=2.5)},
        {"watermarking_config": SYNTHID},
        {"position_ids": batch["attention_mask"].cumsum(-1) - 1},
        {"max_time": 0.0},
    ]
    for options in cases:
        wanted = model.generate(**batch, **OPTIONS, **options)
        assert torch.equal(spec.generate(model, **batch, **OPTIONS, **options), wanted)


def test_stats_are_those_of_the_last_call_and_of_all(model: Any, batch: Any, one: Any):
    spec = foredraft.speculative("prompt_lookup,num_assistant_tokens_schedule=constant")
    assert (spec.stats.tokens, spec.total_stats.tokens) == (0, 0)
    spec.generate(model, **batch, **OPTIONS)
    first = spec.stats
    assert (first.tokens, first.prompt_tokens, first.method, first.lossless) == (24, 7, "prompt_lookup", True)
    assert 0 < first.accepted <= first.drafted and 0 < first.target_forwards < 24
    model.generate(**one, **OPTIONS, custom_generate=spec)
    assert spec.stats.tokens == 12
    assert spec.total_stats.tokens == 36 and spec.total_stats.drafted == first.drafted + spec.stats.drafted
    spec.generate(model, **one, **OPTIONS, max_time=0.0)
    assert spec.stats.tokens == 1, "what a criterion cuts off is not counted"


def test_wrapped_models_and_drafters_of_every_kind(model: Any, one: Any):
    wanted = model.generate(**one, **OPTIONS)
    draft = tiny.build(seed=5)
    steady = "draft_model,num_assistant_tokens=2,num_assistant_tokens_schedule=constant"  # no clock decides
    for drafter, method in ((draft, "draft_model"), ((steady, draft), "draft_model"), (None, "none")):
        spec = foredraft.speculative(drafter)
        assert torch.equal(spec.generate(torch.compile(model, backend="eager"), **one, **OPTIONS), wanted)
        assert torch.equal(model.generate(**one, **OPTIONS, custom_generate=spec), wanted)
        assert spec.stats.method == method and (spec.stats.drafted > 0 or not isinstance(drafter, tuple))
        spec.close()
    with pytest.raises(DrafterError, match="A drafter is a spec such as"):
        foredraft.speculative(3).generate(model, **one, **OPTIONS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="not a str"):
        foredraft.speculative().generate("sample", **one)
    spec = foredraft.speculative(model)  # the target itself
    assert torch.equal(model.generate(**one, **OPTIONS, custom_generate=spec), wanted)
    spec.close()
    assert torch.equal(model.generate(**one, **OPTIONS), wanted)


def test_it_says_what_it_is():
    assert repr(foredraft.speculative("prompt_lookup")) == "foredraft.speculative('prompt_lookup')"
    assert repr(foredraft.speculative("draft_model:x", verifier="block")) == (
        "foredraft.speculative('draft_model:x', verifier='block')"
    )
    assert repr(foredraft.speculative(tiny.build())) == "foredraft.speculative(LlamaForCausalLM)"
