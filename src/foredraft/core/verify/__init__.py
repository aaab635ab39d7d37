"""Verification: from the target's law and a draft to the accepted path. One file per rule, and a table of rules.

Every rule is a pure function ``(p, draft, rng) -> Verdict`` over B rows of arbitrary tree shapes. Rules never read
from the device, and host values bound all their loops, so a step can be captured as one CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.errors import LawError
from foredraft.core.rng import VerifierRng
from foredraft.core.sampling.params import check_known
from foredraft.core.verify.block import block
from foredraft.core.verify.greedy import greedy
from foredraft.core.verify.kseq import kseq
from foredraft.core.verify.lossy import typical
from foredraft.core.verify.recursive import recursive
from foredraft.core.verify.target_sampling import target_sampling
from foredraft.core.verify.token import token
from foredraft.core.verify.traversal import traversal

__all__ = ["DEFAULT", "RULES", "Rule", "check_legal", "greedy", "verify"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule and the draft laws for which it is legal.

    ``why``: the rule's assumption, quoted in the error for an illegal draft. ``lossless``: False for rules that change
    the output distribution by design; these take any draft.
    """

    function: Callable[..., Verdict]
    laws: frozenset[Law]
    why: str
    lossless: bool = True

    @property
    def draws(self) -> bool:
        """Whether it needs drafts that were drawn from their q, with random numbers that the target does not use."""
        return Law.FIXED not in self.laws


_DRAWN = frozenset(Law) - {Law.FIXED}
DEFAULT = "target_sampling"
"""The rule unless another is chosen: accept if equal. The others are methods of the papers."""

RULES: dict[str, Rule] = {
    DEFAULT: Rule(target_sampling, frozenset(Law), "it draws from the target and needs no q"),
    "token": Rule(token, frozenset({Law.CHAIN}), "it needs one child per node, drawn from q"),
    "block": Rule(block, frozenset({Law.CHAIN}), "it needs one child per node, drawn from q"),
    "recursive": Rule(recursive, _DRAWN, "it divides by each sibling's q, given the earlier siblings"),
    "kseq": Rule(kseq, frozenset({Law.IID}), "it needs siblings drawn independently from the same q"),
    "traversal": Rule(traversal, _DRAWN, "it divides by each sibling's q, given the earlier siblings"),
    "typical": Rule(typical, frozenset(Law), "it accepts every likely token of any draft", lossless=False),
}

_LAWS: dict[Law, str] = {
    Law.FIXED: "were picked, so their law is a point mass, regardless of the draft's softmax",
    Law.CHAIN: "were drawn from q as a chain",
    Law.WITHOUT_REPLACEMENT: "are siblings drawn without replacement",
    Law.IID: "are siblings drawn independently from one q",
    Law.IID_MANY: "are siblings drawn independently from different q",
}


def check_legal(rule: str, law: Law) -> None:
    """Check that ``rule`` may verify drafts of this law.

    Raises:
        OptionError: the rule is unknown; the message lists the known rules.
        LawError: the rule is not lossless for this law; the message says why and which rule to use.
    """
    check_known("verification rule", {rule: None}, list(RULES))
    if law not in RULES[rule].laws:
        able = [name for name, each in RULES.items() if each.lossless and law in each.laws]
        raise LawError(
            f"Verification rule {rule!r} would not be lossless for a {law.value!r} draft: {RULES[rule].why}, "
            f"but these tokens {_LAWS[law]}; use {' or '.join(able)}."
        )


def verify(target: Target, draft: Draft, rng: VerifierRng, rule: str | None = None) -> Verdict:
    """Verify a draft with ``rule``; None is the default.

    If all rows are greedy (``target.p`` is None), every rule reduces to greedy verification. Copied rows are verified
    by target sampling, unless the rule is lossy.

    Raises:
        LawError: the rule is not lossless for the draft's law.
    """
    name = rule or DEFAULT
    root = draft.tree.parents.shape[1] == 1  # nothing was drafted
    if target.p is None:
        return Verdict(torch.zeros_like(target.best), target.best[:, 0]) if root else greedy(target.best, draft.tree)
    check_legal(name, draft.law)
    if root:
        return Verdict(torch.zeros_like(draft.tree.parents), rng.target(target.p[:, 0], 0, draft.tree.valid[:, 0]))
    verdict = RULES[name].function(target.p, draft, rng)
    if draft.copied is None or name == DEFAULT or not RULES[name].lossless:
        return verdict
    picked = target_sampling(target.p, draft, rng)
    return Verdict(
        torch.where(draft.copied[:, None], picked.path, verdict.path),
        torch.where(draft.copied, picked.bonus, verdict.bonus),
    )
