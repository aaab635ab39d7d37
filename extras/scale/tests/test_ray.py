"""Two replicas on this machine by Ray, started by the commands of the page: one is killed, and all are updated."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from processes import environment

EXTRA = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow
SCALE = [sys.executable, "-m", "foredraft", "scale"]
FILE = """
model: {drafter: %s}
server: {port: %d, drain_seconds: 60}
scale: {replicas: 2, affinity: %s}
"""


class Deployment:
    """A running ``foredraft scale``."""

    def __init__(self, process: subprocess.Popen[str], url: str, file: Path) -> None:
        self.process, self.url, self.file = process, url, file
        self.port = int(url.rpartition(":")[2])

    def replicas(self) -> list[psutil.Process]:
        title = "ray::ServeReplica:foredraft:replica"
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if each.cmdline()[:1] == [title] or title in each.name()]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deploy.yaml"
        file.write_text(FILE % ("none", 0, "false"))
        with subprocess.Popen(
            [*SCALE, str(file)], env=environment(EXTRA), stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stderr is not None
                said: list[str] = []
                for line in process.stderr:
                    said.append(line)
                    if found := re.search(r"answer on (http://\S+)", line):
                        break
                else:
                    pytest.fail("".join(said))
                with (Path(folder) / "log").open("w") as log:  # the pipe must not fill up
                    drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
                yield Deployment(process, found[1], file)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(120)
                drain.wait(10)


def chat(number: int, *turns: str, **options: Any) -> dict[str, Any]:
    system = f"You are assistant {number}. " + "Answer briefly, and in plain English. " * 5
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *messages], "max_tokens": 8, **options}


async def asked(client: httpx.AsyncClient, number: int) -> str:
    """How a request ended: ``whole``, ``stream``, ``broken`` (a stream with an error object) or ``error``."""
    stream = bool(number % 2)
    answer = await client.post("/v1/chat/completions", json=chat(number, f"Count to {number}.", stream=stream))
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] == answer.status_code
        return "error"
    if not stream:
        assert len(answer.json()["choices"]) == 1
        return "whole"
    *lines, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]" and "[DONE]" not in lines
    events = [json.loads(line) for line in lines]
    ends = [each for each in events if "error" in each or each["choices"][0]["finish_reason"] is not None]
    assert ends == events[-1:], "one end, at the end"
    return "broken" if "error" in ends[0] else "stream"


async def load(url: str, numbers: Iterator[int], ended: list[str], clients: int = 12) -> None:
    """Ask for all numbers, several at a time."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def work() -> None:
            for number in numbers:
                ended.append(await asked(client, number))

        await asyncio.gather(*(work() for _ in range(clients)))


def test_of_500_requests_none_is_lost_when_a_replica_is_killed(deployment: Deployment):
    ended: list[str] = []
    before = deployment.replicas()
    assert len(before) == 2

    def numbers() -> Iterator[int]:
        for number in range(500):
            if number == 200:
                os.kill(before[0].pid, signal.SIGKILL)
            yield number

    asyncio.run(load(deployment.url, numbers(), ended))
    found = Counter(ended)
    assert len(ended) == 500 and found["error"] == 0
    assert found["whole"] == 250 and found["stream"] + found["broken"] == 250 and found["broken"] <= 12
    assert httpx.get(f"{deployment.url}/health").status_code == 200


def cached_tokens(url: str) -> tuple[int, int]:
    """Prompt tokens that came from the KV cache, and all, of the later turns of six conversations."""
    cached = prompts = 0
    with httpx.Client(base_url=url, timeout=300) as client:
        for turn in range(4):
            for number in range(6):
                turns = [f"Tell me more about the {each}th of the many things." for each in range(2 * turn + 1)]
                usage = client.post("/v1/chat/completions", json=chat(number, *turns)).json()["usage"]
                if turn:
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    prompts += usage["prompt_tokens"]
    return cached, prompts


def test_an_update_under_load_drops_no_request_and_affinity_finds_the_cache(deployment: Deployment):
    without, prompts = cached_tokens(deployment.url)
    deployment.file.write_text(FILE % ("prompt_lookup", deployment.port, "true"))
    ended: list[str] = []

    async def update() -> None:
        process = await asyncio.create_subprocess_exec(
            *SCALE, str(deployment.file), "--address", "auto", env=environment(EXTRA), stderr=asyncio.subprocess.PIPE
        )

        def numbers() -> Iterator[int]:
            number = 0
            while process.returncode is None:
                yield number
                number += 1

        text = asyncio.ensure_future(process.communicate())
        await load(deployment.url, numbers(), ended, clients=4)
        assert process.returncode == 0, (await text)[1]

    old = {each.pid for each in deployment.replicas()}
    asyncio.run(update())
    assert len(ended) > 20 and set(ended) == {"whole", "stream"}
    assert old.isdisjoint(each.pid for each in deployment.replicas())
    assert httpx.get(f"{deployment.url}/live").json()["drafter"] == "prompt_lookup"
    found, same = cached_tokens(deployment.url)
    assert prompts == same and found > 0.7 * prompts > without
