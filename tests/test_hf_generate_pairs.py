"""``speculative(...)`` says what transformers' own ``generate`` says, for every pair of options."""

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, WatermarkingConfig

import foredraft
import tiny

NEW, WIDTH = 18, 12
PAD = 95
TREES = "draft_model,num_assistant_tokens=4,branching=2x1x1,num_assistant_tokens_schedule=constant"


class ByRow(LogitsProcessor):
    """Bans one token of each row."""

    def __init__(self, bans: list[int]) -> None:
        self.bans = bans

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, self.bans[row % len(self.bans)]] = -torch.inf
        return scores


class Budget(LogitsProcessor):
    """Forces a token in its sixth call, and lets nothing follow it that it has seen in its third."""

    def __init__(self) -> None:
        self.calls, self.third = 0, torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.third = scores.argmax(-1)
        if self.calls == 6:
            scores = torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)
        elif self.calls > 6:
            scores = scores.scatter(1, self.third[:, None], -torch.inf)
        return scores


class RowEnds(StoppingCriteria):
    """Ends each row by itself, after as many calls as its number says."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Any:
        self.calls += 1
        return torch.arange(len(input_ids)) + 9 <= self.calls


class AllEnd(StoppingCriteria):
    """One bool for all rows."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Any:
        return bool((input_ids[:, -1] == self.token).any()) and input_ids.shape[1] > WIDTH + 4


@cache
def setting() -> dict[str, Any]:
    """A model, its tokenizer, prompts with repeated parts, and what the model says after them."""
    model: Any = tiny.build()
    tokenizer = tiny.tokenizer(eos="~")
    model.generation_config.update(pad_token_id=PAD, eos_token_id=None)
    ids = torch.randint(2, 90, (3, WIDTH), generator=torch.Generator().manual_seed(5))
    ids[:, WIDTH // 2 :] = ids[:, : WIDTH // 2]
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, :7] = 0
    padded = torch.where(mask == 0, PAD, ids)
    shapes = {"one": (ids[:1], None), "equal": (ids, torch.ones_like(ids)), "padded": (padded, mask)}
    said = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, WIDTH:].tolist()
    return {"model": model, "tokenizer": tokenizer, "shapes": shapes, "said": said}


def options() -> dict[str, dict[str, Any]]:
    """28 options that act, with what each needs. Those of one call are made anew, as some have a state."""
    first, second = setting()["said"][:2]
    text = setting()["tokenizer"].decode(second[3:5])
    ends = [first[8], second[6]]
    others = [token for token in second if token not in ends]
    return {
        "ends": {"eos_token_id": ends},
        "min_new_tokens": {"min_new_tokens": 10, "eos_token_id": ends},
        "min_length": {"min_length": WIDTH + 7, "eos_token_id": ends},
        "forced_eos": {"forced_eos_token_id": second[6], "eos_token_id": ends},
        "forced_bos": {"forced_bos_token_id": 7},
        "decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": ends},
        "suppress": {"suppress_tokens": others[2:4]},
        "begin_suppress": {"begin_suppress_tokens": [first[0], second[0]]},
        "bias": {"sequence_bias": [[[first[1]], -9.0], [[second[0], second[1]], -20.0]]},
        "bad words": {"bad_words_ids": [[first[2], first[3]], [second[1]]]},
        "penalty": {"repetition_penalty": 1.4},
        "ngrams": {"no_repeat_ngram_size": 2},
        "encoder ngrams": {"encoder_no_repeat_ngram_size": 1},
        "encoder penalty": {"encoder_repetition_penalty": 1.5},
        "invalid": {"remove_invalid_values": True},
        "normalised": {"renormalize_logits": True},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
        "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(96) if (t + row + len(ids)) % 3]},
        "max_length": {"max_length": WIDTH + 11, "max_new_tokens": None},
        "max_time": {"max_time": 1000.0},
        "dictionary": {"return_dict_in_generate": True},
        "sampled": {"do_sample": True, "top_k": 1, "temperature": 0.7},
        "several": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
        "stop string": {
            "stop_strings": [text],
            "tokenizer": setting()["tokenizer"],
            "eos_token_id": ends,
        },
        "rows": {"logits_processor": [ByRow([first[5], others[1]])]},
        "state": {"logits_processor": [Budget()]},
        "row ends": {"stopping_criteria": [RowEnds()]},
        "all end": {"stopping_criteria": [AllEnd(second[5])]},
    }


def called(names: tuple[str, ...], shape: str, generate: Callable[..., Any]) -> Tensor:
    """The output of a call with these options."""
    ids, mask = setting()["shapes"][shape]
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    for name in names:
        for key, value in options()[name].items():
            lists = key in ("logits_processor", "stopping_criteria")
            given[key] = [*given.get(key, []), *value] if lists else value
    found = generate(ids, **{key: value for key, value in given.items() if value is not None})
    return found if isinstance(found, Tensor) else found.sequences


def differences(pairs: list[tuple[str, ...]]) -> list[str]:
    """The calls whose outputs are not transformers', drafted by the model's twin, which knows few of the options."""
    model, wrong = setting()["model"], []
    for shape in setting()["shapes"]:
        spec = foredraft.speculative((TREES, tiny.build()))
        for names in pairs:
            wanted = called(names, shape, model.generate)
            found = called(names, shape, lambda ids, **given: spec.generate(model, ids, **given))  # noqa: B023
            if wanted.shape != found.shape or not torch.equal(wanted, found):
                wrong.append(f"{' and '.join(names)}, {shape}: {wanted.tolist()} {found.tolist()}")
        assert spec.total_stats.accepted > spec.total_stats.tokens / 4
        assert spec.total_stats.tokens > spec.total_stats.target_forwards + len(pairs)
        spec.close()
    return wrong


def test_each_option_says_what_transformers_says():
    assert len(options()) == 28
    plain = called((), "padded", setting()["model"].generate)
    acts = [
        name for name in options() if not torch.equal(called((name,), "padded", setting()["model"].generate), plain)
    ]
    idle = {"forced_bos", "invalid", "normalised", "max_time", "dictionary", "sampled"}  # alone they change nothing
    assert set(options()) - set(acts) <= idle
    assert differences([(name,) for name in options()]) == []


def test_some_pairs_say_what_transformers_says():
    pairs = random.Random(3).sample(list(itertools.combinations(options(), 2)), 24)
    assert differences(pairs) == []


@pytest.mark.slow
def test_all_pairs_say_what_transformers_says():
    pairs = list(itertools.combinations(options(), 2))
    assert len(pairs) == 378
    assert differences(pairs) == []
