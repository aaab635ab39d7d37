"""Verification: from the target's law and a draft to the accepted path. One file per rule, and a table of rules.

Every rule is a pure function ``(p, draft, rng) -> Verdict`` over B rows of arbitrary tree shapes; lossy ones take the
``Target`` in place of p. Rules never read from the device, and host values bound all their loops, so a step can be
captured as one CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from foredraft.core.draft import Draft, Law, Target, Verdict
from foredraft.core.errors import LawError, OptionError
from foredraft.core.options import read_options, read_pairs
from foredraft.core.rng import VerifierRng
from foredraft.core.sampling.params import check_known
from foredraft.core.verify.block import block
from foredraft.core.verify.greedy import greedy
from foredraft.core.verify.kseq import kseq
from foredraft.core.verify.lossy import Approximate, Typical, approximate, typical
from foredraft.core.verify.recursive import recursive
from foredraft.core.verify.target_sampling import target_sampling
from foredraft.core.verify.token import token
from foredraft.core.verify.traversal import traversal

__all__ = ["DEFAULT", "RULES", "Rule", "check_legal", "greedy", "rule_of", "verify"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule and the draft laws for which it is legal.

    ``why``: the rule's assumption, quoted in the error for an illegal draft. ``lossless``: False for rules that change
    the output distribution by design; these take any draft. ``options``: the dataclass of a lossy rule's options.
    ``relaxed``: it changes greedy rows, too; the others follow the target's best tokens there.
    """

    function: Callable[..., Verdict]
    laws: frozenset[Law]
    why: str
    options: type[Any] | None = None
    relaxed: bool = False

    @property
    def lossless(self) -> bool:
        return self.options is None

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
    "typical": Rule(typical, frozenset(Law), "it accepts every likely token of any draft", Typical),
    "approximate": Rule(approximate, frozenset(Law), "it accepts tokens that are good enough", Approximate, True),
}

_LAWS: dict[Law, str] = {
    Law.FIXED: "were picked, so their law is a point mass, regardless of the draft's softmax",
    Law.CHAIN: "were drawn from q as a chain",
    Law.WITHOUT_REPLACEMENT: "are siblings drawn without replacement",
    Law.IID: "are siblings drawn independently from one q",
    Law.IID_MANY: "are siblings drawn independently from different q",
}


_LOSSY: dict[str, Rule] = {}
"""Lossy rules with their options, by the specs that were read: steps ask for them, also those that are compiled."""


def rule_of(spec: str) -> Rule:
    """The rule of a spec such as ``block`` or ``typical,epsilon=0.2``; the function of a lossy one has its options.

    Raises:
        OptionError: the rule or one of its options is unknown (the message lists the known ones), or a value is wrong.
    """
    if spec in _LOSSY:
        return _LOSSY[spec]
    name, *pairs = (part.strip() for part in spec.split(","))
    check_known("verifier", {name: None}, list(RULES))
    rule = RULES[name]
    if rule.options is None:
        if pairs:
            raise OptionError(f"The verifier {name} has no options: leave out {', '.join(pairs)}.")
        return rule
    options = read_options(rule.options, name, read_pairs(pairs))
    return _LOSSY.setdefault(spec, replace(rule, function=partial(rule.function, options=options)))


def check_legal(spec: str, law: Law) -> None:
    """Check that the rule of ``spec`` may verify drafts of this law.

    Raises:
        OptionError: as of ``rule_of``.
        LawError: the rule is not lossless for this law; the message says why and which rule to use.
    """
    rule = rule_of(spec)
    if law not in rule.laws:
        able = [name for name, each in RULES.items() if each.lossless and law in each.laws]
        raise LawError(
            f"Verification rule {spec!r} would not be lossless for a {law.value!r} draft: {rule.why}, "
            f"but these tokens {_LAWS[law]}; use {' or '.join(able)}."
        )


def verify(target: Target, draft: Draft, rng: VerifierRng, rule: str | None = None) -> Verdict:
    """Verify a draft with ``rule``, a spec as of ``rule_of``; None is the default.

    If all rows are greedy (``target.p`` is None), every rule but relaxed ones reduces to greedy verification. Copied
    rows are verified by target sampling, unless the rule is lossy.

    Raises:
        LawError: the rule is not lossless for the draft's law.
    """
    spec = rule or DEFAULT
    chosen = rule_of(spec)
    p, tree = target.p, draft.tree
    if p is not None:
        check_legal(spec, draft.law)
    if tree.parents.shape[1] == 1:  # nothing was drafted
        bonus = target.best[:, 0] if p is None else rng.target(p[:, 0], 0, tree.valid[:, 0])
        return Verdict(torch.zeros_like(tree.parents), bonus)
    if not chosen.lossless and (p is not None or chosen.relaxed):
        return chosen.function(target, draft, rng)
    if p is None:
        return greedy(target.best, tree)
    verdict = chosen.function(p, draft, rng)
    if draft.copied is None or spec == DEFAULT:
        return verdict
    picked = target_sampling(p, draft, rng)
    return Verdict(
        torch.where(draft.copied[:, None], picked.path, verdict.path),
        torch.where(draft.copied, picked.bonus, verdict.bonus),
    )
