"""How often the j-th child is the one accepted, once its parent is: what Sequoia's trees are made from.

It is measured where it will be used, on texts that the target itself says: at each of their tokens stands a tree of one
level and ``width`` children, and its verification is worked out rather than tossed, so few texts are enough.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.core.errors import OptionError
from foredraft.core.rng import Noise, Stream, derive_seeds, draw
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.core.tree_optimizer import check_acceptance
from foredraft.core.verify.parts import of_token, ratio, residual
from foredraft.drafters.common.draft_runner import DraftRunner
from foredraft.drafters.common.tree_ops import draw_siblings, likeliest, normalize_or_uniform
from foredraft.model.base import TargetModel

TEXTS, BEGINNING, TOKENS = 16, 8, 40
"""Without prompts: so many texts, that many tokens at temperature 1 to tell them apart, and those that are counted."""
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
    """The probability that the j-th child in draw order is the accepted one, given that its parent is: a_1, a_2, ...

    Greedy children are the likeliest tokens of the draft; of sampled ones, drawn without replacement, the chances of
    acceptance are averaged, not their outcomes. Deterministic; nothing of it depends on time.

    Args:
        temperature: of target and draft; 0 is greedy.
        prompts: token ids of texts; the target goes on from each. None: it begins ``TEXTS`` texts itself, at its token
            for beginnings, with a few tokens drawn at temperature 1.
        tokens: how many of each text are looked at.

    Returns:
        ``width`` numbers, or as many as the vocabulary has tokens; they sum to 1 or less.

    Raises:
        OptionError: no prompts, an empty one, or one that leaves no room in the context of either model.
    """
    beginning = BEGINNING if prompts is None else 0
    begun = [[target.first_token]] * TEXTS if prompts is None else [list(prompt) for prompt in prompts]
    longest = min(target.max_length, draft.max_length) - 1
    tokens = min(tokens, longest - max(map(len, begun), default=longest) - beginning)
    if tokens < 1 or not all(begun):
        raise OptionError("Acceptance is measured after prompts of one token or more that leave room in the context.")
    texts = _Texts(target, begun, beginning + tokens)
    reader, words = DraftRunner(target, target.vocab_size), DraftRunner(draft, target.vocab_size)
    for row in texts.rows:
        reader.admit(row)
        words.admit(row)
    counts = torch.zeros(min(width, target.vocab_size), dtype=torch.float64, device=target.device)
    for place in range(beginning + tokens):
        view = texts.view(1.0 if place < beginning else temperature)
        logits = reader.read(view, 0)
        if place >= beginning:
            counts += accepted_ranks(view, logits, words.read(view, 0), len(counts))
        texts.say(view, view.warp.law(logits, _at_roots(view))[:, 0])
    return tuple((counts / (len(begun) * tokens)).tolist())


def accepted_ranks(
    view: View, target: Float[Tensor, "B 1 V"], draft: Float[Tensor, "B 1 V"], width: int
) -> Float[Tensor, "W"]:
    """The chance of each child of the roots to be the accepted one, summed over the rows, from both models' logits."""
    if view.warp.greedy:
        said = view.warp(target, _at_roots(view)).best
        drafted, exist = likeliest(view.warp.scores(draft, _at_roots(view)), width)
        return ((drafted[:, 0] == said) & exist[:, 0]).sum(0).double()
    p = view.warp.law(target, _at_roots(view))[:, 0]
    index = torch.arange(1, width + 1, device=p.device).expand(len(view.rows), 1, -1)
    drawn = draw_siblings(
        normalize_or_uniform(view.warp.law(draft, _at_roots(view))), view.noise.bits(Stream.DRAFT, index)
    )
    reached = torch.ones_like(p[:, 0])
    found = []
    for rank in range(width):  # recursive rejection, each outcome by its weight
        token, q, exist = drawn.tokens[:, 0, rank], drawn.laws[:, 0, rank], drawn.exist[:, 0, rank]
        chance = ratio(of_token(p, token), of_token(q, token)).clamp(max=1.0) * exist
        found.append((reached * chance).sum().double())
        reached = reached * (1.0 - chance)
        p = residual(p, q, exist)
    return torch.stack(found)


def as_text(acceptance: Sequence[float]) -> str:
    """As the option is written: 0.62/0.14/0.06."""
    return "/".join(f"{chance:.4g}" for chance in acceptance)


def read_acceptance(text: str) -> tuple[float, ...]:
    """What ``as_text`` wrote.

    Raises:
        OptionError: no numbers with a slash between them, or none that can be acceptance by rank.
    """
    try:
        acceptance = tuple(float(part) for part in text.split("/"))
    except ValueError:
        acceptance = ()
    check_acceptance(acceptance)
    return acceptance


class _Texts:
    """Texts that are being said, as the drafters see them."""

    def __init__(self, target: TargetModel, begun: Sequence[Sequence[int]], tokens: int) -> None:
        self.rows = tuple(range(len(begun)))
        self._extents = [len(text) for text in begun]
        self._vocab_size = target.vocab_size
        self._device = target.device
        width = max(self._extents) + tokens
        padded = [[*text, *[0] * (width - len(text))] for text in begun]
        self._history = torch.tensor(padded, dtype=torch.long, device=self._device)
        self._seeds = torch.tensor(derive_seeds(_SEED, len(begun)), device=self._device)
        self._warps: dict[float, Warp] = {}

    def view(self, temperature: float) -> View:
        """The texts so far, to be continued at a temperature."""
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

    def say(self, view: View, law: Float[Tensor, "B V"]) -> None:
        """Draw the next token of each text."""
        token = draw(law, view.noise.bits(Stream.TARGET, torch.zeros_like(view.lengths)))
        self._history.scatter_(1, view.lengths[:, None], token[:, None])
        self._extents = [extent + 1 for extent in self._extents]


def _at_roots(view: View) -> Paths:
    return Paths(view.history, view.lengths, TokenTree.root(view.roots))
