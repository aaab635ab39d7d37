"""Connections that do not come to their end, too many of them, and what the log says of it."""

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import servers

from foredraft.serve.logs import OnceAMinute
from foredraft.serve.server import _room_for

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
HALF = HEAD + b"content-length: 1000\r\n\r\n{"


@contextlib.contextmanager
def connected(server: servers.Running, sent: bytes = b"") -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        yield connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def status(answer: bytes) -> tuple[int, str]:
    """Of an answer and its error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_what_does_not_come_to_its_end_is_closed():
    limits: dict[str, Any] = {"head_seconds": 1.0, "body_seconds": 1.0}
    with servers.served(servers.generator(), **limits) as server:
        parts = (b"", b"\r\n", b"POST /v1/comp", HEAD, HALF, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /hea")
        with contextlib.ExitStack() as stack:
            silent, empty, half, fields, body, second = [stack.enter_context(connected(server, x)) for x in parts]
            assert rest(silent) == rest(empty) == b""
            for each in (half, fields):
                assert status(rest(each)) == (408, "The head of the request took too long to arrive.")
            assert status(rest(body)) == (408, "The body of the request took too long to arrive.")
            first, _, late = rest(second).partition(b"HTTP/1.1 408")
            assert b"200 OK" in first and late
        assert server.get("/health").status_code == 200


def test_a_request_may_take_longer_than_a_head_and_a_body():
    limits: dict[str, Any] = {"head_seconds": 1.0, "body_seconds": 1.0}
    generator = servers.generator()
    with servers.served(generator, **limits) as server, generator.engine.exclusive():
        body = b'{"prompt": "abc", "max_tokens": 3}'
        with connected(server, HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as client:
            client.settimeout(3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(60)
            generator.engine._lock.release()
            try:
                assert b"200 OK" in rest(client)
            finally:
                generator.engine._lock.acquire()


def test_the_longest_silent_connection_makes_room(caplog: pytest.LogCaptureFixture):
    with servers.served(servers.generator(), max_connections=4, head_seconds=600.0) as server:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(connected(server)) for _ in range(4)]
            servers.until(lambda: len(server.server.server_state.connections) == 4)
            assert server.get("/health").status_code == 200
            assert rest(silent[0]) == b""
            for each in silent[2:]:
                each.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    each.recv(1)
    assert "All of the 4 connections are in use." in caplog.text


def test_nobody_makes_room_while_all_have_a_request():
    with servers.served(servers.generator(), max_connections=2) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connected(server, HALF)) for _ in range(2)]
        servers.until(lambda: len(server.server.server_state.tasks) == 2)
        late = stack.enter_context(connected(server, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"))
        assert status(rest(late)) == (503, "The server has too many connections.")
        busy[0].close()
        servers.until(lambda: len(server.server.server_state.connections) == 1)
        assert server.get("/health").status_code == 200


def test_half_a_body_does_not_hold_up_the_end():
    """Whoever has sent half a request is told; the server does not wait for the rest, nor for its time to drain."""
    with contextlib.ExitStack() as stack:
        with servers.served(servers.generator(), drain_seconds=600) as server:
            parts = (HALF, b"POST /v1/comp", b"")
            body, half, silent = [stack.enter_context(connected(server, part)) for part in parts]
            servers.until(lambda: len(server.server.server_state.tasks) == 1)
        assert status(rest(body)) == (503, "The server is about to stop.")
        assert rest(half) == rest(silent) == b""


def test_connections_are_at_most_half_of_the_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("os.listdir", lambda _: ["x"] * 28)
    monkeypatch.setattr("resource.getrlimit", lambda _: (128, 128))
    assert _room_for(1024) == 50 and "At most 50 connections, not 1024" in caplog.text
    raised: list[Any] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (128, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: raised.append(limits))
    assert _room_for(1024) == 1024 and raised == [(2076, 4096)]


def test_what_repeats_is_one_line_a_minute():
    kept = OnceAMinute()

    def passes(message: str, at: float, level: int = logging.WARNING) -> logging.LogRecord | None:
        record = logging.LogRecord("foredraft", level, "", 0, message, (), None)
        record.created = at
        return record if kept.filter(record) else None

    assert passes("full\nat 1", 0.0) and not passes("full\nat 2", 59.0) and passes("other", 59.0)
    again = passes("full\nat 3", 60.0)
    assert again is not None and again.__dict__["facts"] == {"left_out": 1}
    assert "facts" not in passes("full", 120.0).__dict__
    assert passes("request", 0.0, logging.INFO) and passes("request", 0.0, logging.INFO)
