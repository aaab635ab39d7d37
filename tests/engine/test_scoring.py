"""Scores of prompts are those of the model's plain forward."""

import threading
from typing import Any

import pytest
import torch

import runs
import tiny
from foredraft.core.errors import ModelError, NumericsError, OptionError, PromptError
from foredraft.engine import scoring
from foredraft.model.hf.causal_lm import CausalLM


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_scores_are_those_of_a_plain_forward(name: str, chunk: int):
    model = tiny.build(name)
    target = CausalLM(model)
    g = tiny.generator(target)
    for prompt in tiny.prompts((1, 2, 8, 61)):
        with torch.no_grad():
            laws = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        parts = list(scoring.score(g.engine, prompt, 3, chunk))
        assert max(map(len, parts)) <= chunk
        first, *found = (each for part in parts for each in part)
        assert first is None and [each.token for each in found if each] == prompt[1:]
        for each, law in zip(found, laws, strict=False):
            assert each is not None
            assert each.logprob == pytest.approx(float(law[each.token]), abs=1e-4)
            best = law.topk(3)
            assert list(each.top) == best.indices.tolist()
            assert list(each.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompts_longer_than_a_chunk_up_to_the_context():
    g = tiny.generator(runs.model())
    (prompt,) = tiny.prompts((256,))
    laws = g.engine.target.stock_logits(torch.tensor([prompt]))[0].log_softmax(-1)
    found = g.score(prompt)
    assert len(prompt) > scoring.CHUNK and len(found) == len(prompt)
    values = [each.logprob for each in found if each is not None]
    assert values == pytest.approx([float(law[token]) for law, token in zip(laws, prompt[1:], strict=False)], abs=1e-4)
    assert found[1] is not None and found[1].top == {}


def test_what_cannot_be_scored_is_refused():
    g = tiny.generator(CausalLM(tiny.build("llama")))
    wrong: list[Any] = [[], [96], [1] * 257]
    for prompt in wrong:
        with pytest.raises(PromptError):
            g.score(prompt)
    for top in (-1, 97, 1.5):
        with pytest.raises(OptionError, match="top must be"):
            g.score([1, 2], top)  # type: ignore[arg-type]
    g.engine.target.collective = False
    with pytest.raises(ModelError, match="scores of prompts"):
        g.score([1, 2])


def test_logits_that_are_not_numbers():
    model = tiny.build("llama")
    g = tiny.generator(CausalLM(model))
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(NumericsError, match="cannot be scored"):
        g.score([1, 2, 3])


def test_steps_run_between_chunks():
    g = tiny.generator(runs.model())
    (prompt,) = tiny.prompts((40,))
    expected, scores = g.generate([5, 6, 7], max_new_tokens=20), g.score(prompt, 2)
    parts = scoring.score(g.engine, prompt, 2, 4)
    found = [*next(parts), *next(parts)]
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(g.generate([5, 6, 7], max_new_tokens=20)))
    thread.start()
    thread.join(30)
    assert done and done[0].tokens == expected.tokens
    found += [each for part in parts for each in part]
    assert [each and each.token for each in found] == [each and each.token for each in scores]
    for each, other in zip(found[1:], scores[1:], strict=True):
        assert each and other and each.logprob == pytest.approx(other.logprob, abs=1e-4)
