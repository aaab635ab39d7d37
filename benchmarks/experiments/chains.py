"""A draft model at every length, against the theory, and truncated laws: the figures of the papers on a real model.

    python -m benchmarks chains --target MODEL --draft DRAFT --prompts ../shared/data/prompts/eagle

``sweep`` remakes Figure 1 of Chen et al. (arXiv:2302.01318): acceptance rate, time of a step and time per token for
drafts of 1 to 10 tokens, on summaries (theirs: XSum; here CNN/DM) and on code (HumanEval), greedy and at temperature 1
with their rule (``verifier="token"``). From plain decoding's step, the draft's level and the acceptance rate, Theorem
3.8 of Leviathan et al. (arXiv:2211.17192) predicts the time per token. Arms take turns, prompt by prompt.

``laws`` cuts the laws of both models as Hewitt et al. (arXiv:2210.15191) do, who call it desmoothing: a language model
is a smoothed law, and what is cut is taken for smoothing. For each token of the target's texts at temperature 1: how
many tokens stay, how much probability goes, and the acceptance rate sum min(p, q) of a draft with the same cut. These
laws are in float32 and need no times.
"""

import itertools
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Inputs, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.pictures import described, grounded
from benchmarks.kit.reading import interval, markdown_table, read
from foredraft.bench.prompts import read_prompts
from foredraft.bench.report import plots
from foredraft.core import theory
from foredraft.core.divergence import acceptance
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.truncation import Truncation
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant

FILE = RESULTS / "chains.jsonl"
LARGER = FILE.with_name("chains_float32.jsonl")
"""Sweep of target-65m with draft-6m in float32, where drafts pay."""
TASKS = {"sum": "summaries", "humaneval": "code"}
LONGEST = 10
RULES = {0.0: None, 1.0: "token"}
"""By temperature."""
CUTS: dict[str, dict[str, float]] = {
    "nothing": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "epsilon 0.0009": {"epsilon_cutoff": 9e-4},
    "eta 0.0009, alpha 0.03": {"eta_cutoff": 9e-4},
    "eta 0.0009, alpha 0.003": {"eta_cutoff": 9e-4, "eta_alpha": 3e-3},
}
"""The second last one is the paper's choice: alpha is the square root of epsilon, as in transformers."""
DRAWN = ("top-p 0.95", "epsilon 0.0009", "eta 0.0009, alpha 0.03")
SAMPLES = 500
"""Of the bootstrap."""
Run = dict[str, Any]


def cells(args: Namespace) -> list[Cell]:
    heats = {"sweep": tuple(RULES), "laws": (1.0,)}
    return [
        {"kind": kind, "task": task, "number": number, "temperature": heat}
        for kind in args.parts
        for number in range(args.count)
        for task in TASKS
        for heat in heats[kind]
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    files = {task: read_prompts(args.prompts / task / "question.jsonl", chat=True) for task in TASKS}
    plain = foredraft.load(args.target, None, weights=args.weights or None, device="cpu")
    for part, made in (("sweep", sweep), ("laws", laws)):
        own = [cell for cell in cells if cell["kind"] == part]
        encoded = [plain.encode(files[cell["task"]][cell["number"]].prompt) for cell in own]
        yield from made(args, plain, list(zip(own, encoded, strict=True)))


def sweep(args: Namespace, plain: Generator, todo: Sequence[tuple[Cell, list[int]]]) -> Iterator[Line]:
    """One line per prompt and temperature, with all lengths."""
    spec = f"draft_model:{args.draft},num_assistant_tokens={LONGEST}"
    made = {heat: foredraft.load(plain, spec, verifier=rule) for heat, rule in RULES.items()}
    for turn, (cell, encoded) in enumerate([*todo[:1], *todo]):  # the first warms up
        number, heat, arms = cell["number"], cell["temperature"], []
        tokens = args.tokens if turn else 16
        params = SamplingParams(max_new_tokens=tokens, eos_token_id=(), temperature=heat, seed=number)
        lengths = range(LONGEST + 1)
        for k in (*lengths[number % 11 :], *lengths[: number % 11]):
            made[heat].engine.policy = Constant(k, confidence=1e-9)  # no siblings
            stats = (made[heat] if k else plain).generate(encoded, params).stats
            arms.append(
                {
                    "k": k,
                    "tokens": stats.tokens - 1,  # the first follows the prompt
                    "steps": stats.target_forwards,
                    "drafted": list(stats.drafted_by_depth),
                    "accepted": list(stats.accepted_by_depth),
                    "seconds": stats.seconds - stats.prefill_seconds,
                    "draft_seconds": stats.draft_seconds,
                }
            )
        if turn:
            yield {**cell, "arms": arms}


@torch.inference_mode()
def laws(args: Namespace, plain: Generator, todo: Sequence[tuple[Cell, list[int]]]) -> Iterator[Line]:
    """One line per text: means for each cut, and for each token entropy, tokens kept, and probability cut."""
    paths = (args.target, args.draft) if todo else ()
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]
    for cell, encoded in todo:
        params = SamplingParams(max_new_tokens=args.tokens, eos_token_id=(), temperature=1.0, seed=cell["number"])
        text = [*encoded, *plain.generate(encoded, params).tokens]
        places = slice(len(encoded) - 1, len(text) - 1)
        p, q = (model(torch.tensor([text])).logits[:, places].float() for model in models)
        whole = p.softmax(-1)
        entropy = torch.special.entr(whole).sum(-1)[0]
        cuts: dict[str, Any] = {}
        for name, options in CUTS.items():
            cut = Truncation.of([SamplingParams(temperature=1.0, **options)], "cpu")  # type: ignore[arg-type]
            target, draft = cut(p), cut(q)
            kept = target.isfinite()
            alpha = acceptance(target.softmax(-1), draft.softmax(-1))[0]
            cuts[name] = {
                "alpha": round(float(alpha.mean()), 5),
                "kept": kept.sum(-1)[0].tolist(),
                "cut": [round(value, 5) for value in (1 - (whole * kept).sum(-1))[0].tolist()],
            }
        yield {**cell, "entropy": [round(value, 4) for value in entropy.tolist()], "cuts": cuts}


# ---- what the lines say


def arm(run: Run, k: int) -> Run:
    return next(each for each in run["arms"] if each["k"] == k)


def acceptance_rate(runs: Sequence[Run], k: int) -> float:
    """Accepted over judged tokens; a token is judged if all before it in the draft were accepted."""
    accepted = judged = 0
    for run in runs:
        own = arm(run, k)
        accepted += sum(own["accepted"])
        judged += sum(min(d, a) for d, a in zip(own["drafted"], [own["steps"], *own["accepted"]], strict=False))
    return accepted / judged


def per_token(runs: Sequence[Run], k: int) -> float:
    """Milliseconds per token."""
    return 1e3 * sum(arm(run, k)["seconds"] for run in runs) / sum(arm(run, k)["tokens"] for run in runs)


def per_step(runs: Sequence[Run], k: int) -> float:
    """Milliseconds of a step: drafting, the target's forward, and the rest."""
    return 1e3 * sum(arm(run, k)["seconds"] for run in runs) / sum(arm(run, k)["steps"] for run in runs)


def level(runs: Sequence[Run], k: int) -> float:
    """Milliseconds of drafting a token."""
    drafted = sum(arm(run, k)["drafted"][0] * k for run in runs)
    return 1e3 * sum(arm(run, k)["draft_seconds"] for run in runs) / drafted


def predicted(runs: Sequence[Run], k: int) -> float:
    """Milliseconds per token by Theorem 3.8, from one acceptance rate and one c for all lengths."""
    plain = per_token(runs, 0)
    alpha = statistics.mean(acceptance_rate(runs, each) for each in range(1, LONGEST + 1))
    cost = statistics.median(level(runs, each) for each in range(1, LONGEST + 1)) / plain
    return plain / theory.speed_up(alpha, k, cost)


def by_cell(path: Path = FILE) -> dict[tuple[str, float], list[Run]]:
    """The runs of each task and temperature."""
    found: dict[tuple[str, float], list[Run]] = {}
    for run in sorted(read(path)["sweep"], key=lambda run: run["temperature"]):
        found.setdefault((run["task"], run["temperature"]), []).append(run)
    return found


def best(runs: Sequence[Run], of: Any) -> int:
    """The length, or 0, with the least time per token."""
    return min(range(LONGEST + 1), key=lambda k: of(runs, k) if k else per_token(runs, 0))


def sweep_table(path: Path = FILE) -> str:
    """Acceptance rate, and measured and predicted speed-up, by length."""
    kinds, lines = read(path), []
    shown = range(1, LONGEST + 1)
    for (task, heat), runs in by_cell(path).items():
        name = f"{TASKS[task]}, T={heat:g}"
        rates = [f"{acceptance_rate(runs, k):.2f}" for k in shown]
        lines.append([f"{name}: acceptance rate", *rates, ""])
        gains = []
        for k in shown:
            low, high = interval(runs, lambda some, k=k: per_token(some, 0) / per_token(some, k), SAMPLES)
            gains.append(f"{per_token(runs, 0) / per_token(runs, k):.2f} ({low:.2f} to {high:.2f})")
        lines.append([f"{name}: speed-up", *gains, f"{best(runs, per_token)}"])
        expected = [f"{per_token(runs, 0) / predicted(runs, k):.2f}" for k in shown]
        lines.append([f"{name}: predicted", *expected, f"{best(runs, predicted)}"])
        times = [f"{per_step(runs, k):.1f}" for k in shown]
        lines.append([f"{name}: ms per step (plain {per_step(runs, 0):.1f})", *times, ""])
    origin = kinds["provenance"][0]
    count = min(map(len, by_cell(path).values()))
    head = ["K", *map(str, shown), "best K"]
    return "\n".join(
        [
            *markdown_table(head, lines),
            "",
            f"{count} prompts or more a row, {origin['tokens']} tokens each; 95 % bootstrap intervals over prompts. "
            f"{origin_line(origin, origin['weights'] or 'float32')}. Made by `{origin['command']}`.",
        ]
    )


def laws_table(path: Path = FILE) -> str:
    """By cut: tokens that stay, probability that goes, and acceptance."""
    kinds, lines = read(path), []
    runs = kinds["laws"]
    for name in CUTS:
        kept = [count for run in runs for count in run["cuts"][name]["kept"]]
        gone = [value for run in runs for value in run["cuts"][name]["cut"]]
        sure = [
            value
            for run in runs
            for value, entropy in zip(run["cuts"][name]["cut"], run["entropy"], strict=True)
            if entropy < 0.5
        ]
        alphas = [run["cuts"][name]["alpha"] for run in runs]
        low, high = interval(alphas, statistics.mean, SAMPLES)
        lines.append(
            [
                name,
                f"{statistics.median(kept):,.0f}",
                f"{100 * statistics.mean(gone):.2f} %",
                f"{100 * statistics.mean(sure):.2f} %",
                f"{statistics.mean(alphas):.3f} ({low:.3f} to {high:.3f})",
            ]
        )
    head = ["cut", "tokens that stay (median)", "probability cut", "where the entropy is below 0.5", "acceptance rate"]
    count = sum(len(run["entropy"]) for run in runs)
    origin = kinds["provenance"][-1]
    about = f"{count:,} tokens of {len(runs)} texts at temperature 1, laws in float32. {origin_line(origin)}. "
    return "\n".join([*markdown_table(head, lines), "", f"{about}Made by `{origin['command']}`."])


def table(path: Path = FILE) -> str:
    """Both tables, with the pictures."""
    parts = ["![Acceptance rate, time of a step and time per token by draft length](figures/chains.svg)"]
    parts.append(sweep_table(path))
    parts += ["The same for target-65m with draft-6m in float32:", sweep_table(LARGER)]
    if "laws" in read(path):
        parts += ["### Truncated laws"]
        parts += ["![Tokens that stay and probability that is cut, by entropy](figures/laws.svg)", laws_table(path)]
    return "\n\n".join(parts)


# ---- pictures


@plots.styled()
def draw_sweep(path: Path = FILE) -> str:
    figure, (tokens, rates, steps) = plots.canvas(8.4, 3.0, 3)
    lengths = range(1, LONGEST + 1)
    facts = []
    for number, ((task, heat), runs) in enumerate(cells(path).items()):
        look = {"color": plots.color(number), "markersize": 3, "label": f"{TASKS[task]}, T={heat:g}"}
        measured = [per_token(runs, k) for k in range(LONGEST + 1)]
        tokens.plot(range(LONGEST + 1), measured, "o-", **look)
        tokens.plot(lengths, [predicted(runs, k) for k in lengths], "--", color=plots.color(number), linewidth=0.8)
        rates.plot(lengths, [acceptance_rate(runs, k) for k in lengths], "o-", **look)
        steps.plot(range(LONGEST + 1), [per_step(runs, k) for k in range(LONGEST + 1)], "o-", **look)
        facts.append(f"{look['label']}: ms per token by K: " + ", ".join(f"{value:.2f}" for value in measured))
    tokens.set_title("ms per token (dashed: theory)")
    rates.set_title("acceptance rate")
    steps.set_title("ms per step")
    for axes in (tokens, rates, steps):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("drafted tokens, K")
    plots.legend(figure, *tokens.get_legend_handles_labels(), columns=4)
    return _drawn(figure, "Acceptance rate, time of a step and time per token by draft length", facts)


@plots.styled()
def draw_laws(path: Path = FILE) -> str:
    figure, (kept, gone) = plots.canvas(7.2, 3.0, 2)
    runs, facts = read(path)["laws"], []
    entropy = np.array([value for run in runs for value in run["entropy"]])
    edges = np.array([0, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, math.inf])
    bins = [(entropy >= low) & (entropy < high) for low, high in itertools.pairwise(edges)]
    bins = [chosen for chosen in bins if chosen.sum() >= 10]
    across = [float(entropy[chosen].mean()) for chosen in bins]
    for number, name in enumerate(DRAWN):
        counts = np.array([value for run in runs for value in run["cuts"][name]["kept"]])
        shares = np.array([value for run in runs for value in run["cuts"][name]["cut"]])
        kept.plot(across, [np.median(counts[each]) for each in bins], "o-", color=plots.color(number), markersize=3)
        values = [100 * float(shares[each].mean()) for each in bins]
        gone.plot(across, values, "o-", color=plots.color(number), markersize=3, label=name)
        facts.append(f"{name}: percent cut by entropy: " + ", ".join(f"{value:.2f}" for value in values))
    kept.set_yscale("log")
    kept.yaxis.set_major_formatter("{x:,.0f}")
    kept.set_title("tokens that stay (median)")
    gone.set_title("probability that is cut, %")
    gone.set_ylim(bottom=0)
    for axes in (kept, gone):
        axes.set_xlabel("entropy of the target's law, nats")
    plots.legend(figure, *gone.get_legend_handles_labels())
    return _drawn(figure, "Tokens that stay and probability that is cut, by entropy", facts)


def _drawn(figure: Any, title: str, facts: Sequence[str]) -> str:
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    return described(grounded(plots.themed_svg(figure, title)), "", "\n".join(facts))


def _commands(inputs: Inputs) -> list[list[str]]:
    prompts = ["--prompts", inputs.prompts / "eagle"]
    words = ["--target", inputs.smollm2, "--draft", inputs.heads / "smollm2" / "draft", *prompts]
    small = ["--target", inputs.models / "target-65m", "--draft", inputs.models / "draft-6m", "--weights", "", *prompts]
    return [measured("chains", *words), measured("chains", *small, "--parts", "sweep", "--out", LARGER)]


EXPERIMENT = Experiment(
    name="chains",
    question="drafts of every length against the theory, truncated laws: theory.md",
    options={
        "parts": option(["sweep", "laws"], choices=["sweep", "laws"]),
        "target": option(str, "a folder", required=True),
        "draft": option(str, "a folder with a draft model of the same tokenizer", required=True),
        "weights": option("int4", "of both, for texts and times; '' for float32"),
        "prompts": option(Path, "the folder with Spec-Bench's tasks as EAGLE's files", required=True),
        "tokens": option(64),
        "count": option(8, "prompts of a task"),
    },
    cells=cells,
    measure=measure,
    facts=lambda args: {"tokens": args.tokens, "weights": args.weights},
    tables={"docs/theory.md": {"chains": table}},
    figures={"chains": draw_sweep, "laws": draw_laws},
    hours=0.5,
    needs=lambda i: (i.prompts, i.models, Path(i.smollm2), i.heads / "smollm2" / "draft"),
    commands=_commands,
    results=("chains.jsonl", "chains_float32.jsonl"),
)
