"""Law tags. Apart from ``draft``, so that the table of methods and the command line can name them without torch."""

from enum import Enum


class Law(Enum):
    """How the children of a node came about. The tag decides which verification rules are lossless."""

    FIXED = "fixed"
    """Picked without chance (look-ups, top-k, argmax): point masses, whatever the draft's softmax says."""
    CHAIN = "chain"
    """One child a node, drawn from q."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn one after another from q, each time without those that were drawn before."""
    IID = "iid"
    """Siblings drawn independently from one and the same q."""
    IID_MANY = "iid_many"
    """Siblings drawn independently, each from a q of its own (several draft models)."""
