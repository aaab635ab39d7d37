"""The two pictures of README.md: a terminal with drafted tokens in colour, and the speed-ups of benchmarks/results.

python benchmarks/pictures.py             # both, to docs/figures
python benchmarks/pictures.py speed       # speed.svg alone, from JSON lines; terminal.svg runs the command

Both stand on a dark ground of their own, so they look the same on a light page and on a dark one.
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

from origin import provenance
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from summary import RUNS, origin_line

from foredraft.bench.measure.records import read_runs
from foredraft.bench.measure.summary import PLAIN, THEIRS, Setting, Summary, summarise
from foredraft.bench.report import plots

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
PROMPT = "class Vector:\n    def __add__(self, other):"
COMMAND = ["generate", PROMPT, "--show-drafts", "--max-new-tokens", "42"]
COLUMNS = 90
GROUND, INK = "#161b22", "#d5dbe1"
LEAST = 1.05
"""Methods of ours that gain less than this on the bundled model are left to docs/results.md."""
THEME = TerminalTheme(
    (22, 27, 34),
    (213, 219, 225),
    [  # black, red, green, yellow, blue, magenta, cyan, white
        *((72, 79, 88), (248, 81, 73), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (213, 219, 225)),
    ],
)


class Bar(NamedTuple):
    """An arm and its speed-up over plain decoding."""

    arm: str
    speed: float


def terminal() -> str:
    """What the command prints, as a picture of a terminal; the facts of the run are in its description."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "foredraft", *COMMAND], env=environment, capture_output=True, text=True, check=True
    )
    statistics = done.stderr.split("\x1b[2K")[-1]  # what stands before was the spinner's
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


def bundled(both: Summary) -> Setting:
    """The bundled model, greedy."""
    return next(each for each in both.settings if each.model == "sample" and each.temperature == 0)


def bars(both: Summary) -> list[Bar]:
    """Plain decoding, transformers' own, and the methods that gain; the fastest first."""
    setting = bundled(both)
    means = [(arm, both.mean(setting, arm).speed_up) for arm in both.arms(setting)]
    found = [
        Bar(arm, speed)
        for arm, speed in means
        if speed is not None and (speed >= LEAST or arm == PLAIN or arm.startswith(THEIRS))
    ]
    return sorted(found, key=lambda bar: -bar.speed)


def caption(both: Summary) -> str:
    """What the chart shows and where it was measured."""
    setting = bundled(both)
    return (
        f"Bundled model ({setting.model}), greedy, batch {setting.batch}: mean of the medians of "
        f"{len(both.tasks(setting))} tasks, over plain decoding (none).\n{origin_line(both.file.provenance[0])}."
    )


@plots.styled()
def speed(both: Summary) -> str:
    """The chart of speed-ups as SVG."""
    found = bars(both)
    figure, axes = plots.canvas(7.2, 0.5 + 0.24 * len(found))
    for place, bar in enumerate(found):
        color = plots.FAINT if bar.arm == PLAIN else plots.color(bar.arm.startswith(THEIRS))
        axes.barh(place, bar.speed, height=0.68, color=color)
        end = (max(bar.speed, 1.0), place)  # right of the line of no gain
        axes.annotate(f"{bar.speed:.2f}x", end, xytext=(4, 0), textcoords="offset points", va="center")
    for number, name in enumerate(("foredraft", "transformers' generate")):
        axes.barh(0, 0, color=plots.color(number), label=name)
    axes.legend(loc="lower right")
    axes.axvline(1.0, color=plots.INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_title("Speed-up over plain decoding, greedy")
    axes.set_xlim(0, 1.1 * found[0].speed)
    axes.set_yticks(range(len(found)), [bar.arm for bar in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.xaxis.set_visible(False)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    figure.supxlabel(caption(both), x=0.01, ha="left", fontsize=7)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    text = plots.themed_svg(figure, "Speed-up by method")
    ground = f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>'
    text = re.sub(r"(<svg [^>]*)>", rf'\1 style="color:{INK}">{ground}', text, count=1)
    return described(text, "", caption(both))


def described(text: str, name: str, facts: str) -> str:
    """An SVG with a name for screen readers, unless it has one, and its provenance inside."""
    named = f' role="img" aria-label="{html.escape(name)}"' if name else ""
    return re.sub(r"<svg([^>]*)>", lambda m: f"<svg{named}{m[1]}>\n<desc>{html.escape(facts)}</desc>", text, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", choices=("terminal", "speed"), default=["terminal", "speed"])
    args = parser.parse_args()
    made = {"terminal": terminal, "speed": lambda: speed(summarise([read_runs(path) for path in RUNS]))}
    for name in args.pictures:
        (FIGURES / f"{name}.svg").write_text(made[name]().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
