"""The law of whole outputs under a grammar: that of constrained plain decoding, by enumeration and chi-square.

As in ``test_law.py``, five tokens, at most three of them in a text, and a draft that ranks them in reverse. Drafts
are not constrained, so most of their tokens are illegal.
"""

import functools
import itertools
import re
from collections import Counter

import pytest
import torch

import laws
import tiny
from dialects import toy
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.grammar import Grammar
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree

LETTERS = ["a", "b", "c", "ab", "."]
EOS = 4
PATTERN = "(ab|ca|b)*c?b?"
LEAST = 1e-3
Text = tuple[int, ...]


@functools.cache
def matching() -> frozenset[str]:
    every = ("".join(letters) for length in range(9) for letters in itertools.product("abc", repeat=length))
    return frozenset(text for text in every if re.fullmatch(PATTERN, text))


@functools.cache
def legal(text: str) -> list[bool]:
    """The tokens that may follow, from Python's own regular expressions."""
    return [*(any(each.startswith(text + letter) for each in matching()) for letter in LETTERS[:4]), text in matching()]


def params(setting: str, seed: int) -> SamplingParams:
    grammar = Grammar.regex(PATTERN)
    return SamplingParams(max_new_tokens=3, seed=seed, eos_token_id=EOS, grammar=grammar, **laws.SETTINGS[setting])


@functools.cache
@torch.inference_mode()
def law(setting: str) -> dict[Text, float]:
    """The probability of each text: stock logits, -inf at illegal tokens, one warp."""
    found: dict[Text, float] = {}
    open_: list[tuple[Text, float]] = [((), 1.0)]
    own = params(setting, 0)
    while open_:
        tokens, weight = open_.pop()
        if len(tokens) == 3 or EOS in tokens:
            found[tokens] = weight
            continue
        history = torch.tensor([[*laws.PROMPT, *tokens]])
        logits = laws.pair()[0].stock_logits(history)[:, -1:].double()
        allowed = torch.tensor(legal("".join(LETTERS[token] for token in tokens)))
        warp = tiny.warp([own], laws.VOCAB, [len(laws.PROMPT)])
        paths = Paths(history, torch.tensor([history.shape[1]]), TokenTree.root(history[:, -1]))
        p = warp(logits.masked_fill(~allowed, -torch.inf), paths).p
        assert p is not None
        open_ += [((*tokens, token), weight * float(p[0, 0, token])) for token in range(5) if p[0, 0, token] > 0]
    return found


def test_the_law_is_one_of_its_own():
    constrained, free = law("temperature"), laws.law("temperature")
    assert sum(constrained.values()) == pytest.approx(1.0)
    assert len(constrained) > 15
    assert sum(float(free[text]) for text in constrained if len(text) == 3) < 0.8, "the grammar forbids a lot"


def p_value(texts: list[Text], setting: str) -> float:
    wanted, counts = law(setting), Counter(texts)
    if not counts.keys() <= wanted.keys():
        return 0.0
    cells = sorted(wanted)
    joint = torch.tensor([wanted[cell] for cell in cells], dtype=torch.float64)
    return laws.p_value(torch.tensor([counts[cell] for cell in cells]), joint)


def sampled(name: str, setting: str, count: int, rule: str | None = None) -> tuple[list[Text], int, int]:
    """Texts of so many requests, drafted and accepted tokens."""
    g = laws.generator(name, rule, toy(LETTERS))
    results = [
        result
        for seed in derive_seeds(1 + len(name), -(-count // laws.ROWS))
        for result in g.generate([laws.PROMPT], params(setting, seed), num_return_sequences=min(count, laws.ROWS))
    ]
    drafted, accepted = (sum(getattr(result.stats, what) for result in results) for what in ("drafted", "accepted"))
    return [tuple(result.tokens) for result in results], drafted, accepted


TABLE = [
    *[(name, setting, None) for name in ("chain", "tree", "lookup tree") for setting in laws.SETTINGS],
    *[(name, "temperature", None) for name in ("none", "unsure chain", "lookup", "sequoia", "specinfer", "opt_tree")],
    *[(name, "temperature", None) for name in ("eagle1", "eagle2", "eagle3", "medusa", "hydra")],
    *[(name, "temperature", None) for name in ("lookahead", "layer_skip", "cascade", "relay", "triforce", "tli")],
    *[(name, "history", None) for name in ("eagle1", "sequoia", "specinfer apart", "cascade")],
    *[("chain", "temperature", rule) for rule in ("token", "recursive", "traversal", "target_sampling")],
    *[("tree", "temperature", rule) for rule in ("recursive", "target_sampling")],
]
"""Drafters, settings and verification rules: picked and drawn, chains and trees, nested ones."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting", "rule"), TABLE)
def test_texts_follow_the_constrained_law(name: str, setting: str, rule: str | None):
    texts, drafted, accepted = sampled(name, setting, 5 * laws.ROWS, rule)
    if name != "none":
        assert 0 < accepted < drafted
    assert p_value(texts, setting) > LEAST


def test_a_few_texts_follow_the_constrained_law():
    texts, _, accepted = sampled("tree", "temperature", laws.ROWS)
    assert accepted
    assert p_value(texts, "temperature") > LEAST
    assert p_value(texts, "cutoffs") < 1e-9, "the test has power"
