"""Texts in the target's own words: prompts from the data, continued by the loop itself, speculation and all.

A head that is trained on what its target says drafts better than one trained on what others wrote.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.errors import DataError
from foredraft.core.params import SamplingParams
from foredraft.engine.generate import Generator
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.checkpoint import alone
from foredraft.train.sources import Sample, parsed, read_sources, refused, sample_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How answers are made.

    count: prompts that are taken, evenly from all of the data.
    prompt_tokens: a text is cut to so many tokens, of which the rest is said anew; of a chat, each question is asked.
    new_tokens, temperature: of each answer.
    batch: answers at once.
    """

    count: int = 2000
    prompt_tokens: int = 48
    new_tokens: int = 208
    temperature: float = 0.8
    batch: int = 64


def regenerate(
    generator: Generator,
    sources: list[str],
    out: Path,
    options: Answers,
    tell: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Path:
    """Write the target's answers as JSON Lines of ids; go on where an earlier call was cut off.

    Args:
        tell: called at the start and after each batch with ``answers`` that there are, ``of`` how many, and after the
            first batch the seconds ``left`` at this call's pace.

    Raises:
        DataError: a source that cannot be read, or no prompts in it.
        OptionError: another call writes this file.
    """
    assert generator.tokenizer is not None
    prompts = _evenly(list(_prompts(read_sources(sources), generator.tokenizer, options.prompt_tokens)), options.count)
    if not prompts:
        raise DataError(f"There are no prompts in {', '.join(sources)}.")
    with alone(out.parent, f".{out.name}.lock"):
        before = _answered(out, prompts)
        tell({"answers": before, "of": len(prompts)})
        clock = time.perf_counter()
        with out.open("a", encoding="utf-8") as file:
            for begin in range(before, len(prompts), options.batch):
                batch = prompts[begin : begin + options.batch]
                for prompt, answer in zip(batch, _said(generator, batch, begin + 1, options), strict=True):
                    file.write(json.dumps({"ids": prompt + answer, "prompt_length": len(prompt)}) + "\n")
                file.flush()
                done = begin + len(batch)
                pace = (time.perf_counter() - clock) / (done - before)
                tell({"answers": done, "of": len(prompts), "left": round(pace * (len(prompts) - done), 1)})
    return out


def _said(generator: Generator, prompts: list[list[int]], seed: int, options: Answers) -> list[list[int]]:
    """Answers to these prompts, made together; each has a seed of its own, so neighbours draw different numbers."""
    sequences = []
    for number, prompt in enumerate(prompts, start=seed):
        params = SamplingParams(max_new_tokens=options.new_tokens, temperature=options.temperature, seed=number)
        sequences += generator.submit([prompt], params)
    generator.engine.run(sequences)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    return [sequence.tokens for sequence in sequences]


def _prompts(samples: Iterator[Sample], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    for sample in samples:
        if sample.messages is not None:
            for number, turn in enumerate(sample.messages):
                if turn["role"] == "assistant" and number:
                    yield _asked(sample, tokenizer, number)
        elif sample.text is not None:
            ids = tokenizer.encode_many([sample.text[: 16 * length]])[0][:length]
            if len(ids) >= 2:
                yield ids


def _asked(sample: Sample, tokenizer: Tokenizer, turns: int) -> list[int]:
    """Ids of the first turns of a chat, ready for the assistant's answer."""
    try:
        return tokenizer.encode_chat((sample.messages or [])[:turns])
    except Exception as error:  # a template raises what it likes
        raise refused(sample, error) from error


def _evenly(prompts: list[list[int]], count: int) -> list[list[int]]:
    if len(prompts) <= count:
        return prompts
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _answered(path: Path, prompts: list[list[int]]) -> int:
    """How many answers there are; one that was cut off is dropped.

    Raises:
        DataError: they answer other prompts.
    """
    if not path.exists():
        return 0
    whole = path.read_bytes()
    *lines, torn = whole.decode("utf-8", errors="replace").split("\n")
    if torn:
        os.truncate(path, whole.rfind(b"\n") + 1)
    for line, prompt in zip(lines, prompts, strict=False):
        sample = sample_of(parsed(line, str(path)), str(path))
        if (sample.ids or [])[: sample.prompt_length] != prompt:
            raise DataError(f"{path} holds answers to other prompts; delete it, or take another folder.")
    return len(lines)
