"""Speculative beam search: a draft searches ahead, the target reads its trie in one forward, the search is replayed.

The draft's own beam search, somewhat wider than the target's, leaves a trie below each beam. The target reads all of
them at once, as trees; then the search goes on, step by step, on logits that are there already, for as long as every
beam is a node of the trie. The step that leaves it is still exact: what its beams continue has been read. So what is
found is what the plain search finds, whatever the draft says. Each prompt goes its own number of steps a forward.
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
from foredraft.core.sampling.warp import Paths, healthy
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.engine.beam.cache import Forks
from foredraft.engine.beam.search import BeamOptions, Beams, Hypothesis, Rules, grow, hypotheses, texts_of
from foredraft.engine.detokenizer import Decode
from foredraft.model.base import TargetModel

_WIDER = 2
"""The draft keeps so many times as many beams as the target: what the target likes best may be the draft's fifth."""
_NOBODY = -1e8
"""What is less likely is no beam: a place that none has taken yet, or a token that is banned."""
Children = dict[tuple[int, int], int]
"""Where a node's child with a token is, by (node, token)."""


class SearchesAhead(Drafter):
    """A drafter on a whole model, which can search with beams of its own."""

    @abstractmethod
    def beam_model(self) -> TargetModel:
        """The model; its cache is the drafter's own business, and the search has another."""


class Trie(NamedTuple):
    """Nodes below each of N beams, node 0 being the beam's last token."""

    tree: TokenTree
    children: list[Children]


class Replayed(NamedTuple):
    """Which beam before the forward each beam continues, and by which nodes, 0 first; or that the search is over."""

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
        """How many tokens there may still be."""
        return self.limit - self.step

    def roots(self) -> Int[Tensor, "K"]:
        """The last token of each beam, which is not yet read."""
        text, lengths = texts_of(self.beams, self.rules, self.step)
        return text.gather(1, lengths[:, None] - 1)[:, 0]

    def replay(self, logits: Float[Tensor, "K M V"], children: Sequence[Children]) -> Replayed:
        """Go on for as long as every beam is a node whose logits are there; at least one step."""
        width = self.rules.options.num_beams
        origins, paths = list(range(width)), [[0] for _ in range(width)]
        while True:
            lines = torch.tensor(origins, device=logits.device)
            nodes = torch.tensor([path[-1] for path in paths], device=logits.device)
            parents, tokens, over = self._grow(logits[lines, nodes])
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
        """One step: which beam each beam continues, by which token, and whether there is nothing left to find."""
        text, lengths = texts_of(self.beams, self.rules, self.step)
        root = TokenTree.root(text.gather(1, lengths[:, None] - 1)[:, 0])
        fine = healthy(logits[:, None], root.valid).all()
        scores = self.rules.warp.scores(logits[:, None].float().log_softmax(-1), Paths(text, lengths, root))
        grown = grow(self.beams, scores[:, 0], self.rules, self.step)
        said = grown.beams.running[0, :, self.step]
        flags = torch.stack([grown.over[0], fine]).long()
        table = torch.cat([grown.parents[0], said, flags]).tolist()  # the only reading
        if not table[-1]:
            raise NumericsError(
                f"The model returned logits that are not numbers, {self.step} tokens behind the prompt."
            )
        self.beams, self.step = grown.beams, self.step + 1
        width = len(said)
        return table[:width], table[width : 2 * width], bool(table[-2])


class DraftBeam:
    """The draft's side: it stands where the target's beams stand, and looks ahead."""

    def __init__(
        self, draft: TargetModel, prompts: Int[Tensor, "B L"], sizes: Sequence[int], width: int, vocab_size: int
    ) -> None:
        self._draft = draft
        self._forks = Forks(draft, self._mine(prompts), sizes, width)
        self._width = width
        self._shared = min(vocab_size, draft.vocab_size)
        self._unread: tuple[TokenTree, int] | None = None  # a last level, which only beams that got so far need

    def room(self, depth: int) -> bool:
        """Whether the draft's context has room for so many tokens more."""
        return self._forks.reach(depth + 1) <= self._draft.max_length

    def pass_by(self, roots: Int[Tensor, "N"]) -> None:
        """Read the last tokens, and look at nothing."""
        self._unread = None
        self._forks.forward(TokenTree.root(self._mine(roots)))

    def look(self, scores: Float[Tensor, "N"], roots: Int[Tensor, "N"], depth: int, ends: Int[Tensor, "E"]) -> Trie:
        """Search so many tokens ahead from every beam of every prompt, each prompt by itself.

        Args:
            scores: of the beams so far.
            ends: tokens that end a text; a text that has ended is no beam.
        """
        trie = _Growing(roots, self._width)
        ends = ends[ends < self._shared]
        totals, start = scores, 0
        for _ in range(depth):
            tree = trie.tree
            logits = self._forks.read(self._in_mine(tree), start)[..., : self._shared]
            law = logits.float().nan_to_num(nan=-1e9, posinf=0.0, neginf=-1e9).log_softmax(-1)
            law[..., ends] = -torch.inf
            lines = torch.tensor([owner for owner, _ in trie.frontier], device=law.device)
            nodes = torch.tensor([node - start for _, node in trie.frontier], device=law.device)
            start = tree.tokens.shape[1]
            totals = trie.extend(law[lines, nodes] + totals[:, None])
            if not trie.frontier:
                break
        self._unread = trie.tree, start
        return Trie(trie.tree, trie.children)

    def move(self, parents: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Follow the target's beams."""
        if self._unread is not None and any(path[-1] >= self._unread[1] for path in paths):
            tree, start = self._unread
            self._forks.read(self._in_mine(tree), start)
        self._forks.move(parents, paths)

    def _in_mine(self, tree: TokenTree) -> TokenTree:
        return TokenTree(self._mine(tree.tokens), tree.parents, tree.depth)

    def _mine(self, tokens: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        return tokens.clamp(max=self._draft.vocab_size - 1)


class _Growing:
    """A trie that grows level by level below N beams, ``width`` of each prompt; levels are padded to their widest."""

    def __init__(self, roots: Int[Tensor, "N"], width: int) -> None:
        self._device = roots.device
        self._width = width
        self._tokens = roots[:, None].tolist()
        self._parents = [[ROOT] for _ in self._tokens]
        self._depth = 0
        self.children: list[Children] = [{} for _ in self._tokens]
        self.frontier = [(owner, 0) for owner in range(len(self._tokens))]
        """The nodes of the last level, as (beam, node)."""
        self._leading = set(self.frontier)  # those that a search with no more beams than the target's would have

    @property
    def tree(self) -> TokenTree:
        tokens, parents = (torch.tensor(each, device=self._device) for each in (self._tokens, self._parents))
        return TokenTree(tokens, parents, depth=self._depth)

    def extend(self, scores: Float[Tensor, "F V"]) -> Float[Tensor, "G"]:
        """Add the best continuations of each prompt's frontier; return their scores, which are the new frontier's."""
        begin, vocabulary = len(self._tokens[0]), scores.shape[1]
        before, leading = self.frontier, self._leading
        self.frontier, self._leading = [], set()
        totals: list[float] = []
        groups = [list(lines) for _, lines in groupby(range(len(before)), lambda line: before[line][0] // self._width)]
        first = torch.tensor([node in leading for node in before], device=scores.device)
        found = [_best(scores[lines], first[lines], self._width) for lines in groups]
        pairs = zip(*torch.cat(found, dim=1).tolist(), strict=True)  # the only reading of a level
        for lines, best in zip(groups, found, strict=True):
            for number, (where, total) in enumerate(islice(pairs, best.shape[1])):
                if total > _NOBODY:
                    owner, node = before[lines[int(where) // vocabulary]]
                    self._add(owner, node, int(where) % vocabulary)
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
    """Places and values: first what a search of ``width`` beams would go on with, then the best of all the others.

    A wider search alone would not do: what the narrow one keeps may be crowded out there.
    """
    flat = scores.flatten()
    narrow = scores.masked_fill(~leading[:, None], -torch.inf).flatten().topk(min(width, len(flat)))
    others = flat.scatter(0, narrow.indices, -torch.inf)
    wide = others.topk(min((_WIDER - 1) * width, len(flat)))
    places, values = torch.cat([narrow.indices, wide.indices]), torch.cat([narrow.values, wide.values])
    return torch.stack([places.double(), values.double()])  # whole numbers of that size are exact


@torch.inference_mode()
def speculative_beam_search(
    target: TargetModel,
    draft: TargetModel,
    prompts: Sequence[Sequence[int]],
    options: BeamOptions,
    eos: Sequence[int],
    decode: Decode,
) -> list[list[Hypothesis]]:
    """What ``beam_search`` finds, with fewer forwards of the target; arguments and errors are the same.

    Args:
        draft: a model with the target's tokenizer; where its context ends, the search goes on without it.
    """
    if not prompts:
        return []
    ends = options.params.eos_token_id if options.params.eos_token_id is not None else tuple(eos)
    width, device = options.num_beams, target.device
    searches = []
    for index, prompt in enumerate(prompts):
        rules = Rules.of(target, [prompt], options, ends)
        searches.append(Search(index, rules, Beams.start(rules), rules.history.shape[1] - len(prompt)))
    history = pad_sequence([torch.tensor([*prompt]) for prompt in prompts], batch_first=True).to(device)
    sizes = [len(prompt) for prompt in prompts]
    forks = Forks(target, history, sizes, width)
    scout: DraftBeam | None = None
    if max(sizes) < draft.max_length:
        scout = DraftBeam(draft, history, sizes, width, target.vocab_size)
    done: list[Search] = []
    while searches:
        roots = torch.cat([search.roots() for search in searches])
        depth = min(options.num_assistant_tokens, max(search.left for search in searches) - 1)
        if scout is not None and not scout.room(depth):
            scout = None
        children: list[Children] = [{} for _ in roots]
        if scout is not None and depth > 0 and forks.parted:
            scores = torch.cat([search.beams.scores[0] for search in searches])
            tree, children = scout.look(scores, roots, depth, searches[0].rules.eos)
            logits = forks.read(tree)
        else:
            logits = forks.forward(TokenTree.root(roots))
            if scout is not None:
                scout.pass_by(roots)
        parents, paths, stay = [], [], []
        for place, search in enumerate(searches):
            mine = slice(place * width, (place + 1) * width)
            found = search.replay(logits[mine], children[mine])
            if found.over:
                done.append(search)
                continue
            stay.append(search)
            parents += [place * width + origin for origin in found.origins]
            paths += found.paths
        searches = stay
        if stay:
            for side in (forks, scout):
                if side is not None:
                    side.move(parents, paths)
    done.sort(key=lambda search: search.index)
    return [hypotheses(search.beams, options.num_return_sequences, decode) for search in done]
