"""Prompts that a model writes itself (Magpie, arXiv:2406.08464), and the choice of prompts for training.

A chat model that is given its template up to the user's turn writes what a user would ask. Such prompts are as
many-sided as what it was tuned on, and no data is needed.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import DataError, PromptError
from foredraft.engine.generator import Generator
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.train.checkpoint import Report
from foredraft.train.data.answers import AnswerOptions, write_answers
from foredraft.train.data.sources import Sample, read_sources, template_error

if TYPE_CHECKING:
    from accelerate import Accelerator

_WORDS = 13
"""Words in a row that a prompt may not share with a benchmark prompt, as in GPT-3's check of its training data
(arXiv:2005.14165, appendix C)."""
_LONGEST = 128
"""Tokens of a prompt that a model writes. Longer ones are not used: their end is missing."""
_NEXT = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Which prompts are answered: ``count`` at most, chosen at random; ``prompt_tokens``: of a text."""

    count: int = 20_000
    prompt_tokens: int = 48


def own_prompts(
    generator: Generator,
    count: int,
    out: Path,
    batch: int,
    report: Report,
    accelerator: "Accelerator | None" = None,
) -> list[str]:
    """What the model writes as a user, without what has no end; resumes an interrupted call.

    Args:
        count: user turns to sample, at temperature 1, with one seed each.
        out: JSON Lines of ids, also of those that are not used.

    Raises:
        DataError: the file has other prompts, or cannot be read.
        PromptError: the model has no chat template.
    """
    assert generator.tokenizer is not None
    opening, ends = opening_of_user_turn(generator.tokenizer), set(generator.eos_token_ids)
    options = AnswerOptions(new_tokens=_LONGEST, temperature=1.0, batch=batch)
    write_answers(generator, [opening] * count, out, options, report, accelerator)
    ids = [(sample.ids or [])[sample.prompt_length :] for sample in read_sources([str(out)])][:count]
    whole = [turn[:-1] for turn in ids if len(turn) > 1 and turn[-1] in ends]
    return [text.strip() for turn in whole if (text := generator.tokenizer.decode(turn)).strip()]


def opening_of_user_turn(tokenizer: Tokenizer) -> list[int]:
    """Ids of the chat template up to the first word of the user.

    Raises:
        PromptError: the model has no chat template.
    """
    one, other = (tokenizer.encode_chat([{"role": "user", "content": word}], ending="open") for word in ("1", "x"))
    return [left for left, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


class Benchmarks:
    """What training prompts may not share with prompts of benchmarks."""

    def __init__(self, prompts: Iterable[str]) -> None:
        texts = [_words(prompt) for prompt in prompts]
        self._whole = {" ".join(words) for words in texts}
        self._runs = {run for words in texts for run in _runs(words)}

    def overlap(self, text: str) -> bool:
        """Whether a text is one of their prompts or has 13 words in a row of one, whatever case and punctuation are."""
        words = _words(text)
        return " ".join(words) in self._whole or any(run in self._runs for run in _runs(words))


def choose(
    generator: Generator,
    written: Sequence[str],
    sources: Sequence[str],
    options: PromptOptions,
    answers: AnswerOptions,
    *,
    benchmarks: Benchmarks,
    report: Report,
) -> list[list[int]]:
    """Ids of prompts from both kinds in a random order: each once, none of a benchmark, and all fit the context.

    Args:
        written: see ``own_prompts``.
        sources: see ``read_sources``; of a chat, the turns before each answer are a prompt.
        answers: the longest must fit the context, too.

    Raises:
        DataError: no prompt is left, or a source cannot be read.
    """
    samples: list[Sample] = [Sample("the model's own prompts", messages=_chat(text)) for text in written]
    samples += read_sources(list(sources))
    once = {json.dumps(sample.messages) if sample.messages else sample.text or "": sample for sample in samples}
    apart = [sample for sample in once.values() if not any(map(benchmarks.overlap, _said(sample)))]
    assert generator.tokenizer is not None
    found = list(_prompts_of(apart, generator.tokenizer, options.prompt_tokens))
    fitting = [prompt for prompt in found if _fits(generator, prompt, answers)]
    if not fitting:
        raise DataError("No prompts are left: give --data or more --own-prompts.")
    report(
        {
            "note": f"{len(samples)} samples: {len(samples) - len(once)} twice, {len(once) - len(apart)} overlap with "
            f"benchmarks; {len(fitting)} of their {len(found)} prompts fit the context"
        }
    )
    random.Random(0).shuffle(fitting)
    return fitting[: options.count]


def write_all(
    generator: Generator,
    prompts: list[list[int]],
    out: Path,
    options: Sequence[AnswerOptions],
    report: Report,
    accelerator: "Accelerator | None" = None,
) -> list[Path]:
    """Answers to the prompts at each temperature, in files of their own; resumes an interrupted call."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"T{each.temperature:g}.jsonl" for each in options]
    for file, each in zip(files, options, strict=True):
        write_answers(generator, prompts, file, each, report, accelerator)
    return files


def _fits(generator: Generator, prompt: list[int], options: AnswerOptions) -> bool:
    try:
        generator.engine.request(prompt, options.params(0), ())
    except PromptError:
        return False
    return True


def _prompts_of(samples: Iterable[Sample], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """The prompts of samples: the turns before each answer of a chat and those of one that waits for its answer, and
    the first tokens of a text."""
    for sample in samples:
        if sample.messages is not None:
            for number, turn in enumerate([*sample.messages, _NEXT]):
                if turn["role"] == "assistant" and number and sample.messages[number - 1]["role"] != "assistant":
                    yield _chat_prompt(sample, tokenizer, number)
        elif sample.text is not None:
            ids = tokenizer.encode_many([sample.text[: 16 * length]])[0][:length]
            if len(ids) >= 2:
                yield ids


def _chat_prompt(sample: Sample, tokenizer: Tokenizer, turns: int) -> list[int]:
    """Ids of a chat's first turns, with the generation prompt."""
    try:
        return tokenizer.encode_chat((sample.messages or [])[:turns])
    except Exception as error:  # templates raise any exception
        raise template_error(sample, error) from error


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _said(sample: Sample) -> Iterator[str]:
    """The texts of a sample."""
    yield from (turn["content"] for turn in sample.messages or ())
    if sample.text is not None:
        yield sample.text


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(words: Sequence[str]) -> Iterator[str]:
    return (" ".join(words[at : at + _WORDS]) for at in range(len(words) - _WORDS + 1))
