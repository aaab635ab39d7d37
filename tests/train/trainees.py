"""Tiny targets, texts and lessons to train on, and runs over them."""

import functools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import foredraft
import tiny
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.train.drafts.run import run_drafts
from foredraft.train.heads.run import run
from foredraft.train.options import LoopOptions
from foredraft.train.recipe import Recipe, TrainBatch
from foredraft.train.run_context import Data

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}~{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = LoopOptions(tokens=6 * 64, length=32, batch=2, validate=4, checkpoint=2, report=1, lr=3e-3, precision="fp32")
"""Six steps."""


@functools.cache
def target(double: bool = False) -> CausalLM:
    model = tiny.build("llama", num_hidden_layers=3).requires_grad_(False)
    return CausalLM(model.double() if double else model, fast=False)


def lesson(
    of: CausalLM, taps: tuple[int, ...], *, batch: int = 2, length: int = 12, seed: int = 0, all_count: bool = False
) -> TrainBatch:
    """Random tokens, of which about two thirds count in the loss."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(tiny.VOCAB, (batch, length), generator=chance)
    weights = (torch.rand(batch, length, generator=chance) < 0.67).float()
    return TrainBatch(tokens, torch.ones_like(weights) if all_count else weights, of.read(tokens, taps), seed)


def gradients(net: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of the loss, by name."""
    named = {name: weight for name, weight in net.named_parameters() if weight.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_same_gradients(net: torch.nn.Module, mine: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Two losses of one net have the same value, and the same gradients, none of which is nothing."""
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)
    wanted = gradients(net, theirs)
    for name, gradient in gradients(net, mine).items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


def assert_unbiased(whole: Recipe[Any], sampled: Recipe[Any], once: TrainBatch, most_error: float) -> None:
    """The loss on a sample of the rows is the whole one on average: of one text many times over, each with own rows."""
    tokens, weights = once.tokens.expand(50, -1), once.weights.expand(50, -1)
    hidden = {tap: states.expand(50, -1, -1) for tap, states in once.hidden.items()}
    with torch.no_grad():
        wanted = float(whole(once)["loss"])
        losses = torch.stack([sampled(TrainBatch(tokens, weights, hidden, seed))["loss"] for seed in range(12)])
    error = float(losses.std()) / 12**0.5
    assert 0 < error < most_error
    assert abs(float(losses.mean()) - wanted) < 4 * error


def tokenizer() -> Any:
    """A character a token; chats look like ``<user>hello~<assistant>hi~``."""
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


def save_target(folder: Path, **changes: Any) -> str:
    tiny.build("llama", num_hidden_layers=3, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def save_texts(path: Path, count: int = 60, seed: int = 0) -> str:
    """Texts of three words that come again and again."""
    chance = torch.Generator().manual_seed(seed)
    words = ["abacus", "barbecue", "cadence"]
    texts = [" ".join(words[int(i)] for i in torch.randint(3, (5,), generator=chance)) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def _trained(run: Any, method: str, place: Path, out: Path, loop: LoopOptions = SHORT, **options: Any) -> Any:
    """Train on ``place/texts.jsonl`` for ``place/target``, with short validations."""
    data = Data(sources=(str(place / "texts.jsonl"),), store=options.pop("store", 0.0))
    with patch.multiple("foredraft.train.heads.validate", _PROMPT=8, _NEW=6, _PROMPTS=3):
        return run(method, str(place / "target"), out, data, loop=loop, device="cpu", **options)


train_head: Callable[..., Path] = functools.partial(_trained, run)
train_draft: Callable[..., list[Path]] = functools.partial(_trained, run_drafts)


def assert_drafts_losslessly(target: Path | str, spec: str) -> None:
    """With this drafter the target writes what it writes alone, and something was drafted."""
    written = []
    for drafter in (spec, "none"):
        with foredraft.load(str(target), drafter=drafter, device="cpu", dtype="float32") as generator:
            written.append(generator.generate("abacus barb", max_new_tokens=24))
    drafted, plain = written
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0 == plain.stats.drafted


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing is saved."""


def stop_at(step: int, stage: int = 1, by: type[BaseException] = KeyboardInterrupt) -> Callable[[dict[str, Any]], None]:
    """Interrupts a run when it tells of this step for the first time, or in its n-th loop."""
    seen: list[int] = []

    def report(line: dict[str, Any]) -> None:
        seen.extend([line["step"]] if "step" in line else [])
        loops = 1 + sum(later < before for before, later in pairwise(seen))
        if line.get("step") == step and loops >= stage:
            raise by

    return report


def log_of(out: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock, and on where the run was cut off."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "resumed" not in line]
    return [{key: value for key, value in line.items() if key not in ("seconds", "rate", "left")} for line in lines]


def weights_of(out: Path) -> dict[str, Tensor]:
    return torch.load(out / "checkpoint.pt", weights_only=True)["net"]


def assert_same_run(mine: Path, theirs: Path) -> None:
    for name, weight in weights_of(theirs).items():
        assert torch.equal(weights_of(mine)[name], weight), name
    assert log_of(mine) == log_of(theirs)
