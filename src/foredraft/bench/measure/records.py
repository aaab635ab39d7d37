"""Run files: JSON Lines, each object with its kind.

``provenance``: origin of the lines after it; ``run``: one call of one arm; ``cost``: forward times; ``watch``: which
drafted nodes were accepted. A file cut off at any byte can be continued.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from foredraft.core.errors import DataError
from foredraft.files.read import json_lines, read_text
from foredraft.files.write import atomic_write


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """One output of a call. ``digest`` identifies it if ``output`` (its tokens) and ``text`` are not kept."""

    prompt: str
    prompt_tokens: int
    tokens: int
    digest: str
    output: tuple[int, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", tuple(self.output))


@dataclass(frozen=True, slots=True)
class Run:
    """One call of one arm: one turn of all ``prompts``, in one batch.

    Counts are sums over the requests; each request counts the target forwards after prefill that it took part in.
    ``seconds``: wall time of the call; ``prefill_seconds``: until the prompts were read. A run with an ``error`` has no
    results.
    """

    arm: str
    task: str
    prompts: tuple[str, ...]
    turn: int = 0
    repeat: int = 0
    temperature: float = 0.0
    batch: int = 1
    category: str = ""
    lossless: bool = True
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decoded: int = 0
    outputs: tuple[OutputRecord, ...] = ()
    error: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("prompts", "drafted_by_depth", "accepted_by_depth"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        outputs = (
            each if isinstance(each, OutputRecord) else OutputRecord(**each) for each in self.outputs
        )  # as read from JSON
        object.__setattr__(self, "outputs", tuple(outputs))

    @property
    def unit(self) -> tuple[Any, ...]:
        """Key of what all arms run in close succession; runs with the same unit form pairs."""
        return (self.model, self.task, self.prompts, self.turn, self.repeat, self.temperature, self.batch)

    @property
    def speed(self) -> float:
        """Tokens per second after prefill."""
        spent = self.seconds - self.prefill_seconds
        return self.decoded / spent if spent > 0 else 0.0

    @property
    def whole_speed(self) -> float:
        """Tokens per second, including prefill."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def lengths(self) -> list[int]:
        """Tokens per forward, longest first (their order in time is not kept).

        Their sum exceeds ``tokens`` by one for each output that ends with an accepted token, which no other follows.
        """
        reached = (*self.accepted_by_depth, 0)
        exact = [before - after for before, after in zip((self.forwards, *reached), reached, strict=False)]
        return [1 + depth for depth in reversed(range(len(exact))) for _ in range(exact[depth])]

    def line(self) -> dict[str, Any]:
        """The JSON line, without defaults and without the model, which the provenance has."""
        found = {
            name: value for name, value in asdict(self).items() if name != "model" and value != _DEFAULTS.get(name)
        }
        outputs = [{k: v for k, v in each.items() if v not in ((), "")} for each in found.pop("outputs", ())]
        return {"kind": "run", **found, **({"outputs": outputs} if outputs else {})}


_DEFAULTS = {each.name: each.default for each in fields(Run)}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a forward by nodes per row, at ``batch`` rows with ``cached`` tokens each in the KV cache.

    ``weight_bytes`` (read per forward) / ``bandwidth`` (bytes per second) is the lower bound of a forward's time.
    """

    batch: int
    cached: int
    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    weight_bytes: int = 0
    bandwidth: float = 0.0
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("nodes", "seconds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.nodes) != len(self.seconds):
            raise TypeError("nodes and seconds are not equally many")

    def line(self) -> dict[str, Any]:
        return _line("cost", self)


@dataclass(frozen=True, slots=True)
class Watched:
    """Counts (judged, accepted) of drafted nodes whose parent was accepted.

    ``places``: by sibling ranks from the root to the node, e.g. "1-1-2". ``confidence``: by the draft's probability
    given the parent, in hundredths.
    """

    arm: str
    task: str
    prompt: str
    temperature: float
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)
    confidence: Mapping[str, Sequence[int]] = field(default_factory=dict)
    model: str = ""

    def __post_init__(self) -> None:
        for counts in (self.places, self.confidence):
            for name, pair in counts.items() if isinstance(counts, dict) else ():
                if not re.fullmatch(r"\d+(-\d+)*", name) or not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise TypeError(f"{name!r} and {pair!r} are no ranks and pairs of counts")

    def line(self) -> dict[str, Any]:
        return _line("watch", self)


def _line(kind: str, record: Cost | Watched) -> dict[str, Any]:
    """A JSON line, without the model, which the provenance has."""
    return {"kind": kind, **{name: value for name, value in asdict(record).items() if name != "model"}}


@dataclass(slots=True)
class RunFile:
    """Contents of a run file. The last run of an arm and unit replaces earlier ones."""

    provenance: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)

    @property
    def errors(self) -> list[Run]:
        return [run for run in self.runs if run.error]

    @property
    def training_runs(self) -> dict[str, list[dict[str, Any]]]:
        """The lines of each training log, by folder name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.training:
            found.setdefault(line["run"], []).append(line)
        return found


_LOGGED = ("loss", "validation", "resumed")
"""A training log line has at least one of these fields."""
T = TypeVar("T", Run, Cost, Watched)


def read_runs(path: str | Path) -> RunFile:
    """Read a file that ``bench`` wrote, or the log of a training run.

    Raises:
        DataError: unreadable file or unknown line; the message names file and line.
    """
    path = Path(path)
    text = read_text(path, "the run file")
    found = RunFile()
    model = ""
    runs: dict[tuple[Any, ...], Run] = {}
    for where, line in json_lines(path, text, torn=True):
        record = _printable(line)
        kind = record.pop("kind", None)
        if kind == "provenance":
            model = _model_of(path, where, record)
            found.provenance.append(record)
        elif kind == "run":
            run = _parsed(where, Run, record, model)
            runs[(run.arm, run.unit)] = run
        elif kind == "cost":
            found.costs.append(_parsed(where, Cost, record, model))
        elif kind == "watch":
            found.watched.append(_parsed(where, Watched, record, model))
        elif not record.keys().isdisjoint(_LOGGED):
            found.training.append({**_logged(where, record), "run": path.resolve().parent.name})
        else:
            raise DataError(f"{where}: not a line of a benchmark or of a training log.")
    found.runs = list(runs.values())
    return found


def repair_end(path: Path) -> None:
    """Prepare a file for appending: terminate a complete last line, remove an incomplete one."""
    whole = path.read_bytes()
    start = whole.rfind(b"\n") + 1
    if start < len(whole):
        try:
            json.loads(whole[start:])
        except ValueError:
            whole = whole[:start]
        atomic_write(path, lambda file: file.write(whole + b"\n" if len(whole) > start else whole))


def merge(files: Iterable[RunFile]) -> RunFile:
    """Merge files; training runs from folders of the same name are numbered."""
    whole = RunFile()
    named: dict[str, int] = {}
    for each in files:
        for name in ("provenance", "runs", "costs", "watched"):
            getattr(whole, name).extend(getattr(each, name))
        for run, lines in each.training_runs.items():
            named[run] = named.get(run, 0) + 1
            label = run if named[run] == 1 else f"{run} ({named[run]})"
            whole.training.extend({**line, "run": label} for line in lines)
    return whole


def digest(tokens: Sequence[int]) -> str:
    """A short hash of an output's tokens."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def _printable(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose texts are valid Unicode."""
    text = json.dumps(record, ensure_ascii=False)
    return json.loads(text.encode("utf-8", errors="replace"))


def _model_of(path: Path, where: str, provenance: dict[str, Any]) -> str:
    """The model of the lines that follow, which are of ``bench`` or of a training, whose commands are foredraft's."""
    command, settings = str(provenance.get("command", "foredraft")), provenance.get("settings", {})
    if not command.startswith("foredraft"):
        raise DataError(f"{path} is a record of {command!r}, not of foredraft bench or of a training run.")
    if not isinstance(settings, dict) or not isinstance(model := settings.get("model", ""), str):
        raise DataError(f"{where}: settings is not an object with the model's name.")
    return model


def _parsed(where: str, kind: type[T], record: dict[str, Any], model: str) -> T:
    known = {each.name for each in fields(kind)}
    unknown = sorted(set(record) - known)
    if unknown:
        raise DataError(f"{where}: unknown field {unknown[0]}; another version wrote the file, or it was edited.")
    try:
        found = kind(**{**record, "model": model})
    except TypeError as error:
        raise DataError(f"{where}: {error}.") from None
    if (wrong := _wrong(found)) is not None:
        raise DataError(f"{where}: {wrong} has the wrong type, or is no finite number.")
    return found


def _wrong(record: Run | Cost | Watched | OutputRecord) -> str | None:
    """The name of a field whose value has another type than it should; None if all are right."""
    return next((each.name for each in fields(record) if not _fits(getattr(record, each.name), each.type)), None)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value that JSON gave has a type."""
    inner = get_args(kind)
    if get_origin(kind) is Mapping:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if inner:
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value)
    if kind is OutputRecord:
        return isinstance(value, OutputRecord) and _wrong(value) is None
    if kind is float:
        return (type(value) is float and math.isfinite(value)) or _fits(value, int)
    return type(value) is kind and (kind is not int or abs(value) < 1 << 63)


def _logged(where: str, record: dict[str, Any]) -> dict[str, Any]:
    """Validate a training log line."""
    validation = record.get("validation", {})
    if "tokens" not in record or not isinstance(validation, dict):
        raise DataError(f"{where}: not a line of a training log.")
    for numbers in (record, validation):
        for name in ("tokens", "step", "loss", "acceptance_length"):
            if name in numbers and not isinstance(numbers[name], int | float):
                raise DataError(f"{where}: {name} is not a number.")
    return record
