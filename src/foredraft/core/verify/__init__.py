"""Verification: from the target's law and a draft to the accepted path. One file a rule, one table of rules.

Every rule is a pure function ``(p, draft, coins) -> Verdict`` over B rows of any tree shapes. None of them
reads anything back from the device, and all their loops are bounded by numbers the host knows, so that a step
can be captured as one CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.errors import LawError
from foredraft.core.rng import VerifierRng
from foredraft.core.sampling.params import check_known
from foredraft.core.tree import PAD, ROOT, ancestors
from foredraft.core.verify.block import block
from foredraft.core.verify.greedy import walk
from foredraft.core.verify.kseq import kseq
from foredraft.core.verify.lossy import typical
from foredraft.core.verify.recursive import recursive
from foredraft.core.verify.target_sampling import target_sampling
from foredraft.core.verify.token import token
from foredraft.core.verify.traversal import traversal

__all__ = ["DEFAULT", "RULES", "Rule", "check_legal", "verify", "walk"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to verify, and the laws for which it may be used.

    ``why`` says what the rule rests on; it becomes part of the sentence that refuses an illegal draft.
    ``lossless`` is False for the rules that change the law of the text by design: those take any draft.
    """

    function: Callable[..., Verdict]
    laws: frozenset[Law]
    why: str
    lossless: bool = True


_DRAWN = frozenset(Law) - {Law.FIXED}

RULES: dict[str, Rule] = {
    "target_sampling": Rule(target_sampling, frozenset(Law), "it draws from the target and needs no q"),
    "token": Rule(token, frozenset({Law.CHAIN}), "it needs one child a node, drawn from q"),
    "block": Rule(block, frozenset({Law.CHAIN}), "it needs one child a node, drawn from q"),
    "recursive": Rule(recursive, _DRAWN, "it divides by the q that each sibling was drawn from, given its elders"),
    "kseq": Rule(kseq, frozenset({Law.IID}), "it needs siblings drawn independently from one and the same q"),
    "traversal": Rule(traversal, _DRAWN, "it divides by the q that each sibling was drawn from, given its elders"),
    "typical": Rule(typical, frozenset(Law), "it takes every likely token, drawn by whomever", lossless=False),
}

DEFAULT: dict[Law, str] = {
    Law.FIXED: "target_sampling",
    Law.CHAIN: "block",
    Law.WITHOUT_REPLACEMENT: "traversal",
    Law.IID: "traversal",
    Law.IID_MANY: "traversal",
}

_LAWS: dict[Law, str] = {
    Law.FIXED: "were picked, so their law is a point mass, whatever the draft's softmax says",
    Law.CHAIN: "were drawn from q one below the other",
    Law.WITHOUT_REPLACEMENT: "are siblings drawn without replacement",
    Law.IID: "are siblings drawn independently from one q",
    Law.IID_MANY: "are siblings drawn independently, each from a q of its own",
}


def check_legal(rule: str, law: Law) -> None:
    """Raise unless ``rule`` may verify drafts of this law.

    Raises:
        OptionError: there is no such rule; the sentence lists the known ones.
        LawError: the rule would change the law of the text; the sentence says why, and what to use.
    """
    check_known("verification rule", {rule: None}, list(RULES))
    if law not in RULES[rule].laws:
        raise LawError(
            f"Verification rule {rule!r} would not be lossless for a {law.value!r} draft: {RULES[rule].why}, "
            f"but these tokens {_LAWS[law]}; use {DEFAULT[law]!r}."
        )


def verify(target: Target, draft: Draft, coins: VerifierRng, rule: str | None = None) -> Verdict:
    """Judge a draft by a rule that is legal for its law; None takes the best known one.

    Where all rows are greedy (``target.p`` is None) every rule, for any law, comes to following the best tokens.
    """
    if target.p is None:
        return walk(target.best, draft.tree)
    name = DEFAULT[draft.law] if rule is None else rule
    check_legal(name, draft.law)
    return RULES[name].function(target.p, _lawful(draft), coins)


def _lawful(draft: Draft) -> Draft:
    """The same draft without nodes whose q is no law (NaN, or nothing at all), and without what hangs below them.

    A drafter may be wrong in anything, and its q was so before it drew: leaving them out gives nothing away.
    """
    if draft.q is None:
        return draft
    parents = draft.tree.parents
    broken = (parents != ROOT) & ~(draft.q.sum(-1) > 0)
    broken = (ancestors(parents) & broken[:, None]).any(-1)
    return replace(draft, tree=replace(draft.tree, parents=torch.where(broken, PAD, parents)))
