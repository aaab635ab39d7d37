"""The tour of docs/architecture.md: one request from load to text, file by file, as docs/figures/tour.svg.

The stops are functions. Their files and what they give are read from the code, and their order is checked on a run
of the bundled model.
"""

import html
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import foredraft
from benchmarks.kit.pictures import GROUND, INK

ROOT = Path(foredraft.__file__).parent
PHASES = {"once a model": "#2f7fd6", "once a request": "#2a9d6f", "each step": "#e0752d"}
"""How often each part of the tour is passed, and its colour."""
COLUMNS, WIDTH, HEIGHT, GAP, MARGIN, HEAD = 3, 292, 70, 36, 20, 34
FAINT = "#7f8790"


class Stop(NamedTuple):
    """A function on the way. ``gives``: a type of its annotations, or its own class where it changes its object."""

    phase: str
    module: str
    function: str
    gives: str

    @property
    def call(self) -> Callable[..., Any]:
        """The function.

        Raises:
            AttributeError: there is none of this name.
        """
        found: Any = importlib.import_module(f"foredraft.{self.module}")
        for name in self.function.split("."):
            found = getattr(found, name)
        return found

    @property
    def file(self) -> str:
        """Its path inside the package."""
        path = inspect.getsourcefile(inspect.unwrap(self.call))
        assert path is not None
        return Path(path).relative_to(ROOT).as_posix()

    @property
    def given(self) -> str:
        """``gives``, checked against the code.

        Raises:
            ValueError: the function has no such type.
        """
        known = str(inspect.signature(self.call))
        if self.gives not in (*known.replace(".", " ").replace("[", " ").replace("]", " ").split(), *self.owner):
            raise ValueError(f"{self.function} of {self.file} gives no {self.gives}: {known}")
        return self.gives

    @property
    def owner(self) -> tuple[str, ...]:
        return tuple(self.function.split(".")[:-1])


LOAD, REQUEST, STEP = PHASES
STOPS = (
    Stop(LOAD, "compose.load", "load", "Generator"),
    Stop(LOAD, "model.loading.load", "load_model", "Loaded"),
    Stop(LOAD, "compose.drafters", "DrafterBuilder.build", "BuiltDrafter"),
    Stop(REQUEST, "engine.generator", "Generator.generate", "Result"),
    Stop(REQUEST, "engine.engine", "Engine.request", "Request"),
    Stop(REQUEST, "engine.prompt_reader", "PromptReader.read", "Ready"),
    Stop(STEP, "engine.policy.throughput", "Throughput.plan", "Plan"),
    Stop(STEP, "engine.step", "Stepper.launch", "Launched"),
    Stop(STEP, "drafters.common.eagle", "DynamicTreeDrafter.propose", "Draft"),
    Stop(STEP, "model.hf.causal_lm", "CausalLM.compute", "StepOut"),
    Stop(STEP, "core.sampling.warp", "Warp.__call__", "Target"),
    Stop(STEP, "core.verify", "verify", "Verdict"),
    Stop(STEP, "model.kv.cache", "SlotCache.compact", "SlotCache"),
    Stop(STEP, "engine.request", "Sequence.extend", "Sequence"),
    Stop(STEP, "engine.detokenizer", "IncrementalDetokenizer.push", "Pushed"),
)


def traced() -> list[str]:
    """``file:function`` of every call in the package while the bundled model is loaded and answers, in order."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            calls.append(f"{Path(path).relative_to(ROOT).as_posix()}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        with foredraft.load("sample") as generator:
            generator.generate("def add(a, b):", max_new_tokens=12, temperature=0.8)
    finally:
        sys.setprofile(None)
    return calls


def missed(calls: list[str]) -> list[str]:
    """The stops that the calls do not pass, each after the one before it."""
    found, begin = [], 0
    for stop in STOPS:
        wanted = f"{stop.file}:{inspect.unwrap(stop.call).__qualname__}"
        try:
            begin = calls.index(wanted, begin) + 1
        except ValueError:
            found.append(wanted)
    return found


def figure() -> str:
    """The tour as SVG: three columns of boxes, read line by line."""
    rows = -(-len(STOPS) // COLUMNS)
    width, height = COLUMNS * (WIDTH + GAP) - GAP + 2 * MARGIN, HEAD + rows * (HEIGHT + GAP) - GAP + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="One request from load to text" font-family="ui-sans-serif, sans-serif" font-size="12">',
        "<desc>Drawn by benchmarks/pages/tour.py from the functions' files and annotations.</desc>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>',
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
    ]
    for number, (phase, color) in enumerate(PHASES.items()):
        left = MARGIN + number * 130
        parts.append(f'<rect x="{left}" y="{MARGIN - 6}" width="10" height="10" rx="2" fill="{color}"/>')
        parts.append(text(left + 16, MARGIN + 3, phase))
    parts += [part for number, stop in enumerate(STOPS) for part in box(number, stop)]
    return "\n".join([*parts, "</svg>", ""])


def place(number: int) -> tuple[int, int]:
    """The upper left corner of a box."""
    row, column = divmod(number, COLUMNS)
    return MARGIN + column * (WIDTH + GAP), MARGIN + HEAD + row * (HEIGHT + GAP)


def box(number: int, stop: Stop) -> list[str]:
    """A box with its arrow to the next one."""
    (left, top), color = place(number), PHASES[stop.phase]
    parts = [
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="none" stroke="{color}"/>',
        f'<rect x="{left}" y="{top}" width="5" height="{HEIGHT}" rx="2" fill="{color}"/>',
        text(left + 16, top + 20, f"{number + 1}  {stop.file}", weight="bold"),
        text(left + 16, top + 40, stop.function),
        text(left + 16, top + 59, f"gives: {stop.given}", FAINT),
    ]
    if number + 1 < len(STOPS):
        x, y = place(number + 1)
        path = f"M{left + WIDTH} {top + HEIGHT // 2} H{x - 2}"
        if y > top:
            middle = top + HEIGHT + GAP // 2
            path = f"M{left + WIDTH // 2} {top + HEIGHT} V{middle} H{x + WIDTH // 2} V{y - 2}"
        parts.append(f'<path d="{path}" fill="none" stroke="{FAINT}" marker-end="url(#head)"/>')
    return parts


def text(x: int, y: int, words: str, color: str = INK, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-weight="{weight}">{html.escape(words)}</text>'


def checked() -> str:
    """The figure; refuses stops that a real request does not pass in this order."""
    if lost := missed(traced()):
        raise SystemExit(f"A request does not pass {', '.join(lost)}: change STOPS.")
    return figure()
