"""Lossless speculative decoding of any Hugging Face causal LM.

Names are imported at first use (PEP 562), so that commands that need no torch, such as ``foredraft --help``, start
quickly.
"""

import importlib
import logging
import typing

from foredraft.core.version import __version__ as __version__

if typing.TYPE_CHECKING:
    from foredraft.compose.load import load, load_many
    from foredraft.compose.options import LoadOptions
    from foredraft.compose.quantize import quantize
    from foredraft.core.draft import Draft, Law, Target, Verdict
    from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
    from foredraft.core.errors import ForedraftError, UsageError
    from foredraft.core.options import DrafterOptions, SizedOptions, option
    from foredraft.core.sampling.grammar import Grammar
    from foredraft.core.sampling.params import SamplingParams
    from foredraft.core.stats import DecodeStats
    from foredraft.core.tree import TokenTree
    from foredraft.drafters import Method
    from foredraft.drafters.context import BuildContext
    from foredraft.engine.generator import Generator
    from foredraft.engine.request import Piece
    from foredraft.engine.results import Completed, Result
    from foredraft.engine.stream import AsyncStream, Stream
    from foredraft.hf_generate import speculative
    from foredraft.model.hf.causal_lm import release

__all__ = [
    "AsyncStream",
    "BuildContext",
    "Completed",
    "DecodeStats",
    "Draft",
    "Drafter",
    "DrafterOptions",
    "ForedraftError",
    "Generator",
    "Grammar",
    "Law",
    "LoadOptions",
    "Method",
    "Needs",
    "Piece",
    "Plan",
    "Result",
    "SamplingParams",
    "SizedOptions",
    "StepOut",
    "Stream",
    "Target",
    "TokenTree",
    "UsageError",
    "Verdict",
    "View",
    "load",
    "load_many",
    "option",
    "quantize",
    "release",
    "speculative",
]

_MODULES = {
    "compose.load": ("load", "load_many"),
    "compose.options": ("LoadOptions",),
    "compose.quantize": ("quantize",),
    "core.draft": ("Draft", "Law", "Target", "Verdict"),
    "core.drafter": ("Drafter", "Needs", "Plan", "StepOut", "View"),
    "core.errors": ("ForedraftError", "UsageError"),
    "core.options": ("DrafterOptions", "SizedOptions", "option"),
    "core.sampling.grammar": ("Grammar",),
    "core.sampling.params": ("SamplingParams",),
    "core.stats": ("DecodeStats",),
    "core.tree": ("TokenTree",),
    "drafters": ("Method",),
    "drafters.context": ("BuildContext",),
    "hf_generate": ("speculative",),
    "engine.generator": ("Generator",),
    "engine.results": ("Completed", "Result"),
    "engine.request": ("Piece",),
    "engine.stream": ("AsyncStream", "Stream"),
    "model.hf.causal_lm": ("release",),
}


logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user sets up logging


if not typing.TYPE_CHECKING:  # type checkers see the imports above and report unknown names

    def __getattr__(name: str) -> object:
        for module, names in _MODULES.items():
            if name in names:
                value = getattr(importlib.import_module(f"foredraft.{module}"), name)
                globals()[name] = value  # later accesses bypass this function
                return value
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
