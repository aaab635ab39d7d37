"""Acceptance by rank: how often the j-th child is accepted, given that its parent is. Sequoia's trees need it.

Measured on outputs of the target: at each token, the draft ranks ``width`` children, and the target takes its token.
For sampled rows both do it ``DRAWS`` times with other noise, so few samples are enough.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.core.errors import OptionError
from foredraft.core.rng import Noise, Stream, derive_seeds, draw, first
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.core.tree_optimizer import check_acceptance
from foredraft.drafters.common.draft_runner import DraftRunner, Forwards
from foredraft.drafters.common.tree_ops import ranked
from foredraft.model.base import TargetModel

SAMPLES, PREFIX, TOKENS = 16, 8, 40
"""Without prompts: number of samples, tokens drawn at temperature 1 to make them differ, and tokens measured."""
WIDTH, DRAWS = 16, 8
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
    """The probability that the draft's j-th best guess is accepted, given that its parent is: a_1, a_2, ...

    Deterministic.

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
    """How often each child of the roots is accepted, summed over the rows, from both models' logits."""
    at, warp = _at_roots(view), view.warp
    law, guessed = warp(target, at), warp.processed(draft, at)
    found = torch.zeros(width, dtype=torch.float64, device=target.device)
    for number in range(1 if law.p is None else DRAWS):
        times = None if law.p is None else view.noise.times(number, target.shape[-1])
        token = law.best if law.p is None or times is None else first(law.p[:, 0], times)[:, None]
        children, shares = ranked(guessed, width, warp, times)
        found += ((children[:, 0] == token) & (shares[:, 0] > -torch.inf)).sum(0) / (1 if times is None else DRAWS)
    return found


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
