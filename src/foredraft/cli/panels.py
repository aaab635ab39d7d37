"""Two streams side by side on a terminal, one after the other elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foredraft.cli.console import DRAFTED, legend, output

if TYPE_CHECKING:
    from foredraft.cli.demo import Arm

_FRAME = 0.05
_FEWEST, _MOST = 5, 11
"""Lines of text in a panel."""
_BELOW = 14
"""Lines left free for later output."""


@contextlib.contextmanager
def shown(prompt: str, arms: "list[Arm]") -> Iterator[Callable[[], None]]:
    """Show the arms while they run; yields a callback to call after each step."""
    console = output()
    console.print(Text.assemble(("prompt: ", "dim"), prompt))
    if not console.is_terminal:
        yield lambda: None
        for arm in arms:
            console.print(f"\n{arm.name}:")
            console.print("".join(piece.text for piece in arm.pieces), markup=False, soft_wrap=True)
        console.print()
        return
    latest = 0.0
    height = max(_FEWEST, min(_MOST, console.height - _BELOW))
    # refreshed between steps: a drawing thread would slow decoding
    with Live(console=console, auto_refresh=False) as live:

        def refresh() -> None:
            nonlocal latest
            now = time.perf_counter()
            if now - latest > _FRAME or all(arm.done for arm in arms):
                live.update(_side_by_side(console, arms, height), refresh=True)
                latest = time.perf_counter()

        yield refresh


def _side_by_side(console: Console, arms: "list[Arm]", height: int) -> Group:
    width = console.width // len(arms)
    grid = Table.grid(expand=True)
    for _ in arms:
        grid.add_column(ratio=1)
    grid.add_row(*[_panel(console, arm, width, height) for arm in arms])
    return Group(grid, legend(console))


def _panel(console: Console, arm: "Arm", width: int, height: int) -> Panel:
    """The last lines of the output, and the numbers so far."""
    text = Text(tab_size=4)
    for piece in arm.pieces:
        text.append(piece.text, style=DRAFTED if piece.drafted else "")
    text.expand_tabs()
    lines = text.wrap(console, width - 4)[-height:]
    stats = arm.stats
    numbers = f"{stats.tokens_per_second:.0f} tokens/s"
    if width >= 44:
        numbers += f" · {stats.acceptance_length:.2f} tokens/forward"
    return Panel(
        Text("\n").join(lines),
        title=f"[bold]{arm.name}[/bold]",
        subtitle=numbers,
        height=height + 2,
        border_style="green" if arm.done else "dim",
    )
