"""What tune can choose from: a method at the sizes that its options allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.bench.tune.probe import Shape
from foredraft.compose.load import BUNDLED_DRAFTS, Spec
from foredraft.core.errors import OptionError
from foredraft.core.options import parts
from foredraft.drafters import METHODS

CONSTANT = "num_assistant_tokens_schedule=constant"
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)
_NODES = (3, 5, 7, 11, 15, 23, 31, 47)
_DEPTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter with a constant size, as ``load`` takes it, and its shape inside its probe."""

    spec: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Family:
    """Candidates that one probe speaks for. ``name``: the method as it was asked for, with its default schedule."""

    name: str
    probe: str
    candidates: tuple[Candidate, ...]


def default_drafters(model: str) -> list[str]:
    """What needs nothing, and what ships for a bundled model."""
    return ["prompt_lookup", *BUNDLED_DRAFTS.get(model, {})]


def families(drafter: str, model: str) -> list[Family]:
    """The families of a drafter as the user names it. Options that were given stay as they are.

    Raises:
        OptionError: an unknown method or option, or a drafter of no size of its own.
    """
    why = _NOT_TRIED.get(Spec.parse(drafter).name)
    if why is not None:
        raise OptionError(why)
    head, *given = parts(drafter, ",")
    method, _, path = head.partition(":")
    path = path or BUNDLED_DRAFTS.get(model, {}).get(method, "")
    if path and Path(path).exists():  # "" is this folder
        path = str(Path(path).resolve())  # the choice is written to a file that may be read from elsewhere
    base = f"{method}:{path}" if path else method
    fixed = {pair.partition("=")[0] for pair in given}
    size = METHODS[method].size
    maker = _MAKERS.get(method) or (_chain(size, max(_LENGTHS)) if size else _as_it_is)
    return [
        Family(_joined(base, given), _joined(base, [*given, *probe, CONSTANT]), tuple(candidates))
        for probe, candidates in maker(base, given, fixed)
        if candidates
    ]


_Made = list[tuple[list[str], list[Candidate]]]


def _chain(option: str, longest: int, shape: str = ""):
    """Chains of each length, all from one probe of the longest. ``shape``: the option that makes a tree of them."""

    def make(base: str, given: Sequence[str], fixed: set[str]) -> _Made:
        if fixed & {option, shape}:
            return _as_it_is(base, given, fixed)
        lengths = [length for length in _LENGTHS if length <= longest]
        made = [_candidate(base, given, [f"{option}={k}"], Shape(depth=k)) for k in lengths]
        return [([f"{option}={longest}"], made)]

    return make


def _grown(base: str, given: Sequence[str], fixed: set[str]) -> _Made:
    """Trees that are grown by context, and chains of the likeliest tokens, which is what most servers run."""
    if fixed & {"nodes", "depth", "top_k"}:
        return _as_it_is(base, given, fixed)
    trees = [
        _candidate(base, given, [f"nodes={nodes}", f"depth={depth}"], Shape(nodes, depth))
        for depth in _DEPTHS
        for nodes in _NODES
        if depth < nodes <= 8 * depth
    ]
    chains = [
        _candidate(base, given, [f"nodes={k}", f"depth={k}", "top_k=1"], Shape(depth=k)) for k in _LENGTHS if k <= 6
    ]
    return [
        ([f"nodes={max(_NODES)}", f"depth={max(_DEPTHS)}"], trees),
        (["nodes=6", "depth=6", "top_k=1"], chains),
    ]


def _static(option: str, values: Sequence[str | int], shape: str = "tree"):
    """Trees of a fixed shape: each has to be tried. ``shape``: the option that fixes it altogether."""

    def make(base: str, given: Sequence[str], fixed: set[str]) -> _Made:
        if fixed & {option, shape}:
            return _as_it_is(base, given, fixed)
        extras = [[f"{option}={value}"] for value in values]
        return [(extra, [_candidate(base, given, extra, Shape())]) for extra in extras]

    return make


def _as_it_is(base: str, given: Sequence[str], fixed: set[str]) -> _Made:
    return [([], [_candidate(base, given, [], Shape())])]


_MAKERS = {
    "draft_model": _chain("num_assistant_tokens", 10, "branching"),
    "eagle1": _static("tree", ("eagle", "4x2x1", "2x1x1x1")),
    "eagle2": _grown,
    "eagle3": _grown,
    "opt_tree": _grown,
    "medusa": _static("nodes", (7, 15, 23, 47)),
    "hydra": _static("nodes", (7, 15, 23, 47)),
}
"""Methods that draft trees. Others are tried at each length of the option ``Method.size``, or as they are."""


_NOT_TRIED = {
    "none": "none is plain decoding, with which every drafter is compared: name another one.",
    "bandit": "bandit finds out by itself which of its drafters pays: name these instead.",
    "online": "online drafts with another drafter, which changes while it is measured: name that one instead.",
}


def told(spec: str, mark: str = "") -> str:
    """A spec for people, between marks: that a size is constant is the rule here, a schedule of its own is said."""
    bare = spec.replace(f",{CONSTANT}", "")
    return f"{mark}{bare}{mark}" if CONSTANT in spec else f"{mark}{bare}{mark} (its own schedule)"


def _candidate(base: str, given: Sequence[str], extra: Sequence[str], shape: Shape) -> Candidate:
    return Candidate(_joined(base, [*given, *extra, CONSTANT]), shape)


def _joined(base: str, pairs: Sequence[str]) -> str:
    schedules = [pair for pair in pairs if pair.startswith("num_assistant_tokens_schedule=")]
    unique = [pair for pair in pairs if pair not in schedules] + schedules[-1:]
    return ",".join([base, *unique])
