from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import servers
import torch

from foredraft.core.sampling.params import SamplingParams
from foredraft.serve.convert import Converter


@pytest.fixture(scope="session")
def server() -> Iterator[servers.Running]:
    with servers.served(servers.generator()) as running:
        yield running


@pytest.fixture
def client(server: servers.Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model of the server say a text."""
    said: list[str] = []
    made = Converter._params

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        done = servers.tokenizer().decode(ids[0].tolist()).rpartition("[assistant]")[2]
        wanted = servers.tokenizer().encode(said[-1][len(done) :] or " ")[0]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([wanted]), 0.0)

    def params(self: Converter, body: Any, *rest: Any) -> SamplingParams:
        own = made(self, body, *rest)
        options = {name: getattr(own, name) for name in own.__slots__}
        return SamplingParams(**{**options, "logits_processor": (force,), "max_new_tokens": len(said[-1])})

    monkeypatch.setattr(Converter, "_params", params)
    return said.append
