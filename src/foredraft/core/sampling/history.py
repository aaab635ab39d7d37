"""Penalties and bans that depend on the text so far, each node judged by its own path.

A node's path is the committed history, root included, and then the drafted tokens from the root down to the
node: the ``input_ids`` that transformers' processors would see, had the draft been committed.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.sampling.params import Processor, SamplingParams
from foredraft.core.tree import TokenTree, ancestors


@dataclass(frozen=True, slots=True)
class Paths:
    """The path that leads to each node: committed history, then the tree down to the node."""

    history: Int[Tensor, "B L"]  # committed tokens, prompt included; root at lengths-1; beyond: rubbish
    lengths: Int[Tensor, "B"]
    tree: TokenTree  # node 0 = root = history[b, lengths[b]-1]
    start: int = 0  # logits given are those of nodes start .. start+M-1 of the tree


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The paths of M nodes in a form to compute with. Padding nodes have the path of their root."""

    paths: Paths
    drafted: Bool[Tensor, "B M N"]  # tree node j lies on the path to node i, the root left out: history has it
    depths: Int[Tensor, "B N"]
    sizes: Int[Tensor, "B M"]  # tokens of each path

    @classmethod
    def of(cls, paths: Paths, count: int) -> "TreePaths":
        """The lineage of ``count`` nodes from ``paths.start`` on."""
        tree = paths.tree
        nodes = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        valid = tree.valid
        if tree.linear:
            above, depths = (nodes <= nodes[:, None]) & valid[:, None], nodes.expand_as(tree.tokens)
        else:
            above = ancestors(tree.parents)
            depths = above.sum(-1) - 1
        drafted = (above & valid[:, :, None] & (nodes > 0))[:, paths.start : paths.start + count]
        return cls(paths, drafted, depths, paths.lengths[:, None] + drafted.sum(-1))

    def committed(self, start: Int[Tensor, "B 1"] | int = 0) -> Bool[Tensor, "B L"]:
        """Which columns of the history hold committed tokens from position ``start`` on."""
        column = torch.arange(self.paths.history.shape[1], device=self.paths.history.device)
        return (column >= start) & (column < self.paths.lengths[:, None])

    def tokens(self) -> Int[Tensor, "B M W"]:
        """The whole path of each node, W = L + tree.depth wide; beyond its size rubbish."""
        history, tree = self.paths.history, self.paths.tree
        rows, count, _ = self.drafted.shape
        # line[b, i, d]: the token at depth d of the path to node i; the last column takes what is on no path
        slot = torch.where(self.drafted, self.depths[:, None], tree.depth + 1)
        line = history.new_zeros(rows, count, tree.depth + 2)
        line = line.scatter(2, slot, tree.tokens[:, None].expand(-1, count, -1))
        column = torch.arange(history.shape[1] + tree.depth, device=history.device)
        depth = (column - self.paths.lengths[:, None] + 1).clamp(0, tree.depth)
        below = line.gather(2, depth[:, None].expand(-1, count, -1))
        above = F.pad(history, (0, tree.depth))[:, None]
        return torch.where(column < self.paths.lengths[:, None, None], above, below)

    def back(self, tokens: Int[Tensor, "B M W"], steps: int) -> Int[Tensor, "B M 1"]:
        """The token so many steps from the end of each path (1 is the last); -1 before its beginning."""
        place = self.sizes[:, :, None] - steps
        return torch.where(place >= 0, tokens.gather(2, place.clamp(min=0)), -1)


@dataclass(frozen=True, slots=True)
class BadWords:
    """Words of several tokens: after all but the last, the last is banned. P: the longest beginning."""

    beginnings: Int[Tensor, "B W P"]  # read backwards from the last but one token on; -1 where there is none
    last: Int[Tensor, "B W"]  # -1 is padding

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> "BadWords | None":
        words = [[word for word in row.bad_words_ids if len(word) > 1] for row in params]
        most = max(map(len, words))
        if most == 0:
            return None
        longest = max(len(word) for row in words for word in row) - 1
        beginnings = [
            [[*word[-2::-1], *[-1] * (longest - len(word) + 1)] for word in row] + [[-1] * longest] * (most - len(row))
            for row in words
        ]
        last = [[word[-1] for word in row] + [-1] * (most - len(row)) for row in words]
        return cls(torch.tensor(beginnings, device=device), torch.tensor(last, device=device))


@dataclass(frozen=True, slots=True)
class HistoryRules:
    """What the rows ask for; a rule that none asks for is None and does not run; idle values do nothing."""

    prompts: Int[Tensor, "B 1"]  # tokens of the prompt
    repetition: Float[Tensor, "B 1 1"] | None
    counting: Float[Tensor, "2 B 1 1"] | None  # presence and frequency penalty
    ngrams: Int[Tensor, "B 1 1"] | None
    longest_ngram: int
    bad_words: BadWords | None
    least_new: Int[Tensor, "B 1 1"] | None
    eos: Int[Tensor, "B 1 E"] | None  # -1 is padding

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        eos_token_ids: Sequence[tuple[int, ...]],
        prompt_lengths: Sequence[int],
        device: torch.device | str,
    ) -> "HistoryRules | None":
        """None when no row has a rule that looks at its history."""

        def column(values: Sequence[float | int], idle: float | int) -> Tensor | None:
            dtype = torch.int64 if isinstance(idle, int) else torch.float64
            if all(value == idle for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)

        repetition = column([row.repetition_penalty for row in params], 1.0)
        counting = [[row.presence_penalty for row in params], [row.frequency_penalty for row in params]]
        ngrams = column([row.no_repeat_ngram_size for row in params], 0)
        bad_words = BadWords.of(params, device)
        most_eos = max(map(len, eos_token_ids), default=0)
        least_new = column([row.min_new_tokens for row in params], 0) if most_eos else None
        if not any(map(any, counting)) and repetition is ngrams is bad_words is least_new is None:
            return None
        eos = [[*ids, *[-1] * (most_eos - len(ids))] for ids in eos_token_ids]
        return cls(
            prompts=torch.tensor(prompt_lengths, device=device).view(-1, 1),
            repetition=repetition,
            counting=torch.tensor(counting, dtype=torch.float64, device=device)[..., None, None]
            if any(map(any, counting))
            else None,
            ngrams=ngrams,
            longest_ngram=max(row.no_repeat_ngram_size for row in params),
            bad_words=bad_words,
            least_new=least_new,
            eos=None if least_new is None else torch.tensor(eos, device=device)[:, None],
        )

    def __call__(self, scores: Float[Tensor, "B M V"], paths: Paths) -> Float[Tensor, "B M V"]:
        """Scores with all rules applied, each node's on its own path."""
        line = TreePaths.of(paths, scores.shape[1])
        if self.repetition is not None:
            scores = _penalise_repetition(scores, line, self.repetition.to(scores.dtype))
        if self.counting is not None:
            presence, frequency = self.counting.to(scores.dtype)
            counts = _counts(scores, line, self.prompts)
            scores = scores - frequency * counts - presence * (counts > 0)
        if self.ngrams is not None or self.bad_words is not None:
            tokens = line.tokens()
            if self.ngrams is not None:
                scores = _ban_ngrams(scores, line, tokens, self.ngrams, self.longest_ngram)
            if self.bad_words is not None:
                scores = _ban_words(scores, line, tokens, self.bad_words)
        if self.least_new is not None and self.eos is not None:
            short = (line.sizes - self.prompts)[:, :, None] < self.least_new
            scores = ban(scores, self.eos.expand(-1, scores.shape[1], -1), short & (self.eos >= 0))
        return scores


def ban(
    scores: Float[Tensor, "B M V"], ids: Int[Tensor, "B M K"], banned: Bool[Tensor, "B M K"]
) -> Float[Tensor, "B M V"]:
    """Scores with -inf at ``ids`` where ``banned``; ids outside the vocabulary are left alone."""
    return add_at(scores, ids, torch.where(banned, -math.inf, 0.0).to(scores.dtype))


def add_at(
    scores: Float[Tensor, "B M V"], ids: Int[Tensor, "B M K"], values: Float[Tensor, "B M K"]
) -> Float[Tensor, "B M V"]:
    """Scores with ``values`` added at ``ids``; ids outside the vocabulary are left alone."""
    vocabulary = scores.shape[-1]
    values = torch.where((ids >= 0) & (ids < vocabulary), values, 0.0)
    return scores.scatter_add(-1, ids.clamp(0, vocabulary - 1), values)


def run_processors(
    scores: Float[Tensor, "B M V"], paths: Paths, processors: Sequence[tuple[Processor, ...]]
) -> Float[Tensor, "B M V"]:
    """Call each row's own processors, once for all its nodes of one depth: their paths are of equal length.

    They are called for several continuations of one text, hence must depend on nothing but their arguments.
    This stage, and no other, reads from the device and cannot be captured in a graph.
    """
    line = TreePaths.of(paths, scores.shape[1])
    tokens = line.tokens()
    sizes = line.sizes.tolist()
    valid = paths.tree.valid[:, paths.start : paths.start + scores.shape[1]].tolist()
    scores = scores.clone()
    for row, chain in enumerate(processors):
        groups: dict[int, list[int]] = defaultdict(list)
        for node, size in enumerate(sizes[row] if chain else []):
            if valid[row][node]:
                groups[size].append(node)
        for size, nodes in groups.items():
            part = scores[row, nodes]
            for processor in chain:
                part = processor(tokens[row, nodes, :size], part)
            scores[row, nodes] = part.to(scores.dtype)
    return scores


def _penalise_repetition(
    scores: Float[Tensor, "B M V"], line: TreePaths, penalty: Float[Tensor, "B 1 1"]
) -> Float[Tensor, "B M V"]:
    """Divide the scores of tokens on the path by the penalty, multiply negative ones (Keskar et al. 2019)."""
    count, vocabulary = scores.shape[1:]
    history, tree = line.paths.history, line.paths.tree
    here = torch.cat([line.committed()[:, None].expand(-1, count, -1), line.drafted], dim=-1)
    ids = torch.cat([history, tree.tokens], dim=-1)[:, None]
    ids = torch.where(here, ids, vocabulary).clamp(0, vocabulary)  # a spare column takes what does not count
    padded = F.pad(scores, (0, 1))
    old = padded.gather(-1, ids)
    return padded.scatter_(-1, ids, torch.where(old < 0, old * penalty, old / penalty))[..., :vocabulary]


def _counts(scores: Float[Tensor, "B M V"], line: TreePaths, prompts: Int[Tensor, "B 1"]) -> Float[Tensor, "B #M V"]:
    """How often each token stands on each path behind the prompt."""
    rows, count, vocabulary = scores.shape
    ids = torch.where(line.committed(prompts), line.paths.history, vocabulary).clamp(0, vocabulary)
    counts = scores.new_zeros(rows, vocabulary + 1)
    counts.scatter_add_(-1, ids, torch.ones_like(ids, dtype=scores.dtype))
    counts = counts[:, None]
    if line.drafted.shape[-1] > 1:  # else the tree is the root alone, and that is in the history
        tokens = line.paths.tree.tokens[:, None]
        ids = torch.where(line.drafted, tokens, vocabulary).clamp(0, vocabulary)
        counts = counts.repeat(1, count, 1)
        counts.scatter_add_(-1, ids, torch.ones_like(ids, dtype=scores.dtype))
    return counts[..., :vocabulary]


def _ban_ngrams(
    scores: Float[Tensor, "B M V"],
    line: TreePaths,
    tokens: Int[Tensor, "B M W"],
    sizes: Int[Tensor, "B 1 1"],
    longest: int,
) -> Float[Tensor, "B M V"]:
    """Ban each token that would complete an n-gram which the path already holds; size 0 bans nothing."""
    column = torch.arange(tokens.shape[-1], device=tokens.device)
    repeats = (sizes > 0) & (column >= sizes - 1) & (column < line.sizes[:, :, None])
    for step in range(1, longest):  # the token so many places before column is the one so many before the end
        before = F.pad(tokens, (step, 0), value=-1)[..., :-step]
        repeats &= (before == line.back(tokens, step)) | (step >= sizes)
    return ban(scores, tokens, repeats)


def _ban_words(
    scores: Float[Tensor, "B M V"], line: TreePaths, tokens: Int[Tensor, "B M W"], words: BadWords
) -> Float[Tensor, "B M V"]:
    """Ban the last token of each word whose beginning ends the path."""
    longest = words.beginnings.shape[-1]
    end = torch.cat([line.back(tokens, step) for step in range(1, longest + 1)], dim=-1)
    wanted = words.beginnings[:, None]
    begun = ((end[:, :, None] == wanted) | (wanted < 0)).all(-1)
    return ban(scores, words.last[:, None].expand(-1, scores.shape[1], -1), begun & (words.last >= 0)[:, None])
