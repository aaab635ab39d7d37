"""The choices of transformers' decoding loop (``GenerationMixin._sample``), for drafts that are verified by them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.choices import Choices, DrawAll
from foredraft.core.sampling.processors import check_scores


class SampleLoop(Choices):
    """Runs the processors and criteria of a ``generate`` call on the whole batch, once a position, in order.

    They see what transformers shows them: padding, rows that have ended, and all rows in their places. So they may
    keep a state, count rows, or return one bool for all.

    Args:
        input_ids: [R, T], padding included.
        processors, criteria: as ``generate`` has prepared them.
        do_sample: draw from the softmax of the scores, else take the best.
        pad: what follows the end of a row, if there are end-of-sequence ids; without these, rows that a criterion has
            ended go on until all have.
    """

    def __init__(
        self,
        input_ids: Int[Tensor, "R T"],
        processors: Iterable[Callable[..., Any]],
        criteria: Any,
        *,
        do_sample: bool,
        pad: int,
    ) -> None:
        self._input_ids = input_ids
        self._processors = tuple(processors)
        self._criteria = criteria
        self._do_sample = do_sample
        self._pads = any(getattr(criterion, "eos_token_id", None) is not None for criterion in criteria)
        self._pad = pad
        self._unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)

    @property
    def open(self) -> list[bool]:
        going = (self._unfinished != 0).tolist()
        return going if self._pads or not any(going) else [True] * len(going)

    def choose(self, logits: Float[Tensor, "R V"], draw: DrawAll) -> list[int]:
        with torch.inference_mode(False), torch.no_grad():  # as in transformers: processors may change scores in place
            scores = logits.to(copy=True, device=self._input_ids.device)
            for processor in self._processors:
                given = scores
                scores = processor(self._input_ids, given)
                check_scores(processor, scores, given)
            chosen = draw(scores.float().softmax(-1)) if self._do_sample else scores.argmax(-1).tolist()
            tokens = torch.tensor(chosen, dtype=self._input_ids.dtype, device=self._input_ids.device)
            if self._pads:
                tokens = tokens * self._unfinished + self._pad * (1 - self._unfinished)
            self._input_ids = torch.cat([self._input_ids, tokens[:, None]], dim=-1)
            self._unfinished = self._unfinished & ~self._criteria(self._input_ids, None)
        return tokens.tolist()
