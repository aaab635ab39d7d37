"""Speculative beam search: a draft model searches ahead, the target reads its trie in one forward.

The draft model's beam search, somewhat wider than the target's, yields a trie below each beam. The target reads all
tries in one forward, as trees. The target's search then replays step by step on these logits while every beam is a
node of the trie. The step that leaves the trie is still exact, since the logits of its parents are known. So the result
equals that of the plain search for any draft. Each prompt advances its own number of steps per forward.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foredraft.core.drafter import Drafter
from foredraft.core.errors import NumericsError
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.engine.beam.cache import BeamCache
from foredraft.engine.beam.search import BeamOptions, Beams, Hypothesis, Rules, beam_paths, grow, hypotheses
from foredraft.engine.detokenizer import Decode
from foredraft.model.base import TargetModel

_WIDTH_FACTOR = 2
"""The draft keeps this many times the target's beams: the target's best token may rank lower in the draft."""
_MIN_SCORE = -1e8
"""Candidates with lower scores are no beams: empty entries or banned tokens."""
Children = dict[tuple[int, int], int]
"""The child node by (node, token)."""


class BeamDrafter(Drafter):
    """A drafter whose model can run a beam search."""

    @abstractmethod
    def beam_model(self) -> TargetModel:
        """The model; the search uses its own cache, not the drafter's."""


class Trie(NamedTuple):
    """Drafted nodes below each of N beams; node 0 is the beam's last token."""

    tree: TokenTree
    children: list[Children]


class Replayed(NamedTuple):
    """Each beam's ancestor before the forward and its path of nodes from there, 0 first; whether the search is over."""

    origins: list[int]
    paths: list[list[int]]
    over: bool


@dataclass
class Search:
    """One prompt's search, after ``step`` tokens of at most ``limit``."""

    index: int
    rules: Rules
    beams: Beams
    limit: int
    step: int = 0

    @property
    def left(self) -> int:
        """Number of tokens still allowed."""
        return self.limit - self.step

    def roots(self) -> Int[Tensor, "K"]:
        """The last token of each beam, not yet read by the target."""
        return beam_paths(self.beams, self.rules, self.step).tree.tokens[:, 0]

    def replay(self, logits: Float[Tensor, "K M V"], children: Sequence[Children]) -> Replayed:
        """Run search steps while every beam is a node with known logits; at least one step."""
        width = self.rules.options.num_beams
        origins, paths = list(range(width)), [[0] for _ in range(width)]
        while True:
            rows = torch.tensor(origins, device=logits.device)
            nodes = torch.tensor([path[-1] for path in paths], device=logits.device)
            parents, tokens, over = self._grow(logits[rows, nodes])
            before = [(origins[parent], paths[parent]) for parent in parents]
            origins = [origin for origin, _ in before]
            found = [
                children[origin].get((path[-1], token)) for (origin, path), token in zip(before, tokens, strict=True)
            ]
            known = [node for node in found if node is not None]
            if over or len(known) < width:
                return Replayed(origins, [path for _, path in before], over)
            paths = [[*path, node] for (_, path), node in zip(before, known, strict=True)]

    def _grow(self, logits: Float[Tensor, "K V"]) -> tuple[list[int], list[int], bool]:
        """Run one step; return each beam's parent and token, and whether the search is over."""
        paths = beam_paths(self.beams, self.rules, self.step)
        grown = grow(self.beams, logits[:, None], paths, self.rules, self.step)
        tokens = grown.beams.running[0, :, self.step]
        table = torch.cat([grown.parents[0], tokens, grown.over, grown.sound]).tolist()  # the only read-back
        if not table[-1]:
            raise NumericsError(f"The model returned NaN or +inf logits {self.step} tokens after the prompt.")
        self.beams, self.step = grown.beams, self.step + 1
        width = len(tokens)
        return table[:width], table[width : 2 * width], bool(table[-2])


class DraftBeam:
    """The draft model's search ahead, from the target's current beams."""

    def __init__(
        self, draft: TargetModel, prompts: Int[Tensor, "B L"], sizes: Sequence[int], width: int, vocab_size: int
    ) -> None:
        self._draft = draft
        self._cache = BeamCache(draft, self._draft_ids(prompts), sizes, width)
        self._width = width
        self._shared = min(vocab_size, draft.vocab_size)
        self._unread_level: tuple[TokenTree, int] | None = None  # the trie's last level, read only if a beam reaches it

    def fits(self, depth: int) -> bool:
        """True if the draft model's context has room for ``depth`` more tokens."""
        return self._cache.used_slots(depth + 1) <= self._draft.max_length

    def skip(self, roots: Int[Tensor, "N"]) -> None:
        """Read the last tokens without searching ahead."""
        self._unread_level = None
        self._cache.forward(TokenTree.root(self._draft_ids(roots)))

    def search(self, scores: Float[Tensor, "N"], roots: Int[Tensor, "N"], depth: int, eos: Int[Tensor, "E"]) -> Trie:
        """Search ``depth`` tokens ahead from all beams, each prompt separately.

        Args:
            scores: of the beams so far.
            eos: end-of-sequence ids; a path that reaches one is no beam.
        """
        trie = _TrieBuilder(roots, self._width)
        eos = eos[eos < self._shared]
        totals, start = scores, 0
        for _ in range(depth):
            tree = trie.tree
            logits = self._cache.read(self._draft_tree(tree), start)[..., : self._shared]
            law = logits.float().nan_to_num(nan=-1e9, posinf=0.0, neginf=-1e9).log_softmax(-1)
            law[..., eos] = -torch.inf
            rows = torch.tensor([owner for owner, _ in trie.frontier], device=law.device)
            nodes = torch.tensor([node - start for _, node in trie.frontier], device=law.device)
            start = tree.tokens.shape[1]
            totals = trie.extend(law[rows, nodes] + totals[:, None])
            if not trie.frontier:
                break
        self._unread_level = trie.tree, start
        return Trie(trie.tree, trie.children)

    def move(self, parents: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Take the target's new beams; arguments as in ``BeamCache.move``."""
        if self._unread_level is not None and any(path[-1] >= self._unread_level[1] for path in paths):
            tree, start = self._unread_level
            self._cache.read(self._draft_tree(tree), start)
        self._cache.move(parents, paths)

    def _draft_tree(self, tree: TokenTree) -> TokenTree:
        return TokenTree(self._draft_ids(tree.tokens), tree.parents, tree.depth)

    def _draft_ids(self, tokens: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        return tokens.clamp(max=self._draft.vocab_size - 1)


class _TrieBuilder:
    """A trie built level by level below N beams, ``width`` of each prompt; all rows are padded to the widest."""

    def __init__(self, roots: Int[Tensor, "N"], width: int) -> None:
        self._device = roots.device
        self._width = width
        self._tokens = roots[:, None].tolist()
        self._parents = [[ROOT] for _ in self._tokens]
        self._depth = 0
        self.children: list[Children] = [{} for _ in self._tokens]
        self.frontier = [(owner, 0) for owner in range(len(self._tokens))]
        """The nodes of the last level, as (beam, node)."""
        self._leading = set(self.frontier)  # nodes that a search with only the target's number of beams would have

    @property
    def tree(self) -> TokenTree:
        tokens, parents = (torch.tensor(each, device=self._device) for each in (self._tokens, self._parents))
        return TokenTree(tokens, parents, depth=self._depth)

    def extend(self, scores: Float[Tensor, "F V"]) -> Float[Tensor, "G"]:
        """Add the best continuations of each prompt's frontier; return the scores of the new frontier."""
        begin, vocabulary = len(self._tokens[0]), scores.shape[1]
        before, leading = self.frontier, self._leading
        self.frontier, self._leading = [], set()
        totals: list[float] = []
        groups = [list(rows) for _, rows in groupby(range(len(before)), lambda row: before[row][0] // self._width)]
        first = torch.tensor([node in leading for node in before], device=scores.device)
        found = [_best(scores[rows], first[rows], self._width) for rows in groups]
        pairs = zip(*torch.cat(found, dim=1).tolist(), strict=True)  # one read-back per level
        for rows, best in zip(groups, found, strict=True):
            for number, (index, total) in enumerate(islice(pairs, best.shape[1])):
                if total > _MIN_SCORE:
                    owner, node = before[rows[int(index) // vocabulary]]
                    self._add(owner, node, int(index) % vocabulary)
                    totals.append(total)
                    if number < self._width:
                        self._leading.add(self.frontier[-1])
        end = max(map(len, self._tokens))
        for tokens, parents in zip(self._tokens, self._parents, strict=True):
            parents += [PAD] * (end - len(tokens))
            tokens += [0] * (end - len(tokens))
        self._depth += end > begin
        return torch.tensor(totals, device=scores.device)

    def _add(self, owner: int, node: int, token: int) -> None:
        new = len(self._tokens[owner])
        self._tokens[owner].append(token)
        self._parents[owner].append(node)
        self.children[owner][node, token] = new
        self.frontier.append((owner, new))


def _best(scores: Float[Tensor, "F V"], leading: Bool[Tensor, "F"], width: int) -> Float[Tensor, "2 C"]:
    """Indices and values: first what a search of ``width`` beams would keep, then the best of the others.

    A wider search alone might drop beams that the narrow search keeps.
    """
    flat = scores.flatten()
    narrow = scores.masked_fill(~leading[:, None], -torch.inf).flatten().topk(min(width, len(flat)))
    others = flat.scatter(0, narrow.indices, -torch.inf)
    wide = others.topk(min((_WIDTH_FACTOR - 1) * width, len(flat)))
    indices, values = torch.cat([narrow.indices, wide.indices]), torch.cat([narrow.values, wide.values])
    return torch.stack([indices.double(), values.double()])  # integers of this size are exact in float64


@torch.inference_mode()
def speculative_beam_search(
    target: TargetModel,
    draft: TargetModel,
    prompts: Sequence[Sequence[int]],
    options: BeamOptions,
    eos: Sequence[int],
    decode: Decode,
) -> list[list[Hypothesis]]:
    """``beam_search`` with fewer forwards of the target; same result, arguments and errors.

    Args:
        draft: a model with the target's tokenizer; beyond its context length the search continues without it.
    """
    if not prompts:
        return []
    width, device = options.num_beams, target.device
    searches = []
    for index, prompt in enumerate(prompts):
        rules = Rules.of(target, [prompt], options, eos)
        searches.append(Search(index, rules, Beams.start(rules), rules.history.shape[1] - len(prompt)))
    history = pad_sequence([torch.tensor([*prompt]) for prompt in prompts], batch_first=True).to(device)
    sizes = [len(prompt) for prompt in prompts]
    cache = BeamCache(target, history, sizes, width)
    draft_beam: DraftBeam | None = None
    if max(sizes) < draft.max_length:
        draft_beam = DraftBeam(draft, history, sizes, width, target.vocab_size)
    ended: list[Search] = []
    while searches:
        roots = torch.cat([search.roots() for search in searches])
        depth = min(options.num_assistant_tokens, max(search.left for search in searches) - 1)
        if draft_beam is not None and not draft_beam.fits(depth):
            draft_beam = None
        children: list[Children] = [{} for _ in roots]
        if draft_beam is not None and depth > 0 and cache.diverged:
            scores = torch.cat([search.beams.scores[0] for search in searches])
            tree, children = draft_beam.search(scores, roots, depth, searches[0].rules.eos)
            logits = cache.read(tree)
        else:
            logits = cache.forward(TokenTree.root(roots))
            if draft_beam is not None:
                draft_beam.skip(roots)
        parents, paths, stay = [], [], []
        for start, search in zip(range(0, len(roots), width), searches, strict=True):
            own = slice(start, start + width)
            found = search.replay(logits[own], children[own])
            if found.over:
                ended.append(search)
                continue
            stay.append(search)
            parents += [start + origin for origin in found.origins]
            paths += found.paths
        searches = stay
        if stay:
            for side in (cache, draft_beam):
                if side is not None:
                    side.move(parents, paths)
    ended.sort(key=lambda search: search.index)
    count = options.num_return_sequences
    return [hypotheses(search.beams, count, decode, prompts[search.index]) for search in ended]
