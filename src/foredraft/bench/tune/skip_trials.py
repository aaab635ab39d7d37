"""What a draft without some parts of the target would bring, on texts that the target has said; and the file of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.bench.jsonl import objects
from foredraft.core.errors import DataError, OptionError
from foredraft.core.io import atomic_write_text
from foredraft.core.theory import acceptance
from foredraft.model.hf import CausalLM
from foredraft.model.masks import address_segments
from foredraft.model.prefill import prefill
from foredraft.model.skipping import Layers, LayerSkipLM

_AT_ONCE = 8
"""Texts in a forward."""


@dataclass(frozen=True, slots=True)
class Said:
    """A text: ids of prompt and answer, and how many of them are the prompt's."""

    tokens: tuple[int, ...]
    prompt: int


@dataclass(frozen=True, order=True, slots=True)
class Sublayer:
    """One thing that can be left out. ``kind`` is attention or mlp; the first layer is 0."""

    layer: int
    kind: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What a set of parts that are left out came to.

    ``tokens[k - 1]``: mean tokens a step, bonus included, with drafts of k. ``cost``: of a draft step, as a share of
    the weights that the whole model reads.
    """

    without: frozenset[Sublayer]
    cost: float
    tokens: tuple[float, ...]

    @property
    def best(self) -> int:
        """The length of draft that pays most."""
        return max(range(1, len(self.tokens) + 1), key=lambda k: (self.rate(k), -k))

    def rate(self, length: int) -> float:
        """Tokens in the time of a whole forward, by weights read: each drafted token costs ``cost``, verifying 1."""
        return self.tokens[length - 1] / (1.0 + length * self.cost)

    @property
    def score(self) -> float:
        """Speed over plain decoding where reading weights is what takes time."""
        return self.rate(self.best)


class Judge:
    """Tries sets of parts on texts, and says what the loop would make of their drafts.

    The texts lie in the cache as the whole model has read them; what is left of it drafts from every place of the
    answers at once, beside them (``masks.address_segments``). A draft is accepted as far as it agrees with the text, so
    its tokens may as well be the text's, and a try takes no more than a forward.

    Args:
        texts: as the target says them, so that drafts for them are what would be drafted.
        temperature: 0 counts a token as accepted where both find the same likeliest; else the overlap of their laws.
        longest: drafts of up to so many tokens.

    Raises:
        DataError: all answers are shorter than that.
    """

    def __init__(self, model: CausalLM, texts: Sequence[Said], *, temperature: float, longest: int) -> None:
        self._layers = Layers(model)
        self._drafts = [_Drafts.of(text, longest) for text in texts]
        self._temperature = temperature
        self._longest = longest
        if max(drafts.count for drafts in self._drafts) < longest:
            raise DataError(
                f"No answer has {longest} tokens, so there is nothing to judge by: ask for longer ones "
                "(--min-new-tokens), or for shorter drafts (--longest)."
            )
        self._cache = model.new_cache()
        self._fill(model)
        self._truth = self._laws(model)

    @property
    def parts(self) -> list[Sublayer]:
        """All that could be left out."""
        return [Sublayer(layer, kind) for layer in range(len(self._layers)) for kind in ("attention", "mlp")]

    @property
    def tokens(self) -> int:
        """So many tokens a set is judged by."""
        return sum(drafts.count for drafts in self._drafts)

    def __call__(self, without: frozenset[Sublayer]) -> Trial:
        left = self._layers.without(
            [part.layer for part in without if part.kind == "attention"],
            [part.layer for part in without if part.kind == "mlp"],
        )
        steps = [0.0] * self._longest
        for drafts, truth, said in zip(self._drafts, self._truth, self._laws(left), strict=True):
            accepted = acceptance(truth, said) if self._temperature else (truth == said).double()
            reached = drafts.table(accepted, self._longest).cumprod(1).tolist()
            for k in range(1, self._longest + 1):
                steps[k - 1] += _steps(reached, k)
        return Trial(without, left.cost, tuple(self.tokens / count for count in steps))

    def _laws(self, model: CausalLM | LayerSkipLM) -> list[Tensor]:
        """What this model says after each token of the drafts: by text, the likeliest [N], or the law [N, V]."""
        whole = self._layers.model
        found: list[Tensor] = []
        for begin in range(0, len(self._drafts), _AT_ONCE):
            group = self._drafts[begin : begin + _AT_ONCE]
            step = address_segments(
                _padded([drafts.tokens for drafts in group], 0).to(whole.device),
                _padded([drafts.places for drafts in group], 0).to(whole.device),
                _padded([drafts.roots for drafts in group], -1).to(whole.device),
                self._longest_text,
                range(begin, begin + len(group)),
                whole.layout,
                dtype=whole.dtype,
            )
            logits = model.forward(step, self._cache).logits
            for line, drafts in enumerate(group):
                own = logits[line, : len(drafts.tokens)]
                law = (own.float() / self._temperature).softmax(-1) if self._temperature else own.argmax(-1)
                found.append(law.cpu())
        return found

    def _fill(self, model: CausalLM) -> None:
        """Read the texts with the whole model."""
        room = max(len(drafts.tokens) for drafts in self._drafts)
        self._cache.reserve(len(self._drafts), self._longest_text + room)
        for begin in range(0, len(self._drafts), _AT_ONCE):
            texts = [drafts.text for drafts in self._drafts[begin : begin + _AT_ONCE]]
            rows = range(begin, begin + len(texts))
            prefill(model, self._cache, rows, _padded(texts, 0).to(model.device), [0] * len(texts))

    @property
    def _longest_text(self) -> int:
        return max(len(drafts.text) for drafts in self._drafts)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The pieces of a text that stand for drafts, one after another: tokens, their places, where each piece begins.

    ``count``: how many there are, one for each token of the answer, the first begun with the prompt's last token.
    """

    text: tuple[int, ...]
    count: int
    tokens: list[int]
    places: list[int]
    roots: list[int]

    @classmethod
    def of(cls, text: Said, longest: int) -> "_Drafts":
        """Drafts of so many tokens, shorter at the end of the text."""
        last = len(text.tokens) - 1
        starts = range(text.prompt - 1, last)
        pairs = [(place, start) for start in starts for place in range(start, min(start + longest, last))]
        places, roots = [place for place, _ in pairs], [root for _, root in pairs]
        return cls(text.tokens, len(starts), [text.tokens[place] for place in places], places, roots)

    def table(self, accepted: Float[Tensor, "N"], longest: int) -> Float[Tensor, "T K"]:
        """A row for each draft; 0 behind the end of the text."""
        left = torch.arange(self.count, 0, -1)
        exists = torch.arange(longest) < left[:, None]
        return accepted.new_zeros(exists.shape).masked_scatter_(exists, accepted)


def _steps(reached: list[list[float]], length: int) -> float:
    """The number of steps that the loop is expected to take for a text, with drafts of so many tokens.

    From its end on: a step at place i brings j + 1 tokens with the chance that just j of its draft are accepted.

    Args:
        reached: for each place, the chance that the first 1, 2, ... of the tokens drafted there are accepted.
    """
    ahead = [0.0] * (len(reached) + length + 1)
    for place in reversed(range(len(reached))):
        chances = [1.0, *reached[place][:length], 0.0]
        ahead[place] = 1.0 + sum((chances[j] - chances[j + 1]) * ahead[place + j + 1] for j in range(length + 1))
    return ahead[0]


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long)


class Journal:
    """Trials on disk, one line each, so that a search that was cut off goes on where it was.

    Args:
        about: what the search is about; another search's journal is refused.

    Raises:
        OptionError: it belongs to another search, or cannot be written.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path = path
        self.known: dict[frozenset[Sublayer], Trial] = {}
        about = json.loads(json.dumps(about))  # as it comes back
        try:
            if path.exists():
                lines = [found for _, found in objects(path, path.read_text(encoding="utf-8"), torn=True)]
                if lines and lines[0] != about:
                    raise OptionError(f"{path} is of another search: remove it, or choose another --out.")
                self.known = {trial.without: trial for trial in map(_read, lines[1:])}
            lines = [about, *map(_record, self.known.values())]
            atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise OptionError(f"Cannot write {path}: {error.strerror}.") from None

    def through(self, judge: Callable[[frozenset[Sublayer]], Trial]) -> Callable[[frozenset[Sublayer]], Trial]:
        """A judge who looks here first, and writes down what is new."""

        def judged(without: frozenset[Sublayer]) -> Trial:
            if without not in self.known:
                trial = self.known[without] = judge(without)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(_record(trial)) + "\n")
            return self.known[without]

        return judged


def _record(trial: Trial) -> dict[str, Any]:
    kinds = {kind: sorted(p.layer for p in trial.without if p.kind == kind) for kind in ("attention", "mlp")}
    return {**kinds, "cost": trial.cost, "tokens": trial.tokens}


def _read(line: dict[str, Any]) -> Trial:
    without = frozenset(Sublayer(layer, kind) for kind in ("attention", "mlp") for layer in line[kind])
    return Trial(without, line["cost"], tuple(line["tokens"]))
