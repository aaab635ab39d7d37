"""The one training loop: AdamW, warm-up and cosine, clipping, accumulation; resumable with the same result.

What a step does depends on the step's number and the seed alone, never on what was drawn before it. So a run that was
killed goes on from its last checkpoint and ends where it would have ended.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft.core.errors import ForedraftError
from foredraft.train import devices
from foredraft.train.checkpoint import Checkpoints, Log
from foredraft.train.data.batches import Lessons
from foredraft.train.options import LoopOptions as LoopOptions
from foredraft.train.precision import autocast
from foredraft.train.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator


Validate = Callable[[], dict[str, float]]


def train(
    recipe: Recipe,
    lessons: Lessons,
    folder: Path,
    options: LoopOptions,
    *,
    validate: Validate,
    tell: Callable[[dict[str, Any]], None] = lambda line: None,
    accelerator: "Accelerator | None" = None,
) -> None:
    """Train ``recipe.net`` in place, from the last checkpoint in ``folder`` if there is one.

    Args:
        validate: called now and then on the first process; its numbers go to the log.
        tell: called with each line of the log, for whoever watches.
        accelerator: as ``accelerate`` or ``torchrun`` have set it up; one of its own otherwise.

    Raises:
        ForedraftError: the loss is no number any more; no checkpoint is written then.
    """
    accelerator = accelerator or devices.accelerator()
    recipe.to(accelerator.device)
    groups = _groups(recipe)
    weights = [weight for group in groups.values() for weight in group]
    optimizer = _adamw(groups, options)
    checkpoints = Checkpoints(folder / "checkpoint.pt", recipe.net, optimizer, asdict(options))
    state = checkpoints.resume()
    model, optimizer = accelerator.prepare(recipe, optimizer)
    steps = lessons.steps(options, accelerator.num_processes)
    tokens = lessons.tokens_a_step(options, accelerator.num_processes)
    log = _log(folder, _place(state.step, steps, state.seconds, tokens), tell) if accelerator.is_main_process else None
    clock, spent = time.perf_counter(), state.seconds
    for step in range(state.step, steps):
        rate = options.rate(step, steps)
        for group, pace in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = options.lr * rate * pace
        said = _step(model, lessons, step, options, accelerator)
        norm = accelerator.clip_grad_norm_(weights, options.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        report, check, save = (done % each == 0 or done == steps for each in options.rhythm)
        if log is None or not (report or check or save):
            continue
        _must_be_finite(done, said["loss"], norm)
        seconds = spent + time.perf_counter() - clock
        if report:
            line = _line(done, steps, seconds, tokens, said)
            line |= {"lr": options.lr * rate, "gradient": float(norm)}  # type: ignore[arg-type]
            log.write(line)
            tell(line)
        if check:
            model.eval()
            line = {"step": done, "tokens": done * tokens, "validation": validate()}
            model.train()
            log.write(line)
            tell(line)
        if save:
            checkpoints.save(done, spent + time.perf_counter() - clock)
    accelerator.wait_for_everyone()


def _log(folder: Path, place: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> Log:
    """The log of a run that goes on from this place, and says so; one that is over only to whoever watches."""
    log = Log(folder / "log.jsonl", place["step"])
    if place["step"]:
        line = {"resumed": True, **place}
        if place["step"] < place["steps"]:
            log.write(line)
        tell(line)
    return log


def _groups(recipe: Recipe) -> dict[float, list[torch.nn.Parameter]]:
    """What learns, by its share of the learning rate."""
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for name, weight in recipe.net.named_parameters():
        if weight.requires_grad:
            groups.setdefault(recipe.paces.get(name.split(".")[0], 1.0), []).append(weight)
    return groups


def _adamw(groups: dict[float, list[torch.nn.Parameter]], options: LoopOptions) -> torch.optim.Optimizer:
    betas = (options.beta1, options.beta2)
    parts = [{"params": weights} for weights in groups.values()]
    return torch.optim.AdamW(parts, lr=options.lr, betas=betas, weight_decay=options.weight_decay)


def _must_be_finite(done: int, loss: Tensor, norm: Any) -> None:
    """After one gradient that is no number all weights are none, and so are the losses from there on."""
    if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
        raise ForedraftError(f"The loss at step {done} is no number, or its gradient; a lower lr may help.")


def _step(
    model: torch.nn.Module, lessons: Lessons, step: int, options: LoopOptions, accelerator: "Accelerator"
) -> dict[str, Tensor]:
    """Gradients of one step, from ``accumulate`` batches; the means of what the recipe says."""
    total: dict[str, Tensor] = {}
    for part, lesson in enumerate(_batches(lessons, step, options, accelerator)):
        last = part == options.accumulate - 1
        with nullcontext() if last else accelerator.no_sync(model):
            with autocast(lesson.tokens.device, options.precision):
                said = model(lesson)
            accelerator.backward(said["loss"] / options.accumulate)
        for name, value in said.items():
            total[name] = total.get(name, 0) + value.detach() / options.accumulate
    return total


def _batches(lessons: Lessons, step: int, options: LoopOptions, accelerator: "Accelerator") -> Iterator[Any]:
    share = (accelerator.process_index, accelerator.num_processes)
    for part in range(options.accumulate):
        yield lessons.lesson(step * options.accumulate + part, options, share)


def _line(done: int, steps: int, seconds: float, tokens: int, said: dict[str, Tensor]) -> dict[str, Any]:
    """One line of the log: where the run stands, and what the recipe says."""
    return {
        **_place(done, steps, seconds, tokens),
        **{name: round(float(value), 6) for name, value in said.items()},
    }


def _place(done: int, steps: int, seconds: float, tokens: int) -> dict[str, Any]:
    """``seconds`` of training so far, and how many are left at this pace."""
    return {
        "step": done,
        "steps": steps,
        "tokens": done * tokens,
        "seconds": round(seconds, 3),
        "left": round(seconds / max(1, done) * (steps - done), 1),
    }
