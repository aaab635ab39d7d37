"""Penalties and bans that depend on a node's path.

A node's path is the committed history, root included, followed by the drafted tokens from the root to the node: the
``input_ids`` that transformers' processors would see if the draft were committed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Paths:
    """The path to each node: committed history, then the tree down to the node."""

    history: Int[Tensor, "B L"]  # committed tokens, prompt included; root at lengths-1; undefined after it
    lengths: Int[Tensor, "B"]
    tree: TokenTree  # node 0 = root = history[b, lengths[b]-1]
    start: int = 0  # the logits are those of nodes start .. start+M-1 of the tree


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The paths of M nodes as tensors. Padding nodes have the root's path."""

    paths: Paths
    drafted: Bool[Tensor, "B M N"]  # tree node j is on the path to node i; without the root, which is in the history
    depths: Int[Tensor, "B N"]
    sizes: Int[Tensor, "B M"]  # tokens of each path

    @classmethod
    def of(cls, paths: Paths, count: int) -> "TreePaths":
        """The paths of ``count`` nodes, starting at ``paths.start``."""
        tree = paths.tree
        nodes = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        valid = tree.valid
        if tree.linear:
            above, depths = (nodes <= nodes[:, None]) & valid[:, None], nodes.expand_as(tree.tokens)
        else:
            above, depths = tree.on_path, tree.depths
        drafted = (above & valid[:, :, None] & (nodes > 0))[:, paths.start : paths.start + count]
        return cls(paths, drafted, depths, paths.lengths[:, None] + drafted.sum(-1))

    def committed(self, start: Int[Tensor, "B 1"] | int = 0) -> Bool[Tensor, "B L"]:
        """Mask of the history columns that hold committed tokens at position ``start`` or later."""
        column = torch.arange(self.paths.history.shape[1], device=self.paths.history.device)
        return (column >= start) & (column < self.paths.lengths[:, None])

    def tokens(self) -> Int[Tensor, "B M W"]:
        """The whole path of each node, W = L + tree.depth wide; undefined past its size."""
        history, tree = self.paths.history, self.paths.tree
        rows, count, _ = self.drafted.shape
        # by_depth[b, i, d]: the token at depth d of the path to node i; the last column takes nodes off the path
        slot = torch.where(self.drafted, self.depths[:, None], tree.depth + 1)
        by_depth = history.new_zeros(rows, count, tree.depth + 2)
        by_depth = by_depth.scatter(2, slot, tree.tokens[:, None].expand(-1, count, -1))
        column = torch.arange(history.shape[1] + tree.depth, device=history.device)
        depth = (column - self.paths.lengths[:, None] + 1).clamp(0, tree.depth)
        drafted = by_depth.gather(2, depth[:, None].expand(-1, count, -1))
        committed = F.pad(history, (0, tree.depth))[:, None]
        return torch.where(column < self.paths.lengths[:, None, None], committed, drafted)

    def from_end(self, tokens: Int[Tensor, "B M W"], steps: int) -> Int[Tensor, "B M 1"]:
        """The token ``steps`` from the end of each path (1 is the last); -1 before its beginning."""
        place = self.sizes[:, :, None] - steps
        return torch.where(place >= 0, tokens.gather(2, place.clamp(min=0)), -1)


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words of several tokens: the last token is banned after the others. P: the longest prefix."""

    prefixes: Int[Tensor, "B W P"]  # all but the last token, in reverse order; -1 is padding
    last: Int[Tensor, "B W"]  # -1 is padding

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> "BadWords | None":
        words = [[word for word in row.bad_words_ids if len(word) > 1] for row in params]
        most = max(map(len, words))
        if most == 0:
            return None
        longest = max(len(word) for row in words for word in row) - 1
        prefixes = [
            [[*word[-2::-1], *[-1] * (longest - len(word) + 1)] for word in row] + [[-1] * longest] * (most - len(row))
            for row in words
        ]
        last = [[word[-1] for word in row] + [-1] * (most - len(row)) for row in words]
        return cls(torch.tensor(prefixes, device=device), torch.tensor(last, device=device))


@dataclass(frozen=True, slots=True)
class HistoryRules:
    """Per-row values of the history rules. A rule that no row uses is None and does not run; idle values do nothing."""

    prompts: Int[Tensor, "B 1"]  # tokens of the prompt
    repetition: Float[Tensor, "B 1 1"] | None
    counting: Float[Tensor, "B 2 1 1"] | None  # presence and frequency penalty
    ngrams: Int[Tensor, "B 1 1"] | None
    longest_ngram: int
    bad_words: BadWords | None
    least_new: Int[Tensor, "B 1 1"] | None
    eos: Int[Tensor, "B 1 E"] | None  # -1 is padding
    constrained: Bool[Tensor, "B 1 1"] | None = None  # by grammars: an end that alone is left is not banned

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        eos_token_ids: Sequence[tuple[int, ...]],
        prompt_lengths: Sequence[int],
        device: torch.device | str,
    ) -> "HistoryRules | None":
        """The rules of the rows; None if no row has any."""

        def column(values: Sequence[float | int], idle: float | int) -> Tensor | None:
            dtype = torch.int64 if isinstance(idle, int) else torch.float64
            if all(value == idle for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)

        repetition = column([row.repetition_penalty for row in params], 1.0)
        penalties = [[row.presence_penalty, row.frequency_penalty] for row in params]
        counting = None
        if any(map(any, penalties)):
            counting = torch.tensor(penalties, dtype=torch.float64, device=device)[..., None, None]
        ngrams = column([row.no_repeat_ngram_size for row in params], 0)
        bad_words = BadWords.of(params, device)
        most_eos = max(map(len, eos_token_ids), default=0)
        least_new = column([row.min_new_tokens for row in params], 0) if most_eos else None
        if repetition is counting is ngrams is bad_words is least_new is None:
            return None
        eos = [[*ids, *[-1] * (most_eos - len(ids))] for ids in eos_token_ids]
        constrained = column([int(row.grammar is not None) for row in params], 0) if least_new is not None else None
        return cls(
            prompts=torch.tensor(prompt_lengths, device=device).view(-1, 1),
            repetition=repetition,
            counting=counting,
            ngrams=ngrams,
            longest_ngram=max(row.no_repeat_ngram_size for row in params),
            bad_words=bad_words,
            least_new=least_new,
            eos=None if least_new is None else torch.tensor(eos, device=device)[:, None],
            constrained=None if constrained is None else constrained.bool(),
        )

    def __call__(self, scores: Float[Tensor, "B M V"], paths: Paths) -> Float[Tensor, "B M V"]:
        """Apply all rules to the scores, each node on its own path."""
        nodes = TreePaths.of(paths, scores.shape[1])
        if self.repetition is not None:
            scores = _penalise_repetition(scores, nodes, self.repetition.to(scores.dtype))
        if self.counting is not None:
            presence, frequency = self.counting.to(scores.dtype).unbind(1)
            counts = _counts(scores, nodes, self.prompts)
            scores = scores - frequency * counts - presence * (counts > 0)
        if self.ngrams is not None or self.bad_words is not None:
            tokens = nodes.tokens()
            if self.ngrams is not None:
                scores = _ban_ngrams(scores, nodes, tokens, self.ngrams, self.longest_ngram)
            if self.bad_words is not None:
                scores = _ban_words(scores, nodes, tokens, self.bad_words)
        if self.least_new is not None and self.eos is not None:
            short = (nodes.sizes - self.prompts)[:, :, None] < self.least_new
            banned = ban(scores, self.eos.expand(-1, scores.shape[1], -1), short & (self.eos >= 0))
            if self.constrained is not None:
                banned = torch.where(self.constrained & banned.isneginf().all(-1, keepdim=True), scores, banned)
            scores = banned
        return scores


def ban(
    scores: Float[Tensor, "B M V"], ids: Int[Tensor, "B M K"], banned: Bool[Tensor, "B M K"]
) -> Float[Tensor, "B M V"]:
    """Scores with -inf at ``ids`` where ``banned``; ids outside the vocabulary are ignored."""
    return add_at(scores, ids, torch.where(banned, -math.inf, 0.0).to(scores.dtype))


def add_at(
    scores: Float[Tensor, "B M V"], ids: Int[Tensor, "B M K"], values: Float[Tensor, "B M K"]
) -> Float[Tensor, "B M V"]:
    """Scores with ``values`` added at ``ids``; ids outside the vocabulary are ignored."""
    vocabulary = scores.shape[-1]
    values = torch.where((ids >= 0) & (ids < vocabulary), values, 0.0)
    return scores.scatter_add(-1, ids.clamp(0, vocabulary - 1), values)


def _penalise_repetition(
    scores: Float[Tensor, "B M V"], nodes: TreePaths, penalty: Float[Tensor, "B 1 1"]
) -> Float[Tensor, "B M V"]:
    """Divide the scores of tokens on the path by the penalty, multiply negative ones (Keskar et al. 2019)."""
    count, vocabulary = scores.shape[1:]
    history, tree = nodes.paths.history, nodes.paths.tree
    on_path = torch.cat([nodes.committed()[:, None].expand(-1, count, -1), nodes.drafted], dim=-1)
    ids = torch.cat([history, tree.tokens], dim=-1)[:, None]
    ids = torch.where(on_path, ids, vocabulary).clamp(0, vocabulary)  # a spare column takes the other tokens
    padded = F.pad(scores, (0, 1))
    old = padded.gather(-1, ids)
    return padded.scatter_(-1, ids, torch.where(old < 0, old * penalty, old / penalty))[..., :vocabulary]


def _counts(scores: Float[Tensor, "B M V"], nodes: TreePaths, prompts: Int[Tensor, "B 1"]) -> Float[Tensor, "B #M V"]:
    """How often each token occurs on each path after the prompt."""
    rows, count, vocabulary = scores.shape
    ids = torch.where(nodes.committed(prompts), nodes.paths.history, vocabulary).clamp(0, vocabulary)
    counts = scores.new_zeros(rows, vocabulary + 1)
    counts.scatter_add_(-1, ids, torch.ones_like(ids, dtype=scores.dtype))
    counts = counts[:, None]
    if nodes.drafted.shape[-1] > 1:  # else the tree is the root alone, which is in the history
        tokens = nodes.paths.tree.tokens[:, None]
        ids = torch.where(nodes.drafted, tokens, vocabulary).clamp(0, vocabulary)
        counts = counts.repeat(1, count, 1)
        counts.scatter_add_(-1, ids, torch.ones_like(ids, dtype=scores.dtype))
    return counts[..., :vocabulary]


def _ban_ngrams(
    scores: Float[Tensor, "B M V"],
    nodes: TreePaths,
    tokens: Int[Tensor, "B M W"],
    sizes: Int[Tensor, "B 1 1"],
    longest: int,
) -> Float[Tensor, "B M V"]:
    """Ban each token that would complete an n-gram already on the path; size 0 bans nothing."""
    column = torch.arange(tokens.shape[-1], device=tokens.device)
    repeats = (sizes > 0) & (column >= sizes - 1) & (column < nodes.sizes[:, :, None])
    for step in range(1, longest):  # compare the tokens ``step`` before each column and before the path's end
        before = F.pad(tokens, (step, 0), value=-1)[..., :-step]
        repeats &= (before == nodes.from_end(tokens, step)) | (step >= sizes)
    return ban(scores, tokens, repeats)


def _ban_words(
    scores: Float[Tensor, "B M V"], nodes: TreePaths, tokens: Int[Tensor, "B M W"], words: BadWords
) -> Float[Tensor, "B M V"]:
    """Ban the last token of each word if the path ends with its other tokens."""
    longest = words.prefixes.shape[-1]
    end = torch.cat([nodes.from_end(tokens, step) for step in range(1, longest + 1)], dim=-1)
    prefixes = words.prefixes[:, None]
    match = ((end[:, :, None] == prefixes) | (prefixes < 0)).all(-1)
    return ban(scores, words.last[:, None].expand(-1, scores.shape[1], -1), match & (words.last >= 0)[:, None])
