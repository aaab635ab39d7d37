"""Law tags. Separate from ``draft`` so that the method table and the command line need not import torch."""

from enum import Enum


class Law(Enum):
    """How the children of a node were chosen. The tag decides which verification rules are lossless."""

    FIXED = "fixed"
    """Picked deterministically (look-ups, top-k, argmax): point masses, regardless of the draft's softmax."""
    CHAIN = "chain"
    """One child per node, drawn from q."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn one after another from q, without replacement."""
    IID = "iid"
    """Siblings drawn independently from the same q."""
    IID_MANY = "iid_many"
    """Siblings drawn independently, each from a different q (several draft models)."""
