"""What the tests of the command line share: names, and what a command that has ended looks like."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import foredraft

BUNDLED = Path(foredraft.__path__[0]) / "models" / "sample-16m"
NAN_AFTER = 6
"""So many tokens come before the broken model breaks down."""
PROMPT = "def add(a, b):"


class Ended(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line that explains a refusal."""
        assert self.err.startswith("foredraft: ") and self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("foredraft: ").strip()

    @property
    def refusal(self) -> str:
        """The sentence of a command that was refused before it had said anything: status 2, nothing on stdout."""
        assert (self.status, self.out) == (2, "")
        return self.sentence

    @property
    def refusal_after_warnings(self) -> str:
        """The sentence of a command that was refused after warnings of the library, a line each."""
        assert (self.status, self.out) == (2, "")
        lines = self.err.splitlines()
        assert all(line.startswith("foredraft: ") for line in lines), self.err
        return lines[-1].removeprefix("foredraft: ")


Run = Callable[..., Ended]
