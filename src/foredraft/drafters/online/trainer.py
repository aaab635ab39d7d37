"""Learning from what was served: one interval's passages make the next version of a net, or show that the present one
is worse than it should be.

Before a version learns from new passages it is examined on them, and so is the best version so far: both say what they
would have drafted at the same places, which neither has learned from. So a text that is harder than those before it
cannot pass for a bad version, nor an easier one for a good version.
"""

import functools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.core.divergence import Distance, jensen_shannon, kl, overlap, reverse_kl
from foredraft.drafters.online.trainable import Lesson, Sample, Trainee

Weights = dict[str, Tensor]

LOSSES = ("forward_kl", "reverse_kl", "jsd")
LEAST_PASSAGES = 8
"""So many passages must have been seen before a version is judged."""
SURE = 3.0
"""A version is worse than the best one if its mean acceptance is lower by so many standard errors of the paired
differences: with 8 passages Student's t says so once in a hundred times of a version that is as good."""
_WINDOW = 64  # passages that a judgement looks back on
_DECAY = 0.8  # level k of a draft weighs as much to the power of k, as in EAGLE-3's recipe
_CLIP = 1.0  # the largest norm of a gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How is learned; see ``online.Options``."""

    lr: float
    loss: str
    jsd_weight: float
    every_law: bool
    passes: int
    batch: int

    def distance(self) -> Distance:
        """The loss as a function of laws."""
        jsd = functools.partial(jensen_shannon, weight=self.jsd_weight)
        return {"forward_kl": kl, "reverse_kl": reverse_kl, "jsd": jsd}[self.loss]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one interval's passages.

    ``outcome``: "learned", a new version; "returned", the weights of the best version again; "refused", a step whose
    loss or gradient was no number, so that nothing has changed. ``acceptance``: of the version that served, on these
    passages, as the mean overlap of its law with the target's; ``best``: the same of the best version.
    """

    version: int
    outcome: str
    passages: int
    laws: int
    acceptance: float
    best: float
    loss: float

    def as_dict(self) -> dict[str, Any]:
        """In types that JSON knows: a loss that is no number is None."""
        return {**asdict(self), "loss": self.loss if math.isfinite(self.loss) else None}


class OnlineTrainer:
    """Changes the trainee's copy, never what serves. It is called from one thread at a time."""

    def __init__(self, trainee: Trainee, study: TrainConfig) -> None:
        self._trainee = trainee
        self._study = study
        self._distance = study.distance()
        self._weights = dict(trainee.shadow.named_parameters())
        self._best = self._copied()
        self._differences: deque[float] = deque(maxlen=_WINDOW)  # of the versions since the best one to that
        self._optimizer = self._fresh_optimizer()
        self.version = 0

    def learn(self, passages: Sequence[Sample]) -> Report:
        """Examine, then return to the best version, or learn."""
        with torch.inference_mode(False), torch.enable_grad():
            served, best = self._examined(passages)
            self._differences += [a - b for a, b in zip(served, best, strict=True)] if self.version else []
            verdict = judged(self._differences)
            if verdict != "unsure":
                self._differences.clear()
            if verdict == "worse":
                self._load(self._best)
                self._optimizer = self._fresh_optimizer()
                outcome, loss = "returned", math.nan
            else:
                before = self._copied()
                if verdict == "as good":
                    self._best = before
                loss = self._trained(passages)
                outcome = "learned" if math.isfinite(loss) else "refused"
                if outcome == "refused":
                    self._load(before)
                    self._optimizer = self._fresh_optimizer()
            self.version += outcome != "refused"
            laws = sum(passage.places.shape[0] for passage in passages)
            means = statistics.fmean(served), statistics.fmean(best)
            return Report(self.version, outcome, len(passages), laws, *means, loss)

    def state(self) -> dict[str, Any]:
        """Everything that another process needs to go on."""
        return {
            "version": self.version,
            "weights": self._copied(),
            "best": self._best,
            "differences": list(self._differences),
            "optimizer": self._optimizer.state_dict(),
            "study": asdict(self._study),
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``; with other options of learning its moments are begun anew.

        Raises:
            KeyError, RuntimeError, ValueError: it is no such state, or of another net.
        """
        for weights in (state["weights"], state["best"]):
            if {name: w.shape for name, w in weights.items()} != {n: w.shape for n, w in self._weights.items()}:
                raise ValueError("other weights")
        if state["study"] == asdict(self._study):
            self._optimizer.load_state_dict(state["optimizer"])
        self._load(state["weights"])
        self._best = {name: weight.to(self._weights[name].device) for name, weight in state["best"].items()}
        self._differences.extend(state["differences"])
        self.version = state["version"]

    def _examined(self, passages: Sequence[Sample]) -> tuple[list[float], list[float]]:
        """Acceptance on each passage, by the present weights and by the best ones."""
        served = self._acceptance(passages)
        if not self.version:
            return served, served
        present = self._copied()
        self._load(self._best)
        best = self._acceptance(passages)
        self._load(present)
        return served, best

    @torch.no_grad()
    def _acceptance(self, passages: Sequence[Sample]) -> list[float]:
        found: list[float] = []
        for lesson in self._lessons(passages, list(range(len(passages)))):
            p, log_q, laws = next(self._trainee.say(lesson))
            rows = lesson.rows[laws]
            total = torch.zeros(lesson.tokens.shape[0], device=rows.device)
            count = total.index_add(0, rows, torch.ones_like(rows, dtype=total.dtype))
            total.index_add_(0, rows, overlap(p, log_q))
            found += (total / count.clamp(min=1)).nan_to_num(nan=0.0).tolist()
        return found

    def _trained(self, passages: Sequence[Sample]) -> float:
        """Take the steps of one interval; the mean loss, or NaN as soon as one is no number."""
        chance = torch.Generator().manual_seed(self.version)
        losses: list[float] = []
        for _ in range(self._study.passes):
            order = torch.randperm(len(passages), generator=chance).tolist()
            for lesson in self._lessons(passages, order):
                loss = self._loss(lesson)
                if loss is None:
                    continue
                self._optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), _CLIP)
                losses.append(float(loss.detach()))
                if not (math.isfinite(losses[-1]) and math.isfinite(float(norm))):
                    return math.nan
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return statistics.fmean(losses) if losses else 0.0

    def _loss(self, lesson: Lesson) -> Tensor | None:
        """The mean over the laws that are learned from, levels by their weight; None where there are none."""
        total: Tensor | None = None
        for level, (p, log_q, laws) in enumerate(self._trainee.say(lesson)):
            asked = torch.ones_like(laws, dtype=torch.bool) if self._study.every_law else lesson.refused[laws]
            if bool(asked.any()):
                loss = _DECAY**level * self._distance(p, log_q)[asked].mean()
                total = loss if total is None else total + loss
        return total

    def _lessons(self, passages: Sequence[Sample], order: list[int]):
        device = next(iter(self._weights.values())).device
        for begin in range(0, len(order), self._study.batch):
            yield Lesson.of([passages[i] for i in order[begin : begin + self._study.batch]], device)

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._weights.values(), lr=self._study.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def _copied(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def _load(self, weights: Weights) -> None:
        for name, weight in weights.items():
            self._weights[name].copy_(weight)


def judged(differences: Sequence[float]) -> str:
    """What acceptance less that of the best version says, passage by passage: "worse", "as good" or "unsure".

    Worse: the mean is below zero by ``SURE`` standard errors. As good: it is not below zero.
    """
    count = len(differences)
    if count < LEAST_PASSAGES:
        return "unsure"
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(count)
    return "as good" if mean >= 0 else "worse" if mean < -SURE * error else "unsure"
