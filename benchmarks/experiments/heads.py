"""Trained heads against plain decoding, a draft model and prompt lookup, on the bundled model, in one process.

There are two kinds of arms. Those of the first kind have the default policy and are timed: every prompt runs on
every arm before the next prompt, in rotating order, greedy and at temperature 1. Those of the second kind draft trees
of fixed sizes, to compare the acceptance of methods at equal nodes.

    python -m benchmarks heads --prompts ../shared/data/prompts --hydra PATH --hydra-plus PATH --equal PATH
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Inputs, Line, measured, option
from benchmarks.kit.reading import markdown_table, read
from benchmarks.kit.recorder import Recorder
from foredraft.bench.measure.records import Watched
from foredraft.bench.measure.summary import temperature_label
from foredraft.bench.prompts import read_prompts
from foredraft.bench.report import plots
from foredraft.bench.report.figures_drafts import by_confidence
from foredraft.drafters.trees.shapes import Template
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.files.provenance import short_commit

FILE = RESULTS / "heads.jsonl"
TASKS = {"humaneval": "human_eval/HumanEval.jsonl", "gsm8k": "eagle/gsm8k/question.jsonl"}
"""Prompt files; those of HumanEval are plain text, the others use the chat template."""
TIMED = {
    "plain": "none",
    "draft_model": "draft_model",
    "prompt_lookup": "prompt_lookup",
    "medusa": "medusa",
    "hydra": "hydra",
    "hydra++": "hydra++",
    "eagle1": "eagle1",
    "eagle2": "eagle2",
    "eagle3": "eagle3",
}
FIXED = {
    "eagle1, 25 nodes": "eagle1",
    "eagle2, 25 nodes, 6 levels, k 8": "eagle2,nodes=25,depth=6,top_k=8",
    "eagle3, 25 nodes, 6 levels, k 8": "eagle3,nodes=25,depth=6,top_k=8",
    "eagle3 of as much training as eagle2, same tree": "equal,nodes=25,depth=6,top_k=8",
    "eagle3, chain of 5": "eagle3,nodes=5,depth=5,top_k=1",
    "eagle3, 24 nodes, 5 levels, k 8": "eagle3,nodes=24,depth=5,top_k=8",
    "eagle3, 59 nodes, 7 levels, k 10": "eagle3,nodes=59,depth=7,top_k=10",
    "eagle2, 59 nodes, 7 levels, k 10": "eagle2,nodes=59,depth=7,top_k=10",
    "medusa, 24 nodes": "medusa",
    "hydra, 24 nodes": "hydra",
    "hydra++, 24 nodes": "hydra++",
}


def with_path(spec: str, args: Namespace) -> str | None:
    """The spec of an arm, with the path of a head that does not ship; None if that path was not given."""
    name, comma, options = spec.partition(",")
    given = {"hydra": ("hydra", args.hydra), "hydra++": ("hydra", args.hydra_plus), "equal": ("eagle3", args.equal)}
    if name not in given:
        return spec
    method, path = given[name]
    return None if path is None else f"{method}:{path}{comma}{options}"


def generators(args: Namespace) -> tuple[dict[str, Generator], dict[str, tuple[Generator, Recorder]]]:
    """Timed arms, and arms of fixed trees with their recorders. Each has its own target."""
    timed, fixed = {}, {}
    for name, spec in TIMED.items():
        if (full := with_path(spec, args)) is not None:
            timed[name] = foredraft.load(args.target, full)
    for name, spec in FIXED.items():
        if (full := with_path(spec, args)) is not None:
            plain = foredraft.load(args.target, full)
            recorder = Recorder(plain.engine.drafter)
            depth = plain.engine.drafter.needs.longest
            shared = foredraft.load(
                plain.engine.target, recorder, tokenizer=plain.tokenizer.inner, policy=Constant(depth)
            )
            fixed[name] = (shared, recorder)
    return timed, fixed


def run(arm: Callable[..., Any], prompt: Any, args: Namespace, temperature: float) -> dict[str, Any]:
    started = time.perf_counter()
    result = arm(prompt, max_new_tokens=args.new_tokens, temperature=temperature, seed=1)
    seconds = time.perf_counter() - started
    return {"tokens": len(result.tokens), "seconds": seconds, "stats": result.stats.as_dict(), "output": result.tokens}


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    timed, fixed = generators(args)
    names, turn = list(timed), 0
    for task, file in TASKS.items():
        prompts = read_prompts(args.prompts / file, chat=task != "humaneval")[: args.count]
        for number, prompt in enumerate(each.prompt for each in prompts):
            if turn == 0:
                for generator in timed.values():  # warm-up: kernels, packed weights, cost tables
                    generator.generate(prompt, max_new_tokens=args.new_tokens)
            for temperature in (0.0, 1.0):
                about = {"kind": "run", "task": task, "prompt": number, "temperature": temperature}
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    yield {**about, "arm": name, **run(timed[name].generate, prompt, args, temperature)}
                for name, (generator, recorder) in fixed.items():
                    line = {**about, "arm": name, "fixed": True, **run(generator.generate, prompt, args, temperature)}
                    yield line | recorder.take()
                turn += 1


def trained(path: Path = RESULTS / "smollm2_heads.jsonl") -> str:
    """Heads of a real model that were trained on a GPU: what they cost, and how much of their drafts is accepted."""
    kinds = read(path)
    origin = kinds["provenance"][0]
    titles = [
        "trained by",
        "tokens",
        "seconds",
        "right guesses, by step",
        "MT-bench: chain, tree",
        "GSM8K: chain, tree",
    ]
    rows = []
    for head in kinds["head"]:
        hits = [value for name, value in head["validation"].items() if name.startswith("hit_")]
        found = head["tokens_per_forward"]
        lengths = [
            ", ".join(
                f"{value:.2f}"
                for shape in ("chain5", "chain", "tree24", "tree")
                if (value := found.get(f"{shape} T=0 {task}"))
            )
            for task in ("mt_bench", "gsm8k")
        ]
        shown = " ".join(f"{hit:.2f}" for hit in hits)
        command = head["command"].removeprefix("foredraft train ")
        rows.append([f"`{command}`", f"{head['tokens'] / 1e6:.1f}M", f"{head['seconds']:.0f}", shown, *lengths])
    data, small = origin["data"], origin["data_of_1M_runs"]
    lines = [
        *markdown_table(titles, rows),
        "",
        f"{origin['target']}, data: {data['answers']:,} answers of {data['answer_tokens'] / 1e6:.1f}M tokens "
        f"({small['answers']:,} of {small['answer_tokens'] / 1e6:.1f}M for the runs of 1M). Several trainings at once "
        f"on an {origin['device']}, torch {origin['torch']}, commit {short_commit(origin['commit'])}, "
        f"{origin['date']}. Tokens per forward, greedy: {origin['evaluation']}.",
    ]
    return "\n".join(lines)


def by_place(runs: list[Line], arm: str) -> dict[int, list[float]]:
    """For each node of a static tree: the accepted share given an accepted parent, one number per prompt."""
    shares: dict[int, list[float]] = {}
    for run in runs:
        if run["arm"] == arm and run["temperature"] == 0:
            for place, (judged, accepted) in run["places"].items():
                if judged >= 3:
                    shares.setdefault(int(place), []).append(accepted / judged)
    return dict(sorted(shares.items()))


@plots.styled()
def by_position() -> str:
    """EAGLE-2's figure 5."""
    runs = read(FILE)["run"]
    paths = Template.of("eagle").paths
    shares = by_place(runs, "eagle1, 25 nodes")
    figure, axes = plots.canvas(8, 3.2)
    axes.boxplot(list(shares.values()), positions=range(len(shares)), widths=0.6, showfliers=False)
    labels = ["-".join(str(rank + 1) for rank in paths[place - 1]) for place in shares]
    axes.set_xticks(range(len(shares)), labels, rotation=60)
    axes.set(xlabel="node of EAGLE-1's tree, by the ranks on its path", ylabel="accepted given its parent")
    axes.set_ylim(0, 1)
    axes.set_title("Acceptance by position: the spread over prompts is why a fixed tree wastes nodes", loc="left")
    return plots.themed_svg(figure, "Acceptance by position")


@plots.styled()
def confidence() -> str:
    """EAGLE-2's figure 6."""
    runs = read(FILE)["run"]
    figure, axes = plots.canvas(4.2, 3.6)
    axes.plot([0, 1], [0, 1], **plots.DASHED)
    for method, color in (("eagle2", plots.color(0)), ("eagle3", plots.color(1))):
        for temperature, style in ((0.0, "-"), (1.0, "--")):
            arm = f"{method}, 59 nodes, 7 levels, k 10"
            own = [run for run in runs if (run["arm"], run["temperature"]) == (arm, temperature)]
            watched = (Watched(arm, run["task"], "", temperature, confidence=run["confidence"]) for run in own)
            xs, ys, _ = zip(*by_confidence(watched), strict=True)
            label = f"{method.upper()[:-1]}-{method[-1]}, {temperature_label(temperature)}"
            axes.plot(xs, ys, style, color=color, marker="o", markersize=3, label=label)
    axes.set(xlabel="score of the draft, given the parent", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    axes.set_title("A draft knows how sure it may be", loc="left")
    axes.legend(frameon=False)
    return plots.themed_svg(figure, "Acceptance by confidence")


def _commands(inputs: Inputs) -> list[list[str]]:
    own = inputs.heads
    words = ["--hydra", own / "hydra" / "head", "--hydra-plus", own / "hydra++" / "head"]
    return [measured("heads", *words, "--equal", own / "eagle3" / "head", "--prompts", inputs.prompts)]


EXPERIMENT = Experiment(
    name="heads",
    question="trained heads of the bundled model, with figures: heads.md",
    options={
        "target": option("sample"),
        "prompts": option(Path("../shared/data/prompts")),
        "hydra": option(str, "folder of Hydra heads, which do not ship (scripts/sample-heads makes them)"),
        "hydra_plus": option(str, "folder of Hydra++ heads"),
        "equal": option(str, "EAGLE-3 head trained on as many tokens as the EAGLE head"),
        "count": option(20, "prompts a task"),
        "new_tokens": option(96),
    },
    measure=measure,
    facts=lambda args: {
        "dtype": "float32",
        **{name: getattr(args, name) for name in ("target", "new_tokens", "count")},
    },
    threads=None,
    tables={"docs/heads.md": {"real heads": trained}},
    figures={"acceptance_by_position": by_position, "confidence": confidence},
    hours=1.0,
    needs=lambda inputs: (inputs.prompts, inputs.heads),
    commands=_commands,
)
