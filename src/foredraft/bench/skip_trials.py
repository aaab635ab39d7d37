"""What a draft without some parts of the target would bring, on texts that the target has said; and the file of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.bench.lines import objects
from foredraft.core.errors import DataError, OptionError
from foredraft.core.theory import acceptance
from foredraft.model.causal import CausalLM
from foredraft.model.masks import beside
from foredraft.model.prefill import prefill
from foredraft.model.skipping import Layers, PartialLM

_AT_ONCE = 8
"""Texts in a forward."""


@dataclass(frozen=True, slots=True)
class Said:
    """A text: ids of prompt and answer, and how many of them are the prompt's."""

    tokens: tuple[int, ...]
    prompt: int


@dataclass(frozen=True, order=True, slots=True)
class Part:
    """One thing that can be left out. ``kind`` is attention or mlp; the first layer is 0."""

    layer: int
    kind: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What a set of parts that are left out came to.

    ``tokens[k - 1]``: mean tokens a step, bonus included, with drafts of k. ``cost``: of a draft step, as a share of
    the weights that the whole model reads.
    """

    without: frozenset[Part]
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
    """Tries sets of parts on texts. A try is one forward: the texts lie in the cache as the whole model has read them,
    and each of their tokens is read once more by what is left, beside them.

    Args:
        texts: as the target says them, so that drafts for them are what would be drafted.
        temperature: 0 counts a token as accepted where both find the same likeliest; else the overlap of their laws.
        longest: drafts of up to so many tokens.
    """

    def __init__(self, model: CausalLM, texts: Sequence[Said], *, temperature: float, longest: int) -> None:
        self._layers = Layers(model)
        self._texts = [text for text in texts if len(text.tokens) - text.prompt >= longest]
        self._temperature = temperature
        self._longest = longest
        if not self._texts:
            raise DataError(
                f"No text has {longest} new tokens to be judged by; ask for longer ones, or for shorter drafts."
            )
        self._cache = model.new_cache()
        self._fill(model)
        self._truth = self._laws(model)

    @property
    def parts(self) -> list[Part]:
        """All that could be left out."""
        return [Part(layer, kind) for layer in range(len(self._layers)) for kind in ("attention", "mlp")]

    @property
    def tokens(self) -> int:
        """So many tokens a set is judged by."""
        return sum(len(text.tokens) - text.prompt for text in self._texts)

    def __call__(self, without: frozenset[Part]) -> Trial:
        left = self._layers.without(
            [part.layer for part in without if part.kind == "attention"],
            [part.layer for part in without if part.kind == "mlp"],
        )
        runs = torch.zeros(self._longest, dtype=torch.float64)
        starts = 0
        for truth, draft in zip(self._truth, self._laws(left), strict=True):
            accepted = self._accepted(truth, draft)  # [T]
            windows = accepted.unfold(0, self._longest, 1).cumprod(1)  # from each place on, token after token
            runs += windows.sum(0)
            starts += windows.shape[0]
        return Trial(without, left.cost, tuple((1.0 + (runs / starts).cumsum(0)).tolist()))

    def _accepted(self, truth: Tensor, draft: Tensor) -> Float[Tensor, "T"]:
        if not self._temperature:
            return (truth == draft).double()
        return acceptance(truth, draft)

    def _laws(self, model: CausalLM | PartialLM) -> list[Tensor]:
        """Of each text, what this model says at every place of the answer: the likeliest [T], or the law [T, V]."""
        whole = self._layers.model
        behind = max(len(text.tokens) for text in self._texts)
        found: list[Tensor] = []
        for begin in range(0, len(self._texts), _AT_ONCE):
            group = self._texts[begin : begin + _AT_ONCE]
            width = max(len(text.tokens) - text.prompt for text in group)
            tokens = torch.zeros(len(group), width, dtype=torch.long)
            places = torch.zeros_like(tokens)
            for line, text in enumerate(group):
                count = len(text.tokens) - text.prompt
                tokens[line, :count] = torch.tensor(text.tokens[text.prompt - 1 : -1])
                places[line, :count] = torch.arange(text.prompt - 1, len(text.tokens) - 1)
            rows = range(begin, begin + len(group))
            step = beside(
                tokens.to(whole.device), places.to(whole.device), behind, rows, whole.layout, dtype=whole.dtype
            )
            logits = model.forward(step, self._cache).logits
            for line, text in enumerate(group):
                own = logits[line, : len(text.tokens) - text.prompt]
                law = (own.float() / self._temperature).softmax(-1) if self._temperature else own.argmax(-1)
                found.append(law.cpu())
        return found

    def _fill(self, model: CausalLM) -> None:
        """Read the texts with the whole model."""
        longest = max(len(text.tokens) for text in self._texts)
        widest = max(len(text.tokens) - text.prompt for text in self._texts)
        self._cache.reserve(len(self._texts), longest + widest)
        for begin in range(0, len(self._texts), _AT_ONCE):
            group = self._texts[begin : begin + _AT_ONCE]
            width = max(len(text.tokens) for text in group)
            tokens = torch.tensor([[*text.tokens, *[0] * (width - len(text.tokens))] for text in group])
            prefill(model, self._cache, range(begin, begin + len(group)), tokens.to(model.device), [0] * len(group))


class Journal:
    """Trials on disk, one line each, so that a search that was cut off goes on where it was.

    Args:
        about: what the search is about; another search's journal is refused.

    Raises:
        OptionError: it belongs to another search, or cannot be written.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path = path
        self.known: dict[frozenset[Part], Trial] = {}
        about = json.loads(json.dumps(about))  # as it comes back
        try:
            if path.exists():
                lines = [found for _, found in objects(path, path.read_text(encoding="utf-8"), torn=True)]
                if lines and lines[0] != about:
                    raise OptionError(f"{path} is of another search: remove it, or choose another --out.")
                self.known = {trial.without: trial for trial in map(_read, lines[1:])}
            lines = [about, *map(_record, self.known.values())]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise OptionError(f"Cannot write {path}: {error.strerror}.") from None

    def through(self, judge: Callable[[frozenset[Part]], Trial]) -> Callable[[frozenset[Part]], Trial]:
        """A judge who looks here first, and writes down what is new."""

        def judged(without: frozenset[Part]) -> Trial:
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
    without = frozenset(Part(layer, kind) for kind in ("attention", "mlp") for layer in line[kind])
    return Trial(without, line["cost"], tuple(line["tokens"]))
