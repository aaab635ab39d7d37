"""A real server in a thread, around a tiny model."""

import asyncio
import contextlib
import faulthandler
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.serve.job import Job
from foredraft.serve.options import ServeOptions
from foredraft.serve.server import Server
from foredraft.serve.service import Service

NAME = "tiny"
TEMPLATE = (
    "{# calls are between <tool_call> tags #}{% if tools %}{{ '[tools]' + tools|tojson }}{% endif %}"
    "{% for m in messages %}{{ '[' + m['role'] + ']' + (m['content'] or '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@functools.cache
def model() -> CausalLM:
    return CausalLM(tiny.build("llama", max_position_embeddings=1024))


@functools.cache
def tokenizer() -> Tokenizer:
    inner = tiny.tokenizer()
    inner.chat_template = TEMPLATE
    return Tokenizer(inner)


def generator(**options: Any) -> Generator:
    return tiny.generator(model(), tokenizer=tokenizer(), **options)


@dataclass(frozen=True)
class Running:
    """A running server around a generator."""

    server: Server
    generator: Generator

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def service(self) -> Service:
        return self.server.app.state.service

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **options)

    def post(self, body: Any = None, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


@contextlib.contextmanager
def served(of: Generator, **options: Any) -> Iterator[Running]:
    """Serve a generator until the end of the context."""
    server = Server(of, (NAME,), ServeOptions(**{"port": 0, "drain_seconds": 10, **options}))
    started = threading.Event()

    async def main() -> None:
        task = asyncio.ensure_future(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        started.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert started.wait(30) and server.started
        yield Running(server, of)
    finally:
        server.should_exit = True
        thread.join(30)
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            pytest.fail(f"The server has not ended: {server.server_state.tasks}, {server.server_state.connections}.")


def until(true: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def job(prompt: list[int], **options: Any) -> Job:
    """A job of one output."""
    return Job([prompt], SamplingParams(**options), 1)
