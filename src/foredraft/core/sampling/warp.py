"""Warp: logits to probabilities, the same function for target and draft.

The stages and their order are those of transformers 5.23 (``_get_logits_processor``):

    logit bias (transformers' sequence_bias is first), banned single tokens (order does not matter for -inf)
    repetition penalty
    presence and frequency penalty (not in transformers; as in OpenAI's API, they count generated tokens)
    no-repeat n-grams, bad words of several tokens, minimum length
    the user's processors
    temperature, top-k, top-p, min-p, typical, epsilon, eta: not for greedy rows
    softmax, or the one-hot of the best score for greedy rows

The host selects the stages when it builds the ``Warp``; only user processors read from the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Target
from foredraft.core.errors import OptionError
from foredraft.core.sampling.history import HistoryRules, Paths, add_at
from foredraft.core.sampling.params import Processor, SamplingParams
from foredraft.core.sampling.processors import run_processors
from foredraft.core.sampling.truncation import Truncation, coldest

__all__ = ["Paths", "Warp", "check_token_ids"]


_COLDEST = 1e-3
"""Least temperature where scores are compared and no law is made."""


@dataclass(frozen=True, slots=True)
class Warp:
    """Converts the logits of B rows to laws, with separate parameters for each row.

    Build one with ``of`` whenever the rows in flight change. Scores are float32, or float64 if the logits are.
    A row whose tokens are all banned, or whose logits are NaN, has no law: see ``Target.sound``.
    """

    greedy: bool
    needs_paths: bool
    greedy_rows: Bool[Tensor, "B 1 1"] | None  # None if all rows are greedy, or none is
    bias_ids: Int[Tensor, "B 1 K"] | None
    bias: Float[Tensor, "B 1 K"] | None
    history: HistoryRules | None
    processors: tuple[tuple[Processor, ...], ...]  # one entry per row; () if no row has any
    truncation: Truncation
    host_temperatures: tuple[float, ...] = ()  # of each row on the host; 0 for greedy rows

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[tuple[int, ...]],
        prompt_lengths: Sequence[int],
        device: torch.device | str,
    ) -> "Warp":
        """Build the warp for these rows.

        Args:
            params: of each row.
            vocab_size: V, the width of the target's logits. A draft's may be narrower.
            eos_token_ids: all ids that end the request, per row.
            prompt_lengths: in tokens, per row; later tokens are generated.
            device: the device of the logits.

        Raises:
            OptionError: a token id is not in the vocabulary.
        """
        for row in params:
            check_token_ids(row, vocab_size)
        greedy = [row.greedy for row in params]
        bias_ids, bias = _bias(params, eos_token_ids, device)
        history = HistoryRules.of(params, eos_token_ids, prompt_lengths, device)
        processors = tuple(row.logits_processor for row in params)
        mixed = any(greedy) and not all(greedy)
        return cls(
            greedy=all(greedy),
            needs_paths=history is not None or any(processors),
            greedy_rows=torch.tensor(greedy, device=device).view(-1, 1, 1) if mixed else None,
            bias_ids=bias_ids,
            bias=bias,
            history=history,
            processors=processors if any(processors) else (),
            truncation=Truncation.of(params, device),
            host_temperatures=tuple(0.0 if row.greedy else coldest(row.temperature) for row in params),
        )

    def __call__(self, logits: Float[Tensor, "B M V"], paths: Paths) -> Target:
        """The law at every node; if all rows are greedy, only the best tokens."""
        scores = self.processed(logits, paths) if self.greedy else self.scores(logits, paths)
        best, some = scores.argmax(-1), self.greedy or self.greedy_rows is not None
        law = None if self.greedy else self._law(scores, best)
        return Target(best, law, _finite(scores, best), scores if some else None)

    def law(self, logits: Float[Tensor, "B M V"], paths: Paths) -> Float[Tensor, "B M V"]:
        """The law at every node as a dense tensor, one-hot for greedy rows; drafters draw from it."""
        if not self.greedy and self.greedy_rows is None:
            return self.scores(logits, paths).softmax(-1)
        scores = self.scores(logits, paths)
        return self._law(scores, scores.argmax(-1))

    def temperature(self, least: float) -> float | Float[Tensor, "B 1 1"]:
        """Each row's temperature, at least ``least`` (also for greedy rows), for estimates of the law."""
        if self.greedy:
            return least
        own = self.truncation.temperature
        clamped = max(1.0, least) if own is None else own.float().clamp(min=least)
        return clamped if self.greedy_rows is None else torch.where(self.greedy_rows, least, clamped)

    @property
    def scales_only(self) -> bool:
        """Whether nothing but the temperature changes logits, and no token is cut."""
        return self.bias_ids is None and not self.needs_paths and not self.truncation.cuts

    def temperature_list(self, greedy: float) -> list[float]:
        """``temperatures`` on the host."""
        return [max(each, _COLDEST) if each else greedy for each in self.host_temperatures]

    def temperatures(self, rows: int, greedy: float) -> Float[Tensor, "B"]:
        """Each row's temperature; that of greedy rows is given."""
        own = self.truncation.temperature
        if self.greedy or own is None:
            plain = torch.full((rows,), greedy if self.greedy else 1.0)
            return plain if self.greedy_rows is None else plain.masked_fill_(self.greedy_rows[:, 0, 0], greedy)
        found = own[:, 0, 0].float().clamp(min=_COLDEST)
        return found if self.greedy_rows is None else found.masked_fill_(self.greedy_rows[:, 0, 0], greedy)

    @property
    def hottest(self) -> float:
        """The highest temperature of all rows, on the host."""
        return max(self.host_temperatures, default=0.0)

    @property
    def processes(self) -> bool:
        """Whether ``processed`` changes anything."""
        return self.needs_paths or self.bias is not None

    def scores(self, logits: Float[Tensor, "B M V"], paths: Paths) -> Float[Tensor, "B M V"]:
        """The softmax's input: -inf at all tokens that are banned or cut."""
        return self.truncation(_wide(self.processed(logits, paths)))

    def processed(self, logits: Float[Tensor, "B M V"], paths: Paths) -> Float[Tensor, "B M V"]:
        """Logits after penalties, bans and processors, before temperature; unchanged if no row has any."""
        scores = logits
        if self.bias_ids is not None and self.bias is not None:
            scores = _wide(scores)
            shape = (-1, scores.shape[1], -1)
            scores = add_at(scores, self.bias_ids.expand(shape), self.bias.to(scores.dtype).expand(shape))
        if self.history is not None:
            scores = self.history(_wide(scores), paths)
        if self.processors:
            scores = run_processors(_wide(scores), paths, self.processors)
        return scores

    def _law(self, scores: Float[Tensor, "B M V"], best: Int[Tensor, "B M"]) -> Float[Tensor, "B M V"]:
        if not self.greedy and self.greedy_rows is None:
            return scores.softmax(-1)
        one_hot = torch.zeros_like(scores).scatter_(-1, best[..., None], 1.0)
        return one_hot if self.greedy_rows is None else torch.where(self.greedy_rows, one_hot, scores.softmax(-1))


def _finite(scores: Float[Tensor, "B M V"], best: Int[Tensor, "B M"]) -> Bool[Tensor, "B M"]:
    """Whether the best score is finite. argmax picks NaN first, and -inf only if all scores are -inf."""
    return scores.gather(-1, best[..., None])[..., 0].isfinite()


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise an ``OptionError`` for the first token id in the parameters that is not in the vocabulary."""
    if isinstance(params.prediction, str):
        raise OptionError("prediction must be token ids here, not a text.")
    named = {
        "logit_bias": params.logit_bias,
        "bad_words_ids": [i for word in params.bad_words_ids for i in word],
        "prediction": params.prediction or (),
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise OptionError(f"{name}: token {token} is outside the vocabulary of {vocab_size} tokens.")


def _wide(scores: Float[Tensor, "B M V"]) -> Float[Tensor, "B M V"]:
    return scores if scores.dtype == torch.float64 else scores.float()


def _bias(
    params: Sequence[SamplingParams], eos_token_ids: Sequence[tuple[int, ...]], device: torch.device | str
) -> tuple[Int[Tensor, "B 1 K"] | None, Float[Tensor, "B 1 K"] | None]:
    """Bias on single tokens: ``logit_bias``, and -inf for bad words of one token.

    As in transformers, an end-of-sequence id is never a bad word.
    """
    rows = []
    for row, eos in zip(params, eos_token_ids, strict=True):
        banned = {word[0]: -math.inf for word in row.bad_words_ids if len(word) == 1 and word[0] not in eos}
        rows.append({**row.logit_bias, **banned})
    most = max(map(len, rows))
    if most == 0:
        return None, None
    ids = [[*row, *[-1] * (most - len(row))] for row in rows]
    values = [[*row.values(), *[0.0] * (most - len(row))] for row in rows]
    return (
        torch.tensor(ids, device=device)[:, None],
        torch.tensor(values, dtype=torch.float64, device=device)[:, None],
    )
