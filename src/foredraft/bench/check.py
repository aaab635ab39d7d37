"""Lossless check of a target and drafter: outputs with and without speculation, and for the ratio rules sampled tokens
against the target's law.

The reference of the law is the model's stock forward: its own attention and masks, without our cache, trees or drafts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.rng import Noise, derive_seeds, resolve_seed
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant, Throughput
from foredraft.engine.request import Sequence as Request

MIN_DRAWS, MIN_EXPECTED = 50, 5.0
"""Fewest draws per context, and fewest expected draws per cell, for a chi-square test."""
SIGNIFICANCE = 1e-4
"""A p-value below this fails: one false alarm in ten thousand lossless pairs."""
POWER = 0.99
_TIE_ROUNDINGS = 16
"""Two candidates are tied if they are apart by at most this many roundings of the largest logit."""


SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.95, "top_k": 200, "repetition_penalty": 1.1},
)
"""The sampling options under which outputs with and without speculation are compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference between an output with and without speculation.

    ``output``: its index; ``place``: index of the token; ``gap``: the margin between the two tokens in the stock
    forward, by which one wins over the other: of their logits in greedy rows, else of log p minus log arrival time (see
    ``Noise.times``); ``tied``: a near-tie.
    """

    output: int
    place: int
    gap: float
    tied: bool


@dataclass(frozen=True, slots=True)
class IdentityCheck:
    """Outputs with speculation against those without; with ``exact``, near-ties fail too."""

    outputs: int
    tokens: int
    differences: tuple[Difference, ...]
    exact: bool

    @property
    def passed(self) -> bool:
        return not self.differences if self.exact else all(each.tied for each in self.differences)

    @property
    def ties(self) -> float:
        """Near-ties that were decided otherwise, by token."""
        return sum(each.tied for each in self.differences) / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class SampledCheck:
    """Chi-square test of sampled tokens against the target's law in each context.

    ``contexts``: contexts with enough draws to test. ``p_value``: probability that a lossless loop deviates at least as
    much. ``shift``: the probability mass that, moved between two cells of every law, is detected with probability
    ``POWER``.
    """

    tokens: int
    accepted: int
    contexts: int
    p_value: float
    shift: float

    @property
    def passed(self) -> bool:
        return self.p_value > SIGNIFICANCE


def draft_always(generator: Generator) -> None:
    """Draft the full length in every step, so that the check covers drafts and is reproducible."""
    policy = generator.engine.policy
    if isinstance(policy, Throughput):
        generator.engine.policy = Constant(generator.engine.drafter.needs.longest)


def check_identity(
    generator: Generator, prompts: Sequence[Any], params: SamplingParams, exact: bool = False, together: int = 0
) -> IdentityCheck:
    """Generate each prompt with and without speculation, with the same seeds.

    Args:
        exact: the generator is in exact mode, or its target gives the same bits in every forward: near-ties fail too.
        together: prompts in a batch with speculation; 0 is all. Those without are one batch.
    """
    seeds = derive_seeds(resolve_seed(params.seed), len(prompts))
    requests = list(zip(prompts, seeds, strict=True))
    plain = _run(generator, requests, replace(params, speculate=False))
    size, speculative = together or len(requests), []
    for start in range(0, len(requests), size):
        speculative += _run(generator, requests[start : start + size], replace(params, speculate=True))
    tokens = sum(len(sequence.tokens) for sequence in speculative)
    return IdentityCheck(len(speculative), tokens, differences(generator, speculative, plain), exact)


def differences(
    generator: Generator, speculative: Sequence[Request], plain: Sequence[Request]
) -> tuple[Difference, ...]:
    """The outputs that are not those of plain decoding, with the margin by which they part."""
    found = []
    for number, (ours, other) in enumerate(zip(speculative, plain, strict=True)):
        pairs = enumerate(zip(ours.tokens, other.tokens, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), None)
        if place is not None:
            found.append(_difference(generator, number, ours, (ours.tokens[place], other.tokens[place]), place))
        elif len(ours.tokens) != len(other.tokens):  # one output is a prefix of the other
            found.append(Difference(number, min(len(ours.tokens), len(other.tokens)), math.inf, False))
    return tuple(found)


def _run(generator: Generator, requests: Sequence[tuple[Any, int]], params: SamplingParams) -> list[Request]:
    """The outputs of these prompts with their seeds, in one batch."""
    sequences = [generator.submit([prompt], replace(params, seed=seed))[0] for prompt, seed in requests]
    generator.engine.run(sequences)
    return sequences


def _difference(
    generator: Generator, number: int, sequence: Request, tokens: tuple[int, int], place: int
) -> Difference:
    """How far apart two tokens are in the stock forward."""
    params, text = sequence.params, [*sequence.prompt, *sequence.tokens[:place]]
    logits = _logits(generator, text)
    if params.greedy:
        scores, heat = logits[0, -1], 1.0
    else:
        noise = Noise(torch.tensor([sequence.seed]), torch.tensor([len(text)]))
        law = _law(generator, sequence.prompt, sequence.tokens[:place], params)
        scores, heat = law.log() - noise.times(0, len(law))[0].double().log(), params.temperature
    first, second = (float(scores[token]) for token in tokens)
    gap = abs(first - second) if first != second else 0.0
    rounding = torch.finfo(generator.engine.target.dtype).eps * float(logits.abs().max()) / heat
    return Difference(number, place, gap, gap <= _TIE_ROUNDINGS * rounding)


def check_sampled(generator: Generator, prompts: Sequence[Any], params: SamplingParams, tokens: int) -> SampledCheck:
    """Sample about ``tokens`` tokens and test them against the target's law.

    Each prompt is continued many times by ``params.max_new_tokens`` tokens. Given its context, a token is a draw from
    the law of the stock forward. Each context with enough draws gives a chi-square statistic; their sum is the test.
    ``params`` must sample.

    Raises:
        OptionError: no context has enough draws.
    """
    each = -(-tokens // (len(prompts) * params.max_new_tokens))
    seen = accepted = contexts = 0
    found = _ChiSquareSum()
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
        for output, drawn in after.items():
            if len(drawn) >= MIN_DRAWS:
                law = _law(generator, sequences[0].prompt, output, own)
                contexts += found.add(law, torch.tensor(drawn))
    if not contexts:
        raise OptionError(
            f"{tokens} sampled tokens are too few: no context occurred {MIN_DRAWS} times. Raise --tokens."
        )
    return SampledCheck(seen, accepted, contexts, found.p_value, found.shift)


class _ChiSquareSum:
    """Sum of the chi-square statistics of several laws."""

    def __init__(self) -> None:
        self._statistic = self._information = 0.0
        self._freedom = 0

    def add(self, law: Float[Tensor, "V"], drawn: Int[Tensor, "N"]) -> bool:
        """Add the draws from one law; false if it has fewer than two cells and cannot be tested.

        Tokens expected fewer than ``MIN_EXPECTED`` times share one cell. A token with probability 0 fails the test.
        """
        expected = law * len(drawn)
        counts = drawn.bincount(minlength=len(law)).double()
        excluded = float(counts[law == 0].sum()) > 0
        if excluded:
            self._statistic = math.inf
        common = expected >= MIN_EXPECTED
        cells = torch.cat([expected[common], expected[~common].sum()[None]])
        seen = torch.cat([counts[common], counts[~common].sum()[None]])
        if float(cells[-1]) < MIN_EXPECTED:  # merge the rare cell into the smallest other one
            if len(cells) < 3:
                return excluded
            smallest = int(cells[:-1].argmin())
            cells[smallest] += cells[-1]
            seen[smallest] += seen[-1]
            cells, seen = cells[:-1], seen[:-1]
        if len(cells) < 2:
            return excluded
        self._statistic += float(((seen - cells) ** 2 / cells).sum())
        self._freedom += len(cells) - 1
        # a shift d of the law from one typical cell to another adds 2 (n d)^2 / (n / K)
        self._information += 2 * len(drawn) * len(cells)
        return True

    @property
    def p_value(self) -> float:
        if math.isinf(self._statistic):
            return 0.0
        return chi_square_tail(self._statistic, self._freedom)

    @property
    def shift(self) -> float:
        """See ``SampledCheck``; 1 if nothing was tested."""
        if not self._freedom:
            return 1.0
        return min(1.0, math.sqrt(detectable_noncentrality(self._freedom) / self._information))


@torch.inference_mode()
def _logits(generator: Generator, tokens: Sequence[int]) -> Float[Tensor, "1 1 V"]:
    """Logits of the stock forward after these tokens."""
    target = generator.engine.target
    return target.stock_logits(torch.tensor([tokens], device=target.device))[:, -1:].cpu()


def _law(
    generator: Generator, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Float[Tensor, "V"]:
    """The target's law of the next token after prompt and output."""
    ends = generator.eos_token_ids if params.eos_token_id is None else params.eos_token_id
    warp = Warp.of(
        [params],
        vocab_size=generator.engine.target.vocab_size,
        eos_token_ids=[ends],
        prompt_lengths=[len(prompt)],
        device="cpu",
    )
    tokens = [*prompt, *output]
    history = torch.tensor([tokens])
    paths = Paths(history, torch.tensor([len(tokens)]), TokenTree.root(history[:, -1]))
    return warp.law(_logits(generator, tokens).double(), paths)[0, 0]


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic) for chi-square X with ``freedom`` degrees of freedom."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def detectable_noncentrality(freedom: int) -> float:
    """The noncentrality that a test at level ``SIGNIFICANCE`` detects with probability ``POWER``."""
    bound = 100.0 + 20 * freedom
    limit = _root(lambda x: SIGNIFICANCE - chi_square_tail(x, freedom), 0.0, bound)
    return _root(lambda size: _noncentral_tail(limit, freedom, size) - POWER, 0.0, bound)


def _noncentral_tail(limit: float, freedom: int, size: float) -> float:
    """The tail of a noncentral chi-square variable: a Poisson mixture of central ones."""
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
