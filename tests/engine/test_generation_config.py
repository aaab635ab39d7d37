"""What a model's generation_config.json says is the default of requests, as in vLLM and in transformers' generate."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import foredraft
import tiny
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams, with_defaults

NEW = 16
PROMPT = [5, 9, 33, 12, 7] * 3


@pytest.fixture(scope="module")
def said() -> list[int]:
    """Without a configuration."""
    model: Any = tiny.build()
    model.generation_config = GenerationConfig(pad_token_id=95)
    return model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, len(PROMPT) :].tolist()


CONFIGS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "ends": lambda said: {"eos_token_id": [said[4], said[9]]},
    "penalty": lambda said: {"repetition_penalty": 1.4},
    "suppressed": lambda said: {"suppress_tokens": said[:2]},
    "bad words": lambda said: {"bad_words_ids": [said[:2], [said[3]]]},
    "n-grams": lambda said: {"no_repeat_ngram_size": 1},
    "length": lambda said: {"max_new_tokens": 5},
    "minimum": lambda said: {"min_new_tokens": 8, "eos_token_id": [said[2]]},
    "one best": lambda said: {"do_sample": True, "temperature": 0.6, "top_k": 1, "suppress_tokens": said[:1]},
    "no samples": lambda said: {"temperature": 0.6, "top_p": 0.5, "repetition_penalty": 1.2},
}


def saved(place: Path, **config: Any) -> Path:
    tiny.build().save_pretrained(place)
    (place / "generation_config.json").write_text(json.dumps({"pad_token_id": 95, **config}))
    return place


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_say_what_transformers_says(name: str, said: list[int], tmp_path: Path):
    config = CONFIGS[name](said)
    folder = saved(tmp_path, **config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    length: dict[str, Any] = {} if "max_new_tokens" in config else {"max_new_tokens": NEW}
    wanted = model.generate(torch.tensor([PROMPT]), **length)[0, len(PROMPT) :].tolist()
    assert wanted != said
    for source in (str(folder), model):
        with foredraft.load(source, "prompt_lookup") as g:
            results = [g.generate(PROMPT, **length), *g.batch([PROMPT], **length)]
            results += [done.result for done in g.as_completed([PROMPT], **length)]
            outputs = [result.tokens for result in results]
            outputs.append([token for piece in g.stream(PROMPT, **length) for token in piece.tokens])
            assert outputs == [wanted] * 4
    ends = tuple(config.get("eos_token_id", ()))
    plain = said[: min((said.index(end) + 1 for end in ends), default=NEW)]
    with foredraft.load(str(folder), "prompt_lookup", generation_config="none") as g:
        assert g.defaults == {}
        assert g.generate(PROMPT, max_new_tokens=NEW).tokens == plain
    with foredraft.load(str(folder)) as g:  # parameters that are given whole are the request's own
        assert g.generate(PROMPT, SamplingParams(max_new_tokens=NEW)).tokens == plain


def test_a_request_overrides_single_values(said: list[int], tmp_path: Path):
    folder = saved(tmp_path, do_sample=True, temperature=0.7, top_k=7, repetition_penalty=1.4, min_new_tokens=9)
    with foredraft.load(str(folder)) as g:
        own = g.params(max_new_tokens=NEW)
        assert (own.temperature, own.top_k, own.repetition_penalty, own.min_new_tokens) == (0.7, 7, 1.4, 9)
        other = g.params(temperature=0.0, top_k=None, repetition_penalty=1.0, min_new_tokens=0, max_new_tokens=NEW)
        assert other == SamplingParams(max_new_tokens=NEW)
        assert g.generate(PROMPT, temperature=0, repetition_penalty=1.0, max_new_tokens=NEW).tokens == said
        assert g.generate(PROMPT, temperature=0, max_new_tokens=4).tokens, "the file's minimum is larger"
        with pytest.raises(OptionError, match=r"min_new_tokens \(6\) is larger than max_new_tokens \(4\)"):
            g.generate(PROMPT, min_new_tokens=6, max_new_tokens=4)
        first, again = (g.generate(PROMPT, seed=3, max_new_tokens=NEW).tokens for _ in range(2))
        assert first == again == g.generate(PROMPT, GenerationConfig(**OWN), seed=3, max_new_tokens=NEW).tokens


OWN: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 7,
    "repetition_penalty": 1.4,
    "min_new_tokens": 9,
}


def test_bans_of_the_file_stay_beside_biases_of_the_request():
    merged = with_defaults({"logit_bias": {3: -1.0, 4: -2.0}, "top_k": 5}, {"logit_bias": {4: 9.0, 6: 1.0}})
    assert merged == {"logit_bias": {3: -1.0, 4: 9.0, 6: 1.0}, "top_k": 5}


def test_beam_search_has_the_files_rules(said: list[int], tmp_path: Path):
    folder = saved(tmp_path, do_sample=True, temperature=0.7, suppress_tokens=said[:2])
    with foredraft.load(str(folder)) as g:
        found = g.beam_search(PROMPT, num_beams=2, max_new_tokens=6)[0].tokens
        bans = dict.fromkeys(said[:2], float("-inf"))
    with foredraft.load(str(folder), generation_config="none") as g:
        assert found == g.beam_search(PROMPT, num_beams=2, max_new_tokens=6, logit_bias=bans)[0].tokens
        assert found != g.beam_search(PROMPT, num_beams=2, max_new_tokens=6)[0].tokens


def test_what_is_not_supported_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = saved(
        tmp_path, num_beams=3, encoder_repetition_penalty=1.3, max_length=400, use_cache=False, repetition_penalty=1.2
    )
    with caplog.at_level(logging.WARNING, logger="foredraft"), foredraft.load(str(folder)) as g:
        assert dict(g.defaults) == {"repetition_penalty": 1.2}
    warnings = [record.getMessage() for record in caplog.records if "generation config" in record.getMessage()]
    assert len(warnings) == 1 and "num_beams" in warnings[0] and "encoder_repetition_penalty" in warnings[0]
    assert not any(name in warnings[0] for name in ("max_length", "use_cache", "pad_token"))


def test_a_wrong_value_is_named(tmp_path: Path):
    folder = saved(tmp_path, top_k=-5, do_sample=True)
    with pytest.raises(OptionError, match=r"generation config of .*top_k must be .*generation_config='none' leaves it"):
        foredraft.load(str(folder))
    with foredraft.load(str(folder), generation_config="none") as g:
        assert g.defaults == {}
    with pytest.raises(OptionError, match="Unknown generation_config 'vllm'. Known: auto, none."):
        foredraft.load(str(folder), generation_config="vllm")
