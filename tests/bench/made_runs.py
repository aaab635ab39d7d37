"""Run files that look like real ones, made from a seed: many arms, tasks, temperatures and batch sizes."""

import math
import random
from dataclasses import replace

import pytest

from foredraft.bench.measure.records import Cost, OutputRecord, Run, RunFile, Watched
from foredraft.bench.measure.summary import Summary, summarise

ARMS = {  # chance that a level is accepted, levels drafted, time of drafting in plain steps
    "none": (0.0, 0, 0.0),
    "transformers": (0.0, 0, 0.0),
    "transformers:assisted": (0.62, 5, 0.9),
    "draft_model": (0.64, 8, 0.7),
    "draft_model:tree": (0.72, 6, 0.8),
    "prompt_lookup": (0.38, 10, 0.01),
    "blockwise": (0.40, 3, 0.03),
    "medusa": (0.52, 4, 0.05),
    "hydra": (0.58, 4, 0.12),
    "eagle1": (0.66, 5, 0.30),
    "eagle2": (0.71, 6, 0.34),
    "eagle3:head,nodes=59,levels=7": (0.78, 7, 0.38),
}
TASKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "summarization", "qa")
PROVENANCE = {
    "time": "2026-11-21T10:00:00+00:00",
    "commit": "0c3194c+",
    "command": "foredraft bench --model sample --watch 8",
    "foredraft": "0.1.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "python": "3.11.7",
    "threads": 1,
    "device": "AMD EPYC",
    "settings": {"model": "sample", "max_new_tokens": 128, "batch_sizes": [1, 4]},
}


def run(arm: str = "none", seconds: float = 1.0, **given: object) -> Run:
    """Ten tokens in ten forwards, after no time of prefill."""
    usual: dict[str, object] = {"task": "qa", "prompts": ("1",), "tokens": 10, "forwards": 10, "decoded": 10}
    return Run(arm=arm, seconds=seconds, **{**usual, **given})  # type: ignore[arg-type]


def page_of(*files: RunFile) -> tuple[Summary, str]:
    """The summary of some files, and the report's page."""
    pytest.importorskip("matplotlib")
    from foredraft.bench.report.figures import draw_figures
    from foredraft.bench.report.page import page

    summary = summarise(files)
    return summary, page(summary, draw_figures(summary))


def made(prompts: int = 6, temperatures: tuple[float, ...] = (0.0, 1.0), batches: tuple[int, ...] = (1, 4)) -> RunFile:
    """Twelve arms on six tasks; positions and calibration of three arms, costs of three batches, two training logs."""
    dice = random.Random(0)
    file = RunFile(provenance=[PROVENANCE])
    for temperature in temperatures:
        for batch in batches:
            for number, task in enumerate(TASKS):
                for prompt in range(prompts):
                    minute = dice.uniform(0.8, 1.3)
                    names = tuple(f"{prompt}.{row}" for row in range(batch))
                    for arm in ARMS:
                        hard = 1 - 0.06 * number - 0.08 * temperature + dice.gauss(0, 0.05)
                        file.runs.append(_call(dice, arm, task, names, (temperature, minute, hard)))
    broken = next(i for i, each in enumerate(file.runs) if each.arm == "hydra")
    file.runs[broken] = replace(run("hydra", task=TASKS[0], model="sample"), error="out of memory", batch=batches[0])
    file.costs = [_cost(batch, cached) for batch, cached in ((1, 128), (1, 1024), (4, 128))]
    file.watched = [
        _watched(dice, arm, str(prompt), temperature)
        for arm in ("medusa", "eagle1", "eagle3:head,nodes=59,levels=7")
        for prompt in range(max(4, prompts))
        for temperature in temperatures
    ]
    for name, top in (("eagle", 3.0), ("eagle3", 4.1)):
        for step in range(1, 9):
            length = 1 + (top - 1) * (1 - math.exp(-step / 3))
            file.training.append({"step": 250 * step, "tokens": 2**step * 250_000, "loss": 2.0 / step, "run": name})
            file.training[-1]["validation"] = {"acceptance_length": length}
    return file


def _call(dice: random.Random, arm: str, task: str, names: tuple[str, ...], where: tuple[float, float, float]) -> Run:
    temperature, minute, hard = where
    chance, levels, drafting = ARMS[arm]
    chance, batch = min(0.97, max(0.0, chance * hard)), len(names)
    tokens = forwards = 0
    accepted, drafted = [0] * levels, [0] * levels
    while tokens < 128 * batch:
        depth = 0
        while depth < levels and dice.random() < chance:
            accepted[depth] += 1
            depth += 1
        for level in range(levels):
            drafted[level] += 1
        tokens, forwards = tokens + depth + 1, forwards + 1
    split = not arm.startswith("transformers")
    plain = 0.020 * minute * (1 if split else 1.25)
    verify = plain * (0.9 + 0.02 * levels * batch) * forwards / batch
    draft, other = plain * drafting * forwards / batch, plain * 0.1 * forwards / batch
    prefill = 0.05 * minute
    said = tuple(OutputRecord(name, 40, 128, f"{task}{name}") for name in names)
    return Run(
        arm=arm,
        task=task,
        prompts=names,
        temperature=temperature,
        batch=batch,
        lossless=arm != "medusa",
        tokens=tokens,
        forwards=forwards,
        drafted=sum(drafted),
        accepted=sum(accepted),
        drafted_by_depth=tuple(drafted),
        accepted_by_depth=tuple(accepted),
        seconds=prefill + verify + draft + other,
        prefill_seconds=prefill,
        draft_seconds=draft if split else 0.0,
        verify_seconds=verify if split else 0.0,
        decoded=tokens,
        outputs=said,
        model="sample",
    )


def _cost(batch: int, cached: int) -> Cost:
    nodes = (1, 2, 4, 8, 16, 32, 64)
    seconds = tuple(0.006 + 0.00002 * batch * n + 0.000001 * batch * cached * (1 + n / 64) for n in nodes)
    return Cost(batch, cached, nodes, seconds, weight_bytes=65_000_000, bandwidth=1.3e10, model="sample")


def _watched(dice: random.Random, arm: str, prompt: str, temperature: float) -> Watched:
    places, confidence = {}, {}
    paths = [(1,), (2,), (3,), (4,), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (1, 1, 1), (1, 1, 2), (1, 2, 1)]
    paths += [
        (2, 1, 1),
        (1, 1, 1, 1),
        (1, 1, 1, 2),
        (1, 1, 2, 1),
        (1, 2, 1, 1),
        *((1, 1, 1, 1, n) for n in range(1, 9)),
    ]
    for path in paths:
        judged = max(1, int(400 / len(path) ** 2 / max(path)))
        chance = min(0.95, max(0.02, 0.75 / path[-1] ** 1.5 + dice.gauss(0, 0.12)))
        places["-".join(map(str, path))] = (judged, round(judged * chance))
    for hundredth in range(100):
        judged = dice.randrange(1, 30) * (3 if hundredth > 90 else 1)
        chance = min(1.0, max(0.0, hundredth / 100 * (0.9 if temperature else 1.05) + dice.gauss(0, 0.05)))
        confidence[str(hundredth)] = (judged, round(judged * chance))
    return Watched(arm, "mt_bench", prompt, temperature, places, confidence, model="sample")
