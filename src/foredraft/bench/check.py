"""Is it lossless, on this pair? Greedy texts by identity, sampled ones by the target's own law.

The truth is the model's own forward: its own attention and masks, no cache of ours, no tree, no draft.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.noise import derive_seeds
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.core.warp import Paths, Warp
from foredraft.engine.generate import Generator

BINS = 20
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

    ``p_value``: how often a sound loop would look at least as odd. ``shift``: the part of the law that, moved from one
    twentieth to another, would have been seen with probability ``POWER``.
    """

    tokens: int
    accepted: int
    p_value: float
    shift: float

    @property
    def passed(self) -> bool:
        return self.p_value > LEAST


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
        logits = _logits(generator, generator.encode(prompt), ours.tokens[: place + 1])[0, -1]
        gap = float((logits[ours.tokens[place]] - logits[other.tokens[place]]).abs())
        rounding = torch.finfo(generator.engine.target.dtype).eps * float(logits.abs().max())
        differences.append(Difference(number, place, gap, gap <= _ROUNDINGS * rounding))
    tokens = sum(len(result.tokens) for result in spoken)
    return GreedyCheck(len(spoken), tokens, tuple(differences), exact)


def check_sampled(generator: Generator, prompts: Sequence[Any], params: SamplingParams, tokens: int) -> SampledCheck:
    """Sample about so many tokens after these prompts, and ask whether the target would have said them.

    Each token is placed in the target's law given its own prefix: u is the mass of the tokens before it, in some order,
    plus a random part of its own. Under the true law every u is uniform on [0, 1] and independent of the others
    (Rosenblatt, 1952), whatever the contexts are, so all of them share one chi-square test; two orders of the
    tokens, likeliest first and by id, look at different faults. ``params`` must sample.
    """
    tally = torch.zeros(2, BINS, dtype=torch.long)
    seen = accepted = 0
    coins = torch.Generator().manual_seed(params.seed)
    seeds = iter(derive_seeds(params.seed, 1 + tokens))
    while seen < tokens:
        sequences = [generator.submit([prompt], replace(params, seed=next(seeds)))[0] for prompt in prompts]
        generator.engine.run(sequences)
        for sequence in sequences:
            law = _law(generator, sequence.prompt, sequence.tokens, sequence.params)
            said = torch.tensor(sequence.tokens)
            share = torch.rand(len(said), generator=coins, dtype=torch.float64)
            for order, places in enumerate((_by_chance(law, said, share), _by_id(law, said, share))):
                tally[order] += (places * BINS).long().clamp(0, BINS - 1).bincount(minlength=BINS)
            seen += len(said)
            accepted += sequence.stats.accepted
    odd = max(_statistic(counts) for counts in tally)
    p_value = min(1.0, 2 * tail(odd, BINS - 1))  # two tests
    return SampledCheck(seen, accepted, p_value, seen_shift(seen))


def _by_chance(law: Float[Tensor, "N V"], said: Int[Tensor, "N"], share: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Where each token stands, the likeliest first; of equal ones, the smaller id."""
    own = law.gather(1, said[:, None])
    ids = torch.arange(law.shape[1])
    before = (law > own) | ((law == own) & (ids < said[:, None]))
    return (law * before).sum(1) + share * own[:, 0]


def _by_id(law: Float[Tensor, "N V"], said: Int[Tensor, "N"], share: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Where each token stands in an order that has nothing to do with the law: its id, shuffled once."""
    order = torch.randperm(law.shape[1], generator=torch.Generator().manual_seed(1))
    before = order < order[said][:, None]
    return (law * before).sum(1) + share * law.gather(1, said[:, None])[:, 0]


@torch.inference_mode()
def _logits(generator: Generator, prompt: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "1 N V"]:
    """The model's own logits before each of these new tokens."""
    target = generator.engine.target
    text = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    return target.stock_logits(text)[:, len(prompt) - 1 :].cpu()


def _law(
    generator: Generator, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> Float[Tensor, "N V"]:
    """The law that each of these new tokens should have been drawn from."""
    logits = _logits(generator, prompt, tokens).double()
    ends = generator.eos_token_ids if params.eos_token_id is None else params.eos_token_id
    warp = Warp.of(
        [params],
        vocab_size=generator.engine.target.vocab_size,
        eos_token_ids=[ends],
        prompt_lengths=[len(prompt)],
        device="cpu",
    )
    history = torch.tensor([list(prompt)])
    tree = TokenTree.chain(torch.tensor([[prompt[-1], *tokens[:-1]]]))
    return warp.law(logits, Paths(history, torch.tensor([len(prompt)]), tree))[0]


def _statistic(counts: Int[Tensor, "K"]) -> float:
    wanted = counts.sum() / len(counts)
    return float(((counts - wanted) ** 2 / wanted).sum())


def tail(statistic: float, freedom: int) -> float:
    """The chance that a chi-square variable is larger."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def seen_shift(tokens: int) -> float:
    """The part of the law that, moved from one bin to another, so many tokens show with probability ``POWER``.

    The statistic then is a noncentral chi-square one with 2 n K d^2; its tail is a Poisson mixture of central ones.
    """
    limit = _root(lambda x: LEAST / 2 - tail(x, BINS - 1), 0.0, 1000.0)
    needed = _root(lambda size: _noncentral_tail(limit, size) - POWER, 0.0, 1000.0)
    return min(1.0 / BINS, math.sqrt(needed / (2 * tokens * BINS))) if tokens else 1.0


def _noncentral_tail(limit: float, size: float) -> float:
    count = torch.arange(0, 1200, dtype=torch.float64)
    mean = max(size / 2, 1e-12)
    weights = (count * math.log(mean) - mean - torch.lgamma(count + 1)).exp()
    freedom = (BINS - 1) / 2 + count
    return float((weights * torch.special.gammaincc(freedom, torch.full_like(freedom, limit / 2))).sum())


def _root(rising: Any, low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
