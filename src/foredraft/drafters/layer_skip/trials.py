"""Evaluates drafts that skip sublayers of the target, on the target's own outputs, and logs the trials."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.divergence import acceptance
from foredraft.core.errors import DataError, OptionError
from foredraft.drafters.layer_skip.search import KINDS, SkipTrial, Sublayer, layers_by_kind
from foredraft.files.outputs import may_cut
from foredraft.files.read import json_lines, read_text
from foredraft.files.write import atomic_write_text
from foredraft.model.base import TargetModel
from foredraft.model.kv.masks import address_segments
from foredraft.model.partial.skipping import LayeredLM, LayerSkipLM, layers_of
from foredraft.model.prefill import prefill

_BATCH = 8
"""Samples per forward."""


@dataclass(frozen=True, slots=True)
class TrialSample:
    """Token ids of prompt and answer, and the prompt's length."""

    tokens: tuple[int, ...]
    prompt: int


class SkipEvaluator:
    """Evaluates sets of skipped sublayers on samples, as expected tokens per step.

    The KV cache holds the samples as the full model computed them. The thinned model drafts from every position of the
    answers in one forward (``masks.address_segments``). A draft is accepted as far as it equals the sample, so its
    input tokens are the sample's, and a trial costs one forward.

    Args:
        samples: outputs of the target, so that drafts resemble those of decoding.
        temperature: at 0 a token is accepted if both models have the same argmax; else by the overlap of their laws.
        longest: longest draft to evaluate.

    Raises:
        DataError: all answers are shorter than ``longest``.
    """

    def __init__(self, model: TargetModel, samples: Sequence[TrialSample], *, temperature: float, longest: int) -> None:
        self._layers = layers_of(model)
        self._drafts = [_Drafts.of(sample, longest) for sample in samples]
        self._temperature = temperature
        self._longest = longest
        if max(drafts.count for drafts in self._drafts) < longest:
            raise DataError(
                f"No answer has {longest} tokens: raise --min-new-tokens for longer answers, or lower --longest."
            )
        self._cache = model.new_cache()
        self._prefill(model)
        self._target_laws = self._laws(self._layers.model)

    @property
    def parts(self) -> list[Sublayer]:
        return [Sublayer(layer, kind) for layer in range(len(self._layers)) for kind in KINDS]

    @property
    def tokens(self) -> int:
        return sum(drafts.count for drafts in self._drafts)

    def __call__(self, without: frozenset[Sublayer]) -> SkipTrial:
        thinned = self._layers.without(**layers_by_kind(without))
        steps = [0.0] * self._longest
        for drafts, p, q in zip(self._drafts, self._target_laws, self._laws(thinned), strict=True):
            accepted = acceptance(p, q) if self._temperature else (p == q).double()
            reached = drafts.table(accepted, self._longest).cumprod(1).tolist()
            for k in range(1, self._longest + 1):
                steps[k - 1] += _steps(reached, k)
        return SkipTrial(without, thinned.cost, tuple(self.tokens / count for count in steps))

    def _laws(self, model: LayeredLM | LayerSkipLM) -> list[Tensor]:
        """Per sample, the model's argmax [N] or law [N, V] after each draft token."""
        full = self._layers.model
        found: list[Tensor] = []
        for begin in range(0, len(self._drafts), _BATCH):
            group = self._drafts[begin : begin + _BATCH]
            step = address_segments(
                _padded([drafts.tokens for drafts in group], 0).to(full.device),
                _padded([drafts.places for drafts in group], 0).to(full.device),
                _padded([drafts.roots for drafts in group], -1).to(full.device),
                self._longest_sample,
                range(begin, begin + len(group)),
                full.layout,
            )
            logits = model.forward(step, self._cache).logits
            for line, drafts in enumerate(group):
                own = logits[line, : len(drafts.tokens)]
                law = (own.float() / self._temperature).softmax(-1) if self._temperature else own.argmax(-1)
                found.append(law.cpu())
        return found

    def _prefill(self, model: TargetModel) -> None:
        """Read the samples with the full model."""
        max_nodes = max(len(drafts.tokens) for drafts in self._drafts)
        self._cache.reserve(range(len(self._drafts)), self._longest_sample + max_nodes)
        for begin in range(0, len(self._drafts), _BATCH):
            samples = [drafts.sample for drafts in self._drafts[begin : begin + _BATCH]]
            rows = range(begin, begin + len(samples))
            prefill(model, self._cache, rows, _padded(samples, 0).to(model.device), [0] * len(samples))

    @property
    def _longest_sample(self) -> int:
        return max(len(drafts.sample) for drafts in self._drafts)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """All drafts on a sample, concatenated: token ids, their positions, and each token's draft root position.

    ``count``: number of drafts, one per token of the answer; the first starts from the prompt's last token.
    """

    sample: tuple[int, ...]
    count: int
    tokens: list[int]
    places: list[int]
    roots: list[int]

    @classmethod
    def of(cls, sample: TrialSample, longest: int) -> "_Drafts":
        """Drafts of up to ``longest`` tokens, shorter at the end of the sample."""
        last = len(sample.tokens) - 1
        starts = range(sample.prompt - 1, last)
        pairs = [(place, start) for start in starts for place in range(start, min(start + longest, last))]
        places, roots = [place for place, _ in pairs], [root for _, root in pairs]
        return cls(sample.tokens, len(starts), [sample.tokens[place] for place in places], places, roots)

    def table(self, accepted: Float[Tensor, "N"], longest: int) -> Float[Tensor, "T K"]:
        """One line per draft; 0 past the end of the sample."""
        left = torch.arange(self.count, 0, -1)
        exists = torch.arange(longest) < left[:, None]
        return accepted.new_zeros(exists.shape).masked_scatter_(exists, accepted)


def _steps(reached: list[list[float]], length: int) -> float:
    """Expected number of decoding steps for a sample at draft length ``length``.

    Dynamic programming from the end: a step at position i yields j + 1 tokens with the probability that exactly j
    drafted tokens are accepted.

    Args:
        reached: per position, the probability that the first 1, 2, ... drafted tokens are accepted.
    """
    ahead = [0.0] * (len(reached) + length + 1)
    for place in reversed(range(len(reached))):
        chances = [1.0, *reached[place][:length], 0.0]
        ahead[place] = 1.0 + sum((chances[j] - chances[j + 1]) * ahead[place + j + 1] for j in range(length + 1))
    return ahead[0]


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long)


class TrialLog:
    """Trials on disk, one line each, so that an interrupted search can resume.

    Args:
        about: identifies the search; a log of another search is refused.

    Raises:
        OptionError: the log belongs to another search, or cannot be written.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path = path
        self.known: dict[frozenset[Sublayer], SkipTrial] = {}
        about = json.loads(json.dumps(about))  # as read back from JSON
        try:
            if path.exists():
                text = read_text(path, "the trials")
                lines = [found for _, found in json_lines(path, text, torn=True)]
                if not may_cut(text.encode(), json.dumps(about).encode()) if not lines else lines[0] != about:
                    raise OptionError(f"{path} belongs to another search: remove it, or choose another --out.")
                self.known = {trial.without: trial for trial in map(_read, lines[1:])}
            lines = [about, *map(_to_json, self.known.values())]
            atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise OptionError(f"Cannot write {path}: {error.strerror}.") from None

    def cached(
        self, evaluate: Callable[[frozenset[Sublayer]], SkipTrial]
    ) -> Callable[[frozenset[Sublayer]], SkipTrial]:
        """Wrap an evaluator: known trials are returned, new ones are evaluated and logged."""

        def lookup(without: frozenset[Sublayer]) -> SkipTrial:
            if without not in self.known:
                trial = self.known[without] = evaluate(without)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(_to_json(trial)) + "\n")
            return self.known[without]

        return lookup


def _to_json(trial: SkipTrial) -> dict[str, Any]:
    return {**layers_by_kind(trial.without), "cost": trial.cost, "tokens": trial.tokens}


def _read(line: dict[str, Any]) -> SkipTrial:
    without = frozenset(Sublayer(layer, kind) for kind in KINDS for layer in line[kind])
    return SkipTrial(without, line["cost"], tuple(line["tokens"]))
