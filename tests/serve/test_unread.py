"""Clients that do not take their answers."""

import json
import socket
import time
from typing import Any

import pytest
import servers

BODY: dict[str, Any] = {"prompt": "abc", "n": 4, "max_tokens": 900, "ignore_eos": True, "stream": True}


def test_a_client_that_reads_nothing_loses_its_rows(monkeypatch: pytest.MonkeyPatch):
    generator = servers.generator()
    step = generator.engine._step

    def slow() -> None:
        time.sleep(0.01)  # the whole answer takes longer than the client's time
        step()

    monkeypatch.setattr(generator.engine, "_step", slow)
    with servers.served(generator, client_seconds=1.0) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        body = json.dumps(BODY).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        servers.until(lambda: generator.engine.running == 4)
        servers.until(lambda: generator.engine.running == 0)
        servers.until(lambda: 'finish_reason="cancelled"} 4.0' in server.get("/metrics").text)


def test_a_client_that_reads_gets_all():
    with servers.served(servers.generator(), client_seconds=1.0) as server:
        got = server.post({**BODY, "return_token_ids": True}).text
        chunks = [json.loads(line[6:]) for line in got.splitlines() if line.startswith("data: {")]
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 4 * 900
        assert got.rstrip().endswith("data: [DONE]")
