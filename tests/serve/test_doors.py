"""Who and what gets in: options, keys, headers, bodies that cannot be read, and what the log says of them."""

import json
import logging
import socket
from typing import Any

import httpx
import pytest
import servers

from foredraft.cli import main
from foredraft.core.errors import OptionError
from foredraft.serve.options import ServeOptions, free_port
from foredraft.serve.server import MAX_HEAD_BYTES

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "port": ({"port": 99999}, "port must be 65535 or less, not 99999."),
    "time": ({"request_timeout": float("inf")}, "request_timeout must be 1000000 or less, not inf."),
    "grammar": ({"grammar_seconds": float("inf")}, "grammar_seconds must be 1000000 or less, not inf."),
    "memory": ({"grammar_memory_bytes": 2**80}, "grammar_memory_bytes must be 1099511627776 or less"),
    "client": ({"client_seconds": float("inf")}, "client_seconds must be 1000000 or less, not inf."),
    "queue": ({"max_queue": 10**30}, "max_queue must be 2147483648 or less"),
    "key": ({"api_key": ("",)}, "api_key must not be empty"),
    "host": ({"host": ""}, "host must not be empty"),
    "name": ({"served_model_name": (" ",)}, "served_model_name must not be empty"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_option_that_cannot_be_is_one_sentence(case: str):
    options, sentence = WRONG[case]
    with pytest.raises(OptionError, match=sentence):
        ServeOptions(**options)


COMMANDS = {
    "port": (("--port", "99999"), "port must be 65535 or less, not 99999."),
    "key": (("--api-key", ""), "api_key must not be empty: leave it out for the default."),
    "host": (("--host", "nope.invalid"), "Cannot listen on nope.invalid:0: "),
    "cache": (("--kv-cache-memory-bytes", "1"), "Raise kv_cache_memory_bytes"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_does_not_start(case: str, capsys: pytest.CaptureFixture[str]):
    arguments, sentence = COMMANDS[case]
    assert main(["serve", "--port", "0", *arguments]) == 2
    *logged, found = capsys.readouterr().err.splitlines()
    assert sentence in found and found.startswith("foredraft: ")
    assert all(json.loads(line)["level"] == "info" for line in logged), "what it loads"


def test_a_host_that_is_no_name():
    with pytest.raises(OptionError, match="Cannot listen on"):
        free_port("a..b", 0)


def test_a_variable_without_a_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREDRAFT_API_KEY", " , ")
    with pytest.raises(OptionError, match="FOREDRAFT_API_KEY is set and holds no key"):
        _ = ServeOptions().keys
    monkeypatch.setenv("FOREDRAFT_API_KEY", "")
    assert ServeOptions().keys == ()


def test_the_scheme_of_a_key_has_no_case():
    with servers.served(servers.generator(), api_key=("secret",)) as running:
        for value, status in (("bearer secret", 200), ("BEARER  secret", 200), ("Bearer secret2", 401), ("", 401)):
            assert running.get("/v1/models", headers={"authorization": value}).status_code == status, value


BODIES: dict[str, tuple[bytes, str]] = {
    "cut off": (b'{"prompt": ', "The body is not valid JSON: Expecting value at character 11."),
    "two": (b'{"prompt": "a"} x', "The body is not valid JSON: Extra data at character 16."),
    "not UTF-8": (b'{"prompt": "\xff"}', "The body is not valid UTF-8: invalid start byte at byte 12."),
    "digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "The body has a number with too many digits."),
    "nested": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "The body is nested too deep."),
    "a list": (b"[1]", "The body must be a JSON object (content-type: application/json)."),
    "empty": (b" ", "The body must be a JSON object (content-type: application/json)."),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_cannot_be_read_says_why(case: str, server: servers.Running, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    content, sentence = BODIES[case]
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == sentence
    assert not caplog.records, "a client's fault is no fault of the server"


def test_bodies_that_are_no_plain_json(server: servers.Running):
    body = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
    cases: list[tuple[dict[str, str], int, str]] = [
        ({}, 200, ""),
        ({"content-type": "application/json; charset=utf-8"}, 200, ""),
        ({"content-type": "application/vnd.api+json"}, 200, ""),
        ({"content-type": "text/plain"}, 400, "(content-type: application/json, not text/plain)"),
        ({"origin": "https://page.example"}, 400, "(content-type: application/json, not none)"),
        ({"content-encoding": "gzip"}, 415, "Bodies with content-encoding gzip are not supported"),
    ]
    for headers, status, message in cases:
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
        assert answer.status_code == status and message in answer.text, (headers, answer.text)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
IMAGES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
    "/v1/responses": {"input": [{"role": "user", "content": [{**IMAGE, "type": "input_image"}]}]},
}


@pytest.mark.parametrize("path", IMAGES)
def test_images_are_not_supported(path: str, server: servers.Running):
    answer = server.post(IMAGES[path], path)
    assert answer.status_code == 400 and "Only text is supported, not 'i" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/openapi.json", "/v1/nothing"])
def test_head_is_get_without_a_body(path: str, server: servers.Running):
    got, head = server.get(path), httpx.head(server.url + path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-length"] == str(len(got.content))


def test_keys_in_any_alphabet():
    keys = ("schlüssel", "ключ", "à")
    with servers.served(servers.generator(), api_key=keys) as running:
        cases = [(key.encode(), 200) for key in keys] + [("schlüssel".encode("latin-1"), 200), (b"????", 401)]
        for value, status in cases:
            found = running.get("/v1/models", headers={b"authorization": b"Bearer " + value})
            assert found.status_code == status, value


def test_pages_can_read_refusals():
    origin = {"origin": "https://page.example", "content-type": "application/json"}
    options: dict[str, Any] = {"cors_origin": (origin["origin"],), "api_key": ("k",), "max_body_bytes": 1000}
    with servers.served(servers.generator(), **options) as running:
        mine = {**origin, "authorization": "Bearer k"}

        def post(body: str, headers: dict[str, str]) -> httpx.Response:
            return httpx.post(f"{running.url}/v1/completions", content=body, headers=headers)

        answers = [post("{}", origin), post(" " * 1001, mine), post("{}", mine)]
        running.service.draining = True
        running.server.app.state.api.stop()
        answers.append(post('{"prompt": "a"}', mine))
    assert [each.status_code for each in answers] == [401, 413, 400, 503]
    for each in answers:
        assert each.headers["access-control-allow-origin"] == origin["origin"] and each.headers["x-request-id"]


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_can_read_why(chunked: bool, closes: bool):
    """It sends all of its body before it reads, as most clients do."""
    size = 20 * 2**20
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" + length + b"\r\n"
    part, next_one = b" " * 2**16, b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with servers.served(servers.generator(), max_body_bytes=2**20) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head + (b"connection: close\r\n\r\n" if closes else b"\r\n"))
            for _ in range(size // len(part)):
                connection.sendall(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
            connection.sendall(b"" if closes else next_one)
            answer = b""
            while more := connection.recv(1 << 16):
                answer += more
    first, _, second = answer.partition(b"HTTP/1.1 200 OK")
    assert first.startswith(b"HTTP/1.1 413") and b"The body has more than 1048576 bytes (--max-body-bytes)." in first
    assert bool(second) is not closes, "the connection can be used again"


def sent(server: servers.Running, *parts: bytes) -> tuple[int, Any]:
    """Status and body of the answer to raw bytes, of which each part is read by the server on its own."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        connection.settimeout(10)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_headers_have_a_limit(server: servers.Running, caplog: pytest.LogCaptureFixture):
    begin = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    long = b"a" * MAX_HEAD_BYTES
    many = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(2000))
    for parts in (
        (begin, b"x-a: " + long + b"\r\n\r\n"),  # one, whole
        (begin + many + b"\r\n",),
        (begin, b"x-a: ", *[long] * 30),  # without an end
        (b"GET /" + long + b" HTTP/1.1\r\n\r\n",),
    ):
        status, answer = sent(server, *parts)
        assert status == 431 and answer["error"]["message"] == (
            f"The path and headers of the request have more than {MAX_HEAD_BYTES} bytes."
        )
    assert sent(server, b"nonsense\r\n\r\n")[1]["error"]["message"] == "The request is not valid HTTP."
    assert not any(record.exc_info for record in caplog.records)
    body = b'{"prompt": "' + b"word " * 200 + b'", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    padded = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(60))
    assert sent(server, head + padded + b"content-length: %d\r\n\r\n" % len(body), body)[0] == 200


def test_one_client_may_send_many_requests_with_long_headers(server: servers.Running):
    with httpx.Client(base_url=server.url) as client:
        for _ in range(5):
            assert client.get("/version", headers={"x-a": "a" * (MAX_HEAD_BYTES // 2)}).status_code == 200
