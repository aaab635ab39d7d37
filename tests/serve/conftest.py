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
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
