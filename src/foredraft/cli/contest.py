"""The same prompt with and without drafts, in turns: what ``foredraft demo`` shows."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.text import Text

from foredraft.cli.console import busy
from foredraft.cli.exit_status import CtrlC, Interrupted
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats

if TYPE_CHECKING:
    from foredraft.engine.generator import Generator, Prompt, Stream
    from foredraft.engine.request import Piece, Sequence

_ENOUGH, _TIME_LIMIT, _PATIENCE = 3, 10.0, 60.0
"""A prompt is not run again after so many runs and these seconds, or after the last number of seconds in any case."""
_WARM_UP = 24


@dataclass(frozen=True, slots=True)
class Scene:
    """A prompt, its kind, and how it is shown."""

    kind: str
    text: str
    chat: bool = True

    @property
    def prompt(self) -> "Prompt":
        return [{"role": "user", "content": self.text}] if self.chat else self.text

    def heading(self) -> Text:
        """The kind, and the first line of the text."""
        first, _, rest = self.text.partition("\n")
        lines = rest.strip().count("\n") + 1
        more = f" (and {lines} line{'s' if lines != 1 else ''} of text)" if rest.strip() else ""
        return Text.assemble(("\n" + self.kind, "bold"), (": ", "dim"), first, (more, "dim"))


@dataclass
class Side:
    """A generator and its running request."""

    generator: "Generator"
    pieces: "list[Piece]" = field(default_factory=list)
    sequence: "Sequence | None" = None
    _stream: "Stream | None" = None
    finished: bool = True

    @property
    def name(self) -> str:
        method = self.generator.kind.method
        return "plain" if method == "none" else method

    def start(self, prompt: "Prompt", params: SamplingParams) -> None:
        from foredraft.engine.generator import Stream

        self.sequence = self.generator.submit([prompt], params)[0]
        self._stream = Stream(self.generator, self.sequence)
        self.pieces, self.finished = [], False

    def advance(self) -> None:
        assert self._stream is not None
        piece = next(self._stream, None)
        if piece is None:
            self.finished = True
        else:
            self.pieces.append(piece)

    @property
    def stats(self) -> DecodeStats:
        return self.sequence.stats if self.sequence else DecodeStats()


@dataclass(frozen=True, slots=True)
class Contest:
    """Results of several runs of a prompt: statistics of both sides, and whether all outputs were equal.

    ``others``: the cores that other programs used meanwhile; None if that is unknown.
    """

    scene: Scene
    drafter: str
    plain: list[DecodeStats]
    fast: list[DecodeStats]
    same: bool
    others: float | None = None

    @classmethod
    def run(
        cls, scene: Scene, sides: "Sides", params: SamplingParams, runs: int, refresh: Callable[[], None]
    ) -> "Contest":
        """Race the sides several times."""
        from foredraft.engine.shared_cores import cpu_usage, others_between

        started, before = time.perf_counter(), cpu_usage()
        stats: list[list[DecodeStats]] = []
        outputs: list[list[int]] = []
        while len(stats) < runs and (not stats or time.perf_counter() - started < _limit(len(stats))):
            race(sides, scene.prompt, params, refresh)
            stats.append([side.stats for side in sides])
            outputs += [side.sequence.tokens for side in sides if side.sequence]
        plain, fast = (list(each) for each in zip(*stats, strict=True))
        after = cpu_usage()
        others = None if before is None or after is None else others_between(before, after)
        return cls(scene, sides[1].name, plain, fast, all(tokens == outputs[0] for tokens in outputs), others)

    @property
    def speeds(self) -> tuple[float, float]:
        """Median tokens per second, plain and with drafts."""
        plain, fast = (statistics.median(run.tokens_per_second for run in side) for side in (self.plain, self.fast))
        return plain, fast

    @property
    def speed_ups(self) -> list[float]:
        """Of each run; both sides had the same moments."""
        runs = zip(self.plain, self.fast, strict=True)
        return [fast.tokens_per_second / (plain.tokens_per_second or 1.0) for plain, fast in runs]

    @property
    def speed_up(self) -> float:
        """The median of the runs'."""
        return statistics.median(self.speed_ups)

    @property
    def acceptance_length(self) -> float:
        return sum(self.fast, DecodeStats()).acceptance_length


def _limit(runs: int) -> float:
    return _TIME_LIMIT if runs >= _ENOUGH else _PATIENCE


Sides = tuple[Side, Side]
"""Plain decoding, and decoding with drafts."""


def race(sides: Sides, prompt: "Prompt", params: SamplingParams, refresh: Callable[[], None]) -> None:
    """Always advance the side that has used less time, so that each shows the progress it would make alone."""
    for side in sides:
        side.start(prompt, params)
    with CtrlC() as ctrl_c:
        while active := [side for side in sides if not side.finished]:
            min(active, key=lambda side: side.stats.seconds).advance()
            refresh()
            if ctrl_c.pressed:
                raise Interrupted("Interrupted.")


def warm_up(sides: Sides, prompt: "Prompt", params: SamplingParams) -> None:
    """The first steps of a process are slow, and a policy may measure costs."""
    with busy("Warming up"):
        short = min(_WARM_UP, params.max_new_tokens)
        race(sides, prompt, replace(params, max_new_tokens=short), lambda: None)
