"""Sequoia (Chen et al., arXiv:2402.12374): the best tree for given acceptance rates by rank and forward costs.

Acceptance by rank is measured once. A dynamic programme finds the best tree of each size, and measured costs decide the
size. Children are the best guesses in order; with a ratio rule they are drawn without replacement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.rng import Noise, RandomStream, derive_seeds, draw, first
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.core.tree_optimizer import OptimalTrees, best_size, check_acceptance
from foredraft.drafters.common.model_trees import ModelTreeDrafter, RunnerTreeBuilder
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.draft_runner import DraftRunner, Forwards
from foredraft.drafters.trees.candidates import SHARPEST
from foredraft.drafters.trees.shapes import Template, TreeLimits, TreeShape
from foredraft.drafters.trees.static import build_static_tree
from foredraft.engine.cost_model import CostTable, measure_costs
from foredraft.engine.fitting import SIZES
from foredraft.model.base import TargetModel
from foredraft.model.ops import TORCH

NODES, DEPTH = 63, 10
"""Largest tree if the size is chosen; with the root its node count is one of ``fitting.SIZES``."""
SAMPLES, PREFIX, TOKENS = 16, 8, 40
"""Without prompts: number of samples, tokens drawn at temperature 1 to make them differ, and tokens measured."""
WIDTH, DRAWS = 16, 8
_SEED = 2402_12374


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Size of the tree and acceptance rates."""

    nodes: int | None = option(None, "drafted nodes; by default chosen by measured costs.", unset="by cost")
    depth: int | None = option(None, "levels of drafted nodes; by default chosen by measured costs.", unset="by cost")
    acceptance: str | None = option(
        None,
        "acceptance rates of the first, second, ... child, such as 0.62/0.14/0.06. By default measured when first "
        "needed, on outputs of the target, separately for greedy and sampled rows (temperature 1).",
        unset="measured",
    )
    sampled_acceptance: str | None = option(
        None, "the same for sampled rows, if it differs from acceptance.", unset="as acceptance"
    )
    law = Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        check_bounds(self, least={"nodes": 1, "depth": 1})
        for text in (self.acceptance, self.sampled_acceptance):
            if text is not None:
                read_acceptance(text)


class Planner:
    """Chooses the tree shapes for greedy and for sampled rows, each once at first use."""

    def __init__(self, options: Options, target: TargetModel, draft: TargetModel) -> None:
        self._options = options
        self._target = target
        self._draft = draft
        self._shapes: dict[bool, TreeShape] = {}

    def shape(self, greedy: bool) -> TreeShape:
        """The best tree for greedy or for sampled rows; the first call measures acceptance and costs."""
        if greedy not in self._shapes:
            template = self._template(greedy)
            with torch.inference_mode(False):  # compilers reject tensors of inference mode
                self._shapes[greedy] = TreeShape.of(template, self._draft.device)
        return self._shapes[greedy]

    def acceptance(self, greedy: bool) -> tuple[float, ...]:
        """Acceptance by rank, as given or measured."""
        given = self._options.acceptance
        if not greedy:
            given = self._options.sampled_acceptance or given
        if given is not None:
            return read_acceptance(given)
        return measure_acceptance(self._target, self._draft, temperature=0.0 if greedy else 1.0)

    def _template(self, greedy: bool) -> Template:
        nodes, depth = self._options.nodes, self._options.depth
        most, deepest = nodes or NODES, depth or min(DEPTH, nodes or DEPTH)
        trees = OptimalTrees.of(self.acceptance(greedy), most, deepest)
        if nodes is None or depth is None:
            sizes = [nodes] if nodes is not None else [size - 1 for size in SIZES if 1 < size <= 1 + NODES]
            depths = [depth] if depth is not None else list(range(1, deepest + 1))
            most, deepest, _ = best_size(trees, sizes, depths, *self._costs())
        return Template(trees.paths(most, deepest) or ((0,),))  # at least one token, even if none is ever accepted

    def _costs(self) -> tuple[CostTable, CostTable]:
        """Costs of forwards of the draft and of the target by number of nodes."""
        return measure_costs(self._draft, longest=1 + NODES), measure_costs(self._target, longest=1 + NODES)


@final
class Sequoia(ModelTreeDrafter):
    """Drafts Sequoia trees with a small model; see ``DraftRunner``.

    Args:
        model, target: the draft model and the target.
        vocab_size: width of the laws.
    """

    def __init__(self, options: Options, model: TargetModel, target: TargetModel, vocab_size: int) -> None:
        self.planner = Planner(options, target, model)
        nodes = options.nodes or NODES
        needs = Needs(max_nodes=nodes, max_depth=options.depth or min(DEPTH, nodes), scored=True, ahead=True)
        super().__init__(needs, DraftRunner(model, vocab_size))

    def limits(self, view: View) -> TreeLimits:
        return self.planner.shape(view.warp.greedy).limits

    def tree(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        levels = self.planner.shape(builder.view.warp.greedy).levels
        return build_static_tree(builder, levels, allowed, limits)


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

    Measured on outputs of the target: at each token, the draft ranks ``width`` children, and the target takes its
    token. For sampled rows both do it ``DRAWS`` times with other noise, so few samples are enough. Deterministic.

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
    from_target, from_draft = target_runner.drafting("root", _at_root), draft_runner.drafting("root", _at_root)
    for row in samples.rows:
        for runner in (target_runner, draft_runner):
            runner.admit(row, samples.prompt(row), {})
    counts = torch.zeros(min(width, target.vocab_size), dtype=torch.float64, device=target.device)
    for place in range(prefix + tokens):
        view = samples.view(1.0 if place < prefix else temperature)
        logits = target_runner.draft(from_target, view, 0)
        if place >= prefix:
            counts += accepted_ranks(view, logits, draft_runner.draft(from_draft, view, 0), len(counts))
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
        children, shares = TORCH.rank(guessed, width, warp, times, SHARPEST)
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
        self._host_lengths = [len(start) for start in starts]
        self._vocab_size = target.vocab_size
        self._device = target.device
        width = max(self._host_lengths) + tokens
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
                prompt_lengths=self._host_lengths,
                device=self._device,
            )
        lengths = torch.tensor(self._host_lengths, device=self._device)
        noise = Noise(self._seeds, lengths)
        return View(self.rows, self._history, lengths, tuple(self._host_lengths), self._warps[temperature], noise)

    def prompt(self, row: int) -> Int[Tensor, "T"]:
        """The tokens before a sample's root."""
        return self._history[row, : self._host_lengths[row] - 1]

    def append(self, view: View, law: Float[Tensor, "B V"]) -> None:
        """Draw and append the next token of each sample."""
        token = draw(law, view.noise.bits(RandomStream.TARGET, torch.zeros_like(view.lengths)))
        self._history.scatter_(1, view.lengths[:, None], token[:, None])
        self._host_lengths = [length + 1 for length in self._host_lengths]


def _at_root(view: View, forwards: Forwards) -> Float[Tensor, "B 1 V"]:
    return forwards.root()


def _at_roots(view: View) -> Paths:
    return Paths(view.history, view.lengths, TokenTree.root(view.roots))


def build(options: Options, context: BuildContext) -> Sequoia:
    """sequoia:PATH"""
    return Sequoia(options, context.model(context.path), context.target, context.vocab_size)
