"""One file a method; this table is the only place that lists them. A class is imported when it is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter


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
    "prompt_lookup": Method(
        "prompt_lookup:PromptLookup",
        (Law.FIXED,),
        True,
        "nothing",
        "Copies what followed the last tokens where they stood before; several places become a tree.",
        "github.com/apoorvumang/prompt-lookup-decoding",
    ),
}


def find(name: str) -> tuple[type[Drafter], type]:
    """The drafter's class and its Options, by a name that is in the table."""
    module_name, class_name = METHODS[name].place.split(":")
    module = importlib.import_module(f"foredraft.drafters.{module_name}")
    return getattr(module, class_name), module.Options


def builder(name: str) -> Callable[[Any, Any], Drafter]:
    """``build(options, supplies)`` of a method in the table."""
    module_name, _ = METHODS[name].place.split(":")
    return importlib.import_module(f"foredraft.drafters.{module_name}").build
