"""The table of drafters: one file a method. The table imports neither torch nor the methods; shell completion reads it.

Another package adds a drafter by an entry point of the group ``foredraft.drafters``; docs/extending.md builds one.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from foredraft.core.errors import DrafterError
from foredraft.core.law import Law

GROUP = "foredraft.drafters"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """An entry of the table: where the drafter is, and what a reader of ``foredraft methods`` should know.

    ``drafter``: "module:Class" of the ``Drafter``. The module also has ``Options``, a frozen dataclass that derives
    from ``DrafterOptions``, and ``build(options, context)``, see ``BuildContext``.
    ``heads``: the kinds of trained heads that it drafts with. ``around``: its path is the spec of another drafter,
    which does the drafting. ``size``: the option that limits the length of its chains, which ``tune`` searches.
    """

    drafter: str
    laws: tuple[Law, ...]
    lossless: bool
    needs: str
    what: str
    paper: str
    heads: tuple[str, ...] = ()
    around: bool = False
    size: str = ""


class Methods(Mapping[str, Method]):
    """The methods by name: foredraft's own, then those of other packages.

    An entry point ``NAME = "module:METHOD"`` names a ``Method``; it is imported when its entry is asked for. The names
    of foredraft's own methods cannot be taken.
    """

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=GROUP) if point.name not in _BUILT_IN}

    def __getitem__(self, name: str) -> Method:
        if name in _BUILT_IN:
            return _BUILT_IN[name]
        point = self._others[name]
        try:
            method = point.load()
        except Exception as error:
            raise DrafterError(f"The drafter {name} ({point.value}) cannot be imported: {error!r}.") from error
        if not isinstance(method, Method):
            raise DrafterError(f"The drafter {name} ({point.value}) must be a foredraft.Method.")
        return method

    def usable(self) -> dict[str, Method]:
        """All methods, without those that cannot be imported; a warning is logged for these."""
        found = {}
        for name in self:
            try:
                found[name] = self[name]
            except DrafterError as error:
                _log.warning("%s", error)
        return found

    def __contains__(self, name: object) -> bool:
        return name in _BUILT_IN or name in self._others

    def __iter__(self) -> Iterator[str]:
        return iter([*_BUILT_IN, *sorted(self._others)])

    def __len__(self) -> int:
        return len(_BUILT_IN) + len(self._others)


_BUILT_IN: dict[str, Method] = {
    "none": Method(
        "foredraft.drafters.none:NoDrafter",
        (),
        True,
        "nothing",
        "Plain decoding through the same loop: the baseline.",
        "-",
    ),
    "draft_model": Method(
        "foredraft.drafters.draft_model:DraftModel",
        (Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "a small model with the target's tokenizer",
        "A small model drafts a chain, or a tree with branching=4x2x1.",
        "arXiv:2211.17192, arXiv:2302.01318",
    ),
    "cape": Method(
        "foredraft.drafters.cape:Cape",
        (Law.FIXED,),
        True,
        "a small model with the target's tokenizer",
        "A small model's likeliest chain, with more siblings where it is less sure.",
        "arXiv:2402.02082",
    ),
    "bandit": Method(
        "foredraft.drafters.bandit:Bandit",
        (Law.FIXED, Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.IID, Law.IID_MANY),
        True,
        "other drafters, by their specs",
        "Plays several drafters and plain decoding in turn, and stays with the one that pays most.",
        "arXiv:2505.15141",
    ),
    "specinfer": Method(
        "foredraft.drafters.specinfer:SpecInfer",
        (Law.IID, Law.IID_MANY, Law.FIXED),
        True,
        "one or several small models with the target's tokenizer",
        "Several small models draft trees that become one.",
        "arXiv:2305.09781",
    ),
    "sequoia": Method(
        "foredraft.drafters.sequoia:Sequoia",
        (Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "a small model with the target's tokenizer",
        "The best tree for how often each child is accepted and for what forwards cost; drawn without replacement.",
        "arXiv:2402.12374",
    ),
    "opt_tree": Method(
        "foredraft.drafters.opt_tree:OptTree",
        (Law.FIXED,),
        True,
        "a small model with the target's tokenizer",
        "A small model's likeliest paths; the tree is grown where the model is sure.",
        "arXiv:2406.17276",
    ),
    "universal": Method(
        "foredraft.drafters.universal:Universal",
        (Law.FIXED, Law.CHAIN),
        True,
        "a small model with any tokenizer",
        "A draft model with a tokenizer of its own: by text, or by the tokens that both have.",
        "arXiv:2502.05202",
    ),
    "eagle1": Method(
        "foredraft.drafters.eagle1:Eagle1",
        (Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "an EAGLE head",
        "A small layer goes on from the target's features; a static tree, drawn without replacement.",
        "arXiv:2401.15077",
        ("eagle", "eagle3"),
    ),
    "eagle2": Method(
        "foredraft.drafters.eagle2:Eagle2",
        (Law.FIXED,),
        True,
        "an EAGLE head",
        "EAGLE-1's head; the tree is grown where the head is sure.",
        "arXiv:2406.16858",
        ("eagle", "eagle3"),
    ),
    "eagle3": Method(
        "foredraft.drafters.eagle3:Eagle3Drafter",
        (Law.FIXED,),
        True,
        "an EAGLE-3 head",
        "A head on three fused layers, trained on its own drafts; EAGLE-2's tree.",
        "arXiv:2503.01840",
        ("eagle3",),
    ),
    "medusa": Method(
        "foredraft.drafters.medusa:MedusaDrafter",
        (Law.FIXED,),
        True,
        "Medusa heads",
        "Heads on the last state, each for one token further ahead; a static tree.",
        "arXiv:2401.10774",
        ("medusa",),
    ),
    "hydra": Method(
        "foredraft.drafters.hydra:HydraDrafter",
        (Law.FIXED,),
        True,
        "Hydra heads",
        "Medusa's heads, each told what was drafted before it; Hydra++ adds a prefix layer.",
        "arXiv:2402.05109",
        ("hydra",),
    ),
    "blockwise": Method(
        "foredraft.drafters.blockwise:BlockwiseDrafter",
        (Law.FIXED,),
        True,
        "blockwise heads",
        "Heads that say one token each at once; a chain.",
        "arXiv:1811.03115",
        ("blockwise", "medusa"),
    ),
    "early_exit": Method(
        "foredraft.drafters.early_exit:EarlyExit",
        (Law.CHAIN, Law.FIXED),
        True,
        "nothing, but a target that was trained for it drafts better",
        "The target's first layers draft, in its own cache.",
        "arXiv:2404.16710",
        size="num_assistant_tokens",
    ),
    "layer_skip": Method(
        "foredraft.drafters.layer_skip:LayerSkip",
        (Law.CHAIN, Law.FIXED),
        True,
        "layers to leave out, which foredraft skip finds",
        "The target without some of its attention and MLP parts drafts, in its own cache.",
        "arXiv:2309.08168",
        size="num_assistant_tokens",
    ),
    "online": Method(
        "foredraft.drafters.online.method:Online",
        (Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "a draft model or a trained head inside, as online:[draft_model:PATH]",
        "A drafter around another that learns while it serves, from the target's laws at what was verified.",
        "arXiv:2310.07177",
        around=True,
    ),
    "prompt_lookup": Method(
        "foredraft.drafters.prompt_lookup:PromptLookup",
        (Law.FIXED,),
        True,
        "nothing",
        "Copies what followed the last tokens where they stood before; several places become a tree.",
        "github.com/apoorvumang/prompt-lookup-decoding",
        size="prompt_lookup_num_tokens",
    ),
    "lookahead": Method(
        "foredraft.drafters.lookahead:Lookahead",
        (Law.FIXED,),
        True,
        "nothing",
        "The target's own n-grams, from a window of Jacobi iterations beside the text.",
        "arXiv:2402.02057",
    ),
    "max_gram": Method(
        "foredraft.drafters.max_gram:MaxGram",
        (Law.FIXED,),
        True,
        "nothing",
        "Copies what followed the longest run of last tokens that stands earlier in the text; a guess where none does.",
        "arXiv:2312.11462",
    ),
    "relay": Method(
        "foredraft.drafters.relay:Relay",
        (Law.CHAIN, Law.FIXED),
        True,
        "two drafters or more",
        "One drafter goes on where another ends: late tokens of a draft are cheap ones.",
        "arXiv:2312.11462",
    ),
    "cascade": Method(
        "foredraft.drafters.cascade:Cascade",
        (Law.CHAIN, Law.FIXED),
        True,
        "a middle model, and what drafts for it",
        "A middle model drafts, and has a drafter of its own; verified exactly at every level.",
        "arXiv:2312.11462",
    ),
    "partial": Method(
        "foredraft.drafters.partial:Partial",
        (Law.CHAIN, Law.FIXED),
        True,
        "nothing",
        "The target drafts for itself over a part of its cache: retrieved chunks, a window, or heavy hitters.",
        "arXiv:2408.11049, arXiv:2404.11912, arXiv:2309.17453, arXiv:2306.14048",
    ),
    "triforce": Method(
        "foredraft.drafters.triforce:TriForce",
        (Law.CHAIN, Law.FIXED),
        True,
        "a small model with the target's tokenizer",
        "A small model drafts for the target over retrieved chunks of its cache, and that for the target.",
        "arXiv:2404.11912",
    ),
}

METHODS = Methods()
