"""The loop: rates, accumulation, clipping, precisions, and a loss that is no number."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainees import SHORT, target, train_head

import random_heads as heads
import tiny
from foredraft.core.errors import ForedraftError, OptionError
from foredraft.core.target_parts import FINAL
from foredraft.train.data.batches import LiveFeatures, TrainBatches
from foredraft.train.data.tokens import TokenStore
from foredraft.train.devices import cast_norm_inputs
from foredraft.train.heads.medusa_hydra import AheadRecipe, Options
from foredraft.train.loop import train
from foredraft.train.options import LoopOptions

LENGTH = 10
LOOP = LoopOptions(tokens=8 * LENGTH, length=LENGTH, batch=2, report=1, precision="fp32", lr=1e-2)


class Poisoned:
    """A target whose third answer holds a number that is none."""

    def __init__(self, interrupt: bool = False) -> None:
        self._live = LiveFeatures(target(), contextlib.nullcontext)
        self._reads = 0
        self._interrupt = interrupt

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
        self._reads += 1
        if self._interrupt and self._reads == 4:
            raise KeyboardInterrupt
        factor = float("nan") if self._reads == 3 else 1.0
        return {tap: states * factor for tap, states in self._live.read(windows, tokens, taps).items()}

    def prefetch(self, windows: list[int], device: torch.device, taps: tuple[int, ...]) -> None:
        pass


def texts(source: Any = None) -> TrainBatches:
    """Forty windows of random tokens that all count."""
    ids = torch.randint(tiny.VOCAB, (40 * LENGTH,), generator=torch.Generator().manual_seed(1)).int().numpy()
    store = TokenStore(ids, np.ones(len(ids), np.uint8), Path())
    return TrainBatches(store, source or LiveFeatures(target(), contextlib.nullcontext), (FINAL,), LENGTH, "cpu")


def trained(folder: Path, source: Any = None, **options: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Weights and log after four steps of two texts."""
    net = heads.medusa(target(), own_heads=False).requires_grad_(True)
    folder.mkdir(exist_ok=True)
    recipe, loop = AheadRecipe(net, Options(share=1.0)), replace(LOOP, **options)
    train(recipe, texts(source), folder, loop, validate=lambda: {"acceptance_length": 1.5})
    return net.state_dict(), [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def lines_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in log if "validation" not in line]


def test_the_log(tmp_path: Path):
    _, log = trained(tmp_path, validate=3, report=2)
    assert [(line["step"], "validation" in line) for line in log] == [(2, False), (3, True), (4, False), (4, True)]
    assert [line["tokens"] for line in log] == [40, 60, 80, 80]
    assert log[1]["validation"] == {"acceptance_length": 1.5}
    line = log[0]
    assert line["steps"] == 4 and "left" not in line and line["seconds"] > 0 and line["gradient"] > 0
    assert {"loss", "lr", "hit_0", "hit_1", "hit_2", "length"} <= set(line)
    assert not list(tmp_path.glob("*.partial"))


def test_two_batches_of_one_are_a_batch_of_two(tmp_path: Path):
    """The same texts and the same gradients, up to rounding, for recipes that leave nothing to chance."""
    whole, log = trained(tmp_path / "a")
    parts, other = trained(tmp_path / "b", batch=1, accumulate=2)
    for mine, theirs in zip(lines_of(log), lines_of(other), strict=True):
        for name in ("loss", "gradient", "hit_0", "hit_2", "lr", "tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), name
    for name, weight in whole.items():
        torch.testing.assert_close(weight, parts[name], rtol=1e-3, atol=1e-5)


def test_one_step_is_adam_along_the_clipped_gradient(tmp_path: Path):
    net = heads.medusa(target(), own_heads=False).requires_grad_(True)
    loss = AheadRecipe(net, Options(share=1.0))(texts().batch(0, LOOP, (0, 1)))["loss"]
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    for clip in (0.01 * norm, 100 * norm):
        folder = tmp_path / str(clip)
        after, log = trained(folder, tokens=20, clip=clip, weight_decay=0.1)
        assert lines_of(log)[0]["gradient"] == pytest.approx(norm, rel=1e-4), "what is logged is the norm before"
        moments = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizer"]["state"]
        scale = min(1.0, clip / norm)
        for number, (name, before) in enumerate(net.named_parameters()):
            gradient = gradients[number] * scale
            torch.testing.assert_close(moments[number]["exp_avg"], gradient * 0.1, rtol=1e-3, atol=1e-7)
            wanted = before * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(after[name], wanted, rtol=1e-3, atol=1e-4)


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine():
    options = LoopOptions(warmup=0.1, floor=0.2)
    rates = [options.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.2 + 0.8 / 2)
    for step in range(10, 100):
        assert rates[step] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi * (step - 10) / 90)))
    assert rates[99] < 0.202
    assert LoopOptions(warmup=0.0).rate(0, 1) == 1.0
    assert options.rate(500, 100) == 0.2


def test_rates_reach_the_optimizer(tmp_path: Path):
    _, log = trained(tmp_path, warmup=0.5, floor=0.0)
    assert [line["lr"] for line in lines_of(log)] == pytest.approx([0.005, 0.01, 0.01, 0.005])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "auto"])
def test_precisions(tmp_path: Path, precision: str):
    weights, _ = trained(tmp_path, precision=precision)
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in weights.values())
    exact, _ = trained(tmp_path / "exact")
    gap = max(float((weights[name] - exact[name]).abs().max()) for name in weights)
    assert gap == 0 if precision == "fp32" else gap < 0.05
    assert (gap > 0) >= (precision == "bf16"), "bf16 is another arithmetic"


def test_mixed_precision_says_nothing(place: Path, tmp_path: Path):
    """Norms were asked in bfloat16 beside float32 weights, of which torch warns once a process."""
    torch.set_warn_always(True)
    try:
        train_head("eagle3", place, tmp_path, replace(SHORT, tokens=64, precision="bf16"))
    finally:
        torch.set_warn_always(False)
    norm = torch.nn.RMSNorm(8)
    x = torch.randn(2, 8).bfloat16()
    cast_norm_inputs(norm)
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x.float(), (8,)))


@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize("report", [1, 100])
def test_a_loss_that_is_no_number_ends_it_and_is_never_kept(tmp_path: Path, report: int, interrupt: bool):
    with pytest.raises(ForedraftError, match="not finite at step [34]; try a lower --lr"):
        trained(tmp_path, Poisoned(interrupt), report=report, checkpoint=2)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 2 and all(weight.isfinite().all() for weight in kept["net"].values())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 0}, "batch must be 1 or more"),
        ({"report": 0}, "report must be 1 or more"),
        ({"precision": "fp16"}, "Unknown precision 'fp16'. Did you mean bf16\\? Known: auto, bf16, fp32"),
        ({"lr": 0.0}, "lr must be above 0, not 0.0"),
        ({"lr": float("nan")}, "lr must be above 0, not nan"),
        ({"warmup": 2.0}, "warmup must be 1 or less, not 2.0"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more, not -1.0"),
        ({"beta2": 1.0}, "beta2 must be below 1, not 1.0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], sentence: str):
    with pytest.raises(OptionError, match=sentence):
        LoopOptions(**options)
