"""The training loop: AdamW, warm-up and cosine, clipping, accumulation; a resumed run has the same result.

A step depends only on its number and the seed, never on earlier random draws, so a killed run that resumes from its
last checkpoint reaches the same weights. Batch k of a step is the same whichever process computes it, so P processes
that accumulate n batches each reach the weights of one that accumulates P n, up to rounding.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft.core.errors import ForedraftError
from foredraft.train import devices
from foredraft.train.checkpoint import Checkpoints, Log, Report
from foredraft.train.data.batches import TrainBatches
from foredraft.train.devices import autocast
from foredraft.train.options import LoopOptions
from foredraft.train.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator


Validate = Callable[[], dict[str, float]]


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
        report: called with each log line.
        accelerator: the process's accelerator; by default a new one.

    Raises:
        ForedraftError: the loss or its gradient is not finite; no checkpoint is written.
    """
    accelerator = accelerator or devices.accelerator()
    recipe.to(accelerator.device)
    groups = _groups(recipe)
    weights = [weight for group in groups.values() for weight in group]
    optimizer = _adamw(groups, options)
    terms = asdict(options) | {"accumulate": options.accumulate * accelerator.num_processes}
    checkpoints = Checkpoints(folder / "checkpoint.pt", recipe.net, optimizer, terms)
    state = checkpoints.resume()
    model, optimizer = accelerator.prepare(recipe, optimizer)
    steps = batches.steps(options, accelerator.num_processes)
    tokens = batches.tokens_per_step(options, accelerator.num_processes)
    place = _place(state.step, steps, state.seconds, tokens)
    log = Log(folder / "log.jsonl", place, report) if accelerator.is_main_process else None
    clock, spent = time.perf_counter(), state.seconds
    for done in range(state.step + 1, steps + 1):
        rate = options.rate(done - 1, steps)
        for group, pace in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = options.lr * rate * pace
        metrics = _step(model, batches, done - 1, options, accelerator)
        norm = accelerator.clip_grad_norm_(weights, options.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log_now, validate_now, save_now = (done % each == 0 or done == steps for each in options.intervals)
        if not (log_now or validate_now or save_now):
            continue
        metrics = _mean_of_all(metrics, accelerator)
        if log is None:
            continue
        gradient = _finite(done, metrics["loss"], norm)
        seconds = spent + time.perf_counter() - clock
        if log_now:
            values = {name: round(float(value), 6) for name, value in metrics.items()} | {"gradient": gradient}
            log.write(_place(done, steps, seconds, tokens) | values | {"lr": options.lr * rate})
        if validate_now:
            model.eval()
            log.write({"step": done, "tokens": done * tokens, "validation": validate()})
            model.train()
        if save_now:
            checkpoints.save(done, spent + time.perf_counter() - clock)
    accelerator.wait_for_everyone()


@contextmanager
def _peers(accelerator: "Accelerator") -> Iterator[None]:
    """Say in one sentence that another process has ended."""
    try:
        yield
    except RuntimeError as error:  # gloo has no class for it
        lost = isinstance(error, torch.distributed.DistError) or "Connection" in str(error)
        if accelerator.num_processes > 1 and lost:
            raise ForedraftError(
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


def _adamw(groups: dict[float, list[torch.nn.Parameter]], options: LoopOptions) -> torch.optim.Optimizer:
    betas = (options.beta1, options.beta2)
    parts = [{"params": weights} for weights in groups.values()]
    return torch.optim.AdamW(parts, lr=options.lr, betas=betas, weight_decay=options.weight_decay)


def _finite(done: int, loss: Tensor, norm: Any) -> float:
    """The gradient's norm. Raises if it or the loss is not finite: all later weights and losses would be NaN."""
    if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
        raise ForedraftError(f"The loss or its gradient is not finite at step {done}; try a lower --lr.")
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


def _place(done: int, steps: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Progress: ``seconds`` of training so far, and estimated seconds ``left``."""
    return {
        "step": done,
        "steps": steps,
        "tokens": done * tokens,
        "seconds": round(seconds, 3),
        "left": round(seconds / max(1, done) * (steps - done), 1),
    }
