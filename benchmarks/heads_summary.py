"""Tables and plots of trained heads: results of heads.py, ablation.py and trainings on a GPU.

python benchmarks/heads_summary.py    # draw docs/figures/*.svg (needs matplotlib)
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from origin import origin_line
from policy_tables import TITLES
from reading import acceptance_interval, markdown_table, per_forward, quotient, read, with_interval

from foredraft.bench.measure.records import Watched
from foredraft.bench.measure.summary import temperature_label
from foredraft.bench.report.figures_drafts import by_confidence
from foredraft.files.provenance import short_commit

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "heads.jsonl"
REAL = ROOT / "benchmarks" / "results" / "smollm2_heads.jsonl"
ABLATION = ROOT / "benchmarks" / "results" / "ablation.jsonl"
GLIDE = ROOT / "benchmarks" / "results" / "glide.jsonl"
REAL_GLIDE = ROOT / "benchmarks" / "results" / "glide_smollm2.jsonl"
METHODS = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "glide": "GLIDE"}
FIGURES = ROOT / "docs" / "figures"
_FEW = 30
"""Judged tokens below which counts are shown, not a share."""
Run = dict[str, Any]


def real(path: Path = REAL) -> str:
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


QUESTIONS = {
    "ttt": "training-time test",
    "ttt-features": "training-time test, loss on features",
    "no-ttt": "no training-time test",
    "no-ttt-features": "no training-time test, loss on features",
    "top-layer": "training-time test, top layer alone",
    "size": "",
}
"""Of ablation.py, in words."""
_GREEDY, _SAMPLED = "chain, T=0, ", "chain, T=1, "
_BY_PROMPT = ("tokens", "forwards")


def ablation(path: Path = ABLATION) -> str:
    """EAGLE's findings: each head's chains by position, and its trees."""
    kinds = read(path)
    origin = kinds["provenance"][0]
    lines = _trials(kinds["head"])
    lines += [
        "",
        f"{origin['target']}, one seed, three passes over the data, draft vocabulary of EAGLE-3 8,192. Tokens per "
        f"forward, {origin['count']} prompts of a task, {origin['new_tokens']} new tokens, with 95 % intervals "
        "over prompts; chains of five, greedy trees of 24 nodes; n-alpha of greedy chains, a fraction where "
        f"fewer than {_FEW} tokens were judged; float32 on an "
        f"{origin['device']}, commit {short_commit(origin['commit'])}, {origin['date']}. "
        "Made by `benchmarks/ablation.py`.",
    ]
    return "\n".join(lines)


def glide(path: Path = GLIDE) -> str:
    """GLIDE's heads beside EAGLE's of as much training, of the real model and of the bundled one."""
    if not path.exists():
        return ""
    kinds = read(path)
    origin = kinds["provenance"][0]
    caption = (
        f"{origin['target']}, one seed, trained on {', '.join(origin['texts'])}. Tokens per forward: greedy chains of "
        f"five on eight held-out texts of these files, 48 new tokens each; no interval. {origin_line(origin)}. Made by "
        "`benchmarks/ablation.py`."
    )
    own = [*_validated(kinds["head"]), "", caption]
    return "\n".join([*([real_glide(), ""] if REAL_GLIDE.exists() else []), *own])


def real_glide(path: Path = REAL_GLIDE, eagle: Path = ABLATION) -> str:
    """GLIDE's heads beside EAGLE's that learned from the same answers: in training's validation, and on the same
    prompts."""
    kinds, others = read(path), read(eagle)
    origin, other = kinds["provenance"][0], others["provenance"][0]
    sizes = {head["size"] for head in kinds["head"]}
    same = [head for head in others["head"] if head["question"] == "size" and head["size"] in sizes]
    parts = [*_validated([*same, *kinds["head"]]), ""]
    trial = ""
    if all(head["trial"] for head in kinds["head"]):
        count = origin["count"]
        heads = [*kinds["head"], *(_first(head, count) for head in same)]
        parts += [*_trials(heads), "", *_by_others(heads), ""]
        first = "the first " if count < other["count"] else ""
        trial = (
            f" Other tokens per forward: {first}{count} prompts of a task, {origin['new_tokens']} new tokens, with 95 "
            "% intervals over prompts; chains of five"
            f"{', greedy trees of 24 nodes' if 'tree' in _shapes(heads) else ''}; n-alpha of EAGLE over "
            f"{other['count']} prompts of a task.{_cape(kinds['head'][-1])}"
        )
    caption = (
        f"SmolLM2-135M-Instruct, one seed, {origin['passes']:g} passes over the same answers for every head; EAGLE-1 "
        "began from random weights. Held-out texts: greedy chains of five on eight of these answers, 48 new tokens "
        f"each; no interval.{trial} GLIDE: {origin_line(origin)}. EAGLE: "
        f"[EAGLE's findings](../heads.md#eagles-findings-on-a-real-model), on an {other['device']}, commit "
        f"{short_commit(other['commit'])}. Made by `benchmarks/ablation.py`."
    )
    return "\n".join([*parts, caption])


def _data(head: Run) -> str:
    """The answer tokens that a head learned from."""
    return f"{head['size']:g}M"


def _validated(heads: Iterable[Run]) -> list[str]:
    """What training's validation found."""
    rows = []
    for head in heads:
        found = head["validation"]
        hits = " ".join(f"{value:.2f}" for name, value in found.items() if name.startswith("hit_"))
        length = f"{found['acceptance_length']:.2f}"
        rows.append([METHODS[head["method"]], f"{head['tokens'] / 1e6:.2f}M", hits, length])
    titles = ["head", "training tokens", "right guesses, by step", "held-out texts: tokens per forward"]
    return markdown_table(titles, rows, words=[0])


def _by_others(heads: Sequence[Run]) -> list[str]:
    """GLIDE's acceptance length by each other head's of as much data, over the same prompts of all tasks."""
    shapes, rows = _shapes(heads), []
    own = {head["size"]: head for head in heads if head["method"] == "glide"}
    for head in (head for head in heads if head["method"] != "glide"):
        cells = []
        for prefix in shapes.values():
            both = [list(_prompts(each, prefix)) for each in (own[head["size"]], head)]
            pairs = list(zip(*both, strict=True))
            cells.append(with_interval(pairs, quotient(per_forward), 1000))
        rows.append([METHODS[head["method"]], _data(head), *cells])
    return markdown_table(["GLIDE's acceptance length by that of", "data", *shapes], rows)


def _cape(head: Run) -> str:
    """A sentence: the acceptance length of CaPE's chains by those of the same head's other shapes."""
    own, found = list(_prompts(head, "CaPE, T=0, ")), []
    for shape, prefix in (("chains", _GREEDY), ("trees", "tree, T=0, ")):
        if others := list(_prompts(head, prefix)):
            by = with_interval(list(zip(own, others, strict=True)), quotient(per_forward), 1000) if own else ""
            found.append(f"{shape} {by}")
    return f" CaPE's acceptance length by that of the same head's {', '.join(found)}." if own else ""


def _shapes(heads: Iterable[Run]) -> dict[str, str]:
    """The shapes of drafts that were tried with all of these heads, and how the names of their arms begin."""
    tried = [" ".join(head["trial"]) for head in heads]
    shapes = {"chain": _GREEDY, "tree": "tree, T=0, ", "chain at T=1": _SAMPLED}
    return {shape: arm for shape, arm in shapes.items() if all(arm in names for names in tried)}


def _prompts(head: Run, prefix: str) -> Iterator[tuple[int, int]]:
    """Tokens and forwards of each prompt of all tasks."""
    for name, arm in head["trial"].items():
        if name.startswith(prefix):
            yield from zip(arm["tokens"], arm["forwards"], strict=True)


def _first(head: Run, count: int) -> Run:
    """The head's trial on the first prompts of each task; depths stay those of all."""
    cut = {name: {**arm, **{key: arm[key][:count] for key in _BY_PROMPT}} for name, arm in head["trial"].items()}
    return {**head, "trial": cut}


def _trials(heads: Iterable[Run]) -> list[str]:
    """The acceptance lengths of each head's chains and trees by task, and its greedy chains' acceptance by position:
    as a fraction where few tokens were judged."""
    heads = sorted(heads, key=lambda each: (each["question"] != "size", each["method"], each["size"]))
    tasks = [name.removeprefix(_GREEDY) for name in heads[0]["trial"] if name.startswith(_GREEDY)]
    shown = _shapes(heads)
    words = ", ".join(shown)
    titles = ["head", "data", *(f"{TITLES.get(task, task)}: {words}" for task in tasks), "0-alpha to 4-alpha"]
    rows = []
    for head in heads:
        method = METHODS[head["method"]]
        question = QUESTIONS[head["question"]]
        found = {name: acceptance_interval(arm) for name, arm in head["trial"].items()}
        cells = [", ".join(found[f"{arm}{task}"] for arm in shown.values()) for task in tasks]
        alphas = " ".join(
            f"{own / judged:.2f}" if judged >= _FEW else f"{own}/{judged}" for own, judged in _judged(head)
        )
        rows.append([f"{method}{question and ', '}{question}", _data(head), *cells, alphas])
        if f"CaPE, T=0, {tasks[0]}" in found:
            rows.append([f"{method} with CaPE", _data(head), *(found[f"CaPE, T=0, {task}"] for task in tasks), ""])
    return markdown_table(titles, rows, words=[0])


def _chain(head: Run) -> float:
    """Acceptance length of greedy chains over all tasks."""
    return per_forward(_prompts(head, _GREEDY))


def _judged(head: Run) -> list[tuple[int, int]]:
    """By position of a chain: accepted tokens, and those that were judged since all before them were accepted."""
    arms = [arm for name, arm in head["trial"].items() if name.startswith(_GREEDY)]
    reached = [sum(sum(arm["accepted_by_depth"][d : d + 1]) for arm in arms) for d in range(5)]
    drafted = [sum(sum(arm["drafted_by_depth"][d : d + 1]) for arm in arms) for d in range(5)]
    before = [drafted[0], *reached[:4]]
    return [(own, above) for own, above in zip(reached, before, strict=True) if above]


def _alphas(head: Run) -> list[float]:
    """n-alpha: the share of tokens at position n of a chain that is accepted, given that those before are."""
    return [own / above for own, above in _judged(head)]


def by_place(runs: list[Run], arm: str) -> dict[int, list[float]]:
    """For each node of a static tree: the accepted share given an accepted parent, one number per prompt."""
    shares: dict[int, list[float]] = {}
    for run in runs:
        if run["arm"] == arm and run["temperature"] == 0:
            for place, (judged, accepted) in run["places"].items():
                if judged >= 3:
                    shares.setdefault(int(place), []).append(accepted / judged)
    return dict(sorted(shares.items()))


def plots(runs: list[Run]) -> None:
    """EAGLE-2's figures 5 and 6, and EAGLE-3's findings if there are results of ablation.py."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "foredraft",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    FIGURES.mkdir(parents=True, exist_ok=True)
    _plot_places(runs)
    _plot_confidence(runs)
    if ABLATION.exists():
        _plot_ablation(read(ABLATION)["head"])


def _figure(width: float, height: float, parts: int = 1) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(1, parts, figsize=(width, height), layout="constrained")


def _save(figure: Any, name: str) -> None:
    figure.savefig(FIGURES / name, metadata={"Date": None})


def _plot_places(runs: list[Run]) -> None:
    from foredraft.drafters.trees.shapes import Template

    paths = Template.of("eagle").paths
    shares = by_place(runs, "eagle1, 25 nodes")
    figure, axes = _figure(8, 3.2)
    axes.boxplot(list(shares.values()), positions=range(len(shares)), widths=0.6, showfliers=False)
    labels = ["-".join(str(rank + 1) for rank in paths[place - 1]) for place in shares]
    axes.set_xticks(range(len(shares)), labels, rotation=60)
    axes.set(xlabel="node of EAGLE-1's tree, by the ranks on its path", ylabel="accepted given its parent")
    axes.set_ylim(0, 1)
    axes.set_title("Acceptance by position: the spread over prompts is why a fixed tree wastes nodes", loc="left")
    _save(figure, "acceptance_by_position.svg")


def _plot_confidence(runs: list[Run]) -> None:
    figure, axes = _figure(4.2, 3.6)
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for method, color in (("eagle2", "C0"), ("eagle3", "C1")):
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
    _save(figure, "confidence.svg")


def _plot_ablation(heads: list[Run]) -> None:
    figure, (alphas, sizes) = _figure(8, 3.4, 2)
    for question, style in (("ttt", "-"), ("ttt-features", "--"), ("no-ttt", "-"), ("no-ttt-features", "--")):
        head = next(each for each in heads if each["question"] == question and each["seed"] == 0)
        color = "C0" if question.startswith("ttt") else "C3"
        alphas.plot(_alphas(head), style, color=color, marker="o", markersize=4, label=QUESTIONS[question])
    alphas.set(xlabel="position in the chain, n", ylabel="n-alpha, greedy", ylim=(0, 0.8), xticks=range(5))
    alphas.set_title("Later positions need the training-time test", loc="left")
    for method, label in (("eagle", "EAGLE-1"), ("eagle3", "EAGLE-3")):
        own = [each for each in heads if each["method"] == method and each["question"] in ("size", "ttt")]
        points = sorted((each["size"], _chain(each)) for each in own if each["seed"] == 0)
        sizes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    ticks = sorted({each["size"] for each in heads})
    sizes.set_xscale("log", base=2)
    sizes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    sizes.set(xlabel="answer tokens, millions", ylabel="acceptance length, chain of 5, greedy")
    sizes.set_title("Acceptance against data", loc="left")
    for axes in (alphas, sizes):
        axes.legend(frameon=False, fontsize=8)
    _save(figure, "ablation.svg")


if __name__ == "__main__":
    plots(read(RESULTS)["run"])
