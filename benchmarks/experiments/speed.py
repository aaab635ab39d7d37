"""Speed against transformers, both sides in one process: plain decoding, a draft model, prompt lookup.

Every prompt runs on every arm before the next prompt, in rotating order, so that machine drift affects all arms alike.
Both sides generate exactly the same number of tokens, greedily, in float32. Times are wall times of whole calls,
prefill included. Measured are every run, the cost of a forward by rows, and the peak memory of each side, in a process
of its own; shown are medians of paired ratios.
"""

import resource
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers

import foredraft
from benchmarks.experiments.policy import TITLES
from benchmarks.kit.claims import Claim, Row, facts_of, rows_figure
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, quartiles, read
from foredraft.bench.prompts import read_prompts
from foredraft.engine.cost_model import measure_costs

FILE = RESULTS / "speed.jsonl"
TASKS = tuple(TITLES)
PAIRS = (  # title, faster arm, slower arm
    ("plain decoding / transformers' `generate`", "plain", "hf_plain"),
    ("draft model / transformers' assisted generation", "draft_model", "hf_assisted"),
    ("draft model / transformers' `generate`", "draft_model", "hf_plain"),
    ("draft model / our plain decoding", "draft_model", "plain"),
    ("prompt lookup / our plain decoding", "prompt_lookup", "plain"),
    ("transformers' assisted generation / its `generate`", "hf_assisted", "hf_plain"),
    ("transformers' prompt lookup / its `generate`", "hf_lookup", "hf_plain"),
)


def markdown(path: Path = FILE) -> str:
    """All results of a run, as Markdown."""
    kinds = read(path)
    runs, origin = kinds["run"], kinds["provenance"][0]
    prompts = {(run["task"], run["prompt"]) for run in runs}
    tasks = [TITLES[task] for task in TASKS]
    speeds, rates, lengths = [], [], []
    for title, top, bottom in PAIRS:
        speeds.append([title, *_ratios(runs, top, bottom)])
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [_of(runs, arm, task) for task in TASKS]
        rates.append([arm, *(quartiles([r["tokens"] / r["seconds"] for r in each]) for each in own)])
        if arm in ("draft_model", "prompt_lookup"):
            means = [statistics.mean(r["stats"]["acceptance_length"] for r in each) for each in own]
            lengths.append([arm, *(f"{mean:.2f}" for mean in means)])
    lines = [*markdown_table(["speed-up, median (quartiles)", *tasks], speeds), ""]
    lines += [*markdown_table(["tokens per second, median (quartiles)", *tasks], rates), ""]
    lines += [*markdown_table(["acceptance length", *tasks], lengths), ""]
    lines += [*_costs(kinds), *_memory(kinds), ""]
    lines.append(
        f"All arms produced the same tokens on {_agreeing(runs)} of {len(prompts)} prompts. {origin['target']} with "
        f"{origin['draft']}, greedy, {origin['new_tokens']} new tokens, prefill included, {origin_line(origin)}. Made "
        f"by `{origin['command']}`; every run is in `benchmarks/results/speed.jsonl`."
    )
    return "\n".join(lines)


def _of(runs: list[dict], arm: str, task: str) -> list[dict]:
    return [run for run in runs if run["arm"] == arm and run["task"] == task]


def _ratios(runs: list[dict], top: str, bottom: str) -> list[str]:
    """Median and quartiles of each task."""
    return [quartiles(paired([run for run in runs if run["task"] == task], top, bottom)) for task in TASKS]


def paired(runs: list[dict], top: str, bottom: str) -> list[float]:
    """Ratios of paired prompts, so that a slow minute of the machine cancels out."""
    slow = {(run["task"], run["prompt"]): run["seconds"] for run in runs if run["arm"] == bottom}
    return [slow[run["task"], run["prompt"]] / run["seconds"] for run in runs if run["arm"] == top]


def _agreeing(runs: list[dict]) -> int:
    outputs: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for run in runs:
        outputs.setdefault((run["task"], run["prompt"]), set()).add(tuple(run["output"]))
    return sum(len(texts) == 1 for texts in outputs.values())


def _costs(kinds: dict[str, list[dict]]) -> list[str]:
    lines = []
    for cost in kinds.get("cost", []):
        ratios = [seconds / cost["seconds"][0] for seconds in cost["seconds"]]
        head = ["rows in a forward", *map(str, cost["rows"])]
        times = ["milliseconds", *(f"{1e3 * seconds:.1f}" for seconds in cost["seconds"])]
        lines += [*markdown_table(head, [times, ["relative to one row", *(f"{ratio:.2f}" for ratio in ratios)]]), ""]
    return lines


def _memory(kinds: dict[str, list[dict]]) -> list[str]:
    lines = []
    for memory in kinds.get("memory", []):
        peak = memory["mebibytes"]
        for ours, theirs in (("plain", "hf_plain"), ("draft_model", "hf_assisted")):
            ratio = peak[ours] / peak[theirs]
            lines.append(
                f"Peak memory of {ours}: {peak[ours]:.0f} MiB, {ratio:.2f} of {theirs}'s {peak[theirs]:.0f} MiB."
            )
    return lines


# ---- measurement


class TransformersArms:
    """transformers' own generate: plain, assisted, and with prompt lookup."""

    def __init__(self, target: str, draft: str | None, new_tokens: int) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(target, dtype=torch.float32).eval()
        self.assistant = load(draft, dtype=torch.float32).eval() if draft else None
        self.length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}

    def run(self, ids: list[int], **extra: object) -> list[int]:
        inputs = torch.tensor([ids])
        out = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), **self.length, **extra)
        return out[0, len(ids) :].tolist()

    def arms(self) -> dict[str, Callable[[list[int]], tuple[list[int], dict]]]:
        return {
            "hf_plain": lambda ids: (self.run(ids), {}),
            "hf_assisted": lambda ids: (self.run(ids, assistant_model=self.assistant), {}),
            "hf_lookup": lambda ids: (self.run(ids, prompt_lookup_num_tokens=10), {}),
        }


def our_arms(target: str, draft: str, new_tokens: int) -> dict[str, Callable[[list[int]], tuple[list[int], dict]]]:
    generators = {
        "plain": foredraft.load(target, drafter=None),
        "draft_model": foredraft.load(target, drafter=f"draft_model:{draft}"),
        "prompt_lookup": foredraft.load(target, drafter="prompt_lookup"),
    }

    def arm(name: str) -> Callable[[list[int]], tuple[list[int], dict]]:
        def run(ids: list[int]) -> tuple[list[int], dict]:
            result = generators[name].generate(ids, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
            return result.tokens, result.stats.as_dict()

        return run

    return {name: arm(name) for name in generators}


def texts(args: Namespace) -> Iterator[Line]:
    target, draft = str(args.models / args.target), str(args.models / args.draft)
    arms = TransformersArms(target, draft, args.new_tokens).arms() | our_arms(target, draft, args.new_tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    names = list(arms)
    turn = 0
    for task in TASKS:
        prompts = read_prompts(args.prompts / task / "question.jsonl", chat=True)[: args.count]
        for number, prompt in enumerate(prompts):
            chat = tokenizer.apply_chat_template(prompt.prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
            if turn == 0:
                for name in names:  # warm-up: kernels, packed weights, the cost table
                    arms[name](ids)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                started = time.perf_counter()
                tokens, stats = arms[name](ids)
                seconds = time.perf_counter() - started
                line = {"kind": "run", "task": task, "prompt": number, "prompt_tokens": len(ids), "arm": name}
                line |= {"tokens": len(tokens), "seconds": seconds, "stats": stats, "output": tokens}
                yield line
            turn += 1


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    """Runs, then the cost of a forward, then the peak resident memory of each side, each in a process of its own."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.peak:
        one_side(args)
        raise SystemExit
    yield from texts(args)
    generator = foredraft.load(str(args.models / args.target), drafter=None)
    tables = [measure_costs(generator.engine.target, cached=300, budget=20.0, longest=64) for _ in range(5)]
    seconds = [statistics.median(table(rows) for table in tables) for rows in tables[0].rows]
    yield {"kind": "cost", "rows": tables[0].rows, "seconds": seconds}
    peaks, words = {}, [f"--{name}={getattr(args, name)}" for name in ("models", "target", "draft")]
    for side in ("hf_plain", "plain", "hf_assisted", "draft_model"):
        own = measured("transformers", *words, f"--new-tokens={args.new_tokens}", "--peak", side, "--out", args.out)
        peaks[side] = float(subprocess.run(own, capture_output=True, text=True, check=True).stdout.split()[-1])
    yield {"kind": "memory", "mebibytes": peaks}


def one_side(args: Namespace) -> None:
    target, draft = str(args.models / args.target), str(args.models / args.draft)
    if args.peak.startswith("hf"):
        run = TransformersArms(target, draft if "assisted" in args.peak else None, args.new_tokens).arms()[args.peak]
    else:
        spec = f"draft_model:{draft}" if args.peak == "draft_model" else None
        generator = foredraft.load(target, drafter=spec)

        def run(ids: list[int]) -> object:
            return generator.generate(ids, min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens)

    for _ in range(3):
        run(list(range(10, 310)))
    print(_peak_mebibytes())


def _peak_mebibytes() -> float:
    """Peak resident memory of this process. getrusage would include the parent's at the time of the fork."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # bytes on macOS


def claim() -> Claim:
    """Both sides in one process, paired by prompt."""
    kinds = read(FILE)
    rows = []
    for title, top, bottom in PAIRS:
        speeds = paired(kinds["run"], top, bottom)
        rows.append(Row(title.replace("`", ""), statistics.median(speeds), ours=not top.startswith("hf_")))
    origin = kinds["provenance"][0]
    return Claim(
        f"On the same float32 model our plain decoding is {rows[0].value:.2f} times as fast as transformers' generate, "
        f"and a draft model {rows[1].value:.2f} times as fast as its assisted generation.",
        facts_of(rows, ".2f"),
        f"{origin['target']} with {origin['draft']}, greedy, medians; {origin_line(origin)}",
        lambda: rows_figure("Ratio of tokens per second, median over prompts", rows, "{:.2f}".format, 1.0),
    )


EXPERIMENT = Experiment(
    name="transformers",
    question="against transformers at equal length: results.md",
    options={
        "models": option(Path("../shared/models")),
        "prompts": option(Path("../shared/data/prompts/eagle")),
        "target": option("target-65m"),
        "draft": option("draft-6m"),
        "count": option(8, "prompts a task"),
        "new_tokens": option(96),
        "peak": option(str, "print the peak memory of this side alone"),
    },
    measure=measure,
    facts=lambda args: {
        "dtype": "float32",
        **{name: getattr(args, name) for name in ("target", "draft", "new_tokens")},
    },
    shown=markdown,
    threads=None,
    tables={"docs/results.md": {"speed": markdown}},
    claims={"transformers": claim},
    hours=0.3,
    needs=lambda inputs: (inputs.models, inputs.prompts),
    commands=lambda inputs: [
        measured("transformers", "--models", inputs.models, "--prompts", inputs.prompts / "eagle")
    ],
    results=("speed.jsonl",),
)
