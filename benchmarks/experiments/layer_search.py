"""How to search for layers to skip: the search of ``foredraft skip``, random sets, and Bayesian optimisation.

    python -m benchmarks layer_search --target MODEL --prompts ../shared/data/prompts/eagle/*/question.jsonl

Draft & Verify (arXiv:2309.08168) finds its layers by Bayesian optimisation. Each search here has as many trials, on the
same answers of the target, and looks for the same score: tokens per weight read (``SkipTrial.score``). The Bayesian one
models scores by a Gaussian process over sets, whose kernel falls with the number of sublayers that differ, and tries
the set with the largest expected improvement among random sets and changes of the best ones; its first trials are
random. One JSON line per search and seed, with the best score after each trial.
"""

import math
import random
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import foredraft
from benchmarks.kit.experiment import PROMPTS, RESULTS, Cell, Experiment, Inputs, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, read
from benchmarks.kit.seeded_texts import in_turns, run_texts
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.layer_skip.search import SearchBudget, SkipTrial, Sublayer, search
from foredraft.drafters.layer_skip.trials import SkipEvaluator, TrialSample

FILE = RESULTS / "layer_search.jsonl"
FIRST = 20
"""Random trials before the model of the Bayesian search."""
CANDIDATES = 400
"""Sets among which it looks for the largest expected improvement."""
Set = frozenset[Sublayer]
Evaluate = Callable[[Set], SkipTrial]
Report = Callable[[int, SkipTrial], None]


class Enough(Exception):
    """The budget is spent."""


def random_set(parts: Sequence[Sublayer], source: random.Random) -> Set:
    """Up to three quarters of the sublayers, every number as likely."""
    return frozenset(source.sample(parts, source.randint(1, 3 * len(parts) // 4)))


def randomly(parts: Sequence[Sublayer], evaluate: Evaluate, seed: int, _: int) -> None:
    source = random.Random(seed)
    while True:
        evaluate(random_set(parts, source))


def by_model(parts: Sequence[Sublayer], evaluate: Evaluate, seed: int, _: int) -> None:
    """Bayesian optimisation."""
    source, tried = random.Random(seed), dict[Set, float]()
    while True:
        chosen = random_set(parts, source)
        if len(tried) >= FIRST:
            best = sorted(tried, key=tried.__getitem__)[-5:]
            near = [
                each.symmetric_difference(source.sample(parts, source.choice((1, 1, 2, 3))))
                for each in source.choices(best, k=CANDIDATES // 2)
            ]
            every = {each for each in near if each} | {random_set(parts, source) for _ in range(CANDIDATES // 2)}
            candidates = sorted(every - tried.keys(), key=sorted)
            chosen = candidates[int(np.argmax(improvements(parts, tried, candidates)))]
        if chosen not in tried:
            tried[chosen] = evaluate(chosen).score


def improvements(parts: Sequence[Sublayer], tried: dict[Set, float], candidates: Sequence[Set]) -> np.ndarray:
    """The expected improvement of each candidate, with the kernel's length by maximum likelihood."""
    known, new = (np.array([[part in each for part in parts] for each in sets]) for sets in (list(tried), candidates))
    scores = np.array(list(tried.values()))
    y = (scores - scores.mean()) / max(float(scores.std()), 1e-9)
    apart = (known[:, None] != known[None]).sum(-1)
    fits = []
    for scale in (4.0, 8.0, 16.0, 32.0):
        kernel = np.exp(-apart / scale) + 1e-3 * np.eye(len(y))
        weights = np.linalg.solve(kernel, y)
        fits.append((-0.5 * float(y @ weights) - 0.5 * float(np.linalg.slogdet(kernel)[1]), scale, kernel, weights))
    _, scale, kernel, weights = max(fits, key=lambda fit: fit[0])
    across = np.exp(-(new[:, None] != known[None]).sum(-1) / scale)
    mean = across @ weights
    spread = np.sqrt(np.clip(1 - (across * np.linalg.solve(kernel, across.T).T).sum(-1), 1e-9, None))
    z = (mean - y.max()) / spread
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z])
    return spread * (z * below + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))


def ours(parts: Sequence[Sublayer], evaluate: Evaluate, seed: int, trials: int) -> None:
    """That of ``foredraft skip``: greedy, then local."""
    search(list(parts), evaluate, SearchBudget(trials, seed))


SEARCHES: dict[str, Callable[[Sequence[Sublayer], Evaluate, int, int], None]] = {
    "greedy and local (foredraft skip)": ours,
    "Bayesian": by_model,
    "random": randomly,
}


def run(args: Namespace, evaluator: Any, name: str, seed: int) -> list[float]:
    """The best score after each trial."""
    best: list[float] = []

    def evaluate(without: Set) -> SkipTrial:
        if len(best) >= args.trials:
            raise Enough
        trial = evaluator(without)
        best.append(max(trial.score, best[-1] if best else 0.0))
        return trial

    try:
        SEARCHES[name](evaluator.parts, evaluate, seed, args.trials)
    except Enough:
        pass
    return best


def table(path: Path = FILE) -> str:
    """The best score after some trials, by search."""
    kinds = read(path)
    runs, origin = kinds["run"], kinds["provenance"][0]
    shown = [count for count in (20, 50, 100, 150, 200) if count <= origin["trials"]]
    lines = []
    for name in SEARCHES:
        own = [run["best"] for run in runs if run["search"] == name]
        cells = []
        for count in shown:
            found = [each[min(count, len(each)) - 1] for each in own]
            spread = f" ({min(found):.3f} to {max(found):.3f})" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.3f}{spread}")
        lines.append([name, *cells] if own else [name, *["-"] * len(shown)])
    return "\n".join(
        [
            *markdown_table(["best score after", *(f"{count} trials" for count in shown)], lines),
            "",
            f"{origin['target']}: {origin['parts']} sublayers, {origin['positions']} tokens of its answers, drafts up "
            f"to {origin['longest']} tokens; means and ranges over {origin['seeds']} seeds. {origin_line(origin)}. "
            f"Made by `{origin['command']}`.",
        ]
    )


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    plain = foredraft.load(args.target, None, dtype="float32", device="cpu")
    prompts = in_turns(args.prompts, plain)[: args.answers]
    params = SamplingParams(max_new_tokens=args.tokens, eos_token_id=())
    answers = run_texts(plain, prompts, params, range(len(prompts)))
    samples = [
        TrialSample((*prompt, *answer.tokens), len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    evaluator = SkipEvaluator(plain.engine.target, samples, temperature=0.0, longest=args.longest)
    yield {"kind": "provenance", "positions": evaluator.tokens, "parts": len(evaluator.parts)}
    for cell in cells:
        yield {**cell, "best": run(args, evaluator, cell["search"], cell["seed"])}


def _commands(inputs: Inputs) -> list[list[str]]:
    words = ["--target", inputs.models / "sample-16m", "--prompts", *inputs.questions("mt_bench", "gsm8k")]
    few = ["--answers", "2", "--tokens", "20", "--trials", "100", "--seeds", "3"]
    return [measured("layer_search", *words, *few)]


EXPERIMENT = Experiment(
    name="layer_search",
    question="searches for layers to skip: methods/layer_skip.md",
    options={
        "target": option("sample"),
        "prompts": PROMPTS,
        "answers": option(3),
        "tokens": option(24),
        "longest": option(4),
        "trials": option(150),
        "seeds": option(2),
    },
    cells=lambda args: [
        {"kind": "run", "search": name, "seed": seed} for seed in range(args.seeds) for name in SEARCHES
    ],
    measure=measure,
    facts=lambda args: {
        "target": Path(args.target).resolve().name,
        **{name: getattr(args, name) for name in ("trials", "seeds", "longest")},
    },
    shown=table,
    tables={"docs/methods/layer_skip.md": {"measured": table}},
    hours=0.3,
    needs=lambda inputs: (inputs.models, inputs.prompts),
    commands=_commands,
)
