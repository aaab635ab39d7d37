"""Lossless speculative decoding of any Hugging Face causal LM."""

from foredraft.compose import load
from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.errors import ForedraftError, UsageError
from foredraft.core.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.core.tree import TokenTree
from foredraft.dropin import speculative
from foredraft.engine.generate import Generator, Result, Stream
from foredraft.engine.sequence import Piece

__version__ = "0.1.0"

__all__ = [
    "DecodeStats",
    "Draft",
    "Drafter",
    "ForedraftError",
    "Generator",
    "Law",
    "Needs",
    "Piece",
    "Plan",
    "Result",
    "SamplingParams",
    "StepOut",
    "Stream",
    "Target",
    "TokenTree",
    "UsageError",
    "Verdict",
    "View",
    "load",
    "speculative",
]
