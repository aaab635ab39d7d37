"""Whatever users hand in for a prompt or for parameters is either understood or refused in one sentence."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import foredraft
import tiny
from foredraft.core.errors import OptionError, PromptError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.inputs import as_params, encode, listed
from foredraft.model.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.fixture(scope="module")
def stock() -> Any:
    made = tiny.tokenizer(eos="~")
    made.pad_token, made.padding_side, made.chat_template = "~", "left", TEMPLATE
    return made


@pytest.fixture(scope="module")
def generator(stock: Any) -> Iterator[foredraft.Generator]:
    made = foredraft.load(tiny.build(), None, tokenizer=stock)
    yield made
    made.close()


CHAT = [ord(each) - 32 for each in "user:AB|"]
LINES = [*CHAT[:6], 0, *CHAT[6:]]  # the line end between them is unknown to this tokenizer
PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
SINGLE: dict[str, Any] = {
    "string": ("AB", [33, 34]),
    "ids": ([1, 2], [1, 2]),
    "tuple": ((1, 2), [1, 2]),
    "range": (range(1, 3), [1, 2]),
    "tensor": (torch.tensor([1, 2]), [1, 2]),
    "array": (np.array([1, 2]), [1, 2]),
    "ids of numpy": ([np.int64(1), np.int32(2)], [1, 2]),
    "ids of torch": ([torch.tensor(1), torch.tensor(2)], [1, 2]),
    "chat": ([{"role": "user", "content": "AB"}], CHAT),
    "one message": ({"role": "user", "content": "AB"}, CHAT),
    "text parts": ({"role": "user", "content": PARTS}, LINES),
    "parts as strings": ([{"role": "user", "content": ["A", "B"]}], LINES),
    "encoding": ({"input_ids": [1, 2], "attention_mask": [1, 1]}, [1, 2]),
    "encoding without mask": ({"input_ids": torch.tensor([1, 2])}, [1, 2]),
    "encoding with types": ({"input_ids": [9, 1, 2], "attention_mask": [0, 1, 1], "token_type_ids": [0] * 3}, [1, 2]),
}
SEVERAL: dict[str, Any] = {
    "strings": (["A", "B"], [[33], [34]]),
    "tensor": (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    "array": (np.array([[1, 2]]), [[1, 2]]),
    "tensors": ([torch.tensor([1, 2]), torch.tensor([[3, 4]])], [[1, 2], [3, 4]]),
    "padded": ({"input_ids": [[9, 1], [2, 3]], "attention_mask": [[0, 1], [1, 1]]}, [[1], [2, 3]]),
    "ragged": ({"input_ids": [[1], [2, 3]], "attention_mask": [[1], [1, 1]]}, [[1], [2, 3]]),
    "encodings": ([{"input_ids": [1]}, {"input_ids": torch.tensor([[2, 3]])}], [[1], [2, 3]]),
    "mixed": (["A", [1, 2], [{"role": "user", "content": "AB"}]], [[33], [1, 2], CHAT]),
}
REFUSED: dict[str, Any] = {
    "None": (None, "must be a string, .*not a NoneType"),
    "number": (3, "must be a string, .*not an int"),
    "bytes": (b"AB", "must be a string, .*not a bytes"),
    "set": ({1, 2}, "must be a string, .*not a set"),
    "list of None": ([None], "must be a string, .*not a NoneType"),
    "truth": ([True, False], "Token ids are whole numbers, not True"),
    "fractions": ([1, 2.5], "Token ids are whole numbers, not 2.5"),
    "float tensor": (torch.tensor([1.0, 2.0]), "Token ids are whole numbers, not 1.0"),
    "scalar": (torch.tensor(3), "one or two dimensions"),
    "empty": ([], "prompt is empty|There are no prompts"),
    "nothing visible": ({"input_ids": [1], "attention_mask": [0]}, "prompt is empty"),
    "other mapping": ({"text": "AB"}, "needs input_ids, or role and content as a chat message; this one has text"),
    "embeddings": ({"inputs_embeds": torch.ones(1, 2, 3)}, "this one has inputs_embeds"),
    "pixels": ({"input_ids": [1], "pixel_values": 3}, "A prompt cannot have pixel_values"),
    "wrong mask": ({"input_ids": [1, 2], "attention_mask": [1]}, "must have the same shape"),
    "flat mask": ({"input_ids": [[1, 2]], "attention_mask": [1]}, "must have the same shape"),
    "words for ids": ({"input_ids": "AB"}, "one or two dimensions"),
    "image": ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url'.* text parts only"),
    "odd content": ({"role": "user", "content": 3}, "content of chat message 1 must be a string or a list"),
    "no content": ([{"role": "user", "content": None}], "content of chat message 1 must be a string or a list"),
    "no role": ([{"content": "A"}], "Chat message 1 must be a mapping with 'role' and 'content'"),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_one_prompt(kind: str, stock: Any):
    prompt, wanted = SINGLE[kind]
    assert listed(prompt).single
    assert encode(prompt, Tokenizer(stock)) == wanted


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_prompts(kind: str, stock: Any):
    prompts, wanted = SEVERAL[kind]
    found = listed(prompts)
    assert not found.single
    assert [encode(prompt, Tokenizer(stock)) for prompt in found.prompts] == wanted


@pytest.mark.parametrize("kind", REFUSED)
def test_a_prompt_that_is_none_gets_one_sentence(kind: str, generator: foredraft.Generator):
    prompt, said = REFUSED[kind]
    for call in (generator.generate, generator.batch, generator.stream):
        with pytest.raises(PromptError, match=said) as caught:
            call(prompt)
        assert "\n" not in str(caught.value)


def test_what_a_tokenizer_returns_is_as_many_prompts_as_it_was_given(generator: foredraft.Generator, stock: Any):
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": ()}
    texts = ["AB", "ABCDE"]
    wanted = [generator.generate(text, **options).tokens for text in texts]
    for encoding in (stock(texts), stock(texts, return_tensors="pt", padding=True), stock(texts, padding=True)):
        assert [each.tokens for each in generator.generate(encoding, **options)] == wanted
        assert [each.tokens for each in generator.batch(encoding, **options)] == wanted
    assert generator.generate(stock("AB"), **options).tokens == wanted[0]
    with generator.stream(stock("AB", return_tensors="pt"), **options) as stream:
        assert [token for piece in stream for token in piece.tokens] == wanted[0]
    with pytest.raises(PromptError, match="Expected one prompt, not 2: generate and batch take several, as one"):
        generator.stream(stock(texts), **options)


def test_a_template_that_refuses_a_chat_says_so(stock: Any):
    odd = tiny.tokenizer()
    odd.chat_template = "{{ raise_exception('Roles must alternate.') }}"
    with pytest.raises(PromptError, match="chat template rejects these messages: Roles must alternate."):
        encode({"role": "user", "content": "A"}, Tokenizer(odd))


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"max_new_tokens": 7, "temperature": 0.5}, {"max_new_tokens": 7}),
    "sampled": (
        {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8},
    ),
    "sampled by default": ({"do_sample": True}, {"temperature": 1.0}),
    "off": ({"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}, {"temperature": 1.0}),
    "penalties": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[3], [4, 5]], "min_new_tokens": 2},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": ((3,), (4, 5)), "min_new_tokens": 2},
    ),
    "ends": ({"eos_token_id": [3, 4], "stop_strings": "x"}, {"eos_token_id": (3, 4), "stop_strings": ("x",)}),
    "bans": ({"suppress_tokens": [3]}, {"logit_bias": {3: float("-inf")}}),
    "no beams": ({"num_beams": 1, "pad_token_id": 3, "bos_token_id": 1, "use_cache": True}, {}),
    "both lengths": (
        {"max_length": 20, "max_new_tokens": 5, "min_length": 4, "min_new_tokens": 2},
        {"max_new_tokens": 5, "min_new_tokens": 2},
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_generation_config_is_read(kind: str):
    given, wanted = CONFIGS[kind]
    assert as_params(GenerationConfig(**given), {}) == SamplingParams(**wanted)


def test_the_generation_config_that_a_model_has_is_read(generator: foredraft.Generator):
    model = generator.engine.target.model
    for config in (model.generation_config, GenerationConfig.from_model_config(model.config)):
        assert len(generator.generate([1, 2], config, max_new_tokens=3, eos_token_id=()).tokens) == 3


@pytest.mark.parametrize("count", [0, True])
def test_a_number_of_outputs_is_a_whole_number(count: Any, generator: foredraft.Generator):
    with pytest.raises(
        OptionError, match="num_return_sequences must be a whole number, 1 or more and at most 1048576, not "
    ):
        generator.generate([1, 2], num_return_sequences=count)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 4}, "num_beams=4: use load\\(model\\).beam_search"),
        ({"max_length": 20}, "max_length=20: it counts the prompt"),
        ({"min_length": 20}, "min_length=20: it counts the prompt"),
        ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences=2: pass it to generate"),
        ({"cache_implementation": "static"}, "cache_implementation='static': foredraft uses"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5: classifier-free"),
        ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens=4: drafting options belong to the drafter"),
        ({"output_scores": True}, "output_scores=True: only the sequences"),
        ({"top_h": 0.4}, "top_h=0.4: foredraft has no such option"),
        ({"sequence_bias": [[[3], 1.0]]}, "sequence_bias=.*: foredraft has no such option"),
    ],
)
def test_what_params_have_no_word_for_is_refused(given: dict[str, Any], said: str):
    with pytest.raises(OptionError, match=said):
        as_params(GenerationConfig(**given), {})


def test_options_by_name_come_before_params(generator: foredraft.Generator):
    assert as_params(GenerationConfig(max_length=20, num_beams=1), {"max_new_tokens": 3}).max_new_tokens == 3
    assert as_params(SamplingParams(top_k=3), {"top_p": 0.5}) == SamplingParams(top_k=3, top_p=0.5)
    assert len(generator.generate([1, 2], GenerationConfig(max_new_tokens=3, eos_token_id=[])).tokens) == 3
    for odd in ({"temperature": 1.0}, 3, "greedy"):
        with pytest.raises(OptionError, match="params must be a foredraft.SamplingParams or a transformers"):
            generator.generate([1, 2], odd)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(OptionError, match="Unknown generation option 'generation_config'. Pass it as params"):
        generator.generate([1, 2], generation_config=GenerationConfig())  # pyright: ignore[reportCallIssue]
