"""The two pictures of README.md: a terminal with drafted tokens in colour, and the speed-ups of benchmarks/results.

python benchmarks/pictures.py             # both, to docs/figures
python benchmarks/pictures.py speed       # speed.svg alone, from JSON lines; terminal.svg runs the command

Both have their own dark background, so they look the same on light and dark pages.
"""

import argparse
import html
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import policy_tables
from origin import origin_line, provenance
from policy_tables import IN_SHORT, POLICY, TITLES
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from foredraft.bench.report import plots

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
PROMPT = "class Vector:\n    def __add__(self, other):"
COMMAND = ["generate", PROMPT, "--show-drafts", "--max-new-tokens", "42"]
COLUMNS = 90
GROUND, INK = "#161b22", "#d5dbe1"
TASK = "humaneval"
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
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "foredraft", *COMMAND], env=environment, capture_output=True, text=True, check=True
    )
    statistics = done.stderr.split("\x1b[2K")[-1]  # after the spinner's output
    shown = shlex.join(["foredraft", *COMMAND])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text("$ ", style="bold") + Text(shown.replace("\n", "\n> ")))
    console.print(Text.from_ansi(done.stdout.rstrip("\n")))
    console.print(Text.from_ansi(statistics.rstrip("\n")))
    origin = provenance(shown)
    facts = f"A real run of: {shown}\n{statistics_text(statistics)}\n{origin_line(origin)}"
    text = console.export_svg(title="drafted and accepted tokens in green", theme=THEME, unique_id="terminal")
    text = re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL)  # an image of a page loads nothing
    text = text.replace("Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace")
    return described(text, "Terminal: tokens that were drafted and accepted are green", facts)


def statistics_text(line: str) -> str:
    """The line of statistics without its colours."""
    return Text.from_ansi(line).plain.strip()


def measured() -> tuple[list[Bars], str]:
    """The bundled model's methods on one task, greedy, the fastest under the policy first, and the caption."""
    cells = policy_tables.read()
    chosen = [c for c in cells if (c.target, c.temperature, c.task) == ("sample", 0.0, TASK) and c.method in IN_SHORT]
    found = [Bars(cell.method, cell.speed_up(cell.best_draft or POLICY), cell.speed_up(POLICY)) for cell in chosen]
    caption = (
        f"Bundled model (sample), greedy, {TITLES[TASK]} prompts.\n{origin_line(policy_tables.origin_of(chosen))}."
    )
    return sorted(found, key=lambda pair: -pair.policy), caption


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
    axes.axvline(1.0, color=plots.INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_title("Speed-up over plain decoding, greedy")
    axes.set_xlim(0, 1.12 * max(max(pair[1:]) for pair in found))
    axes.set_yticks(range(len(found)), [pair.method for pair in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.xaxis.set_visible(False)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    text = plots.themed_svg(figure, "Speed-up by method")
    ground = f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>'
    text = re.sub(r"(<svg [^>]*)>", rf'\1 style="color:{INK}">{ground}', text, count=1)
    return described(text, "", caption)


def described(text: str, name: str, facts: str) -> str:
    """An SVG with a name for screen readers, unless it has one, and its provenance inside."""
    named = f' role="img" aria-label="{html.escape(name)}"' if name else ""
    return re.sub(r"<svg([^>]*)>", lambda m: f"<svg{named}{m[1]}>\n<desc>{html.escape(facts)}</desc>", text, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", choices=("terminal", "speed"), default=["terminal", "speed"])
    args = parser.parse_args()
    made = {"terminal": terminal, "speed": speed}
    for name in args.pictures:
        (FIGURES / f"{name}.svg").write_text(made[name]().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
