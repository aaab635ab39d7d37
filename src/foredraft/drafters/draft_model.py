"""A small model drafts: speculative sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

As a chain it draws k tokens from its own law q. As a tree it draws a few children a node without replacement
(RSD-C, arXiv:2402.14160), level by level. Greedy rows get its likeliest tokens, which are picked, not drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Needs, Plan, Rewindable, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.noise import Stream
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.warp import Paths
from foredraft.drafters.chain import draw_chain
from foredraft.drafters.grow import Levels, draw_siblings, likeliest, proper
from foredraft.drafters.reader import Reader
from foredraft.drafters.supplies import Supplies
from foredraft.model.causal import CausalLM


@dataclass(frozen=True, slots=True)
class Options:
    """``num_assistant_tokens``, its schedule and the threshold mean what they mean in transformers.

    num_assistant_tokens: the longest path.
    num_assistant_tokens_schedule: constant; heuristic, transformers' up and down; cost, what the measured costs and
        the acceptance so far make best; or auto, cost where texts cannot depend on it and constant elsewhere.
    assistant_confidence_threshold: a chain ends after its first token that the draft gives less probability; that
        token is kept. 0 never ends one.
    branching: children of a node by level, for instance 4x2x1; None drafts a chain.
    """

    num_assistant_tokens: int = 8
    num_assistant_tokens_schedule: str = "auto"
    assistant_confidence_threshold: float = 0.4
    branching: tuple[int, ...] | None = None

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.CHAIN if self.branching is None else Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        if self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")
        if self.branching is not None and (not self.branching or min(self.branching) < 1):
            raise OptionError("branching must be whole numbers, 1 or more, one a level, such as 4x2x1.")


@final
class DraftModel(Rewindable):
    """Drafts with a model that reads each text beside the target; see ``Reader``.

    Args:
        model: the draft.
        vocab_size: of the target. The draft's may be narrower or wider, as padded vocabularies are.
    """

    def __init__(self, options: Options, model: CausalLM, vocab_size: int) -> None:
        self._options = options
        self._reader = Reader(model, vocab_size)
        self.needs = Needs(max_nodes=_most_nodes(options), max_depth=_longest(options))

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._reader.admit(row)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None: ...

    def rewind(self, row: int, length: int) -> None:
        self._reader.rewind(row, length)

    def release(self, row: int) -> None:
        self._reader.release(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._reader.within_context(view, plan)
        depth = min(plan.length, _longest(self._options))
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        logits = self._reader.read(view, self.needs.max_nodes)
        branching = self._options.branching
        if branching is None:
            return draw_chain(view, plan, depth, logits, partial(self._reader.read_on, view))
        return self._tree(view, plan, branching[:depth], logits)

    def _tree(self, view: View, plan: Plan, branching: tuple[int, ...], logits: Float[Tensor, "B 1 V"]) -> Draft:
        """Grow level by level. A sampled row draws siblings without replacement, a greedy one takes the likeliest."""
        levels = Levels(branching)
        rows, device = len(view.rows), view.lengths.device
        allowed = torch.tensor(plan.lengths, device=device)[:, None, None]
        tree = TokenTree.root(view.roots)
        laws = [logits.new_zeros(logits.shape, dtype=torch.float32)]
        for level, width in enumerate(branching, start=1):
            begin, end, after = levels.starts[level - 1], levels.starts[level], levels.starts[level + 1]
            paths = Paths(view.history, view.lengths, tree, start=begin)
            if view.warp.greedy:
                tokens, exist = likeliest(view.warp.scores(logits, paths), width)
            else:
                index = torch.arange(end, after, device=device).view(1, end - begin, width).expand(rows, -1, -1)
                drawn = draw_siblings(proper(view.warp.law(logits, paths)), view.noise.uniform(Stream.DRAFT, index))
                tokens, exist = drawn.tokens, drawn.exist
                laws.append(drawn.laws.flatten(1, 2))
            exist = exist & (allowed >= level) & tree.valid[:, begin:, None]
            above = torch.tensor(levels.parents(level), device=device).expand(rows, -1)
            parents = torch.where(exist.flatten(1), above, PAD)
            tree = TokenTree(
                torch.cat([tree.tokens, tokens.flatten(1)], 1), torch.cat([tree.parents, parents], 1), depth=level
            )
            if level < len(branching):
                logits = self._reader.read_level(view, tree, end)
        if view.warp.greedy:
            return Draft(tree, Law.FIXED)
        return Draft(tree, Law.WITHOUT_REPLACEMENT, torch.cat(laws, 1))


def _most_nodes(options: Options) -> int:
    return options.num_assistant_tokens if options.branching is None else Levels(options.branching).nodes


def _longest(options: Options) -> int:
    return options.num_assistant_tokens if options.branching is None else len(options.branching)


def build(options: Options, supplies: Supplies) -> DraftModel:
    """draft_model:PATH"""
    return DraftModel(options, supplies.model(supplies.path), supplies.place.target.vocab_size)
