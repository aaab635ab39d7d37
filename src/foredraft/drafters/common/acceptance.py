"""Acceptance by rank: how often the j-th child is accepted, given that its parent is. Sequoia's trees need it.

Measured on outputs of the target: at each token, a tree of one level with ``width`` children is drawn and its
acceptance probabilities are computed instead of sampled, so few samples are enough.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.core.errors import OptionError
from foredraft.core.rng import Noise, Stream, derive_seeds, draw, draw_distinct, exponentials, race_size
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.core.tree_optimizer import check_acceptance
from foredraft.core.verify.parts import ratio, residual
from foredraft.drafters.common.draft_runner import DraftRunner, Forwards
from foredraft.drafters.common.tree_ops import likeliest, normalize_or_uniform, without_earlier
from foredraft.model.base import TargetModel

SAMPLES, PREFIX, TOKENS = 16, 8, 40
"""Without prompts: number of samples, tokens drawn at temperature 1 to make them differ, and tokens measured."""
WIDTH = 16
_SEED = 2402_12374


@torch.inference_mode()
def measure_acceptance(
    target: TargetModel,
    draft: TargetModel,
    temperature: float = 0.0,
    prompts: Sequence[Sequence[int]] | None = None,
    width: int = WIDTH,
    tokens: int = TOKENS,
) -> tuple[float, ...]:
    """The probability that the j-th child in draw order is accepted, given that its parent is: a_1, a_2, ...

    Greedy children are the draft's likeliest tokens; sampled children are drawn without replacement, and their
    acceptance probabilities are averaged, not the outcomes. Deterministic.

    Args:
        temperature: of target and draft; 0 is greedy.
        prompts: token ids that the target continues. None: ``SAMPLES`` samples that begin with the target's first
            token and a few tokens drawn at temperature 1.
        tokens: the number of tokens measured in each sample.

    Returns:
        ``width`` numbers (at most the vocabulary size), whose sum is at most 1.

    Raises:
        OptionError: no prompts, an empty prompt, or one that leaves no room in the context of either model.
    """
    prefix = PREFIX if prompts is None else 0
    starts = [[target.first_token]] * SAMPLES if prompts is None else [list(prompt) for prompt in prompts]
    longest = min(target.max_length, draft.max_length) - 1
    tokens = min(tokens, longest - max(map(len, starts), default=longest) - prefix)
    if tokens < 1 or not all(starts):
        raise OptionError("Measuring acceptance needs prompts of one token or more that leave room in the context.")
    samples = _Samples(target, starts, prefix + tokens)
    target_runner, draft_runner = DraftRunner(target, target.vocab_size), DraftRunner(draft, target.vocab_size)
    for row in samples.rows:
        target_runner.admit(row)
        draft_runner.admit(row)
    counts = torch.zeros(min(width, target.vocab_size), dtype=torch.float64, device=target.device)
    for place in range(prefix + tokens):
        view = samples.view(1.0 if place < prefix else temperature)
        logits = target_runner.draft("root", view, 0, _at_root)
        if place >= prefix:
            counts += accepted_ranks(view, logits, draft_runner.draft("root", view, 0, _at_root), len(counts))
        samples.append(view, view.warp.law(logits, _at_roots(view))[:, 0])
    return tuple((counts / (len(starts) * tokens)).tolist())


def accepted_ranks(
    view: View, target: Float[Tensor, "B 1 V"], draft: Float[Tensor, "B 1 V"], width: int
) -> Float[Tensor, "W"]:
    """The acceptance probability of each child of the roots, summed over the rows, from both models' logits."""
    if view.warp.greedy:
        best = view.warp(target, _at_roots(view)).best
        drafted, exist = likeliest(view.warp.scores(draft, _at_roots(view)), width)
        return ((drafted[:, 0] == best) & exist[:, 0]).sum(0).double()
    p = view.warp.law(target, _at_roots(view))[:, 0]
    law = normalize_or_uniform(view.warp.law(draft, _at_roots(view)))
    bits = view.noise.bits(Stream.DRAFT, torch.zeros_like(view.lengths)[:, None])
    drawn = draw_distinct(law, exponentials(bits, width * race_size(law.shape[-1])), width)
    earlier = torch.ones(width, width, dtype=law.dtype, device=law.device).tril(-1)
    tokens, chances = (each.expand(-1, width, -1) for each in drawn)
    laws = without_earlier(law.repeat(1, width, 1), tokens, chances * earlier)
    reached = torch.ones_like(p[:, 0])
    found = []
    for rank in range(width):  # recursive rejection, with probabilities instead of outcomes
        token, q, exist = tokens[:, 0, rank, None], laws[:, rank], chances[:, 0, rank] > 0
        chance = ratio(p.gather(1, token), q.gather(1, token))[:, 0].clamp(max=1.0) * exist
        found.append((reached * chance).sum().double())
        reached = reached * (1.0 - chance)
        p = residual(p, q, exist)
    return torch.stack(found)


def as_text(acceptance: Sequence[float]) -> str:
    """Format as the option is written: 0.62/0.14/0.06."""
    return "/".join(f"{chance:.4g}" for chance in acceptance)


def read_acceptance(text: str) -> tuple[float, ...]:
    """Parse the format of ``as_text``.

    Raises:
        OptionError: not numbers separated by slashes, or not valid acceptance by rank.
    """
    try:
        acceptance = tuple(float(part) for part in text.split("/"))
    except ValueError:
        acceptance = ()
    check_acceptance(acceptance)
    return acceptance


class _Samples:
    """Growing outputs of the target, as views."""

    def __init__(self, target: TargetModel, starts: Sequence[Sequence[int]], tokens: int) -> None:
        self.rows = tuple(range(len(starts)))
        self._extents = [len(start) for start in starts]
        self._vocab_size = target.vocab_size
        self._device = target.device
        width = max(self._extents) + tokens
        padded = [[*start, *[0] * (width - len(start))] for start in starts]
        self._history = torch.tensor(padded, dtype=torch.long, device=self._device)
        self._seeds = torch.tensor(derive_seeds(_SEED, len(starts)), device=self._device)
        self._warps: dict[float, Warp] = {}

    def view(self, temperature: float) -> View:
        """The samples so far, with the warp of a temperature."""
        count = len(self.rows)
        if temperature not in self._warps:
            self._warps[temperature] = Warp.of(
                [SamplingParams(temperature=temperature)] * count,
                vocab_size=self._vocab_size,
                eos_token_ids=[()] * count,
                prompt_lengths=self._extents,
                device=self._device,
            )
        lengths = torch.tensor(self._extents, device=self._device)
        noise = Noise(self._seeds, lengths)
        return View(self.rows, self._history, lengths, tuple(self._extents), self._warps[temperature], noise)

    def append(self, view: View, law: Float[Tensor, "B V"]) -> None:
        """Draw and append the next token of each sample."""
        token = draw(law, view.noise.bits(Stream.TARGET, torch.zeros_like(view.lengths)))
        self._history.scatter_(1, view.lengths[:, None], token[:, None])
        self._extents = [extent + 1 for extent in self._extents]


def _at_root(view: View, forwards: Forwards) -> Float[Tensor, "B 1 V"]:
    return forwards.root()


def _at_roots(view: View) -> Paths:
    return Paths(view.history, view.lengths, TokenTree.root(view.roots))
