"""What the tests of the benchmark share: an arm that says what a test wants, prompts for it, and files of lines."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from foredraft.bench.measure.arms import ArmResult, BenchArm
from foredraft.bench.measure.records import read_runs
from foredraft.bench.measure.run import Settings
from foredraft.bench.prompts import BenchPrompt
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats

TEMPLATE = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
SETTINGS = Settings("tiny", max_new_tokens=4)
Prompts = Sequence[Sequence[int]]
Write = Callable[..., Path]


class Fake(BenchArm):
    """Notes what it is asked, and answers with its own token, as often as there are tokens in the prompt."""

    def __init__(self, name: str, log: list["Fake"] | None = None, most: int = 8, token: int = 40) -> None:
        super().__init__(name, most)
        self.calls: list[tuple[list[list[int]], SamplingParams]] = []
        self.fails: Callable[[Prompts], BaseException | None] = lambda prompts: None
        self.token = token
        self._log = log if log is not None else []

    def run(self, prompts: Prompts, params: SamplingParams) -> ArmResult:
        self.calls.append(([list(prompt) for prompt in prompts], params))
        self._log.append(self)
        if error := self.fails(prompts):
            raise error
        tokens = [[self.token] * len(prompt) for prompt in prompts]
        count = sum(map(len, tokens))
        return ArmResult(
            tokens, DecodeStats(tokens=count, target_forwards=count, seconds=2.0, prefill_seconds=1.0), count
        )


def asks(*texts: str, task: str = "t") -> list[BenchPrompt]:
    return [BenchPrompt(text, (text,), "text", str(number), task) for number, text in enumerate(texts)]


def talk(name: str, *turns: str) -> BenchPrompt:
    return BenchPrompt([{"role": "user", "content": turns[0]}], turns, "chat", name, "talks")


def units(path: Path) -> list[tuple[Any, ...]]:
    return sorted((run.arm, *run.unit[1:]) for run in read_runs(path).runs)


def fakes() -> tuple[Fake, Fake, list[Fake]]:
    """Two arms, and the log that they share."""
    log: list[Fake] = []
    return Fake("a", log), Fake("b", log), log


def write_lines(path: Path, rows: Iterable[Any], end: str = "\n") -> Path:
    """Write records as JSON, and text as it is, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("".join(line + end for line in lines).encode())
    return path
