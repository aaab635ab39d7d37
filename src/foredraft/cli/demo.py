"""``foredraft demo``: the same model with and without drafts, side by side."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foredraft.cli.choices import MODEL, ModelChoice
from foredraft.cli.console import DRAFTED, busy, errors, legend, output
from foredraft.cli.exit_status import CtrlC, Interrupted
from foredraft.cli.flags import flags
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats

if TYPE_CHECKING:
    from foredraft.engine.generator import Generator, Prompt, Stream
    from foredraft.engine.request import Piece, Sequence

QUESTION = (
    "Sam has 3 dogs. Each dog eats 2 cups of food in the morning and 3 cups in the evening. "
    "How many cups of food does Sam need for a week?"
)
REPEATING = "".join(
    f"def test_{name}():\n    assert {call} == {value}\n\n\n"
    for name, call, value in (("add", "add(1, 2)", 3), ("subtract", "subtract(3, 1)", 2))
)
_STEADY = "num_assistant_tokens_schedule=constant"
_DRAFTER = f"eagle3,nodes=15,depth=5,top_k=4,{_STEADY}"
_LOOKUP = f"prompt_lookup,{_STEADY}"
"""A constant draft length: other programs on the same cores mislead policies that measure costs."""
_TIME_LIMIT = 15.0
"""No further run starts after this many seconds."""
_WARM_UP = 24
_FRAME = 0.05
_FEWEST, _MOST = 5, 11
"""Lines of text in a panel."""
_BELOW = 14
"""Lines left free for later output."""


EXAMPLES = ("foredraft demo", 'foredraft demo -m PATH -d prompt_lookup "def test_add():"')


@flags(choice=MODEL)
def command(
    prompt: Annotated[
        str | None, typer.Argument(help="Default: a question for the bundled model.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.", metavar="INT")] = 96,
    runs: Annotated[int, typer.Option(help="Repeats; fewer if they take over 15 seconds.", metavar="INT")] = 3,
    *,
    choice: ModelChoice,
) -> None:
    """Compare plain and speculative decoding side by side.

    Both decode greedily and take turns, step by step; only a side's own steps count towards its time. By default the
    bundled EAGLE-3 head drafts trees of 15 tokens. Exit status: 1 if the tokens differ.
    """
    if runs < 1:
        raise OptionError("--runs must be 1 or more.")
    choice = replace(choice, dtype=choice.dtype or "float32")  # half precision may flip near-ties
    if (choice.model, choice.drafter) == ("sample", "auto"):
        choice = replace(choice, drafter=_DRAFTER)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    plain = Side("plain", replace(choice, drafter="none", draft_option=()).load())
    fast = Side.of(choice)
    question: Any = prompt or [{"role": "user", "content": QUESTION}]
    if choice.model == "sample" and prompt is None:
        errors().print("[dim]The sample model has only 16 million parameters: its answers are poor.[/dim]")
    _warm_up([plain, fast], question, params)
    with _shown(prompt or QUESTION, [plain, fast]) as refresh:
        contests = [Contest.run([plain, fast], question, params, runs, refresh)]
    if prompt is None:
        lookup = Side.of(replace(choice, drafter=_LOOKUP))
        _warm_up([plain, lookup], REPEATING, params)
        errors().print("Now prompt_lookup on repetitive text ...", style="dim")
        contests.append(Contest.run([plain, lookup], REPEATING, params, runs, lambda: None))
    _report(contests, plain)
    if not all(contest.same for contest in contests):
        raise typer.Exit(1)


@dataclass
class Side:
    """A generator and its running request."""

    name: str
    generator: "Generator"
    pieces: "list[Piece]" = field(default_factory=list)
    sequence: "Sequence | None" = None
    _stream: "Stream | None" = None
    finished: bool = True

    @classmethod
    def of(cls, choice: ModelChoice) -> "Side":
        generator = choice.load()
        return cls(generator.kind.method, generator)

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
    """Results of several runs: statistics per side, and whether all outputs were equal."""

    names: list[str]
    stats: list[list[DecodeStats]]  # by run, then by side
    same: bool

    @classmethod
    def run(
        cls, sides: list[Side], prompt: "Prompt", params: SamplingParams, runs: int, refresh: Callable[[], None]
    ) -> "Contest":
        """Race the sides several times."""
        started = time.perf_counter()
        stats: list[list[DecodeStats]] = []
        outputs: list[list[int]] = []
        while len(stats) < runs and (not stats or time.perf_counter() - started < _TIME_LIMIT):
            _race(sides, prompt, params, refresh)
            stats.append([side.stats for side in sides])
            outputs += [side.sequence.tokens for side in sides if side.sequence]
        return cls([side.name for side in sides], stats, all(tokens == outputs[0] for tokens in outputs))

    def speed(self, side: int) -> float:
        """Median tokens per second."""
        return statistics.median(run[side].tokens_per_second for run in self.stats)

    def acceptance_length(self, side: int) -> float:
        return sum((run[side] for run in self.stats), DecodeStats()).acceptance_length


def _race(sides: list[Side], prompt: "Prompt", params: SamplingParams, refresh: Callable[[], None]) -> None:
    """Always advance the side that has used less time, so that each shows the progress it would make alone."""
    for side in sides:
        side.start(prompt, params)
    with CtrlC() as ctrl_c:
        while active := [side for side in sides if not side.finished]:
            min(active, key=lambda side: side.stats.seconds).advance()
            refresh()
            if ctrl_c.pressed:
                raise Interrupted("Interrupted.")


def _warm_up(sides: list[Side], prompt: "Prompt", params: SamplingParams) -> None:
    """The first steps of a process are slow, and a policy may measure costs."""
    with busy("Warming up"):
        short = min(_WARM_UP, params.max_new_tokens)
        _race(sides, prompt, replace(params, max_new_tokens=short), lambda: None)


@contextlib.contextmanager
def _shown(prompt: str, sides: list[Side]) -> Iterator[Callable[[], None]]:
    """Show the sides while they run; yields a callback to call after each step."""
    console = output()
    console.print(Text.assemble(("prompt: ", "dim"), prompt))
    if not console.is_terminal:
        yield lambda: None
        for side in sides:
            console.print(f"\n{side.name}:")
            console.print("".join(piece.text for piece in side.pieces), markup=False, soft_wrap=True)
        console.print()
        return
    latest = 0.0
    height = max(_FEWEST, min(_MOST, console.height - _BELOW))
    # refreshed between steps: a drawing thread would slow decoding
    with Live(console=console, auto_refresh=False) as live:

        def refresh() -> None:
            nonlocal latest
            now = time.perf_counter()
            if now - latest > _FRAME or all(side.finished for side in sides):
                live.update(_side_by_side(console, sides, height), refresh=True)
                latest = time.perf_counter()

        yield refresh


def _side_by_side(console: Console, sides: list[Side], height: int) -> Group:
    width = console.width // len(sides)
    grid = Table.grid(expand=True)
    for _ in sides:
        grid.add_column(ratio=1)
    grid.add_row(*[_panel(console, side, width, height) for side in sides])
    return Group(grid, legend(console))


def _panel(console: Console, side: Side, width: int, height: int) -> Panel:
    """The last lines of the output, and the numbers so far."""
    text = Text(tab_size=4)
    for piece in side.pieces:
        text.append(piece.text, style=DRAFTED if piece.drafted else "")
    text.expand_tabs()
    lines = text.wrap(console, width - 4)[-height:]
    stats = side.stats
    numbers = f"{stats.tokens_per_second:.0f} tokens/s"
    if width >= 44:
        numbers += f" · {stats.acceptance_length:.2f} tokens/forward"
    return Panel(
        Text("\n").join(lines),
        title=f"[bold]{side.name}[/bold]",
        subtitle=numbers,
        height=height + 2,
        border_style="green" if side.finished else "dim",
    )


def _report(contests: list[Contest], plain: Side) -> None:
    import torch

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("tokens/s", "acceptance length", "speed-up", "same tokens"):
        table.add_column(name, justify="right")
    for number, contest in enumerate(contests):
        if number:
            table.add_row("[dim]repetitive text[/dim]")
        for side, name in enumerate(contest.names):
            speed = contest.speed(side)
            row = [name, f"{speed:.1f}", f"{contest.acceptance_length(side):.2f}"]
            if side:
                same = "[green]yes[/green]" if contest.same else "[bold red]no[/bold red]"
                row += [f"[bold]{speed / (contest.speed(0) or 1.0):.2f}x[/bold]", same]
            table.add_row(*row)
    console = output()
    console.print(table)
    target = plain.generator.engine.target
    threads = torch.get_num_threads()
    on_cpu = f"CPU with {threads} thread{'s' if threads != 1 else ''}"
    where = on_cpu if target.device.type == "cpu" else str(target.device)
    tokens = contests[0].stats[0][0].tokens
    console.print(
        f"Greedy, {str(target.dtype).removeprefix('torch.')}, {where}; {tokens} new tokens, median of "
        f"{len(contests[0].stats)} runs after a warm-up, taking turns step by step; prefill is not counted.",
        style="dim",
    )
    same = all(contest.same for contest in contests)
    console.print(f"same tokens: {'yes' if same else 'NO'}", style="green" if same else "bold red")
