"""Completions that repeat their prompts with log-probabilities: as the library scores them."""

import threading
import time
from typing import Any

import httpx
import openai
import pytest
import servers

import tiny

PROMPTS = tiny.prompts((5, 1, 300))
SCORE: Any = {"model": servers.NAME, "max_tokens": 0, "echo": True, "logprobs": 2}


def check_prompt(logprobs: Any, prompt: list[int]) -> None:
    """The lists begin with the scores of the prompt's tokens."""
    scores = servers.generator().score(prompt, 2)
    size = len(prompt)
    texts = [servers.tokenizer().decode([token]) for token in prompt]
    assert logprobs.tokens[:size] == texts
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:size] == pytest.approx([each.logprob for each in scores[1:] if each], abs=1e-4)
    whole = servers.tokenizer().decode(prompt)
    for text, offset in zip(texts, logprobs.text_offset, strict=False):
        assert whole[offset : offset + len(text)] == text


def by_token(found: Any) -> list[Any]:
    """Log-probabilities in lists, as one list by token."""
    return list(zip(found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True))


def test_the_thread_that_scores_ends_with_the_server():
    before = set(threading.enumerate())
    with servers.served(servers.generator()) as running:
        assert running.post({"prompt": [5, 6], "max_tokens": 0, "echo": True, "logprobs": 1}).status_code == 200
        (scorer,) = (each for each in set(threading.enumerate()) - before if each.name.startswith("foredraft-score"))
    scorer.join(20)
    assert not scorer.is_alive()


def test_prompts_alone(client: openai.OpenAI):
    answer = client.completions.create(prompt=PROMPTS, n=2, **SCORE)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        prompt = PROMPTS[choice.index // 2]
        assert (choice.text, choice.finish_reason) == (servers.tokenizer().decode(prompt), "length")
        assert choice.logprobs is not None and len(choice.logprobs.tokens or []) == len(prompt)
        check_prompt(choice.logprobs, prompt)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (306, 0)


def test_a_streamed_echo_is_the_unstreamed_one(client: openai.OpenAI):
    for max_tokens in (0, 6):
        options: Any = {**SCORE, "prompt": PROMPTS, "max_tokens": max_tokens, "temperature": 0.0}
        whole = client.completions.create(**options)
        *chunks, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        assert last.choices == [] and last.usage == whole.usage
        texts, logprobs = [""] * 3, [[], [], []]
        for chunk in chunks:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            logprobs[choice.index] += by_token(choice.logprobs)
        assert texts == [choice.text for choice in whole.choices]
        for choice, streamed in zip(whole.choices, logprobs, strict=True):
            assert streamed == by_token(choice.logprobs)
            assert len(streamed) == len(PROMPTS[choice.index]) + max_tokens


def test_a_continuation_as_lm_eval_scores_it(client: openai.OpenAI):
    """The harness sends ids with max_tokens 1 and sums what is after the context, without the last token."""
    g = servers.generator()
    context = PROMPTS[2][:200]
    greedy = g.generate(context, max_new_tokens=4).tokens
    for continuation, is_greedy in ((greedy, True), ([*greedy[:3], (greedy[3] + 1) % tiny.VOCAB], False)):
        prompt = [*context, *continuation]
        options: Any = {**SCORE, "max_tokens": 1, "temperature": 0, "seed": 1234, "logprobs": 1}
        (choice,) = client.completions.create(prompt=[prompt], **options).choices
        assert choice.logprobs is not None and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs
        own, best = choice.logprobs.token_logprobs[200:-1], choice.logprobs.top_logprobs[200:-1]
        assert sum(own) == pytest.approx(sum(each.logprob for each in g.score(prompt)[200:] if each), abs=1e-3)
        assert all(one == max(top.values()) for one, top in zip(own, best, strict=True)) == is_greedy
        check_prompt(choice.logprobs, prompt)


def test_a_text_and_its_offsets(client: openai.OpenAI):
    text = servers.generator().generate([7, 8, 9], max_new_tokens=12).text
    (choice,) = client.completions.create(prompt=text, **SCORE).choices
    assert choice.text == text and choice.logprobs is not None
    check_prompt(choice.logprobs, servers.tokenizer().encode(text))


def test_nothing_is_queued_and_faults_are_explained(server: servers.Running):
    def post(**change: Any) -> httpx.Response:
        return server.post({**SCORE, "prompt": [1, 2], **change})

    def submit(*args: Any, **options: Any) -> None:
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.generator.engine, "submit", submit)
        assert post().status_code == 200
        assert post(logprobs=None).json()["choices"][0]["logprobs"] is None
    for change, sentence in (
        ({"echo": False}, "max_tokens: 0 needs echo"),
        ({"prompt": [96]}, "outside the model's vocabulary"),
        ({"prompt": [1] * 1025}, "the model's context is 1024"),
        ({"prompt": [[1]] * 10**4}, "more than the"),
        ({"n": 10**9}, "more than the"),
        ({"n": 10**9, "logprobs": None}, "more than the"),
        ({"max_tokens": -1}, "max_tokens"),
    ):
        answer = post(**change)
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]


def test_a_target_on_several_processes_scores_nothing(monkeypatch: pytest.MonkeyPatch):
    g = servers.generator()
    with servers.served(g) as running:
        monkeypatch.setattr(g.engine.target, "ranks", 2)
        answer = running.post({**SCORE, "prompt": [1, 2]})
        assert answer.status_code == 400 and "it scores no prompts" in answer.json()["error"]["message"]
        assert running.post({**SCORE, "prompt": [1, 2], "logprobs": None}).is_success


def test_a_long_prompt_does_not_outlast_its_time(monkeypatch: pytest.MonkeyPatch):
    g = servers.generator()
    forward = g.engine.target.forward
    seen: list[float] = []

    def slow(*args: Any) -> Any:
        seen.append(time.monotonic())
        time.sleep(0.4)
        return forward(*args)

    with servers.served(g, request_timeout=1) as running:
        monkeypatch.setattr(g.engine.target, "forward", slow)
        assert running.post({**SCORE, "prompt": [1] * 1000}).status_code == 408
        time.sleep(1.0)
        assert 2 <= len(seen) <= 4 and running.service.idle
