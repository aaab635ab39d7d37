"""A draft model that learns online against the same model frozen: acceptance by request, while topics change.

The stream has three stages: chat questions, the beginnings of novels in capitals, which the draft has hardly seen,
and questions again. Prompts come from the training corpus; the results name their places in it and hold no text.
Learning is synchronous, so a run can be repeated.

python benchmarks/online.py CORPUS           # writes benchmarks/results/online.jsonl
python benchmarks/online.py --plot           # draws docs/figures/online.svg, and prints a summary
"""

import argparse
import itertools
import json
import lzma
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from origin import provenance
from pictures import grounded
from reading import markdown_table, read

import foredraft
from foredraft.bench.report import plots
from foredraft.drafters.online.method import Online
from foredraft.engine.policy import Constant

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "online.jsonl"
FIGURE = ROOT / "docs" / "figures" / "online.svg"
STAGES: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("questions", "gsm8k_train", str),
    ("capitals", "english_novels", str.upper),
    ("questions", "gsm8k_train", str),
)
SHARES = (1, 2, 1)  # of the requests
LINES = 4000  # of a corpus file from which prompts are taken
PROMPT = 64  # tokens of a prompt; half of the text if it has fewer than twice as many
WINDOW = 32  # requests of the running mean
FIRST = 12  # requests of a stage that are not drawn: a mean of fewer is noise
ARMS = ("frozen", "online")


def texts(corpus: Path, file: str) -> list[str]:
    """The first texts of a file."""
    with lzma.open(corpus / f"{file}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for _, line in zip(range(LINES), lines, strict=False)]


def stream(corpus: Path, requests: int, encode: Callable[[str], list[int]]) -> Iterator[tuple[str, int, list[int]]]:
    """Topic, place in the file, and token ids of each prompt; no text comes twice."""
    orders: dict[str, Iterator[tuple[int, str]]] = {}
    for (topic, file, change), share in zip(STAGES, SHARES, strict=True):
        if file not in orders:
            numbered = list(enumerate(texts(corpus, file)))
            random.Random(0).shuffle(numbered)
            orders[file] = iter(numbered)
        wanted = requests * share // sum(SHARES)
        while wanted:
            place, text = next(orders[file])
            ids = encode(change(text[:1500]))
            if len(ids) >= PROMPT:
                yield topic, place, ids[: min(PROMPT, len(ids) // 2)]
                wanted -= 1


def serve(arm: str, args: argparse.Namespace) -> Iterator[dict]:
    """Run the stream, ``--together`` requests at a time; one line per request, then one per version of the draft."""
    inner = f"draft_model:{args.draft}"
    spec = inner if arm == "frozen" else f"online:[{inner}],background=no,{args.options}"
    control = Constant(args.length)
    g = foredraft.load(args.target, spec, dtype="float32", device="cpu", policy=control)
    requests = list(stream(args.corpus, args.requests, g.encode))
    for begin in range(0, len(requests), args.together):
        part = requests[begin : begin + args.together]
        results = g.generate(
            [ids for _, _, ids in part],
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            temperature=args.temperature,
            seed=begin,
        )
        for number, ((topic, place, ids), result) in enumerate(zip(part, results, strict=True), start=begin):
            stats = result.stats
            yield {
                "kind": "run",
                "arm": arm,
                "request": number,
                "topic": topic,
                "place": place,
                "prompt_tokens": len(ids),
                "tokens": stats.tokens,
                "target_forwards": stats.target_forwards,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
            }
    if isinstance(g.engine.drafter, Online):
        for report in g.engine.drafter.reports:
            yield {"kind": "version", **report.as_dict()}
    g.close()


def measure(args: argparse.Namespace) -> None:
    """All arms, into one file."""
    origin = provenance(
        "python benchmarks/online.py CORPUS",
        target=args.target,
        draft=args.draft,
        options=args.options,
        temperature=args.temperature,
        num_assistant_tokens=args.length,
        new_tokens=args.new_tokens,
        together=args.together,
        stages=[[topic, file] for topic, file, _ in STAGES],
    )
    with args.out.open("w", encoding="utf-8") as out:
        out.write(json.dumps(origin) + "\n")
        for arm in args.arms.split(","):
            for line in serve(arm, args):
                out.write(json.dumps(line) + "\n")
                out.flush()


def running(runs: list[dict]) -> list[float]:
    """Acceptance length over the last requests of the same stage."""
    means = []
    for end in range(1, len(runs) + 1):
        last = [run for run in runs[max(0, end - WINDOW) : end] if run["stage"] == runs[end - 1]["stage"]]
        means.append(acceptance(last))
    return means


def acceptance(runs: list[dict]) -> float:
    return sum(run["tokens"] for run in runs) / sum(run["target_forwards"] for run in runs)


def by_arm(kinds: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """The runs of each arm in order, each with the number of its stage."""
    arms = {arm: [run for run in kinds["run"] if run["arm"] == arm] for arm in ARMS}
    for runs in arms.values():
        stage = 0
        for before, run in zip([runs[0], *runs], runs, strict=False):
            stage += run["topic"] != before["topic"]
            run["stage"] = stage
    return arms


@plots.styled()
def draw(arms: dict[str, list[dict]], *also: Path) -> None:
    figure, axes = plots.canvas(6.4, 3.0)
    for number, (arm, runs) in enumerate(arms.items()):
        means, places = running(runs), [run["request"] + 1 for run in runs]
        for stage in sorted({run["stage"] for run in runs}):
            of = [i for i, run in enumerate(runs) if run["stage"] == stage][FIRST:]
            label = arm if not stage else None
            axes.plot([places[i] for i in of], [means[i] for i in of], color=plots.color(number), label=label)
    runs = arms["frozen"]
    for run, after in itertools.pairwise(runs):
        if run["stage"] != after["stage"]:
            axes.axvline(after["request"] + 0.5, color=plots.FAINT, linewidth=0.8)
    for stage in sorted({run["stage"] for run in runs}):
        own = [run for run in runs if run["stage"] == stage]
        middle = (own[0]["request"] + own[-1]["request"]) / 2 + 1
        axes.annotate(own[0]["topic"], (middle, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axes.set_xlabel("request")
    axes.set_ylabel(f"acceptance length, last {WINDOW} requests")
    axes.legend(loc="lower right")
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(grounded(plots.themed_svg(figure, "Acceptance while topics change")) + "\n", encoding="utf-8")
    for path in also:
        plots.save(figure, path)


def summary(kinds: dict[str, list[dict]], arms: dict[str, list[dict]]) -> Iterator[str]:
    """By half of each stage: both acceptance lengths, and how many requests were better and worse online."""
    lines = []
    for stage in sorted({run["stage"] for run in arms["frozen"]}):
        frozen, online = ([run for run in arms[arm] if run["stage"] == stage] for arm in ARMS)
        for half, part in (("first", slice(None, len(frozen) // 2)), ("second", slice(len(frozen) // 2, None))):
            pairs = list(zip(frozen[part], online[part], strict=True))
            gains = [a["target_forwards"] / a["tokens"] - b["target_forwards"] / b["tokens"] for a, b in pairs]
            better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
            lengths = [f"{acceptance(list(each)):.2f}" for each in zip(*pairs, strict=True)]
            lines.append([frozen[0]["topic"], half, *lengths, f"{better} / {worse}"])
    head = ["stage", "half", "frozen", "online", "better / worse of each request"]
    yield from markdown_table(head, lines, words=(0, 1))
    outcomes = [line["outcome"] for line in kinds["version"]]
    counted = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
    overlaps = statistics.fmean(line["acceptance"] for line in kinds["version"][-8:])
    yield f"\nversions: {counted}; mean overlap of the last eight {overlaps:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="folder with NAME.jsonl.xz")
    parser.add_argument("--plot", action="store_true", help="draw the results file and print a summary")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="draw these files too, .png or .pdf")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--target", default="sample")
    parser.add_argument("--draft", default="sample-draft")
    parser.add_argument("--options", default="interval=8,lr=2e-4", help="of online")
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--together", type=int, default=8, help="requests in flight")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=5, help="num_assistant_tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    if args.plot:
        kinds = read(args.out)
        arms = by_arm(kinds)
        draw(arms, *args.also)
        print("\n".join(summary(kinds, arms)))
        return
    if args.corpus is None:
        parser.error("CORPUS is missing")
    torch.manual_seed(0)
    measure(args)


if __name__ == "__main__":
    main()
