"""The training loop: AdamW, warm-up and cosine, clipping, accumulation; a resumed run has the same result.

A step depends only on its number and the seed, never on earlier random draws, so a run that resumes from a checkpoint
reaches the same weights. One that is interrupted, or loses another process, first saves its last whole step. Batch k of
a step is the same whichever process computes it, so P processes that accumulate n batches each reach the weights of one
that accumulates P n, up to rounding.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft.core.errors import ForedraftError
from foredraft.train import devices
from foredraft.train.checkpoint import Checkpoints, Log, Report, RunState
from foredraft.train.data.batches import TrainBatches
from foredraft.train.devices import autocast
from foredraft.train.interruptions import Interruptions
from foredraft.train.options import LoopOptions
from foredraft.train.pace import SpeedMeter
from foredraft.train.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator


Validate = Callable[[], dict[str, float]]


class _PeerLost(ForedraftError):
    """Another process of the training has ended."""


def train(
    recipe: Recipe,
    batches: TrainBatches,
    folder: Path,
    options: LoopOptions,
    *,
    validate: Validate,
    report: Report = lambda line: None,
    accelerator: "Accelerator | None" = None,
) -> None:
    """Train ``recipe.net`` in place, from the last checkpoint in ``folder`` if there is one.

    Args:
        validate: called every ``options.validate`` steps on the first process; its metrics go to the log.
        report: called with each log line; and before an interruption is raised, with ``kept``, the last whole step,
            which was saved, ``steps`` and ``folder``.
        accelerator: the process's accelerator; by default a new one.

    Raises:
        ForedraftError: the loss or its gradient is not finite; no checkpoint is written.
        KeyboardInterrupt: after Ctrl-C, or a SIGTERM that raises it.
    """
    accelerator = accelerator or devices.accelerator()
    recipe.to(accelerator.device)
    groups = _groups(recipe)
    lr = options.lr or recipe.lr
    optimizer = _adamw(groups, options, lr)
    terms = asdict(options) | {"lr": lr, "accumulate": options.accumulate * accelerator.num_processes}
    checkpoints = Checkpoints(folder / "checkpoint.pt", recipe.net, optimizer, terms)
    state = checkpoints.resume()
    model, optimizer = accelerator.prepare(recipe, optimizer)
    steps = batches.steps(options, accelerator.num_processes)
    progress = _Progress(state, steps, batches.tokens_per_step(options, accelerator.num_processes))
    log = Log(folder / "log.jsonl", progress.line(), report) if accelerator.is_main_process else None
    run = _Run(model, optimizer, groups, batches, options, lr, accelerator, progress, log)
    # the first process saves and ends; the others end when they miss it, so that its last step can be completed
    with Interruptions(always=log is None) as interruptions:
        try:
            if log is not None and log.validated < state.step and run.due(state.step, options.validate):
                run.validate(validate)  # the run was interrupted in it
            for number in range(state.step + 1, steps + 1):
                run.step(number, interruptions)
                if log is None:
                    continue
                if run.due(number, options.validate):
                    run.validate(validate)
                if run.due(number, options.checkpoint) or checkpoints.age >= options.checkpoint_seconds:
                    with interruptions.deferred():
                        run.save(checkpoints)
            with _peers(accelerator):
                accelerator.wait_for_everyone()
        except (KeyboardInterrupt, _PeerLost):
            if log is not None:
                with interruptions.deferred():
                    if progress.number > checkpoints.step:
                        run.save(checkpoints)
                if checkpoints.step:
                    report({"kept": checkpoints.step, "steps": steps, "folder": folder.name})
            raise


class _Progress:
    """The number of the last step, and training time, in this run and before it was resumed."""

    def __init__(self, state: RunState, steps: int, tokens: int) -> None:
        self.number = state.step
        self.steps = steps
        self._tokens = tokens
        self._before, self._clock = state.seconds, time.perf_counter()
        self._pace = SpeedMeter()

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._clock

    def step(self, number: int) -> None:
        self.number = number
        self._pace.update(number)

    def line(self) -> dict[str, Any]:
        """For the log: ``seconds`` of training so far; if known, tokens a second, and seconds ``left``."""
        rate, left = self._pace.rate, self._pace.left(self.steps - self.number)
        return {
            "step": self.number,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            **({} if rate is None else {"rate": round(rate * self._tokens, 1)}),
            **({} if left is None else {"left": left}),
        }

    @property
    def tokens(self) -> int:
        return self.number * self._tokens


@dataclass(slots=True)
class _Run:
    """The parts of a run, which steps read and change. ``log``: of the first process."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    groups: dict[float, list[torch.nn.Parameter]]
    batches: TrainBatches
    options: LoopOptions
    lr: float  # at the peak
    accelerator: "Accelerator"
    progress: _Progress
    log: Log | None
    last: tuple[Tensor, Any] | None = None  # loss and gradient norm of the last step

    def due(self, number: int, each: int) -> bool:
        """True every ``each`` steps, and after the last one."""
        return number % each == 0 or number == self.progress.steps

    def step(self, number: int, interruptions: Interruptions) -> None:
        """One optimizer step, of which no half is ever saved, and its line in the log."""
        options, accelerator = self.options, self.accelerator
        rate = options.rate(number - 1, self.progress.steps)
        for group, pace in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["lr"] = self.lr * rate * pace
        metrics = _step(self.model, self.batches, number - 1, options, accelerator)
        norm = accelerator.clip_grad_norm_([weight for group in self.groups.values() for weight in group], options.clip)
        with interruptions.deferred():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.progress.step(number)
            self.last = metrics["loss"], norm
            if not any(self.due(number, each) for each in options.intervals):
                return
            with _peers(accelerator):
                metrics = _mean_of_all(metrics, accelerator)
            if self.log is None:
                return
            gradient = _finite(number, metrics["loss"], norm)
            if self.due(number, options.report):
                values = {name: round(float(value), 6) for name, value in metrics.items()} | {"gradient": gradient}
                self.log.write(self.progress.line() | values | {"lr": self.lr * rate})

    def validate(self, validate: Validate) -> None:
        assert self.log is not None
        self.model.eval()
        self.log.write({"step": self.progress.number, "tokens": self.progress.tokens, "validation": validate()})
        self.model.train()

    def save(self, checkpoints: Checkpoints) -> None:
        """Save the last step, unless the weights may hold values that are not finite."""
        if self.last is not None:
            _finite(self.progress.number, *self.last)
        checkpoints.save(self.progress.number, self.progress.seconds)


@contextmanager
def _peers(accelerator: "Accelerator") -> Iterator[None]:
    """Say in one sentence that another process has ended."""
    try:
        yield
    except RuntimeError as error:  # gloo has no class for it
        lost = isinstance(error, torch.distributed.DistError) or "Connection" in str(error)
        if accelerator.num_processes > 1 and lost:
            raise _PeerLost(
                "Another process of this training has ended or has failed; the same command continues from the last "
                "checkpoint."
            ) from error
        raise


def _groups(recipe: Recipe) -> dict[float, list[torch.nn.Parameter]]:
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for name, weight in recipe.net.named_parameters():
        if weight.requires_grad:
            groups.setdefault(recipe.paces.get(name.split(".")[0], 1.0), []).append(weight)
    return groups


def _adamw(groups: dict[float, list[torch.nn.Parameter]], options: LoopOptions, lr: float) -> torch.optim.Optimizer:
    betas = (options.beta1, options.beta2)
    parts = [{"params": weights} for weights in groups.values()]
    return torch.optim.AdamW(parts, lr=lr, betas=betas, weight_decay=options.weight_decay)


def _finite(number: int, loss: Tensor, norm: Any) -> float:
    """The gradient's norm. Raises if it or the loss is not finite: all later weights and losses would be NaN."""
    if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
        raise ForedraftError(f"The loss or its gradient is not finite at step {number}; try a lower --lr.")
    return float(norm)


def _step(
    model: torch.nn.Module, batches: TrainBatches, step: int, options: LoopOptions, accelerator: "Accelerator"
) -> dict[str, Tensor]:
    """Accumulate the gradients of one step over ``accumulate`` batches; returns the recipe's mean metrics."""
    total: dict[str, Tensor] = {}
    share = (accelerator.process_index, accelerator.num_processes)
    for part in range(options.accumulate):
        batch = batches.batch(step * options.accumulate + part, options, share)
        last = part == options.accumulate - 1
        with _peers(accelerator), nullcontext() if last else accelerator.no_sync(model):
            with autocast(batch.tokens.device, options.precision):
                metrics = model(batch)
            accelerator.backward(metrics["loss"] / options.accumulate)
        for name, value in metrics.items():
            total[name] = total.get(name, 0) + value.detach() / options.accumulate
    return total


def _mean_of_all(metrics: dict[str, Tensor], accelerator: "Accelerator") -> dict[str, Tensor]:
    means: Any = accelerator.reduce(torch.stack([value.float() for value in metrics.values()]), "mean")
    return dict(zip(metrics, means.unbind(), strict=True))
