"""The official client against a real server: the answers are the library's."""

import asyncio
import json
from typing import Any

import openai
import pytest
import servers

import tiny

JSON = {"content-type": "application/json"}
CHAT: Any = [{"role": "user", "content": "say something"}]
NEW = 12
GREEDY: Any = {"model": servers.NAME, "max_tokens": NEW, "temperature": 0.0}


def library(prompt: Any, **options: Any) -> Any:
    return servers.generator().generate(prompt, max_new_tokens=NEW, **options)


def test_a_greedy_chat_is_the_librarys(client: openai.OpenAI):
    answer = client.chat.completions.create(messages=CHAT, **GREEDY)
    expected = library(CHAT)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (choice.finish_reason, answer.model, answer.object) == ("length", servers.NAME, "chat.completion")
    assert answer.usage is not None and answer.usage.completion_tokens == NEW
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + NEW
    assert answer.id.startswith("chatcmpl-")


def test_a_greedy_completion_is_the_librarys(client: openai.OpenAI):
    for prompt in ("abc", [5, 6, 7]):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert answer.choices[0].text == library(prompt).text
    several = client.completions.create(prompt=["abc", "x y"], n=2, echo=True, **GREEDY)
    texts = [prompt + library(prompt).text for prompt in ("abc", "abc", "x y", "x y")]
    assert [choice.text for choice in several.choices] == texts
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_a_seed_gives_the_librarys_text(client: openai.OpenAI):
    sampled = {**GREEDY, "temperature": 0.9, "seed": 11, "n": 3}
    answer = client.chat.completions.create(messages=CHAT, **sampled)
    expected = servers.generator().generate(CHAT, max_new_tokens=NEW, temperature=0.9, seed=11, num_return_sequences=3)
    assert [choice.message.content for choice in answer.choices] == [result.text for result in expected]


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_joins_to_the_unstreamed_one(client: openai.OpenAI, n: int):
    options: Any = {**GREEDY, "temperature": 0.8, "seed": 3, "n": n, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(messages=CHAT, **options)
    texts, reasons, logprobs = [""] * n, [None] * n, [[] for _ in range(n)]
    stream = client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks[:n]] == ["assistant"] * n
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        if choice.finish_reason is not None:
            assert reasons[choice.index] is None
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices if choice.logprobs]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_streamed_completion_joins_to_the_unstreamed_one(client: openai.OpenAI):
    options: Any = {**GREEDY, "prompt": ["abc", "x y"], "echo": True, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**options)
    texts, ids = ["", ""], [[], []]
    for chunk in client.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ids[choice.index] += choice.token_ids  # type: ignore[attr-defined]
    assert texts == [choice.text for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]  # type: ignore[attr-defined]


def test_stops(client: openai.OpenAI):
    tokens = library("abc").tokens
    text = library("abc").text
    stopped = client.completions.create(prompt="abc", stop=[text[4:6], "\n"], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[4:6])], "stop")
    assert stopped.stop_reason == text[4:6]  # type: ignore[attr-defined]
    by_id = client.completions.create(prompt="abc", extra_body={"stop_token_ids": [tokens[3]]}, **GREEDY).choices[0]
    assert by_id.finish_reason == "stop" and by_id.stop_reason == tokens[3]  # type: ignore[attr-defined]
    assert by_id.text == text[: tokens.index(tokens[3]) + 1]


def test_many_asynchronous_clients_get_their_own_answers(server: servers.Running):
    prompts = tiny.prompts((3, 9, 14, 2, 30, 7))
    expected = [library(prompt).text for prompt in prompts]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(prompt: list[int]) -> str:
                stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == expected


def test_acceptance_is_in_the_answer():
    truth = library([5, 6, 7]).tokens
    drafter = tiny.liar([[5, 6, 7, *truth]])
    with servers.served(servers.generator(drafter=drafter)) as running:
        body = {"prompt": [5, 6, 7], "max_tokens": NEW, "temperature": 0.0}
        answer = running.post(body).json()
    found = answer["metrics"]["speculative_decoding"]
    assert answer["lossless"] is True and found["lossless"] is True
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"])
    accepted = sum(size * count for size, count in enumerate(found["acceptance_histogram"]))
    assert found["num_accepted_draft_tokens"] == accepted > 0
    assert found["mean_acceptance_length"] * found["num_spec_steps"] == pytest.approx(NEW)


def test_models_and_health(client: openai.OpenAI, server: servers.Running):
    (card,) = client.models.list().data
    assert (card.id, card.object) == (servers.NAME, "model")
    assert client.models.retrieve(servers.NAME) == card
    with pytest.raises(openai.NotFoundError, match="There is no model 'a/b' here. Known: tiny."):
        client.models.retrieve("a/b")
    health = server.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert server.get("/version").json().keys() == {"version"}


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({"model": "other"}, 404, "There is no model 'other'"),
        ({"guided_json": {}}, 400, "Unknown field 'guided_json'"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options needs stream"),
        ({"temperature": -1.0}, 400, "temperature must be"),
        ({"max_tokens": "5"}, 400, "max_tokens"),
        ({"prompt": ""}, 400, "The prompt is empty"),
        ({"prompt": [1000]}, 400, "outside the model's vocabulary"),
        ({"prompt": [1] * 1100}, 400, "the model's context"),
        ({"n": 10**6}, 400, "more than the"),
        ({"logit_bias": {"x": 1.0}}, 400, "logit_bias"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"presence_penalty": 1e300}, 400, "presence_penalty"),
        ({"logit_bias": {"3": 1e300}}, 400, "logit_bias"),
        ({"no_repeat_ngram_size": 2**40}, 400, "no_repeat_ngram_size"),
        ({"bad_words_ids": [[token] for token in range(96)]}, 400, "No next token can be chosen"),
        ({"stop_token_ids": list(range(96)), "min_tokens": 2}, 400, "No next token can be chosen"),
        ({"top_k": 2**63}, 400, "top_k"),
        ({"min_tokens": 2**63, "max_tokens": 2**64}, 400, "tokens"),
        ({"stop_token_ids": [2**63]}, 400, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025, "ignore_eos": True}, 400, "stop_token_ids has 1025 ids; the most are 1024."),
        ({"prompt": {"a": 1}}, 400, "prompt: Input should be a valid string or a valid list"),
        ({"prompt": [{}]}, 400, "prompt.0: Input should be a valid string, a valid integer or a valid list"),
        ({"stop": ["a", 3]}, 400, "stop.1: Input should be a valid string"),
        ({"speculative": {"num_assistant_tokens": -1}}, 400, "speculative.num_assistant_tokens: Input should be great"),
        ({"prediction": {"type": "content"}}, 400, "prediction.content: Field required"),
        ({"prediction": {"type": "content", "content": [5]}}, 400, "prediction.content.0: Input should be a valid obj"),
        ({"seed": 10**4000}, 400, "seed"),
        ({"temperature": 10**400}, 400, "temperature"),
        ({"repetition_penalty": 1e-39}, 400, "repetition_penalty must be"),
        ({"prompt": [2**31], "echo": True}, 400, "prompt.0: Input should be less than"),
        ({"prompt": [96], "echo": True}, 400, "outside the model's vocabulary"),
    ],
)
def test_a_refused_request_has_an_error_object(server: servers.Running, change: Any, status: int, sentence: str):
    body = {"prompt": "abc", "model": servers.NAME, **change}
    answer = server.post(content=json.dumps(body), headers=JSON)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and sentence in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}


def test_the_error_of_an_image_names_its_part(server: servers.Running):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    answer = server.post({"messages": [{"role": "user", "content": parts}]}, "/v1/chat/completions")
    error = answer.json()["error"]
    assert error["param"] == "messages.0.content.1"
    assert error["message"] == "messages.0.content.1: Only text is supported, not 'image_url'."


def test_what_is_no_json_and_what_is_too_long(server: servers.Running):
    broken = server.post(content="{", headers=JSON)
    assert broken.status_code == 400 and broken.json()["error"]["message"].startswith("The body is not valid JSON: ")
    for content, headers in ((b"", JSON), (b"[1]", JSON)):
        form = server.post(content=content, headers=headers)
        sentence = "The body must be a JSON object (content-type: application/json)."
        assert (form.status_code, form.json()["error"]["message"]) == (400, sentence)
    large = server.post(content=b"[" * (5 * 2**20), headers=JSON)
    assert large.status_code == 413 and large.json()["error"]["code"] == 413
    lost = server.get("/nothing")
    assert lost.status_code == 404 and lost.json()["error"]["type"] == "NotFoundError"


def test_a_prediction_is_drafted_from_and_counted(client: openai.OpenAI):
    plain = client.chat.completions.create(messages=CHAT, **GREEDY)
    text = plain.choices[0].message.content or ""
    assert plain.usage is not None and plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    parts: Any = [{"type": "text", "text": text[:6]}, {"type": "text", "text": text[6:]}]
    for content in (text, parts):
        predicted = {"type": "content", "content": content}
        answer = client.chat.completions.create(messages=CHAT, prediction=predicted, **GREEDY)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == text
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == NEW - 1 and details.rejected_prediction_tokens == 0


def test_speculation_is_limited_by_request(client: openai.OpenAI):
    text = library(CHAT).text
    for speculative, most in (
        (True, NEW - 1),
        (False, 0),
        ({"num_assistant_tokens": 0}, 0),
        ({"num_assistant_tokens": 2}, 2),
    ):
        extra = {"speculative": speculative, "prediction": {"type": "content", "content": text}}
        answer = client.chat.completions.create(messages=CHAT, extra_body=extra, **GREEDY)
        assert answer.model_extra is not None
        rates = answer.model_extra["metrics"]["speculative_decoding"]["acceptance_rate_by_position"]
        assert answer.choices[0].message.content == text and rates == [1.0] * most
    with pytest.raises(openai.BadRequestError, match="speculative"):
        client.completions.create(prompt="a", extra_body={"speculative": {"num_assistant_tokens": -1}}, **GREEDY)
