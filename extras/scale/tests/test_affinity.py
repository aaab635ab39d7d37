"""Which replica gets a request: the one that knows most of its prompt, unless it is too busy."""

import json
from collections import Counter
from typing import Any

import pytest

from foredraft_scale import affinity
from foredraft_scale.affinity import Affinity, prompt_blocks


def chat(*texts: str, **options: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return json.dumps({**options, "messages": messages}).encode()


LONG = "The quick brown fox jumps over the lazy dog. " * 20


def test_a_conversation_that_goes_on_begins_with_the_blocks_of_its_last_turn():
    first, second = prompt_blocks(chat(LONG)), prompt_blocks(chat(LONG, "An answer.", "And then? " * 20))
    assert len(first) >= 14 and len(second) > len(first)
    assert second[: len(first) - 1] == first[:-1]  # the last block has the end of the message
    assert prompt_blocks(chat(LONG, temperature=1, stream=True)) == first


def test_other_prompts_keys_and_tools_have_other_blocks():
    first = prompt_blocks(chat(LONG))
    for other in (
        prompt_blocks(chat("x" + LONG)),
        prompt_blocks(chat(LONG), "another key"),
        prompt_blocks(chat(LONG, tools=[{"type": "function"}])),
        prompt_blocks(json.dumps({"prompt": LONG}).encode()),
    ):
        assert other and not set(other) & set(first)


def test_long_bodies_are_compared_as_they_are(monkeypatch: pytest.MonkeyPatch):
    words = LONG * 300
    first, second = prompt_blocks(chat(words)), prompt_blocks(chat(words, "An answer.", "And then?"))
    assert first == second and len(first) == affinity._MOST_BLOCKS
    assert not set(first) & set(prompt_blocks(chat("x" + words)))
    monkeypatch.setattr("json.loads", lambda _: pytest.fail("it is not parsed"))
    assert prompt_blocks(chat(words)) == first


def test_the_input_of_a_response_has_blocks():
    def response(**body: object) -> tuple[bytes, ...]:
        return prompt_blocks(json.dumps({"instructions": LONG, **body}).encode())

    first = response(input="Hello.")
    assert len(first) >= 14 and response(input="Goodbye.")[: len(first) - 1] == first[:-1]
    assert not set(response(input="Hello.", instructions="x" + LONG)) & set(first)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"{}", b'{"prompt": "short"}', b"\xff", b"[" * 10**5])
def test_a_body_without_a_long_prompt_has_no_blocks(body: bytes):
    assert prompt_blocks(body) == ()


def test_a_prompt_of_token_ids_has_blocks():
    body = json.dumps({"prompt": list(range(100))}).encode()
    assert len(prompt_blocks(body)) > 4


def test_a_prompt_goes_where_most_of_it_was_read():
    router, loads = Affinity(), {"a": 0, "b": 0, "c": 0}
    short, longer, other = prompt_blocks(chat(LONG)), prompt_blocks(chat(LONG * 2)), prompt_blocks(chat("o" + LONG))
    router.routed(short, "a", loads)
    router.routed(longer, "b", loads)
    assert router.ranked(prompt_blocks(chat(LONG * 3)), loads)[0] == "b"
    assert set(router.ranked(short, loads)[:2]) == {"a", "b"}
    assert router.ranked(other, {"a": 0, "b": 0, "c": 1})[-1] == "c"


def test_nobody_gets_more_than_the_bound_for_its_cache_alone():
    router, loads = Affinity(load_bound=1.25), {"a": 0, "b": 0, "c": 0, "d": 0}
    blocks = prompt_blocks(chat(LONG))
    for _ in range(100):
        best = router.ranked(blocks, loads)[0]
        loads[best] += 1
        router.routed(blocks, best, loads)
        assert max(loads.values()) <= 1.25 * (sum(loads.values()) + 1) / 4 + 1
    assert sum(loads.values()) == 100 and max(loads.values()) < 35


def test_routers_that_know_nothing_decide_alike_and_spread():
    loads = {"a": 0, "b": 0, "c": 0}
    prompts = [prompt_blocks(chat(f"{number} {LONG}")) for number in range(300)]
    chosen = [Affinity().ranked(blocks, loads)[0] for blocks in prompts]
    assert chosen == [Affinity().ranked(blocks, dict(reversed(loads.items())))[0] for blocks in prompts]
    assert min(Counter(chosen).values()) > 70


def test_replicas_that_are_gone_are_never_chosen():
    router, blocks = Affinity(), prompt_blocks(chat(LONG))
    router.routed(blocks, "a", ["a", "b"])
    assert router.ranked(blocks, {"b": 3}) == ["b"]
    router.routed(blocks, "b", ["b"])
    assert router.ranked(blocks, {"a": 0, "b": 0})[0] == "b"
    assert router.ranked(blocks, {}) == []


def test_what_was_not_seen_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(affinity, "_REMEMBERED", 20)
    router, first = Affinity(), prompt_blocks(chat(LONG))
    loads = {"a": 0, "b": 1}
    router.routed(first, "b", loads)
    assert router.ranked(first, loads)[0] == "b"
    router.routed(prompt_blocks(chat("x" + LONG * 2)), "a", loads)
    assert router.ranked(first, loads)[0] == "a"
