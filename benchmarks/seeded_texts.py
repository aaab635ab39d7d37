"""Texts whose number gives their prompt and their seed, so that they can be compared with plain decoding's."""

import functools
from collections.abc import Sequence
from typing import Any

from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence as Request


class SeededTexts:
    """Groups of at most ``most`` texts of ``new_tokens`` tokens.

    Args:
        plain: decodes without drafts.
        prompts: taken in turns.
    """

    def __init__(self, plain: Generator, prompts: Sequence[Any], new_tokens: int, most: int) -> None:
        self._plain = plain
        self._prompts = prompts
        self._new_tokens = new_tokens
        self._most = most

    def run(self, generator: Generator, temperature: float, group: int, count: int) -> list[Request]:
        """The first texts of a group, submitted at once."""
        sequences: list[Request] = []
        for seed in range(group * self._most, group * self._most + count):
            params = SamplingParams(
                max_new_tokens=self._new_tokens, eos_token_id=(), temperature=temperature, seed=seed
            )
            sequences += generator.submit([self._prompts[seed % len(self._prompts)]], params)
        generator.engine.run(sequences)
        return sequences

    @functools.cache  # noqa: B019 - one object a process
    def plain(self, temperature: float, group: int, count: int) -> list[Request]:
        """Plain decoding's texts of a group."""
        return self.run(self._plain, temperature, group, count)
