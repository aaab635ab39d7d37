"""The progress of training, and of making answers."""

from collections.abc import Callable
from typing import Any

from foredraft.cli.console import errors


class Progress:
    """Shows log lines: on a terminal in the status line that ``update`` changes, as lines elsewhere.

    ``answers``, ``of``: how many of the target's answers are written, and how many there will be; ``kept``: the last
    line of an interrupted run.
    """

    def __init__(self) -> None:
        self._console = errors()
        self.update: Callable[[str], None] = lambda text: None
        self.answers = self.of = 0
        self.kept: dict[str, Any] | None = None

    def report(self, line: dict[str, Any]) -> None:
        if "kept" in line:
            self.kept = line
            return
        if "begun" in line:
            self.update(f"Training {line['steps']} steps")
            return
        text = _format(line)
        self.answers, self.of = line.get("answers", self.answers), line.get("of", self.of)
        if not self._console.is_terminal or not line.keys().isdisjoint(("validation", "note", "resumed")):
            self._console.print(text, style="dim", soft_wrap=True)
        else:
            self.update(text)


def _format(line: dict[str, Any]) -> str:
    if "note" in line:
        return str(line["note"])
    if "answers" in line:
        return f"answer {line['answers']} of {line['of']}{_speed(line)}"
    if "resumed" in line:
        if line["step"] == line["steps"]:
            return f"all {line['steps']} steps were already done"
        return f"resumed after step {line['step']} of {line['steps']} and {_clock(line['seconds'])} of training"
    if "validation" in line:
        values = ", ".join(f"{name} {value:.3f}" for name, value in line["validation"].items())
        return f"step {line['step']} · {line['tokens']:,} tokens · validation: {values}"
    return f"step {line['step']} of {line['steps']} · loss {line['loss']:.3f}{_speed(line)}"


def _speed(line: dict[str, Any]) -> str:
    """Tokens per second and the time left, as far as they are known."""
    rate = f" · {line['rate']:,.0f} tokens/s" if "rate" in line else ""
    bound = "at most " if "bound" in line else ""
    return rate + (f" · {bound}{_clock(line['left'])} left" if "left" in line else "")


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. 0:12:30."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
