"""Candidates of tune: each method at the sizes that its options allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.bench.tune.probe import DraftSize
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
    """A drafter spec of constant size, and its shape within the probe's drafts."""

    spec: str
    shape: DraftSize


@dataclass(frozen=True, slots=True)
class CandidateFamily:
    """Candidates predicted from one probe. ``name``: the requested spec, with its default schedule."""

    name: str
    probe: str
    candidates: tuple[Candidate, ...]


def default_drafters(model: str) -> list[str]:
    """Drafters that need no files, and those bundled with the model."""
    return ["prompt_lookup", *BUNDLED_DRAFTS.get(model, {})]


def families(drafter: str, model: str) -> list[CandidateFamily]:
    """The families of a drafter spec; given options stay fixed.

    Raises:
        OptionError: unknown method or option, or a drafter without a size.
    """
    reason = _NOT_TRIED.get(Spec.parse(drafter).name)
    if reason is not None:
        raise OptionError(reason)
    head, *given = parts(drafter, ",")
    method, _, path = head.partition(":")
    path = path or BUNDLED_DRAFTS.get(model, {}).get(method, "")
    if path and Path(path).exists():  # Path("") would be the current folder
        path = str(Path(path).resolve())  # the tuned file may be read from another folder
    base = f"{method}:{path}" if path else method
    fixed = {pair.partition("=")[0] for pair in given}
    size = METHODS[method].size
    maker = _MAKERS.get(method) or (_chain(size, max(_LENGTHS)) if size else _fixed)
    return [
        CandidateFamily(_joined(base, given), _joined(base, [*given, *probe, CONSTANT]), tuple(candidates))
        for probe, candidates in maker(base, given, fixed)
        if candidates
    ]


_Probes = list[tuple[list[str], list[Candidate]]]


def _chain(option: str, longest: int, shape: str = ""):
    """Chains of each length, all predicted from one probe of the longest. ``shape``: the option for a tree."""

    def make(base: str, given: Sequence[str], fixed: set[str]) -> _Probes:
        if fixed & {option, shape}:
            return _fixed(base, given, fixed)
        lengths = [length for length in _LENGTHS if length <= longest]
        chains = [_candidate(base, given, [f"{option}={k}"], DraftSize(k, k)) for k in lengths]
        return [([f"{option}={longest}"], chains)]

    return make


def _dynamic_trees(base: str, given: Sequence[str], fixed: set[str]) -> _Probes:
    """Dynamic trees, and chains of top-1 tokens, which most servers run."""
    if fixed & {"nodes", "depth", "top_k"}:
        return _fixed(base, given, fixed)
    trees = [
        _candidate(base, given, [f"nodes={nodes}", f"depth={depth}"], DraftSize(nodes, depth))
        for depth in _DEPTHS
        for nodes in _NODES
        if depth < nodes <= 8 * depth
    ]
    chains = [
        _candidate(base, given, [f"nodes={k}", f"depth={k}", "top_k=1"], DraftSize(k, k)) for k in _LENGTHS if k <= 6
    ]
    return [([f"nodes={max(_NODES)}", f"depth={max(_DEPTHS)}"], trees), (["nodes=6", "depth=6", "top_k=1"], chains)]


def _static(option: str, values: Sequence[str | int], shape: str = "tree"):
    """Static trees, each with its own probe. ``shape``: the option that sets the whole shape."""

    def make(base: str, given: Sequence[str], fixed: set[str]) -> _Probes:
        if fixed & {option, shape}:
            return _fixed(base, given, fixed)
        extras = [[f"{option}={value}"] for value in values]
        return [(extra, [_candidate(base, given, extra, DraftSize())]) for extra in extras]

    return make


def _fixed(base: str, given: Sequence[str], fixed: set[str]) -> _Probes:
    return [([], [_candidate(base, given, [], DraftSize())])]


_MAKERS = {
    "draft_model": _chain("num_assistant_tokens", 10, "branching"),
    "eagle1": _static("tree", ("eagle", "4x2x1", "2x1x1x1")),
    "eagle2": _dynamic_trees,
    "eagle3": _dynamic_trees,
    "opt_tree": _dynamic_trees,
    "medusa": _static("nodes", (7, 15, 23, 47)),
    "hydra": _static("nodes", (7, 15, 23, 47)),
}
"""Other methods are tried at each length of the option ``Method.size``, or with the given options only."""


_NOT_TRIED = {
    "none": "none is plain decoding, the baseline: name another drafter.",
    "bandit": "bandit chooses among its own drafters: name these instead.",
    "online": "online trains its inner drafter while it is measured: name that drafter instead.",
}


def short_spec(spec: str, mark: str = "") -> str:
    """A spec for display, between marks; constant size is the default here, so only other schedules are noted."""
    bare = spec.replace(f",{CONSTANT}", "")
    return f"{mark}{bare}{mark}" if CONSTANT in spec else f"{mark}{bare}{mark} (default schedule)"


def _candidate(base: str, given: Sequence[str], extra: Sequence[str], shape: DraftSize) -> Candidate:
    return Candidate(_joined(base, [*given, *extra, CONSTANT]), shape)


def _joined(base: str, pairs: Sequence[str]) -> str:
    schedules = [pair for pair in pairs if pair.startswith("num_assistant_tokens_schedule=")]
    unique = [pair for pair in pairs if pair not in schedules] + schedules[-1:]
    return ",".join([base, *unique])
