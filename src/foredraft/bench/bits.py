"""The last bit: logits of every node that a loop verifies, compared as integers with plain decoding's.

The reference reads a text one token at a time, alone, in one thread. Compared are the forwards of the engine's loop:
its rows in batches, chains, random trees, and the user's drafter.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, TokenTree
from foredraft.drafters.common.wrapper import DrafterWrapper
from foredraft.drafters.none import NoDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.base import TargetModel
from foredraft.model.threads import threads_of

BATCHES, THREADS = (1, 2, 4, 8, 16, 32), (1, 2)
_NODES, _NEAR = 15, 6
"""Most drafted nodes of a random tree, and how far before a node its parent may be."""
_FEWEST = 4
"""Tokens of an output in a large batch."""


class BitComparison(NamedTuple):
    """The positions compared in one setting, and those that differ. ``drafts``: what was verified."""

    drafts: str
    threads: int
    batch: int
    positions: int
    different: int


class FirstDifference(NamedTuple):
    """Where logits first differ: the token of the vocabulary at which they do most, and both of its logits.

    ``place``: tokens before the one that the logits predict; ``logits``: how many of them differ.
    """

    drafts: str
    threads: int
    batch: int
    place: int
    logits: int
    token: int
    found: float
    expected: float


@dataclass(frozen=True, slots=True)
class BitsCheck:
    """Logits compared with plain decoding's as integers, by setting."""

    cells: tuple[BitComparison, ...]
    first: FirstDifference | None

    @property
    def positions(self) -> int:
        return sum(cell.positions for cell in self.cells)

    @property
    def different(self) -> int:
        return sum(cell.different for cell in self.cells)

    @property
    def passed(self) -> bool:
        return not self.different


def check_bits(
    generator: Generator, prompts: Sequence[str | Sequence[int]], tokens: int, seed: int = 0
) -> Iterator[BitsCheck]:
    """Yield what has been compared so far, after each setting.

    Args:
        prompts: those after the first round are shortened, so that each row of a batch has a text of its own.
        tokens: of each output at batch size 1; of all outputs together in larger batches, but a few for each.

    Raises:
        OptionError: the target does not promise equal bits.
    """
    target = generator.engine.target
    if not target.same_bits:
        raise OptionError(
            f"{target.name} runs on transformers, where logits are equal up to rounding, which depends on the shape of "
            "a forward: check the texts without --bits (--exact gives all forwards one shape), or load the model with "
            "--weights int4 or int8, where the native engine runs it and promises equal bits."
        )
    texts = _rows([generator.encode(prompt) for prompt in prompts], max(BATCHES))
    plain = PlainDecoding(target)
    drafters: dict[str, Drafter] = {
        "plain rows": NoDrafter(),
        "chains": _Random(plain, target.vocab_size, seed, linear=True),
        "trees": _Random(plain, target.vocab_size, seed, linear=False),
    }
    if generator.engine.drafter.needs.max_nodes:
        drafters[generator.kind.method] = generator.engine.drafter
    cells: list[BitComparison] = []
    first: FirstDifference | None = None
    for threads in THREADS:
        for name, drafter in drafters.items():
            for batch in BATCHES:
                comparing = Comparing(drafter, plain)
                with threads_of(threads):
                    _generate(generator, comparing, texts[:batch], max(tokens // batch, min(tokens, _FEWEST)))
                cells.append(BitComparison(name, threads, batch, comparing.positions, comparing.different))
                if first is None and comparing.first is not None:
                    first = FirstDifference(name, threads, batch, *comparing.first)
                yield BitsCheck(tuple(cells), first)


def _rows(prompts: list[list[int]], count: int) -> list[list[int]]:
    """The texts of ``count`` rows: the prompts, then the prompts without their last tokens."""
    return [
        prompt[: max(len(prompt) - number // len(prompts), 1)]
        for number in range(count)
        for prompt in [prompts[number % len(prompts)]]
    ]


def _generate(generator: Generator, drafter: Drafter, texts: Sequence[list[int]], tokens: int) -> None:
    """Continue the texts in one batch, with drafts of full length."""
    engine, policy = generator.engine, Constant(drafter.needs.longest)
    running = Engine(engine.target, drafter, policy, max_rows=len(texts), cache=engine.cache)
    params = SamplingParams(max_new_tokens=tokens, eos_token_id=())
    Generator(running, None, (), generator.kind).batch(texts, params)


class _After(NamedTuple):
    """Plain decoding after a text: the digest of its logits, and its choice."""

    digest: bytes
    best: int


class PlainDecoding:
    """Plain decoding of any text: one token a forward, one thread. Each row continues what it has read last."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._cache = target.new_cache()
        self._read: dict[int, list[int]] = {}
        self._known: dict[tuple[int, ...], _After] = {}

    def after(self, row: int, text: tuple[int, ...]) -> _After:
        if text not in self._known:
            logits = self.logits(row, text)
            self._known[text] = _After(digest(logits), int(logits.argmax()))
        return self._known[text]

    @torch.inference_mode()
    def logits(self, row: int, text: tuple[int, ...]) -> Float[Tensor, "V"]:
        read = self._read.setdefault(row, [])
        shared = next(
            (i for i, (a, b) in enumerate(zip(read, text, strict=False)) if a != b), min(len(read), len(text))
        )
        begin = min(shared, len(text) - 1)
        self._cache.reserve([row], len(text))
        logits = torch.empty(0)
        with threads_of(1):
            for place in range(begin, len(text)):
                root = TokenTree.root(torch.tensor([text[place]]))
                step = self._target.address(root, torch.tensor([place]), (row,), place + 1)
                logits = self._target.forward(step, self._cache).logits[0, 0]
        self._read[row] = list(text)
        return logits


def digest(logits: Float[Tensor, "V"]) -> bytes:
    """Of the bits of the logits."""
    return hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).digest()


@final
class Comparing(DrafterWrapper):
    """Compares the logits of every node of each step with plain decoding's."""

    def __init__(self, inner: Drafter, plain: PlainDecoding) -> None:
        super().__init__(inner)
        self._plain = plain
        self.positions = self.different = 0
        self.first: tuple[int, int, int, float, float] | None = None

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        super().commit(view, draft, verdict, out)
        for index, row in enumerate(view.rows):
            history = view.history[index, : view.host_lengths[index]].tolist()
            paths = paths_of(history, draft.tree, index)
            for text, node in sorted((text, node) for node, text in paths.items()):  # so that rows go on from a parent
                logits = out.logits[index, node]
                self.positions += 1
                if digest(logits) != self._plain.after(row, text).digest:
                    self.different += 1
                    if self.first is None:
                        self.first = _apart(len(text), logits, self._plain.logits(row, text))


def paths_of(history: list[int], tree: TokenTree, index: int) -> dict[int, tuple[int, ...]]:
    """The text that ends with each node of a row. ``history`` ends with the root."""
    tokens, parents = tree.tokens[index].tolist(), tree.parents[index].tolist()
    paths = {0: tuple(history)}
    for node, parent in enumerate(parents[1:], 1):
        if parent != PAD:
            paths[node] = (*paths[parent], tokens[node])
    return paths


def _apart(place: int, found: Float[Tensor, "V"], expected: Float[Tensor, "V"]) -> tuple[int, int, int, float, float]:
    differ = found.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
    gaps = torch.where(differ, (found - expected).abs().nan_to_num(nan=torch.inf), -1.0)
    token = int(gaps.argmax())
    return place, int(differ.sum()), token, float(found[token]), float(expected[token])


@final
class _Random(Drafter):
    """Drafts of random shapes, in which about half of the paths are plain decoding's.

    A row's draft depends on its text alone, so that all settings verify the same nodes.
    """

    def __init__(self, plain: PlainDecoding, vocab_size: int, seed: int, *, linear: bool) -> None:
        self.needs = Needs(max_nodes=_NODES)
        self._plain = plain
        self._vocab_size = vocab_size
        self._seed = seed
        self._linear = linear

    def propose(self, view: View, plan: Plan) -> Draft:
        drawn = [
            self._drawn(row, tuple(view.history[index, : view.host_lengths[index]].tolist()), plan.lengths[index])
            for index, row in enumerate(view.rows)
        ]
        width = max(len(tokens) for tokens, _ in drawn)
        tokens = torch.tensor([each + [0] * (width - len(each)) for each, _ in drawn])
        parents = torch.tensor([each + [PAD] * (width - len(each)) for _, each in drawn])
        return Draft(TokenTree(tokens, parents, width - 1, self._linear), Law.FIXED)

    def _drawn(self, row: int, text: tuple[int, ...], longest: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a row's draft, no path of which is longer than that."""
        source = random.Random(f"{self._seed} {self._linear} {text}")
        paths, tokens, parents = [text], [text[-1]], [-1]
        most = min(longest, _NODES) if self._linear or not longest else _NODES
        for node in range(1, source.randint(min(most, 1), most) + 1):
            near = range(node - 1 if self._linear else max(node - _NEAR, 0), node)
            able = [parent for parent in near if len(paths[parent]) < len(text) + longest]
            parent = source.choice(able or [0])
            token = source.randrange(self._vocab_size)
            if source.random() < (0.8 if self._linear else 0.5):
                token = self._plain.after(row, paths[parent]).best
            paths.append((*paths[parent], token))
            tokens.append(token)
            parents.append(parent)
        return tokens, parents
