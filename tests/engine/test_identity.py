"""Greedy identity: whatever is drafted, the text is the one of ``reference`` and of transformers' ``generate``."""

import functools
from dataclasses import dataclass

import pytest
import torch

import runs
import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM
from reference import reference

NEW = 24
LONGER = {"deepseek_v3": 40, "gptj": 40}
"""These say the same token for a while."""
GAP = 1e-3
"""Least gap between the two best logits; what two ways to compute them differ by is a hundred times less."""


@dataclass(frozen=True)
class Case:
    """A target, its prompts, and what transformers makes of each prompt alone."""

    target: CausalLM
    prompts: list[list[int]]
    expected: list[list[int]]

    @property
    def truths(self) -> list[list[int]]:
        return [prompt + text for prompt, text in zip(self.prompts, self.expected, strict=True)]


def stock_greedy(model, prompt: list[int], new: int) -> tuple[list[int], float]:
    """transformers' own greedy text, and the least gap between the two best logits on its way."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=new,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@functools.cache
def stock_texts(name: str) -> list[list[int]]:
    model = tiny.build(name)
    new = LONGER.get(name, NEW)
    texts, gaps = zip(*[stock_greedy(model, prompt, new) for prompt in tiny.prompts()], strict=True)
    assert min(gaps) > GAP, "this model has near-ties; take another seed"
    assert min(len(set(text)) for text in texts) >= 5, "these texts are too plain; take another seed"
    return list(texts)


@functools.cache
def case(name: str, fast: bool) -> Case:
    return Case(CausalLM(tiny.build(name), fast=fast), tiny.prompts(), stock_texts(name))


def with_drafter(c: Case, kind: str) -> Generator:
    return tiny.generator(c.target, tiny.liar(c.truths)) if kind == "liar" else runs.drafting(kind, c.target)


KINDS = ("none", "self", "self tree", "other", "other tree", "lookup", "lookup tree", "liar")
PLAIN = ("self tree", "liar")
"""What is run on unpacked weights as well."""
RUNS = [
    *[(name, True, kind) for name in tiny.MODELS for kind in KINDS],
    *[(name, False, kind) for name in tiny.MODELS for kind in PLAIN],
    *[(name, True, kind) for name in tiny.MORE for kind in PLAIN],
]


def is_long(name: str, fast: bool, kind: str) -> bool:
    """Left to the long tests: unpacked weights, and chains and copies, which most models see as parts of trees."""
    return not fast or (kind in ("other", "lookup", "lookup tree") and name not in ("llama", "gemma2", "gpt2"))


@pytest.mark.parametrize(
    ("name", "fast", "kind"),
    [pytest.param(*run, marks=pytest.mark.slow if is_long(*run) else ()) for run in RUNS],
    ids=lambda v: {True: "fast", False: "slow"}.get(v, v),
)
def test_greedy_text_is_that_of_transformers(name: str, fast: bool, kind: str):
    c, new = case(name, fast), LONGER.get(name, NEW)
    results = with_drafter(c, kind).generate(c.prompts, max_new_tokens=new)
    assert [result.tokens for result in results] == c.expected
    assert all(result.finish_reason == "length" for result in results)
    stats = results[0].stats
    assert stats.tokens == new
    if kind == "none":
        assert stats.drafted == 0 and stats.target_forwards == new
    else:
        assert 0 <= stats.accepted <= stats.drafted and stats.drafted > 0
    if kind in ("self", "self tree"):
        assert stats.acceptance_length == 4  # 3 drafted and the bonus, in every step
    if kind == "liar":
        assert stats.accepted > 0 and stats.accepted < stats.drafted


@pytest.mark.parametrize("name", tiny.MODELS)
def test_greedy_reference_is_transformers(name: str):
    c = case(name, False)
    for prompt, expected in zip(c.prompts, c.expected, strict=True):
        assert reference(c.target, prompt, SamplingParams(max_new_tokens=NEW)) == expected
