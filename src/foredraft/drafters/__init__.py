"""One file a method; this table is the only place that lists them. A class is imported when it is asked for.

The table itself does not import torch: shell completion and ``foredraft --help`` read it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.core.law import Law

if TYPE_CHECKING:
    import foredraft.core.drafter


@dataclass(frozen=True, slots=True)
class Method:
    """An entry of the table: where the drafter is, and what a reader of ``foredraft methods`` should know."""

    place: str  # module:Class under foredraft.drafters; its module also has a frozen dataclass Options, and build
    laws: tuple[Law, ...]
    lossless: bool
    needs: str
    what: str
    paper: str
    heads: tuple[str, ...] = ()  # kinds of trained heads that it drafts with, as formats names them
    around: bool = False  # its path is the spec of another drafter, which does the drafting


METHODS: dict[str, Method] = {
    "none": Method("none:NoDrafter", (), True, "nothing", "Plain decoding through the same loop: the baseline.", "-"),
    "draft_model": Method(
        "draft_model:DraftModel",
        (Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "a small model with the target's tokenizer",
        "A small model drafts a chain, or a tree with branching=4x2x1.",
        "arXiv:2211.17192, arXiv:2302.01318",
    ),
    "cape": Method(
        "cape:Cape",
        (Law.FIXED,),
        True,
        "a small model with the target's tokenizer",
        "A small model's likeliest chain, with more siblings where it is less sure.",
        "arXiv:2402.02082",
    ),
    "bandit": Method(
        "bandit:Bandit",
        (Law.FIXED, Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.IID, Law.IID_MANY),
        True,
        "other drafters, by their specs",
        "Plays several drafters and plain decoding in turn, and stays with the one that pays most.",
        "arXiv:2505.15141",
    ),
    "specinfer": Method(
        "specinfer:SpecInfer",
        (Law.IID, Law.IID_MANY, Law.FIXED),
        True,
        "one or several small models with the target's tokenizer",
        "Several small models draft trees that become one.",
        "arXiv:2305.09781",
    ),
    "sequoia": Method(
        "sequoia:Sequoia",
        (Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "a small model with the target's tokenizer",
        "The best tree for how often each child is accepted and for what forwards cost; drawn without replacement.",
        "arXiv:2402.12374",
    ),
    "opt_tree": Method(
        "opt_tree:OptTree",
        (Law.FIXED,),
        True,
        "a small model with the target's tokenizer",
        "A small model's likeliest paths; the tree is grown where the model is sure.",
        "arXiv:2406.17276",
    ),
    "universal": Method(
        "universal:Universal",
        (Law.FIXED, Law.CHAIN),
        True,
        "a small model with any tokenizer",
        "A draft model with a tokenizer of its own: by text, or by the tokens that both have.",
        "arXiv:2502.05202",
    ),
    "eagle1": Method(
        "eagle1:Eagle1",
        (Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "an EAGLE head",
        "A small layer goes on from the target's features; a static tree, drawn without replacement.",
        "arXiv:2401.15077",
        ("eagle", "eagle3"),
    ),
    "eagle2": Method(
        "eagle2:Eagle2",
        (Law.FIXED,),
        True,
        "an EAGLE head",
        "EAGLE-1's head; the tree is grown where the head is sure.",
        "arXiv:2406.16858",
        ("eagle", "eagle3"),
    ),
    "eagle3": Method(
        "eagle3:Eagle3Drafter",
        (Law.FIXED,),
        True,
        "an EAGLE-3 head",
        "A head on three fused layers, trained on its own drafts; EAGLE-2's tree.",
        "arXiv:2503.01840",
        ("eagle3",),
    ),
    "medusa": Method(
        "medusa:MedusaDrafter",
        (Law.FIXED,),
        True,
        "Medusa heads",
        "Heads on the last state, each for one token further ahead; a static tree.",
        "arXiv:2401.10774",
        ("medusa",),
    ),
    "hydra": Method(
        "hydra:HydraDrafter",
        (Law.FIXED,),
        True,
        "Hydra heads",
        "Medusa's heads, each told what was drafted before it; Hydra++ adds a prefix layer.",
        "arXiv:2402.05109",
        ("hydra",),
    ),
    "blockwise": Method(
        "blockwise:BlockwiseDrafter",
        (Law.FIXED,),
        True,
        "blockwise heads",
        "Heads that say one token each at once; a chain.",
        "arXiv:1811.03115",
        ("blockwise", "medusa"),
    ),
    "early_exit": Method(
        "early_exit:EarlyExit",
        (Law.CHAIN, Law.FIXED),
        True,
        "nothing, but a target that was trained for it drafts better",
        "The target's first layers draft, in its own cache.",
        "arXiv:2404.16710",
    ),
    "layer_skip": Method(
        "layer_skip:LayerSkip",
        (Law.CHAIN, Law.FIXED),
        True,
        "layers to leave out, which foredraft skip finds",
        "The target without some of its attention and MLP parts drafts, in its own cache.",
        "arXiv:2309.08168",
    ),
    "online": Method(
        "online:Online",
        (Law.CHAIN, Law.WITHOUT_REPLACEMENT, Law.FIXED),
        True,
        "a draft model or a trained head inside, as online:[draft_model:PATH]",
        "A drafter around another that learns while it serves, from the target's laws at what was verified.",
        "arXiv:2310.07177",
        around=True,
    ),
    "prompt_lookup": Method(
        "prompt_lookup:PromptLookup",
        (Law.FIXED,),
        True,
        "nothing",
        "Copies what followed the last tokens where they stood before; several places become a tree.",
        "github.com/apoorvumang/prompt-lookup-decoding",
    ),
    "lookahead": Method(
        "lookahead:Lookahead",
        (Law.FIXED,),
        True,
        "nothing",
        "The target's own n-grams, from a window of Jacobi iterations beside the text.",
        "arXiv:2402.02057",
    ),
    "max_gram": Method(
        "max_gram:MaxGram",
        (Law.FIXED,),
        True,
        "nothing",
        "Copies what followed the longest run of last tokens that stands earlier in the text; a guess where none does.",
        "arXiv:2312.11462",
    ),
    "relay": Method(
        "relay:Relay",
        (Law.CHAIN, Law.FIXED),
        True,
        "two drafters or more",
        "One drafter goes on where another ends: late tokens of a draft are cheap ones.",
        "arXiv:2312.11462",
    ),
    "cascade": Method(
        "cascade:Cascade",
        (Law.CHAIN, Law.FIXED),
        True,
        "a middle model, and what drafts for it",
        "A middle model drafts, and has a drafter of its own; verified exactly at every level.",
        "arXiv:2312.11462",
    ),
    "partial": Method(
        "partial:Partial",
        (Law.CHAIN, Law.FIXED),
        True,
        "nothing",
        "The target drafts for itself over a part of its cache: retrieved chunks, a window, or heavy hitters.",
        "arXiv:2408.11049, arXiv:2404.11912, arXiv:2309.17453, arXiv:2306.14048",
    ),
    "triforce": Method(
        "triforce:TriForce",
        (Law.CHAIN, Law.FIXED),
        True,
        "a small model with the target's tokenizer",
        "A small model drafts for the target over retrieved chunks of its cache, and that for the target.",
        "arXiv:2404.11912",
    ),
}


def find(name: str) -> "tuple[type[foredraft.core.drafter.Drafter], type]":
    """The drafter's class and its Options, by a name that is in the table."""
    module_name, class_name = METHODS[name].place.split(":")
    module = importlib.import_module(f"foredraft.drafters.{module_name}")
    return getattr(module, class_name), module.Options


def builder(name: str) -> "Callable[[Any, Any], foredraft.core.drafter.Drafter]":
    """``build(options, supplies)`` of a method in the table."""
    module_name, _ = METHODS[name].place.split(":")
    return importlib.import_module(f"foredraft.drafters.{module_name}").build
