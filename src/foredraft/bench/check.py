"""Is it lossless, on this pair? Greedy texts by identity, sampled ones by the target's own law.

The truth is the model's own forward: its own attention and masks, no cache of ours, no tree, no draft.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.rng import derive_seeds, resolve_seed
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant, Throughput

ENOUGH, RARE = 50, 5.0
"""Draws after one text, and expected draws of a token, below which a law is not tested."""
LEAST = 1e-4
"""A p-value below is a failure: of ten thousand sound pairs one is blamed."""
POWER = 0.99
_ROUNDINGS = 16
"""How many roundings of the largest logit two greedy candidates may be apart and still count as tied."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where speculation first said something else than plain decoding did: text, place, and how much better the model
    itself finds the better of the two (in logits)."""

    text: int
    place: int
    gap: float
    tied: bool


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """Greedy texts with speculation against those without it. ``exact``: in exact mode, which excuses nothing."""

    texts: int
    tokens: int
    differences: tuple[Difference, ...]
    exact: bool

    @property
    def passed(self) -> bool:
        return not self.differences if self.exact else all(each.tied for each in self.differences)


@dataclass(frozen=True, slots=True)
class SampledCheck:
    """Sampled tokens against the target's law, each given the text before it.

    ``contexts``: texts after which enough tokens were drawn to be held against a law. ``p_value``: how often a sound
    loop would look at least as odd. ``shift``: the part of every law that, moved from one token to another (or from
    one group of rare ones), would have been seen with probability ``POWER``.
    """

    tokens: int
    accepted: int
    contexts: int
    p_value: float
    shift: float

    @property
    def passed(self) -> bool:
        return self.p_value > LEAST


def draft_always(generator: Generator) -> None:
    """Draft the full length in every step, whether that pays or not: a check is of the drafts, and is reproducible."""
    policy = generator.engine.policy
    if isinstance(policy, Throughput):
        generator.engine.policy = Constant(generator.engine.drafter.needs.longest, policy.confidence)


def check_greedy(
    generator: Generator, prompts: Sequence[Any], params: SamplingParams, exact: bool = False
) -> GreedyCheck:
    """Generate each prompt with and without speculation. ``params`` must be greedy.

    Args:
        exact: the generator was made so, hence no difference is excused as a near-tie.
    """
    spoken = generator.batch(prompts, replace(params, speculate=True))
    plain = generator.batch(prompts, replace(params, speculate=False))
    differences = []
    for number, (prompt, ours, other) in enumerate(zip(prompts, spoken, plain, strict=True)):
        pairs = enumerate(zip(ours.tokens, other.tokens, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), None)
        if place is None:
            if len(ours.tokens) != len(other.tokens):  # one went on where the other stopped
                differences.append(Difference(number, min(len(ours.tokens), len(other.tokens)), math.inf, False))
            continue
        logits = _logits(generator, [*generator.encode(prompt), *ours.tokens[:place]])[0, -1]
        gap = float((logits[ours.tokens[place]] - logits[other.tokens[place]]).abs())
        rounding = torch.finfo(generator.engine.target.dtype).eps * float(logits.abs().max())
        differences.append(Difference(number, place, gap, gap <= _ROUNDINGS * rounding))
    tokens = sum(len(result.tokens) for result in spoken)
    return GreedyCheck(len(spoken), tokens, tuple(differences), exact)


def check_sampled(generator: Generator, prompts: Sequence[Any], params: SamplingParams, tokens: int) -> SampledCheck:
    """Draw about so many tokens after these prompts, and ask whether the target would have said them.

    Each prompt is continued many times by a few tokens (``params.max_new_tokens``). Given what was said before it,
    a token is a draw from the law of the model's own forward; wherever the same text came up often enough, the tokens
    after it are held against that law, and all of these chi-square statistics are added. ``params`` must sample.
    """
    each = -(-tokens // (len(prompts) * params.max_new_tokens))
    seen = accepted = contexts = 0
    found = _Sum()
    for prompt, seed in zip(prompts, derive_seeds(resolve_seed(params.seed), 1 + len(prompts))[1:], strict=True):
        own = replace(params, seed=seed)
        sequences = generator.submit([prompt], own, each)
        generator.engine.run(sequences)
        after: dict[tuple[int, ...], list[int]] = {}
        for sequence in sequences:
            seen += len(sequence.tokens)
            accepted += sequence.stats.accepted
            for place, token in enumerate(sequence.tokens):
                after.setdefault(tuple(sequence.tokens[:place]), []).append(token)
        for said, drawn in after.items():
            if len(drawn) >= ENOUGH:
                law = _law(generator, sequences[0].prompt, said, own)
                contexts += found.add(law, torch.tensor(drawn))
    if not contexts:
        raise OptionError(f"{tokens} sampled tokens are too few: no text came up {ENOUGH} times.")
    return SampledCheck(seen, accepted, contexts, found.p_value, found.shift)


class _Sum:
    """Chi-square statistics of several laws, added up."""

    def __init__(self) -> None:
        self._statistic = self._information = 0.0
        self._freedom = 0

    def add(self, law: Float[Tensor, "V"], drawn: Int[Tensor, "N"]) -> bool:
        """Whether these draws can be held against this law: it has at least two cells of some size.

        Tokens that are expected less than ``RARE`` times are one cell. A token that the law excludes is as odd as can
        be, whatever the cells.
        """
        expected = law * len(drawn)
        counts = drawn.bincount(minlength=len(law)).double()
        excluded = float(counts[law == 0].sum()) > 0
        if excluded:
            self._statistic = math.inf
        common = expected >= RARE
        wanted = torch.cat([expected[common], expected[~common].sum()[None]])
        seen = torch.cat([counts[common], counts[~common].sum()[None]])
        if float(wanted[-1]) < RARE:  # too small a cell by itself goes to the smallest of the others
            if len(wanted) < 3:
                return excluded
            smallest = int(wanted[:-1].argmin())
            wanted[smallest] += wanted[-1]
            seen[smallest] += seen[-1]
            wanted, seen = wanted[:-1], seen[:-1]
        if len(wanted) < 2:
            return excluded
        self._statistic += float(((seen - wanted) ** 2 / wanted).sum())
        self._freedom += len(wanted) - 1
        # a shift d of the law from one typical cell to another adds 2 (n d)^2 / (n / K)
        self._information += 2 * len(drawn) * len(wanted)
        return True

    @property
    def p_value(self) -> float:
        if math.isinf(self._statistic):
            return 0.0
        return tail(self._statistic, self._freedom)

    @property
    def shift(self) -> float:
        """See ``SampledCheck``; all of it where there was nothing to see a shift in."""
        if not self._freedom:
            return 1.0
        return min(1.0, math.sqrt(needed(self._freedom) / self._information))


@torch.inference_mode()
def _logits(generator: Generator, text: Sequence[int]) -> Float[Tensor, "1 1 V"]:
    """The model's own logits after this text."""
    target = generator.engine.target
    return target.stock_logits(torch.tensor([text], device=target.device))[:, -1:].cpu()


def _law(
    generator: Generator, prompt: Sequence[int], said: Sequence[int], params: SamplingParams
) -> Float[Tensor, "V"]:
    """The law that the token after these should have been drawn from."""
    ends = generator.eos_token_ids if params.eos_token_id is None else params.eos_token_id
    warp = Warp.of(
        [params],
        vocab_size=generator.engine.target.vocab_size,
        eos_token_ids=[ends],
        prompt_lengths=[len(prompt)],
        device="cpu",
    )
    text = [*prompt, *said]
    history = torch.tensor([text])
    paths = Paths(history, torch.tensor([len(text)]), TokenTree.root(history[:, -1]))
    return warp.law(_logits(generator, text).double(), paths)[0, 0]


def tail(statistic: float, freedom: int) -> float:
    """The chance that a chi-square variable is larger."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def needed(freedom: int) -> float:
    """The noncentrality that is seen, at ``LEAST``, with probability ``POWER``.

    The tail of a noncentral chi-square variable is a Poisson mixture of central ones.
    """
    wide = 100.0 + 20 * freedom
    limit = _root(lambda x: LEAST - tail(x, freedom), 0.0, wide)
    return _root(lambda size: _noncentral_tail(limit, freedom, size) - POWER, 0.0, wide)


def _noncentral_tail(limit: float, freedom: int, size: float) -> float:
    mean = max(size / 2, 1e-12)
    count = torch.arange(0, int(mean + 12 * math.sqrt(mean) + 40), dtype=torch.float64)
    weights = (count * math.log(mean) - mean - torch.lgamma(count + 1)).exp()
    halves = freedom / 2 + count
    return float((weights * torch.special.gammaincc(halves, torch.full_like(halves, limit / 2))).sum())


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
