from collections.abc import Iterator

import openai
import pytest
import servers


@pytest.fixture(scope="session")
def server() -> Iterator[servers.Running]:
    with servers.served(servers.generator()) as running:
        yield running


@pytest.fixture
def client(server: servers.Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
