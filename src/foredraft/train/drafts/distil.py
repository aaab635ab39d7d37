"""Distillation of a whole small model from the target: what ``foredraft train draft`` teaches.

The divergences are those of online speculative decoding and DistillSpec (arXiv:2310.07177, arXiv:2310.08461).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from foredraft.core.divergence import jensen_shannon, kl, reverse_kl
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import check_known
from foredraft.heads.nets.target_parts import FINAL
from foredraft.model.head_parts import parts_of
from foredraft.model.hf import CausalLM
from foredraft.model.taps import body
from foredraft.train.losses import weighted_mean
from foredraft.train.recipe import Lesson, Recipe, recompute

LOSSES = ("forward_kl", "reverse_kl", "jsd", "hard", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the draft is to learn of the target.

    loss: forward_kl, reverse_kl or jsd between the target's law and the draft's; hard, the target's likeliest token; or
        text, the tokens of the text, which with --regenerate are what the target said.
    weight: of jsd, the target's part in the mixture; the smaller, the nearer to forward_kl.
    rows: rows of logits that are in memory at once.
    """

    loss: str = "forward_kl"
    weight: float = 0.5
    rows: int = 1024

    def __post_init__(self) -> None:
        check_known("loss", {self.loss: None}, list(LOSSES))
        if not 0 < self.weight < 1:
            raise OptionError("weight must be above 0 and below 1.")
        if self.rows < 1:
            raise OptionError("rows must be 1 or more.")


@final
class Teacher:
    """Judges states of a draft by what the target says of the same text.

    Where one vocabulary is padded further than the other, only the ids that both have are looked at.
    """

    def __init__(self, target: CausalLM, options: Options) -> None:
        self._head = parts_of(target.model).head
        self._options = options

    def __call__(
        self, lesson: Lesson, states: Float[Tensor, "B T H"], head: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The loss by weight of the rows, and the share of rows where both have the same likeliest token.

        Args:
            lesson: with the target's final states.
            states: what the draft's output layer ``head`` reads.
        """
        labels = lesson.tokens[:, 1:].flatten()  # what follows the last row is not in the lesson
        weights = lesson.weights[:, :-1].flatten()
        taught, learned = self._rows(lesson, states)
        losses, hits = [], []
        for begin in range(0, len(labels), self._options.rows):
            some = slice(begin, begin + self._options.rows)
            loss, hit = recompute(True, self._judge, taught[some], learned[some], labels[some], head)
            losses.append(loss)
            hits.append(hit)
        mean, agreement = (weighted_mean(torch.cat(each), weights) for each in (losses, hits))
        return {"loss": mean, "agreement": agreement.detach()}

    def agrees(
        self, lesson: Lesson, states: Float[Tensor, "B T H"], head: Callable[[Tensor], Tensor]
    ) -> Bool[Tensor, "B M"]:
        """Whether both have the same likeliest token at each row but the last."""
        taught, learned = self._rows(lesson, states)
        size = self._options.rows
        pairs = zip(taught.split(size), learned.split(size), strict=True)
        laws = (self._logits(p, q, head) for p, q in pairs)
        return torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in laws]).view(lesson.tokens.shape[0], -1)

    @staticmethod
    def _rows(lesson: Lesson, states: Tensor) -> tuple[Tensor, Tensor]:
        """States of the target and of the draft as rows, without the last of each text."""
        return lesson.hidden[FINAL][:, :-1].flatten(0, 1), states[:, :-1].flatten(0, 1)

    def _judge(
        self, taught: Tensor, learned: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        p, q = self._logits(taught, learned, head)
        choice = p.argmax(-1)
        hit = (q.argmax(-1) == choice).float()
        law, log_q = p.softmax(-1), q.clamp(min=torch.finfo(q.dtype).min / 4).log_softmax(-1)  # -inf times 0 is NaN
        match self._options.loss:
            case "forward_kl":
                loss = kl(law, log_q)
            case "reverse_kl":
                loss = reverse_kl(law, log_q)
            case "jsd":
                loss = jensen_shannon(law, log_q, self._options.weight)
            case "hard":
                loss = F.cross_entropy(q, choice, reduction="none")
            case _:
                loss = F.cross_entropy(q, labels, reduction="none")
        return loss, hit

    def _logits(self, taught: Tensor, learned: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Of target and draft, for the ids that both have."""
        with torch.no_grad():
            p = self._head(taught).float()
        q = head(learned).float()
        shared = min(p.shape[-1], q.shape[-1])
        return p[:, :shared], q[:, :shared]


@final
class Student(nn.Module):
    """A causal LM that learns, as transformers has it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model.float().requires_grad_(True)
        self.head = parts_of(model).head

    def states(self, tokens: Tensor) -> Float[Tensor, "B T H"]:
        """What the output layer reads, with gradients."""
        self.model.eval()  # dropout would draw numbers that a resumed run does not draw again
        return body(self.model)(input_ids=tokens, use_cache=False)[0]


@final
class DistilRecipe(Recipe[Student]):
    """The whole draft learns, at every row that counts."""

    def __init__(self, net: Student, teacher: Teacher) -> None:
        super().__init__()
        self.taps = (FINAL,)
        self.net = net
        self._teacher = teacher

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        return self._teacher(lesson, self.net.states(lesson.tokens), self.net.head)

    @torch.no_grad()
    def agrees(self, lesson: Lesson) -> Bool[Tensor, "B M"]:
        """Whether target and draft have the same likeliest token, at each row but the last."""
        return self._teacher.agrees(lesson, self.net.states(lesson.tokens), self.net.head)
