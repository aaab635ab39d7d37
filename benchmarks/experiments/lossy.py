"""Lossy rules of verification: acceptance and quality beside the exact rule, by temperature; and Medusa-2's target.

    python -m benchmarks lossy --model MODEL --medusa HEAD --blockwise HEAD --prompts GSM8K.jsonl MT_BENCH.jsonl
    python -m benchmarks.tools.held_out T0.jsonl T1.jsonl --out FOLDER    # training data, and what is held out
    python -m benchmarks lossy ... --medusa2 RUN/head --answers FOLDER/held_T0.jsonl FOLDER/held_T1.jsonl
    python -m benchmarks lossy_speed ... --weights int8 --count 8 --new-tokens 64    # on a quiet machine

A cell is a drafter, a rule and a temperature: prompts run in batches, with everything drafted in every step. One JSON
line a cell, with each text's tokens, forwards of the target and quality. transformers scores the texts, by the law of
the original target in float32: log-likelihood at the cell's temperature and at 1, and how many tokens are the target's
best. GSM8K's answers are right if the last number is. With ``--medusa2``, that target's texts are scored by the
original's law, and ``--answers`` (of ``foredraft answers``, not of its training) by both. Times do not matter: on a
CPU, ``--weights int8 --rows 8`` is many times faster than float32. ``lossy_speed`` runs all rules of a drafter beside
plain decoding, one request at a time, with as many tokens drafted as the policy says and with a fixed size: the arm
with the fewest tokens takes a step. Four prompts of a file are a line of a results file of their own.
"""

import functools
import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import foredraft
from benchmarks.experiments.early_exit import last_number
from benchmarks.experiments.policy import Arm, rate
from benchmarks.kit.experiment import (
    PROMPTS,
    RESULTS,
    Cell,
    Experiment,
    Inputs,
    Line,
    command,
    measured,
    option,
)
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, quotient, read, with_interval
from benchmarks.kit.seeded_texts import run_texts
from foredraft.bench.prompts import read_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.inputs import encode
from foredraft.model.loading.bundled import resolve

FILE = RESULTS / "lossy.jsonl"
SPEEDS = "lossy_speed.jsonl"
"""Name of the file of speeds, beside the other one."""
EXACT, NONE, FIXED_ARM = "exact", "none", ", fixed size"
SAMPLES = 2000
"""Of the bootstrap."""
TYPICAL = (
    *(f"typical,epsilon={epsilon:g}" for epsilon in (0.01, 0.03, 0.09, 0.2, 0.3)),
    "typical,epsilon=0.09,delta=0.1",
    "typical,epsilon=0.3,delta=0.3",
)
"""Delta is the paper's sqrt(epsilon), and two others."""
APPROXIMATE = (
    *(f"approximate,top_k={k}" for k in (2, 3, 5)),
    *(f"approximate,min_block={size}" for size in (2, 3)),
    "approximate,top_k=2,min_block=2",
    *(f"approximate,distance=2,ordered={ids}" for ids in ("32x41", "0x49151")),
)
"""Of SmolLM2, ids 32 to 41 are the digits in their order; those of the whole vocabulary have none."""
SIZES = {"medusa": "three nodes of the tree", "blockwise": "the whole chain"}
"""Of the drafts of a fixed size, by the drafter."""
RULES = {"medusa": TYPICAL, "blockwise": APPROXIMATE}
"""Lossy rules by the drafter of their paper."""
FLOAT = "float32"
PLAIN, JOINT = "original", "medusa2"
"""Names of the targets."""


class LossyCell(NamedTuple):
    """What is decoded, and how; ``count``: prompts of each file, ``weights``: of target and head."""

    target: str
    drafter: str
    rule: str
    temperature: float
    count: int
    tokens: int
    weights: str = FLOAT

    @classmethod
    def of(cls, line: dict[str, Any]) -> "LossyCell":
        """The cell of a line, or what a line has for one."""
        return cls(**{name: line[name] for name in cls._fields if name in line})


def rules_of(drafter: str, temperature: float) -> list[str]:
    """Those that differ at this temperature: under typical acceptance greedy rows are exact."""
    return [EXACT, *(rule for rule in RULES[drafter] if temperature or not rule.startswith("typical"))]


def _shown(texts: Sequence[dict], above: str, below: str, form: str = "") -> str:
    """A sum over another with its bootstrap interval; ``form`` exp: of -log-likelihood, so a perplexity."""

    def of(some: Sequence[dict]) -> float:
        ratio = sum(text[above] for text in some) / max(1, sum(text[below] for text in some))
        return math.exp(-ratio) if form == "exp" else ratio

    return with_interval(texts, of, SAMPLES)


def row_of(texts: Sequence[dict]) -> list[str]:
    """Acceptance and quality of a cell."""
    answered = [{**text, "asked": 1} for text in texts if text["right"] is not None]
    sampled = all(text["logp"] is not None for text in texts)
    return [
        _shown(texts, "tokens", "forwards"),
        _shown(texts, "logp", "tokens", "exp") if sampled else "-",
        _shown(texts, "logp_1", "tokens", "exp"),
        f"{sum(text['best'] for text in texts) / sum(text['tokens'] for text in texts):.2f}",
        f"{sum(text['repeated'] for text in texts) / max(1, sum(text['grams'] for text in texts)):.2f}",
        _shown(answered, "right", "asked") if answered else "-",
    ]


COLUMNS = ["acceptance length", "perplexity at T", "perplexity at T = 1", "best tokens", "repeated 4-grams", "GSM8K"]


class Speeds:
    """Speed-ups over plain decoding on the same prompts, from a results file; none where it does not exist."""

    def __init__(self, path: Path, drafter: str, weights: str) -> None:
        kinds = read(path) if path.exists() else {}
        self._lines = [
            line for line in kinds.get("speed", []) if (line["drafter"], line["weights"]) == (drafter, weights)
        ]
        self._origins = [each for each in kinds.get("provenance", []) if each["weights"] == weights]

    def __bool__(self) -> bool:
        return bool(self._lines)

    def of(self, rule: str, temperature: float) -> str:
        """All tokens in all seconds, by those of plain decoding, with the interval over prompts; "-" if not run."""
        found = []
        for line in self._lines:
            plain = {run["prompt"]: run for run in line["runs"] if run["arm"] == NONE}
            own = [run for run in line["runs"] if (run["arm"], line["temperature"]) == (rule, temperature)]
            found += [(run, plain[run["prompt"]]) for run in own]
        return with_interval(found, quotient(rate), SAMPLES) if found else "-"

    def about(self) -> str:
        """How they were measured."""
        heat = self._lines[0]["temperature"]
        some = [line for line in self._lines if line["temperature"] == heat]
        tasks = Counter(line["task"] for line in some for run in line["runs"] if run["arm"] == NONE)
        number = ", ".join(f"{count} of {task}" for task, count in tasks.items())
        first = self._lines[0]
        return (
            f"Speed-up over plain decoding: {number}, {first['tokens']} tokens each, one request at a time, as much "
            f"drafted as the policy says, and a fixed size ({SIZES[first['drafter']]}). "
            f"{origin_line(self._origins[-1], first['weights'], self._origins)}."
        )


def table(drafter: str, path: Path = FILE) -> str:
    """Acceptance and quality of a drafter's rules by temperature, for its page; nothing where nothing was measured."""
    if not path.exists():
        return ""
    kinds = read(path)
    found = {LossyCell.of(line): line["texts"] for line in kinds["cell"]}
    rules = [EXACT, *RULES[drafter]]
    parts = []
    for weights in sorted({cell.weights for cell in found}, key=lambda each: each != FLOAT):
        own = [cell for cell in found if cell.weights == weights]
        most = max((cell.count, cell.tokens) for cell in own)
        own = [cell for cell in own if cell.drafter == drafter and (cell.count, cell.tokens) == most]
        if not own:
            continue
        own.sort(key=lambda cell: (cell.temperature, cell.target != PLAIN, rules.index(cell.rule)))
        some = {cell: found[cell] for cell in own}
        origins = [each for each in kinds["provenance"] if each.get("weights", FLOAT) == weights]
        parts += _part(some, origins, Speeds(path.with_name(SPEEDS), drafter, weights))
    if drafter == "medusa" and "answers" in kinds:
        parts.append("\n".join(answers_table(kinds["answers"])))
    if drafter == "medusa" and "training" in kinds:
        (line,) = kinds["training"]
        parts.append(
            f"Medusa-2's target after {line['tokens']:,} training tokens: the KL divergence of its law from the "
            f"original's is {line['validation']['own_loss']:.3f} nats a token on held-out samples of the answers "
            "(the last validation of `foredraft train medusa2`)."
        )
    return "\n\n".join(parts)


def _part(found: dict[LossyCell, list[dict]], origins: Sequence[dict], speeds: Speeds) -> list[str]:
    """The table of cells with the same weights, and how they were made."""
    lines = []
    for cell in found:
        name = cell.rule if cell.target == PLAIN else "exact, Medusa-2's target"
        shown = name if name.startswith(EXACT) else f"`{name}`"
        speed = [speeds.of(cell.rule + arm, cell.temperature) for arm in ("", FIXED_ARM)] if speeds else []
        lines.append([f"{cell.temperature:g}", shown, *speed, *row_of(found[cell])])
    first = next(iter(found))
    tasks = Counter(text["task"] for text in found[first])
    changed = ", also where Medusa-2 has changed it" if any(cell.target == JOINT for cell in found) else ""
    about = (
        f"{', '.join(f'{number} prompts of {task}' for task, number in tasks.items())}, {first.tokens} tokens at most, "
        f"{origins[0]['model']}. Perplexities of the texts are by the original target's law in float32{changed}; best "
        "tokens: the share that is its most likely token; in brackets the 95 % bootstrap interval over "
        f"prompts. {origin_line(origins[-1], first.weights, origins)}. Made by `python -m benchmarks lossy`."
    )
    head = ["T", "rule", *(["speed-up, policy", f"speed-up{FIXED_ARM}"] if speeds else []), *COLUMNS]
    return ["\n".join(markdown_table(head, lines, words=(0, 1))), *([speeds.about()] if speeds else []), about]


def answers_table(lines: Sequence[dict]) -> list[str]:
    """Both targets' perplexity of held-out answers."""
    files = list(dict.fromkeys(line["file"] for line in lines))
    texts = {(line["target"], line["file"]): line["texts"] for line in lines}
    shown = {PLAIN: "original", JOINT: "Medusa-2's"}
    rows = [
        [name, *(_shown(texts[target, file], "logp_1", "tokens", "exp") for file in files)]
        for target, name in shown.items()
    ]
    return markdown_table(["target: perplexity of held-out answers", *files], rows)


# ---- measurement

FIXED = "num_assistant_tokens_schedule=constant"
SMALL = {"medusa": f",nodes=3,{FIXED}", "blockwise": f",{FIXED}"}
"""The draft size of the fixed arms: three nodes of Medusa's tree, all tokens of blockwise's chain."""
GROUP = 4
"""Prompts of a line of speeds."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a task, with its answer if that is a number."""

    task: str
    prompt: Any
    answer: float | None


def questions(paths: Sequence[Path], count: int) -> list[Question]:
    """The first prompts of each file, as chats."""
    found = []
    for path in paths:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if count else []
        for prompt, row in list(zip(read_prompts(path, chat=True), rows, strict=True))[:count]:
            _, mark, given = (row.get("reference") or [""])[0].rpartition("#### ")
            found.append(Question(prompt.task, prompt.prompt, last_number(given) if mark else None))
    return found


def cells(args: Namespace) -> list[Cell]:
    sides = [(PLAIN, name) for name in RULES if getattr(args, name)] + ([(JOINT, "medusa")] if args.medusa2 else [])
    made = read(args.out).get("cell", []) if args.out.exists() else []
    old = {LossyCell.of(line) for line in made if "weights" not in line}
    every = [
        LossyCell(target, drafter, rule, heat, args.count, args.new_tokens, args.weights)
        for heat in args.temperatures
        for target, drafter in sides
        for rule in ([EXACT] if target == JOINT else rules_of(drafter, heat))
        if args.prompts
    ]
    found: list[Cell] = [{"kind": "cell", **cell._asdict()} for cell in every if cell not in old]
    if args.answers and not args.medusa2:
        raise SystemExit("--answers compares with --medusa2: give both.")
    return [*found, *({"kind": "answers", "file": file.stem} for file in args.answers)]


# ---- texts and their scores


class Scorer:
    """Scores of outputs by a model of transformers, a few texts at once."""

    def __init__(self, model: str, device: str, rows: int) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32)
        self._model.eval().to(device)  # type: ignore[arg-type]
        self._rows = rows

    @torch.inference_mode()
    def __call__(self, texts: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[dict[str, Any]]:
        """Of each prompt and output: sums of log-probabilities at the temperature (None at 0) and at 1, and how many
        tokens are the model's best."""
        found: dict[int, dict[str, Any]] = {}
        order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]) + len(texts[i][1]))
        for begin in range(0, len(order), self._rows):
            some = order[begin : begin + self._rows]
            whole = [torch.tensor(texts[i][0] + texts[i][1]) for i in some]
            ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True).to(self._model.device)
            logits = self._model(input_ids=ids, use_cache=False).logits  # padding is on the right, so nothing reads it
            for row, i in enumerate(some):
                prompt, output = texts[i]
                own = logits[row, len(prompt) - 1 : len(prompt) + len(output) - 1].float()
                tokens = torch.tensor(output, device=own.device)[:, None]
                heats = (temperature or None, 1.0)
                sums = [heat and float((own / heat).log_softmax(-1).gather(1, tokens).sum()) for heat in heats]
                best = int((own.argmax(-1) == tokens[:, 0]).sum())
                found[i] = {"logp": sums[0], "logp_1": sums[1], "best": best}
        return [found[i] for i in range(len(texts))]


def run(generator: Generator, some: Sequence[Question], cell: LossyCell, scorer: Scorer) -> list[dict[str, Any]]:
    """The texts of a cell: prompt i has seed i."""
    params = SamplingParams(max_new_tokens=cell.tokens, temperature=cell.temperature)
    prompts = [encode(each.prompt, generator.tokenizer) for each in some]
    sequences = run_texts(generator, prompts, params, range(len(prompts)))
    scores = scorer([(list(each.prompt), each.tokens) for each in sequences], cell.temperature)
    texts = []
    for question, sequence, own in zip(some, sequences, scores, strict=True):
        tokens = sequence.tokens
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        right = None if question.answer is None else last_number(generator.decode(tokens)) == question.answer
        text = {"task": question.task, "tokens": len(tokens), "forwards": sequence.stats.target_forwards}
        texts.append(text | own | {"grams": len(grams), "repeated": len(grams) - len(set(grams)), "right": right})
    return texts


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    todo = [LossyCell.of(cell) for cell in cells if cell["kind"] == "cell"]
    some = questions(args.prompts, args.count)
    rows = {"max_batch_size": min(args.rows, len(some)), "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    stored = {"dtype": FLOAT} if args.weights == FLOAT else {"weights": args.weights}
    options = {**stored, "device": args.device, **rows}
    paths = {PLAIN: args.model, JOINT: args.medusa2}
    heads = {(PLAIN, "medusa"): args.medusa, (PLAIN, "blockwise"): args.blockwise, (JOINT, "medusa"): args.medusa2}
    scorer = Scorer(args.model, args.device, args.score_rows)
    plain: dict[str, Generator] = {}
    yield {"kind": "provenance", **_device(args)}
    for cell in todo:
        if cell.target not in plain:
            plain[cell.target] = foredraft.load(paths[cell.target], "none", **options)
        spec = f"{cell.drafter}:{heads[cell.target, cell.drafter]},{FIXED}"
        rule = None if cell.rule == EXACT else cell.rule
        target = plain[cell.target]
        with foredraft.load(target, spec, verifier=rule, **rows) as generator:
            yield {"kind": "cell", **cell._asdict(), "texts": run(generator, some, cell, scorer)}
    for cell in cells:
        if cell["kind"] == "answers":
            yield from held_out(args, next(file for file in args.answers if file.stem == cell["file"]))


def _device(args: Namespace) -> dict[str, str]:
    return {"device": torch.cuda.get_device_name(args.device)} if args.device != "cpu" else {}


def held_out(args: Namespace, file: Path) -> Iterator[Line]:
    """Both targets' log-likelihood of given answers."""
    for name, model in ((PLAIN, args.model), (JOINT, args.medusa2)):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: args.answer_count]]
        pairs = [(row["ids"][: row["prompt_length"]], row["ids"][row["prompt_length"] :][:512]) for row in rows]
        scores = Scorer(model, args.device, args.score_rows)(pairs, 1.0)
        texts = [
            {"tokens": len(output), "logp_1": own["logp_1"], "best": own["best"]}
            for (_, output), own in zip(pairs, scores, strict=True)
        ]
        yield {"kind": "answers", "target": name, "file": file.stem, "texts": texts}


def speed_cells(args: Namespace) -> list[Cell]:
    return [
        {"kind": "speed", "drafter": name, "temperature": heat, "task": _task(file), "first": first}
        | {"weights": args.weights, "tokens": args.new_tokens}
        for heat in args.temperatures
        for name in RULES
        if getattr(args, name)
        for first in range(0, args.count, GROUP)
        for file in args.prompts
    ]


def _task(file: Path) -> str:
    return read_prompts(file)[0].task


def measure_speeds(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    """Speeds of the rules and of plain decoding, GROUP prompts of a file a line."""
    stored = {"dtype": FLOAT} if args.weights == FLOAT else {"weights": args.weights}
    plain, files = foredraft.load(args.model, "none", device=args.device, **stored), {_task(f): f for f in args.prompts}
    yield {"kind": "provenance", **_device(args)}
    for cell in cells:
        some = questions([files[cell["task"]]], args.count)[cell["first"] : cell["first"] + GROUP]
        drafter, prompts = cell["drafter"], [each.prompt for each in some]
        runs = race(plain, drafter, getattr(args, drafter), cell["temperature"], prompts, args.new_tokens)
        yield {**cell, "runs": runs}


def race(
    plain: Generator, drafter: str, head: str, heat: float, prompts: Sequence[Any], tokens: int
) -> list[dict[str, Any]]:
    """Tokens, forwards and seconds of each arm on each prompt. The arms take turns by steps, so a machine that is slow
    for a moment is slow for all of them."""
    arms = [Arm(NONE, plain)]
    for rule in rules_of(drafter, heat):
        for name, options in (("", ""), (FIXED_ARM, SMALL[drafter])):
            verifier = None if rule == EXACT else rule
            arms.append(Arm(rule + name, foredraft.load(plain, f"{drafter}:{head}{options}", verifier=verifier)))
    params = SamplingParams(max_new_tokens=tokens, temperature=heat, eos_token_id=())
    for arm in arms:
        arm.start(prompts, params)
    while (arm := min(arms, key=lambda each: each.tokens)).tokens < tokens * len(prompts):
        arm.step(prompts, params)
    for arm in arms[1:]:
        arm.generator.close()
    return [result for arm in arms for result in arm.results]


def _commands(inputs: Inputs) -> list[list[str]]:
    """Heads of the real model and Medusa-2's target, and what lossy rules do with them."""
    answers, parts, model = inputs.state / "answers", inputs.state / "answers-split", ["-m", inputs.smollm2]
    files = [answers / "T0.jsonl", answers / "T1.jsonl"]
    held = [parts / f"held_{file.name}" for file in files]
    data, medusa = ["--data", parts / "train.jsonl", "--tokens", "3000000"], inputs.state / "medusa" / "head"
    joint = ["--start", medusa, "--recipe", "alone=0", "--recipe", "own=kl", "--batch", "16", "--lr", "0.0005"]
    heads = ["--model", inputs.smollm2, "--medusa", medusa, "--blockwise", inputs.state / "blockwise" / "head"]
    heads += ["--weights", "int8", "--prompts", *inputs.questions("gsm8k", "mt_bench")]
    new = ["--medusa2", inputs.state / "medusa2" / "head", "--answers", *held]
    train = [
        command("foredraft", "train", name, *model, *data, "--out", inputs.state / name)
        for name in ("medusa", "blockwise")
    ]
    return [
        inputs.answers(),
        command("benchmarks.tools.held_out", *files, "--out", parts),
        *train,
        command("foredraft", "train", "medusa2", *model, *data, *joint, "--out", inputs.state / "medusa2"),
        measured("lossy", *heads, *new, "--rows", "8"),
        measured("lossy_speed", *heads, "--temperatures", "1", "--count", "12", "--new-tokens", "48"),
    ]


_OPTIONS = {
    "model": option("sample", "folder or hub name, or sample"),
    "medusa": option(str, "head"),
    "blockwise": option(str, "blockwise or Medusa head"),
    "prompts": PROMPTS,
    "count": option(40, "prompts of each file"),
    "new_tokens": option(128),
    "temperatures": option([0.0, 0.7, 1.0]),
    "device": option("cpu"),
    "weights": option(FLOAT, "int8 or int4: on the native engine, quantised"),
}
EXPERIMENT = Experiment(
    name="lossy",
    question="lossy rules and Medusa-2, with training (minutes on a GPU): methods",
    options=_OPTIONS
    | {
        "medusa2": option(str, "folder of train medusa2: another target, with its heads"),
        "answers": option([], "held-out answers for both targets", type=Path),
        "answer_count": option(200, "answers of each file"),
        "rows": option(80, "prompts in a batch"),
        "kv_cache_memory_bytes": option(int),
        "score_rows": option(8, "texts that are scored at once"),
    },
    cells=cells,
    measure=measure,
    facts=lambda args: {"model": Path(args.model).name, "weights": args.weights},
    tables={f"docs/methods/{name}.md": {"measured": functools.partial(table, name)} for name in RULES},
    hours=12.0,
    needs=lambda i: (Path(i.smollm2), i.prompts),
    commands=_commands,
    results=("lossy.jsonl", "lossy_speed.jsonl"),
)
SPEEDS_OF_RULES = Experiment(
    name="lossy_speed",
    question="speeds under lossy rules, which `lossy` measures",
    options=_OPTIONS,
    cells=speed_cells,
    measure=measure_speeds,
    facts=lambda args: {"model": Path(args.model).name, "weights": args.weights},
    threads=None,
)
