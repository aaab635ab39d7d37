"""Prompt lookup (Saxena 2023): copies the tokens that followed an earlier occurrence of the last tokens.

Deterministic: tokens are picked (``Law.FIXED``), so lossless at every temperature. It needs no index: the longest match
takes a few comparisons with the whole history, on its device.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.tree import PAD, TokenTree, merge_paths
from foredraft.drafters.common.copying import LONGEST_MATCH, ODDS
from foredraft.drafters.context import BuildContext
from foredraft.model.kv.masks import kv_extent_of


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Size of matches and copies; names as in transformers where it has them."""

    prompt_lookup_num_tokens: int = option(10, "most tokens copied from one match.")
    max_matching_ngram_size: int = option(3, "longest n-gram of last tokens to search for.")
    min_matching_ngram_size: int = option(1, "shortest n-gram of last tokens to search for.")
    continuations: int = option(
        1, "number of matches used as branches of a tree: the longest, of equal ones the latest."
    )

    def __post_init__(self) -> None:
        if not 1 <= self.min_matching_ngram_size <= self.max_matching_ngram_size:
            raise OptionError("min_matching_ngram_size must be at least 1 and at most max_matching_ngram_size.")
        check_bounds(self, least={"prompt_lookup_num_tokens": 1, "continuations": 1})


@final
class PromptLookup(Rewindable):
    """Copies from the row's history; has no state of requests."""

    def __init__(self, options: Options, device: torch.device | None = None) -> None:
        self._options = options
        nodes = options.continuations * options.prompt_lookup_num_tokens
        super().__init__(Needs(max_nodes=nodes, max_depth=options.prompt_lookup_num_tokens, ahead=True))
        self._scores = [_scores(odds, options.prompt_lookup_num_tokens).to(device or "cpu") for odds in ODDS]

    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self._options.prompt_lookup_num_tokens)
        host = view.history.device.type == "cpu" and not view.slack
        if host and self._options.continuations == 1:
            return self._chains(view, plan, depth)
        paths, matches = map(torch.from_numpy, self._find_on_host(view, depth)) if host else self._find(view, depth)
        lengths = torch.where(matches > 0, plan.on(paths.device)[:, None].clamp(max=depth), 0)
        tree, nodes = merge_paths(view.roots, paths, lengths)
        chances = self._scores[view.warp.hottest > 0.5][matches, 1 : depth + 1].flatten(
            1
        )  # of a shared node: its longest match decides
        scores = chances.new_full(tree.tokens.shape, -torch.inf).scatter_reduce(1, nodes.flatten(1), chances, "amax")
        scores[:, 0] = 0.0
        return Draft(tree, Law.FIXED, scores=scores)

    def _chains(self, view: View, plan: Plan, depth: int) -> Draft:
        """One continuation for each row, without operators of torch, each of which takes longer than the search."""
        paths, matches = self._find_on_host(view, depth)
        lengths = np.where(matches[:, 0] > 0, np.minimum(plan.lengths, depth), 0)
        if not lengths.any():
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        nodes = np.arange(1 + depth)
        tokens = np.concatenate([view.roots.numpy()[:, None], paths[:, 0]], axis=1)
        parents = np.where(nodes <= lengths[:, None], nodes - 1, PAD)
        scores = self._scores[view.warp.hottest > 0.5].numpy()[matches[:, 0], : depth + 1]
        tree = TokenTree(torch.from_numpy(tokens), torch.from_numpy(parents), depth, linear=True)
        return Draft(tree, Law.FIXED, scores=torch.from_numpy(scores))

    def _find_on_host(self, view: View, depth: int) -> tuple[Int[np.ndarray, "B K D"], Int[np.ndarray, "B K"]]:
        """``_find`` without operators over the whole history: only a few positions hold the last token."""
        options, history = self._options, view.history.numpy()
        paths = np.zeros((len(view.rows), options.continuations, depth), dtype=np.int64)
        matches = np.zeros(paths.shape[:2], dtype=np.int64)
        for row, length in enumerate(view.host_lengths):
            tokens = history[row, :length]
            ends = np.flatnonzero(tokens[:-1] == tokens[-1])
            found = [ends]  # ends of matches of one token, two tokens and so on
            while len(found) < options.max_matching_ngram_size and len(ends):
                back = len(found)
                ends = ends[ends >= back]
                ends = ends[tokens[ends - back] == tokens[-1 - back]] if back < length else ends[:0]
                found.append(ends)
            best: dict[int, None] = {}  # the longest, of equal ones the latest
            for each in reversed(found[options.min_matching_ngram_size - 1 :]):
                best.update(dict.fromkeys(each[::-1][: options.continuations].tolist()))
            for place, end in enumerate([*best][: options.continuations]):
                paths[row, place] = np.resize(tokens[end + 1 :], depth)
                match = 1
                while match < min(LONGEST_MATCH, end + 1) and tokens[end - match] == tokens[-1 - match]:
                    match += 1
                matches[row, place] = match
        return paths, matches

    def _find(self, view: View, depth: int) -> tuple[Int[Tensor, "B K D"], Int[Tensor, "B K"]]:
        """Continuations, best first, and the length of each one's match, 0 without one.

        Past the end of the history a copy repeats itself, as if the history were periodic.
        """
        longest = min(kv_extent_of(max(view.host_lengths), view.history.device), view.history.shape[1])
        history = view.history[:, :longest]
        match = self._match_lengths(history, view.lengths)
        count = min(self._options.continuations, longest)
        # of equal matches the latest wins: its position breaks the tie
        place = torch.arange(longest, device=history.device)
        score = torch.where(match >= self._options.min_matching_ngram_size, match * longest + place, -1)
        best, ends = score.topk(count, dim=1)
        period = (view.lengths[:, None] - 1 - ends).clamp(min=1)
        index = ends[..., None] + 1 + torch.arange(depth, device=history.device) % period[..., None]
        paths = history.gather(1, index.clamp(max=longest - 1).flatten(1)).view(-1, count, depth)
        back = torch.arange(min(LONGEST_MATCH, longest), device=history.device)
        earlier, last = ends[..., None] - back, (view.lengths[:, None] - 1 - back).clamp(min=0)
        same = (
            history.gather(1, earlier.clamp(min=0).flatten(1)).view(earlier.shape) == history.gather(1, last)[:, None]
        )
        matches = (same & (earlier >= 0)).long().cumprod(2).sum(2)
        missing = self._options.continuations - count
        pad = torch.nn.functional.pad
        return pad(paths, (0, 0, 0, missing)), pad(torch.where(best >= 0, matches, 0), (0, missing))

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


def _scores(odds: tuple[float, float], depth: int) -> Float[Tensor, "M D"]:
    """``[m, d]``: the log-probability that d tokens copied after a match of m tokens are right.

    A match grows with each token that is right, so the longer a copy is, the more likely it goes on.
    """
    grown = torch.arange(LONGEST_MATCH + 1)[:, None] + torch.arange(depth)
    right = torch.nn.functional.logsigmoid(odds[0] + odds[1] * grown.clamp(min=1).float().log())
    return torch.nn.functional.pad(right.cumsum(1), (1, 0))


def build(options: Options, context: BuildContext) -> PromptLookup:
    """prompt_lookup"""
    return PromptLookup(options, context.target.device)
