"""The table of drafting methods, one module each. It imports neither torch nor the methods, so completion is fast.

Another package adds a drafter with an entry point of the group ``foredraft.drafters``; see docs/extending.md.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from foredraft.core.errors import DrafterError
from foredraft.core.law import Law
from foredraft.model.loading.bundled import resolve

GROUP = "foredraft.drafters"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """An entry of the table, as shown by ``foredraft methods``.

    ``drafter``: "module:Class" of the ``Drafter``. The module also has ``Options``, a frozen dataclass derived from
    ``DrafterOptions``, and ``build(options, context)``; see ``BuildContext``.
    ``heads``: the kinds of trained heads it supports. ``bundled``: the draft of the bundled model. ``nests``: its path
    has specs of other drafters; ``around``: of one, which does the drafting. ``several``: it may be several models.
    ``size``: the option that limits the length of its chains; ``tune`` searches it. ``untuned``: why ``tune`` does not
    try the method.
    """

    drafter: str
    laws: tuple[Law, ...]
    needs: str
    what: str
    paper: str
    heads: tuple[str, ...] = ()
    bundled: str = ""
    nests: bool = False
    around: bool = False
    several: bool = False
    size: str = ""
    untuned: str = ""
    lossless: bool = True


class Methods(Mapping[str, Method]):
    """The methods by name: foredraft's own, then those of other packages.

    An entry point ``NAME = "module:METHOD"`` names a ``Method``; it is imported at the first look-up. The names of
    foredraft's own methods are reserved.
    """

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=GROUP) if point.name not in _BUILT_IN}

    def __getitem__(self, name: str) -> Method:
        if name in _BUILT_IN:
            return _BUILT_IN[name]
        point = self._entry_points[name]
        try:
            method = point.load()
        except Exception as error:
            raise DrafterError(f"The drafter {name} ({point.value}) cannot be imported: {error!r}.") from error
        if not isinstance(method, Method):
            raise DrafterError(f"The drafter {name} ({point.value}) must be a foredraft.Method.")
        return method

    def usable(self) -> dict[str, Method]:
        """All methods that can be imported; a warning is logged for the others."""
        found = {}
        for name in self:
            try:
                found[name] = self[name]
            except DrafterError as error:
                _log.warning("%s", error)
        return found

    def __contains__(self, name: object) -> bool:
        return name in _BUILT_IN or name in self._entry_points

    def __iter__(self) -> Iterator[str]:
        return iter([*_BUILT_IN, *sorted(self._entry_points)])

    def __len__(self) -> int:
        return len(_BUILT_IN) + len(self._entry_points)


_BUILT_IN: dict[str, Method] = {
    "none": Method(
        "foredraft.drafters.none:NoDrafter",
        (),
        "nothing",
        "Plain decoding in the same loop: the baseline.",
        "-",
        untuned="none is plain decoding, the baseline: name another drafter.",
    ),
    "draft_model": Method(
        "foredraft.drafters.draft_model:DraftModel",
        (Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.FIXED),
        "a small model with the target's tokenizer",
        "A small model drafts a chain, or a tree with branching=4x2x1.",
        "arXiv:2211.17192, arXiv:2302.01318",
        bundled="sample-draft",
        size="num_assistant_tokens",
    ),
    "cape": Method(
        "foredraft.drafters.cape:Cape",
        (Law.FIXED,),
        "a small model with the target's tokenizer, or a GLIDE head",
        "A small model drafts its best chain, with more siblings where it is less confident.",
        "arXiv:2402.02082",
        ("glide",),
    ),
    "bandit": Method(
        "foredraft.drafters.bandit:Bandit",
        (Law.FIXED, Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.IID, Law.IID_MANY),
        "specs of other drafters",
        "Chooses among several drafters and plain decoding the one with the best throughput.",
        "arXiv:2505.15141",
        nests=True,
        untuned="bandit chooses among its own drafters: name these instead.",
    ),
    "hybrid": Method(
        "foredraft.drafters.hybrid:Hybrid",
        (Law.FIXED, Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.IID, Law.IID_MANY),
        "another drafter inside, as hybrid:[eagle3:PATH]",
        "Copies from earlier text where it repeats itself; elsewhere another drafter drafts.",
        "arXiv:2411.04975",
        nests=True,
        around=True,
    ),
    "specinfer": Method(
        "foredraft.drafters.specinfer:SpecInfer",
        (Law.IID, Law.IID_MANY, Law.FIXED),
        "one or several small models with the target's tokenizer",
        "Several small models draft trees, which are merged into one.",
        "arXiv:2305.09781",
        several=True,
    ),
    "sequoia": Method(
        "foredraft.drafters.sequoia:Sequoia",
        (Law.WITHOUT_REPLACEMENT, Law.FIXED),
        "a small model with the target's tokenizer",
        "A tree optimised for measured acceptance rates and forward costs.",
        "arXiv:2402.12374",
        bundled="sample-draft",
    ),
    "opt_tree": Method(
        "foredraft.drafters.opt_tree:OptTree",
        (Law.FIXED,),
        "a small model with the target's tokenizer",
        "A small model's best paths: a dynamic tree, deeper where the model is confident.",
        "arXiv:2406.17276",
        bundled="sample-draft",
    ),
    "universal": Method(
        "foredraft.drafters.universal.method:Universal",
        (Law.FIXED, Law.CHAIN),
        "a small model with any tokenizer",
        "A draft model with another tokenizer: drafts by text, or with the tokens that both have.",
        "arXiv:2502.05202",
    ),
    "eagle1": Method(
        "foredraft.drafters.eagle1:Eagle1",
        (Law.WITHOUT_REPLACEMENT, Law.FIXED),
        "an EAGLE head",
        "A one-layer head predicts the target's next features; a static tree.",
        "arXiv:2401.15077",
        ("eagle", "eagle3"),
        bundled="sample-eagle",
    ),
    "eagle2": Method(
        "foredraft.drafters.eagle2:Eagle2",
        (Law.FIXED, Law.WITHOUT_REPLACEMENT),
        "an EAGLE head",
        "EAGLE-1's head with a dynamic tree, deeper where the head is confident.",
        "arXiv:2406.16858",
        ("eagle", "eagle3"),
        bundled="sample-eagle",
    ),
    "eagle3": Method(
        "foredraft.drafters.eagle3:Eagle3Drafter",
        (Law.FIXED, Law.WITHOUT_REPLACEMENT),
        "an EAGLE-3 head",
        "A head on features of three layers, trained on its own drafts; EAGLE-2's dynamic tree.",
        "arXiv:2503.01840",
        ("eagle3",),
        bundled="sample-eagle3",
    ),
    "medusa": Method(
        "foredraft.drafters.medusa:MedusaDrafter",
        (Law.FIXED, Law.WITHOUT_REPLACEMENT),
        "Medusa heads",
        "Heads on the last hidden state, each for one position further ahead; a static tree.",
        "arXiv:2401.10774",
        ("medusa",),
        bundled="sample-medusa",
    ),
    "hydra": Method(
        "foredraft.drafters.hydra:HydraDrafter",
        (Law.FIXED, Law.WITHOUT_REPLACEMENT),
        "Hydra heads",
        "Medusa heads that also read the tokens drafted before; Hydra++ adds a prefix layer.",
        "arXiv:2402.05109",
        ("hydra",),
    ),
    "blockwise": Method(
        "foredraft.drafters.blockwise:BlockwiseDrafter",
        (Law.CHAIN, Law.FIXED),
        "blockwise heads",
        "Heads that predict one token each in parallel; a chain.",
        "arXiv:1811.03115",
        ("blockwise", "medusa"),
    ),
    "glide": Method(
        "foredraft.drafters.glide:Glide",
        (Law.FIXED,),
        "a GLIDE head",
        "A one-layer draft model that attends to the target's keys and values; a dynamic tree.",
        "arXiv:2402.02082",
        ("glide",),
    ),
    "early_exit": Method(
        "foredraft.drafters.early_exit:EarlyExit",
        (Law.CHAIN, Law.FIXED),
        "nothing, but works best with a target trained for it",
        "The target's first layers draft, in the target's cache.",
        "arXiv:2404.16710",
        size="num_assistant_tokens",
    ),
    "layer_skip": Method(
        "foredraft.drafters.layer_skip.method:LayerSkip",
        (Law.CHAIN, Law.FIXED),
        "layers to skip, found by foredraft skip",
        "The target drafts without some of its attention and MLP blocks, in its own cache.",
        "arXiv:2309.08168",
        size="num_assistant_tokens",
    ),
    "online": Method(
        "foredraft.drafters.online.method:Online",
        (Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.FIXED),
        "a draft model or a trained head inside, as online:[draft_model:PATH]",
        "Trains another drafter while serving, on the target's laws at verified tokens (online distillation).",
        "arXiv:2310.07177",
        nests=True,
        around=True,
        untuned="online trains its inner drafter while it is measured: name that drafter instead.",
    ),
    "prompt_lookup": Method(
        "foredraft.drafters.prompt_lookup:PromptLookup",
        (Law.FIXED,),
        "nothing",
        "Copies the tokens that followed earlier occurrences of the last n-gram; several matches form a tree.",
        "github.com/apoorvumang/prompt-lookup-decoding",
        size="prompt_lookup_num_tokens",
    ),
    "lookahead": Method(
        "foredraft.drafters.lookahead:Lookahead",
        (Law.FIXED,),
        "nothing",
        "N-grams of the target from a window of parallel Jacobi iterations.",
        "arXiv:2402.02057",
    ),
    "max_gram": Method(
        "foredraft.drafters.max_gram:MaxGram",
        (Law.FIXED,),
        "nothing",
        "Copies the tokens after the longest earlier match of the last tokens; without one, repeats the last token.",
        "arXiv:2312.11462",
    ),
    "relay": Method(
        "foredraft.drafters.relay:Relay",
        (Law.CHAIN, Law.FIXED),
        "two drafters or more",
        "Each drafter continues the draft of the one before; later tokens come from cheaper drafters.",
        "arXiv:2312.11462",
        nests=True,
    ),
    "cascade": Method(
        "foredraft.drafters.cascade:Cascade",
        (Law.CHAIN, Law.FIXED),
        "a middle model and a drafter for it",
        "A middle model drafts by speculative decoding with its own drafter; lossless at every level.",
        "arXiv:2312.11462",
        nests=True,
    ),
    "partial": Method(
        "foredraft.drafters.partial:Partial",
        (Law.CHAIN, Law.FIXED),
        "nothing",
        "The target drafts with a part of its KV cache: retrieved chunks, a window, or heavy hitters.",
        "arXiv:2408.11049, arXiv:2404.11912, arXiv:2309.17453, arXiv:2306.14048",
    ),
    "triforce": Method(
        "foredraft.drafters.triforce:TriForce",
        (Law.CHAIN, Law.FIXED),
        "a small model with the target's tokenizer",
        "A small model drafts for the target with a partial KV cache, which drafts for the full target.",
        "arXiv:2404.11912",
        bundled="sample-draft",
        nests=True,
    ),
}

METHODS = Methods()
_QUANTISATION = re.compile(r"([.-](i?q|b?f)\d\w*)?\.gguf$", re.IGNORECASE)
_SAMPLE = "sample"
BUNDLED_DRAFTS: dict[str, dict[str, str]] = {
    _SAMPLE: {name: method.bundled for name, method in _BUILT_IN.items() if method.bundled},
    "SmolLM2-135M-Instruct": {"eagle3": "smollm2-eagle3"},
}
"""Bundled drafts by method: for the bundled target, and for other targets by the last part of their names."""
BUNDLED_CONTENTS = {"e429869238a5cf2b": _SAMPLE, "824cf4dfddc66fb5": "SmolLM2-135M-Instruct"}
"""The same targets by their contents (``TargetModel.contents``)."""


AUTO = "auto"
"""In place of a drafter: see ``automatic_drafter``."""


def automatic_drafter(bundled: Mapping[str, str]) -> str:
    """The default drafter of a target with these bundled drafts: look-ups, beside an EAGLE-3 head if there is one."""
    return "hybrid:eagle3" if "eagle3" in bundled else "prompt_lookup"


def bundled_drafts(target: str, contents: str | None = None) -> dict[str, str]:
    """The bundled drafts for a target, by method: by its contents, or if these are unknown by its name, folder or file.

    A GGUF file may name its quantisation, as in NAME.Q4_1.gguf or name-q8_0.gguf.
    """
    if contents is not None:
        return BUNDLED_DRAFTS.get(BUNDLED_CONTENTS.get(contents, ""), {})
    path = resolve(target)
    if path == resolve(_SAMPLE):
        return BUNDLED_DRAFTS[_SAMPLE]
    name = _QUANTISATION.sub("", Path(path).name).casefold()
    others = ((known, drafts) for known, drafts in BUNDLED_DRAFTS.items() if known != _SAMPLE)
    return next((drafts for known, drafts in others if name == known.casefold()), {})
