"""Distillation of a draft model from the target, for ``foredraft train draft``.

The divergences are those of online speculative decoding and DistillSpec (arXiv:2310.07177, arXiv:2310.08461).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from foredraft.core.divergence import jensen_shannon, kl, reverse_kl
from foredraft.core.options import check_bounds
from foredraft.core.sampling.params import check_known
from foredraft.core.target_parts import FINAL
from foredraft.heads.nets.ttt_attention import sample_rows, take
from foredraft.model.base import TargetModel
from foredraft.model.hf.head_parts import parts_of
from foredraft.model.hf.taps import body
from foredraft.train.checkpoint import Report
from foredraft.train.losses import agree, likeliest, weighted_mean
from foredraft.train.options import LoopOptions
from foredraft.train.recipe import Recipe, TrainBatch, recompute
from foredraft.train.run_context import RunContext

LOSSES = ("forward_kl", "reverse_kl", "jsd", "hard", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of distillation.

    loss: forward_kl, reverse_kl or jsd between the target's law and the draft's; hard: the target's argmax; text: the
        data's tokens, which are the target's outputs if foredraft answers wrote them; the target is not read then.
    weight: for jsd, the target's share of the mixture; small values approach forward_kl.
    share: fraction of the positions used in each step; an unbiased estimate that saves time.
    rows: rows of logits in memory at once.
    """

    loss: str = "forward_kl"
    weight: float = 0.5
    share: float = 1.0
    rows: int = 1024

    def __post_init__(self) -> None:
        check_known("loss", {self.loss: None}, list(LOSSES))
        check_bounds(self, least={"rows": 1}, above={"weight": 0, "share": 0}, most={"share": 1}, below={"weight": 1})


@dataclass(frozen=True, slots=True)
class DraftRun:
    """A training run of draft models. ``options``: of the recipe ``method``; ``report``: called with each log line."""

    context: RunContext
    method: str
    target_name: str
    options: Any
    loop: LoopOptions
    report: Report


@final
class Teacher:
    """Compares the laws of draft and target on the same tokens; with the loss ``text``, the draft's law and the tokens.

    If one vocabulary is padded further than the other, only the common ids count. ``taps``: what batches must have.
    """

    def __init__(self, target: TargetModel, options: Options) -> None:
        self._head = target.parts().head
        self._options = options
        self.taps = () if options.loss == "text" else (FINAL,)

    def __call__(
        self, batch: TrainBatch, states: Float[Tensor, "B T H"], head: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The weighted loss, and the share of positions where the draft's argmax is the target's or, with the loss
        ``text``, the token.

        Args:
            states: input of the draft's output layer ``head``.
        """
        losses, agreements = self.each(batch, states[None], head)
        return {"loss": losses[0], "agreement": agreements[0]}

    def each(
        self, batch: TrainBatch, states: Float[Tensor, "E B T H"], head: Callable[[Tensor], Tensor]
    ) -> tuple[Float[Tensor, "E"], Float[Tensor, "E"]]:
        """The loss and the agreement of several drafts with one output layer: the target's law is computed once."""
        wanted, weights = batch.hidden[FINAL][:, :-1] if self.taps else batch.tokens[:, 1:], batch.weights[:, :-1]
        drafts = states[:, :, :-1]  # the last position has no label
        if self._options.share < 1:
            rows = sample_rows(weights.shape[1], len(weights), self._options.share, batch.rng())
            wanted, weights = take(wanted, rows), take(weights, rows)
            drafts = torch.stack([take(each, rows) for each in drafts])
        wanted, weights, drafts = wanted.flatten(0, 1), weights.flatten(), drafts.flatten(1, 2)
        losses_and_hits, found = self._by_laws if self.taps else self._by_tokens, []
        for begin in range(0, len(weights), self._options.rows):
            some = slice(begin, begin + self._options.rows)
            found.append(recompute(True, losses_and_hits, wanted[some], drafts[:, some], head))
        losses, hits = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        losses, hits = (torch.stack([weighted_mean(one, weights) for one in each]) for each in (losses, hits))
        return losses, hits.detach()

    def agrees(
        self, batch: TrainBatch, states: Float[Tensor, "B T H"], head: Callable[[Tensor], Tensor]
    ) -> Bool[Tensor, "B M"]:
        """Whether both argmaxes are equal, at each position but the last."""
        size, rows = self._options.rows, (batch.hidden[FINAL][:, :-1].flatten(0, 1), states[:, :-1].flatten(0, 1))
        laws = (self._logits(p, q[None], head) for p, q in zip(*(each.split(size) for each in rows), strict=True))
        return torch.cat([agree(q[0], p) for p, q in laws]).view(batch.tokens.shape[0], -1)

    def _by_tokens(
        self, tokens: Int[Tensor, "rows"], draft_rows: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Float[Tensor, "E rows"], Float[Tensor, "E rows"]]:
        """Losses and hits of drafts against the data."""
        q = head(draft_rows).float()
        return _surprise(_log_law(q), tokens), (likeliest(q) == tokens).float()

    def _by_laws(
        self, target_rows: Float[Tensor, "rows H"], draft_rows: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Float[Tensor, "E rows"], Float[Tensor, "E rows"]]:
        """Losses and hits of drafts against the target, by its final states."""
        p, q = self._logits(target_rows, draft_rows, head)
        law, log_q = p.softmax(-1), _log_law(q)
        match self._options.loss:
            case "forward_kl":
                losses = kl(law, log_q)
            case "reverse_kl":
                losses = reverse_kl(law, log_q)
            case "jsd":
                losses = jensen_shannon(law, log_q, self._options.weight)
            case _:
                losses = _surprise(log_q, likeliest(p))
        hits = likeliest(q) == likeliest(p)  # last: the backward pass recomputes up to the losses
        return losses, hits.float()

    def _logits(
        self, target_rows: Tensor, draft_rows: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logits of target [rows, V] and drafts [E, rows, V] over the common ids."""
        with torch.no_grad():
            p = self._head(target_rows).float()
        q = head(draft_rows).float()
        shared = min(p.shape[-1], q.shape[-1])
        return p[:, :shared], q[..., :shared]


def _log_law(q: Float[Tensor, "E rows V"]) -> Float[Tensor, "E rows V"]:
    return q.clamp(min=torch.finfo(q.dtype).min / 4).log_softmax(-1)  # -inf times 0 is NaN


def _surprise(log_q: Float[Tensor, "E rows V"], tokens: Int[Tensor, "rows"]) -> Float[Tensor, "E rows"]:
    """Of each draft at each row's token."""
    return -log_q.gather(-1, tokens.expand(log_q.shape[:-1])[..., None])[..., 0]


@final
class Student(nn.Module):
    """The transformers model that is trained."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model.float().requires_grad_(True)
        self.head = parts_of(model).head

    def states(self, tokens: Tensor) -> Float[Tensor, "B T H"]:
        """Input of the output layer, with gradients."""
        self.model.eval()  # dropout would make resumed runs differ
        return body(self.model)(input_ids=tokens, use_cache=False)[0]


@final
class DistilRecipe(Recipe[Student]):
    """Trains the whole draft model at every position that counts."""

    def __init__(self, net: Student, teacher: Teacher) -> None:
        super().__init__()
        self.taps = teacher.taps
        self.net = net
        self._teacher = teacher

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        return self._teacher(batch, self.net.states(batch.tokens), self.net.head)

    @torch.no_grad()
    def agrees(self, batch: TrainBatch) -> Bool[Tensor, "B M"]:
        """Whether the argmaxes of target and draft are equal, at each position but the last."""
        return self._teacher.agrees(batch, self.net.states(batch.tokens), self.net.head)
