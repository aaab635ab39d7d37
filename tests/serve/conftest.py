from collections.abc import Iterator

import openai
import pytest
import serving


@pytest.fixture(scope="session")
def server() -> Iterator[serving.Running]:
    with serving.served(serving.generator()) as running:
        yield running


@pytest.fixture
def client(server: serving.Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
