"""Candidates of tune: each method at the sizes that its options allow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foredraft.bench.tune.probe import DraftSize
from foredraft.compose.spec import Spec, option_defaults
from foredraft.core.errors import OptionError
from foredraft.core.options import entries, parts
from foredraft.drafters import AUTO, METHODS, automatic_drafter, bundled_drafts
from foredraft.model.loading.contents import contents_of_files

CONSTANT = "num_assistant_tokens_schedule=constant"
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)
_NODES = (3, 5, 7, 11, 15, 23, 31, 47)
_DEPTHS = (2, 3, 4, 5, 6, 8)
_DYNAMIC = {"nodes", "depth", "top_k"}
"""The options of dynamic trees."""
_SHAPE = {*_DYNAMIC, "tree", "branching"}
"""Options that set the shape of drafts; if one is given, no size is searched."""


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
    """Drafters that need no files, those bundled with the model, and the one that is the default."""
    bundled = _bundled(model)
    return list(dict.fromkeys(["prompt_lookup", *bundled, automatic_drafter(bundled)]))


def _bundled(model: str) -> dict[str, str]:
    return bundled_drafts(model, contents_of_files(model))


def families(drafter: str, model: str) -> list[CandidateFamily]:
    """The families of a drafter spec, or of auto; given options stay fixed. Of ``hybrid`` the inner drafter has sizes.

    Raises:
        OptionError: unknown method or option, or a drafter without a size.
    """
    if drafter == AUTO:
        drafter = automatic_drafter(_bundled(model))
    method = Spec.parse(drafter).name
    if METHODS[method].untuned:
        raise OptionError(METHODS[method].untuned)
    head, *given = parts(drafter, ",")
    if METHODS[method].around:
        return [_around(method, given, each) for each in families(_inner(drafter), model)]
    path = head.partition(":")[2] or _bundled(model).get(method, "")
    if path and Path(path).exists():  # Path("") would be the current folder
        path = str(Path(path).resolve())  # the tuned file may be read from another folder
    base = f"{method}:{path}" if path else method

    def spec(*sized: str) -> str:
        return _joined(base, [*given, *sized, CONSTANT])

    return [
        CandidateFamily(_joined(base, given), spec(*probe), tuple(Candidate(spec(*own), shape) for own, shape in sizes))
        for probe, sizes in _probes(method, {pair.partition("=")[0] for pair in given})
    ]


def _inner(drafter: str) -> str:
    """The spec inside a drafter that wraps another."""
    path = Spec.parse(drafter).path
    specs = entries(path) if path else []
    if len(specs) != 1:
        raise OptionError(f"{drafter!r} has not one drafter inside: write hybrid:[SPEC].")
    return specs[0]


def _around(method: str, given: Sequence[str], inner: CandidateFamily) -> CandidateFamily:
    """The family of a drafter that wraps another: the other's sizes."""

    def wrapped(spec: str) -> str:
        return ",".join([f"{method}:[{spec}]", *given])

    candidates = tuple(replace(each, spec=wrapped(each.spec)) for each in inner.candidates)
    return CandidateFamily(wrapped(inner.name), wrapped(inner.probe), candidates)


_Sized = tuple[list[str], DraftSize]
"""Options of a candidate, and its shape."""


def _probes(method: str, given: set[str]) -> list[tuple[list[str], list[_Sized]]]:
    """The options of each probe, with the candidates that are predicted from it."""
    options, length = option_defaults(method).keys(), METHODS[method].size
    if given & {*_SHAPE, length}:
        return [([], [([], DraftSize())])]
    if options >= _DYNAMIC:
        return _dynamic_trees()
    if "tree" in options:  # static trees have a probe each
        named = [f"tree={tree}" for tree in ("eagle", "4x2x1", "2x1x1x1")]
        trees = [f"nodes={nodes}" for nodes in (7, 15, 23, 47)] if "nodes" in options else named
        return [([tree], [([tree], DraftSize())]) for tree in trees]
    if length:
        return [([f"{length}={max(_LENGTHS)}"], [([f"{length}={k}"], DraftSize(k, k)) for k in _LENGTHS])]
    return [([], [([], DraftSize())])]


def _dynamic_trees() -> list[tuple[list[str], list[_Sized]]]:
    """Dynamic trees, and chains of top-1 tokens, which most servers run."""
    trees = [
        ([f"nodes={nodes}", f"depth={depth}"], DraftSize(nodes, depth))
        for depth in _DEPTHS
        for nodes in _NODES
        if depth < nodes <= 8 * depth
    ]
    chains = [([f"nodes={k}", f"depth={k}", "top_k=1"], DraftSize(k, k)) for k in _LENGTHS if k <= 6]
    return [([f"nodes={max(_NODES)}", f"depth={max(_DEPTHS)}"], trees), (chains[-1][0], chains)]


def short_spec(spec: str, mark: str = "") -> str:
    """A spec for display, between marks; constant size is the default here, so only other schedules are noted."""
    bare = spec.replace(f",{CONSTANT}", "")
    return f"{mark}{bare}{mark}" if CONSTANT in spec else f"{mark}{bare}{mark} (default schedule)"


def _joined(base: str, pairs: Sequence[str]) -> str:
    """The spec with these options; of several schedules, the last."""
    schedules = [pair for pair in pairs if pair.startswith("num_assistant_tokens_schedule=")]
    unique = [pair for pair in pairs if pair not in schedules] + schedules[-1:]
    return ",".join([base, *unique])
