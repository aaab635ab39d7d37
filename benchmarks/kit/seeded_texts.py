"""Texts whose number gives their prompt and their seed, so that they can be compared with plain decoding's."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.bench.prompts import read_prompts, standard_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.inputs import encode
from foredraft.engine.request import Sequence as Request


def tokenized(generator: Generator, files: Sequence[Path], count: int) -> dict[str, list[list[int]]]:
    """The first turns of the first prompts of each file in the chat template, by task."""
    found: dict[str, list[list[int]]] = {}
    for prompt in (each for file in files for each in read_prompts(file)[:count]):
        chat = [{"role": "user", "content": prompt.turns[0]}]
        found.setdefault(prompt.task, []).append(encode(chat, generator.tokenizer))
    return found


def in_turns(files: Sequence[Path | str], generator: Generator) -> list[list[int]]:
    """The prompts of these files, one of each in turn; by default the bundled ones."""
    read = [read_prompts(path, chat=True) for path in files] or [standard_prompts(chat=True)]
    return [encode(each.prompt, generator.tokenizer) for some in zip(*read, strict=False) for each in some]


def run_texts(
    generator: Generator, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
) -> list[Request]:
    """One text of each prompt with its seed, submitted at once. Tokens become no text, which would take time."""
    engine = generator.engine
    requests = [
        engine.request(prompt, replace(params, seed=seed), generator.eos_token_ids)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    sequences = engine.submit(requests, lambda ids: "", seeds)
    engine.run(sequences)
    return sequences


class SeededTexts:
    """Groups of at most ``most`` texts of ``new_tokens`` tokens.

    Args:
        plain: decodes without drafts.
        prompts: taken in turns.
    """

    def __init__(self, plain: Generator, prompts: Sequence[Any], new_tokens: int, most: int) -> None:
        self._plain = plain
        self._prompts = [encode(prompt, plain.tokenizer) for prompt in prompts]
        self._new_tokens = new_tokens
        self._most = most

    def run(self, generator: Generator, temperature: float, group: int, count: int) -> list[Request]:
        """The first texts of a group, submitted at once."""
        seeds = range(group * self._most, group * self._most + count)
        params = SamplingParams(max_new_tokens=self._new_tokens, eos_token_id=(), temperature=temperature)
        return run_texts(generator, [self._prompts[seed % len(self._prompts)] for seed in seeds], params, seeds)

    @functools.cache  # noqa: B019 - one object a process
    def plain(self, temperature: float, group: int, count: int) -> list[Request]:
        """Plain decoding's texts of a group."""
        return self.run(self._plain, temperature, group, count)
