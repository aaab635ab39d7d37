"""``custom_generate=foredraft.speculative(...)`` on a plain transformers model: what transformers says, no traces."""

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, StoppingCriteriaList, pipeline
from transformers.utils import logging
from xgrammar.contrib.hf import LogitsProcessor as XGrammarProcessor

import foredraft
from foredraft.model.loading.bundled import resolve

TEXTS = ["def add(a, b):", "Once upon a time there was a king who had", "1 + 1 ="]
DRAFT = f"draft_model:{resolve('sample-draft')},num_assistant_tokens_schedule=constant"


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield AutoModelForCausalLM.from_pretrained(resolve("sample"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve("sample"), padding_side="left")


@pytest.fixture(scope="module")
def batch(tokenizer: Any) -> Any:
    return tokenizer(TEXTS, return_tensors="pt", padding=True)


@pytest.mark.parametrize(
    ("options", "drafters"),
    [
        ({}, (None, "prompt_lookup", DRAFT)),
        ({"repetition_penalty": 1.3}, ("prompt_lookup", DRAFT)),
        ({"no_repeat_ngram_size": 2, "min_new_tokens": 16}, (DRAFT,)),
        ({"bad_words_ids": [[13], [40, 41]]}, ("prompt_lookup",)),
        ({"sequence_bias": [[[13], -5.0]]}, (DRAFT,)),
    ],
    ids=["plain", "penalty", "ngrams", "bad words", "bias"],
)
def test_a_padded_batch_says_what_transformers_says(model: Any, batch: Any, options: dict, drafters: tuple):
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    wanted = model.generate(**batch, **options)
    for drafter in drafters:
        assert torch.equal(model.generate(**batch, **options, custom_generate=foredraft.speculative(drafter)), wanted)
    assert torch.equal(model.generate(**batch, **options), wanted)


def test_the_model_is_left_as_it_was_found(model: Any, batch: Any):
    gc.collect()  # what other tests have left packs the model until it has gone
    attention, before = model.config._attn_implementation, {k: v.clone() for k, v in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    custom = foredraft.speculative("prompt_lookup", fast=True)
    model.generate(**batch, max_new_tokens=8, do_sample=False, custom_generate=custom)
    assert [type(module) for module in model.modules()] != modules  # packed between calls, as asked for
    custom.close()
    assert model.config._attn_implementation == attention
    assert [type(module) for module in model.modules()] == modules
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_sampling_is_repeatable_and_gives_several_texts(model: Any, batch: Any):
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 2}
        return model.generate(**batch, max_new_tokens=12, custom_generate=foredraft.speculative(DRAFT), **options)

    first = sample(0)
    assert first.shape[0] == 2 * len(TEXTS)
    assert torch.equal(first, sample(0)) and not torch.equal(first, sample(1))
    assert not torch.equal(first[0], first[1])


def test_user_processors_and_stopping_criteria(model: Any, batch: Any):
    class Never13:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.tensor([13]), -torch.inf)

    class After:
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] == 16

    options = {"max_new_tokens": 24, "do_sample": False, "logits_processor": LogitsProcessorList([Never13()])}
    wanted = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, custom_generate=foredraft.speculative(DRAFT)), wanted)
    options["stopping_criteria"] = StoppingCriteriaList([After()])
    wanted = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, custom_generate=foredraft.speculative(DRAFT)), wanted)


def test_dictionary_output_and_pipeline(model: Any, tokenizer: Any, batch: Any):
    custom = foredraft.speculative("prompt_lookup")
    options = {"max_new_tokens": 16, "do_sample": False}
    wanted = model.generate(**batch, **options)
    found = model.generate(**batch, **options, custom_generate=custom, return_dict_in_generate=True)
    assert torch.equal(found.sequences, wanted)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert pipe(TEXTS[0], **options, custom_generate=custom) == pipe(TEXTS[0], **options)


def test_the_processor_of_xgrammar_writes_what_it_writes_without_drafts(model: Any, tokenizer: Any):
    """It keeps a matcher for each row, and advances it in every call."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size, stop_token_ids=[0, 5])
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    inputs = tokenizer(["Anna is 31. As JSON: ", "In JSON, Bob is: "], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 24, "do_sample": False}
    wanted = model.generate(**inputs, **options, logits_processor=[XGrammarProcessor(grammar)])
    spec = foredraft.speculative(DRAFT)
    found = model.generate(**inputs, **options, logits_processor=[XGrammarProcessor(grammar)], custom_generate=spec)
    assert torch.equal(found, wanted) and spec.stats.accepted > 0
    start = inputs["input_ids"].shape[1]
    assert all(text.startswith("{") for text in tokenizer.batch_decode(found[:, start:], skip_special_tokens=True))
