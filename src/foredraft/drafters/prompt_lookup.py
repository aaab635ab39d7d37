"""Prompt lookup (Saxena 2023): copies the tokens that followed an earlier occurrence of the last tokens.

Deterministic: tokens are picked (``Law.FIXED``), so lossless at every temperature. It needs no index: the longest match
at every earlier position takes a few comparisons over the whole history, on its device.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.tree import merge_paths
from foredraft.drafters.common.build_context import BuildContext
from foredraft.model.masks import extent_of


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Size of matches and copies; names as in transformers where it has them.

    prompt_lookup_num_tokens: most tokens copied from one match.
    max_matching_ngram_size: longest n-gram of last tokens to search for.
    min_matching_ngram_size: shortest n-gram of last tokens to search for.
    continuations: number of matches used as branches of a tree: the longest, of equal ones the latest.
    """

    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int = 3
    min_matching_ngram_size: int = 1
    continuations: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_matching_ngram_size <= self.max_matching_ngram_size:
            raise OptionError("min_matching_ngram_size must be at least 1 and at most max_matching_ngram_size.")
        if self.prompt_lookup_num_tokens < 1 or self.continuations < 1:
            raise OptionError("prompt_lookup_num_tokens and continuations must be 1 or more.")


@final
class PromptLookup(Rewindable):
    """Copies from the row's history; has no state."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.needs = Needs(
            max_nodes=options.continuations * options.prompt_lookup_num_tokens,
            max_depth=options.prompt_lookup_num_tokens,
            ahead=True,
        )

    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self._options.prompt_lookup_num_tokens)
        longest = min(extent_of(max(view.extents), view.history.device), view.history.shape[1])
        history = view.history[:, :longest]
        match = self._match_lengths(history, view.lengths)
        count = min(self._options.continuations, longest)
        # of equal matches the latest wins: its position breaks the tie
        place = torch.arange(longest, device=history.device)
        score = torch.where(match >= self._options.min_matching_ngram_size, match * longest + place, -1)
        best, ends = score.topk(count, dim=1)
        # past the end of the history the copy repeats itself, as if the history were periodic
        period = (view.lengths[:, None] - 1 - ends).clamp(min=1)
        index = ends[..., None] + 1 + torch.arange(depth, device=history.device) % period[..., None]
        paths = history.gather(1, index.clamp(max=longest - 1).flatten(1)).view(-1, count, depth)
        allowed = plan.on(history.device)[:, None]
        lengths = torch.where(best >= 0, allowed.clamp(max=depth), 0)
        return Draft(merge_paths(view.roots, paths, lengths).tree, Law.FIXED)

    def rewind(self, row: int, length: int) -> None: ...

    def _match_lengths(self, history: Int[Tensor, "B L"], lengths: Int[Tensor, "B"]) -> Int[Tensor, "B L"]:
        """Length of the match between the last tokens and those ending at each position, up to the longest n-gram.

        The end of the history itself does not count, nor do uncommitted tokens.
        """
        width = history.shape[1]
        place = torch.arange(width, device=history.device)
        run = place < lengths[:, None] - 1
        match = torch.zeros_like(history)
        for back in range(min(self._options.max_matching_ngram_size, width)):
            token = history.gather(1, (lengths[:, None] - 1 - back).clamp(min=0))
            shifted = history[:, : width - back] if back else history
            same = torch.nn.functional.pad(shifted == token, (back, 0)) & (lengths[:, None] > back)
            run = run & same
            match = match + run
        return match


def build(options: Options, context: BuildContext) -> PromptLookup:
    """prompt_lookup"""
    return PromptLookup(options)
