"""Early exits of a model before and after `foredraft train early_exit`: acceptance, and the quality of both models.

    foredraft train early_exit --model MODEL --data build/answers --out build/exit --lr 3e-4 --recipe share=0.25
    python -m benchmarks early_exit --model MODEL --trained build/exit/model --prompts mt_bench.jsonl gsm8k.jsonl

Acceptance: chains of each length from exits after a quarter and after half of the layers; with `--skips FILE` (of
`foredraft skip`), also those of the original without these layers. On a CPU, `--weights int8` is many times faster than
float32. Quality, in float32: the perplexity of the reference answers in the prompt files and of `--answers` (of
`foredraft answers`, not of the training), how often the likeliest next token there is the original's, and, where a
reference ends with "#### NUMBER" (GSM8K), how many greedy answers end with that number. `--parts` runs some of this.
"""

import json
import math
import re
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import foredraft
from benchmarks.experiments import fixed_sizes
from benchmarks.kit.experiment import (
    ALL_TASKS,
    PROMPTS,
    RESULTS,
    Cell,
    Experiment,
    Inputs,
    Line,
    command,
    measured,
    option,
    repeated,
)
from benchmarks.kit.reading import acceptance_interval, markdown_table, per_forward, read, with_interval
from benchmarks.kit.seeded_texts import tokenized
from foredraft.drafters.layer_skip.config import read_skip_config
from foredraft.files.provenance import processor, short_commit
from foredraft.model.partial.skipping import layers_of

FILE = RESULTS / "early_exit.jsonl"
MODELS, SKIPPING = ("original", "trained"), "layer_skip"
FLOAT = "float32"
TITLES = {"mt_bench": "MT-bench", "gsm8k": "GSM8K", "humaneval": "HumanEval", "alpaca": "Alpaca", "sum": "CNN/DM"}
TITLES |= {"held_T0": "held-out answers, greedy", "held_T1": "held-out answers, T=1"}
CHAIN = "num_assistant_tokens_schedule=constant,assistant_confidence_threshold=0"
SHOWN = {"original": "original", "trained": "trained", SKIPPING: "original, no exit"}
_BATCH, _LONGEST = 8, 512  # reference answers in a forward, and the most tokens of each with its prompt


def arms(model: str, args: Namespace, done: set[str]) -> Iterator[dict[str, Any]]:
    """The chains of one of the two models, all prompts at once, and how many texts are plain decoding's."""
    path = args.trained if model == "trained" else args.model
    rows = {"max_batch_size": len(args.prompts) * args.count, "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    stored = {"dtype": FLOAT} if args.weights == FLOAT else {"weights": args.weights}
    with foredraft.load(path, "none", device=args.device, **stored, **rows) as plain:
        prompts, found = tokenized(plain, args.prompts, args.count), list(drafts(model, args, plain.engine.target))
        flat = [prompt for own in prompts.values() for prompt in own]
        for temperature in args.temperatures:
            limits, expected = {"max_new_tokens": args.new_tokens, "temperature": temperature, "seed": 1}, None
            for exit, start, cost in found:
                for chain in args.chains:
                    facts = {"model": model, "exit": exit, "chain": chain, "temperature": temperature}
                    name = ", ".join(f"{key} {value}" for key, value in facts.items())
                    if name in done:
                        continue
                    expected = expected or plain.generate(flat, **limits)
                    with foredraft.load(plain, f"{start},num_assistant_tokens={chain},{CHAIN}", **rows) as generator:
                        begin = time.perf_counter()
                        results = generator.generate(flat, **limits)
                        seconds = time.perf_counter() - begin
                    same = sum(a.tokens == b.tokens for a, b in zip(results, expected, strict=True))
                    ordered, tasks = iter(results), {}
                    for task, own in prompts.items():
                        stats = [next(ordered).stats for _ in own]
                        total = sum(stats, foredraft.DecodeStats())
                        tasks[task] = {
                            "tokens": [each.tokens for each in stats],
                            "forwards": [each.target_forwards for each in stats],
                            "accepted_by_depth": total.accepted_by_depth,
                            "drafted_by_depth": total.drafted_by_depth,
                        }
                    yield {"kind": "arm", "name": name, **facts, "cost": cost, "same": same, "prompts": len(flat)} | {
                        "seconds": round(seconds, 3),
                        "tasks": tasks,
                    }


def drafts(model: str, args: Namespace, target: Any) -> Iterator[tuple[int | str, str, float]]:
    """What drafts: the number of first layers or what is skipped, how the spec begins, and the share of the weights."""
    layers = layers_of(target)
    if model == SKIPPING:
        skips = read_skip_config(args.skips)
        kept = len(layers) - len(skips.attention), len(layers) - len(skips.mlp)
        cost = layers.without(skips.attention, skips.mlp).cost
        yield f"{kept[0]} attentions and {kept[1]} MLPs", f"layer_skip:{args.skips}", round(cost, 4)
        return
    for exit in args.exits or (len(layers) // 4, len(layers) // 2):
        yield exit, f"early_exit,assistant_early_exit={exit}", round(layers.first(exit).cost, 4)


def quality(args: Namespace, done: set[str]) -> Iterator[dict[str, Any]]:
    """Both models on the reference answers of each prompt file that has some, and on given answers."""
    rows = {"max_batch_size": args.answer_count, "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    given = {"dtype": FLOAT, "device": args.device, **rows}
    with (
        foredraft.load(args.model, "none", **given) as original,
        foredraft.load(args.trained, "none", **given) as trained,
    ):
        for file in args.answers:
            if f"quality {file.stem}" not in done:
                lines = [
                    json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: args.answer_count]
                ]
                cut = [(line["ids"], line["prompt_length"]) for line in lines]
                texts = [(ids, [0] * begin + [1] * (len(ids) - begin)) for ids, begin in cut]
                yield scored(file.stem, [original, trained], texts)
        for file in args.prompts:
            task = file.parent.name if file.stem == "question" else file.stem
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: args.answer_count]]
            lines = [line for line in lines if line.get("reference")]
            if not lines or f"quality {task}" in done:
                continue
            turns = [each["turns"][0] for each in lines]
            references = [re.sub(r"<<.*?>>", "", each["reference"][0]) for each in lines]
            chats = [
                [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
                for turn, answer in zip(turns, references, strict=True)
            ]
            line = scored(task, [original, trained], [original.tokenizer.encode_turns(chat) for chat in chats])
            wanted = [found[1] if (found := re.search(r"#### *(\S+)", each)) else None for each in references]
            if all(wanted):
                for name, generator in zip(MODELS, (original, trained), strict=True):
                    results = generator.generate([chat[:1] for chat in chats], max_new_tokens=args.answer_tokens)
                    ends = [last_number(result.text) for result in results]
                    line[f"right_{name}"] = sum(a == number(b) for a, b in zip(ends, wanted, strict=True))
            yield line


@torch.inference_mode()
def scored(task: str, generators: Sequence[Any], texts: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """A line of quality: of each text the tokens that count, their negative log-likelihood by each model, and at how
    many of them both have the same likeliest token.

    Args:
        texts: ids of each and which of them count.
    """
    device = generators[0].engine.target.device
    line: dict[str, Any] = {"kind": "quality", "name": f"quality {task}", "task": task, "answers": len(texts)}
    line |= {"tokens": [], "equal": [], **{f"loss_{name}": [] for name in MODELS}}
    for begin in range(0, len(texts), _BATCH):
        some = texts[begin : begin + _BATCH]
        length = min(_LONGEST, max(len(ids) for ids, _ in some))
        padded = [[(row + [0] * length)[:length] for row in rows] for rows in zip(*some, strict=True)]
        tokens, counts = (torch.tensor(rows, device=device) for rows in padded)
        logits = [each.engine.target.stock_logits(tokens)[:, :-1] for each in generators]
        for row, asked in enumerate(counts[:, 1:].bool()):
            laws = [each[row][asked].float().log_softmax(-1) for each in logits]
            for name, law in zip(MODELS, laws, strict=True):
                line[f"loss_{name}"].append(round(-float(law.gather(-1, tokens[row, 1:][asked][:, None]).sum()), 4))
            line["tokens"].append(int(asked.sum()))
            line["equal"].append(int((laws[0].argmax(-1) == laws[-1].argmax(-1)).sum()))
    return line


def number(text: str) -> float | None:
    """The value of a number with thousands separators; None for other text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return number(found[-1].rstrip(",")) if found else None


def training(trained: Path) -> dict[str, Any]:
    """Of the run that made a model: its command, tokens, seconds and last validation."""
    notes = json.loads((trained / "provenance.json").read_text(encoding="utf-8"))
    log = (trained.parent / "log.jsonl").read_text(encoding="utf-8").splitlines()
    last = next(line for line in map(json.loads, reversed(log)) if "seconds" in line)
    return {
        "command": notes["command"],
        "device": notes["device"],
        "commit": notes["commit"],
        "validation": notes["validation"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
    }


def table(path: Path = FILE) -> str:
    """Chains and quality before and after the training; empty without results."""
    if not path.exists():
        return ""
    kinds = read(path)
    origin = kinds["provenance"][0]
    tasks = list(kinds["arm"][0]["tasks"])
    rows = []
    for arm in sorted(kinds["arm"], key=_place):
        every = [pair for own in arm["tasks"].values() for pair in zip(own["tokens"], own["forwards"], strict=True)]
        most = per_forward(every) / (1 + arm["chain"] * arm["cost"])
        law = "greedy" if not arm["temperature"] else f"T={arm['temperature']:g}"
        drafts = f"{arm['exit']} of {origin['layers']}{' layers' if arm['model'] == SKIPPING else ''}"
        draft = [drafts, f"{arm['cost']:.2f}", str(arm["chain"]), law, SHOWN[arm["model"]]]
        cells = [acceptance_interval(arm["tasks"][task]) for task in tasks]
        rows.append([*draft, with_interval(every, per_forward, 1000), *cells, f"{most:.2f}"])
    titles = [TITLES.get(task, task) for task in tasks]
    head = ["layers that draft", "weights read", "chain", "temperature", "model", "all tasks", *titles, "most speed-up"]
    lines = ["Tokens per forward of the target, before and after `train early_exit`:", ""]
    lines += [*markdown_table(head, rows, words=(0, 3, 4)), "", *_quality(kinds.get("quality", []))]
    made, skips, search = origin["training"], origin.get("skips"), ""
    if skips:
        search = (
            f"The best layers to skip that `foredraft skip` found: {skips['tokens_a_step']:.2f} tokens per step at "
            f"draft length {skips['length']}, {skips['cost']:.2f} of the weights a drafted token, so "
            f"{skips['speed_by_weights']:.2f} of plain decoding's speed by weights, on {skips['tokens']} tokens of "
            "the target's answers. "
        )
    same, prompts = (sum(arm[key] for arm in kinds["arm"]) for key in ("same", "prompts"))
    lines.append(
        f"{origin['target']}; `{made['command']}`: {made['tokens'] / 1e6:.2f}M tokens in {made['seconds']:.0f} seconds "
        f"on {made['device']}. Chains of fixed length, {origin['count']} prompts of a task, {origin['new_tokens']} new "
        "tokens, with 95 % intervals over prompts; weights read: by a forward of the draft, as a share of the target's;"
        " most speed-up: tokens per forward, divided by the weights that a step reads, in forwards. Texts "
        f"that equal plain decoding's of the same model, by the same seed: {same} of {prompts}. {search}"
        f"{origin.get('weights', FLOAT)} on {origin['target_device']}, commit {short_commit(origin['commit'])}, "
        f"{origin['date']}. Made by `python -m benchmarks early_exit`."
    )
    return "\n".join(lines)


def _place(arm: dict[str, Any]) -> tuple[Any, ...]:
    """The order of rows: what needs no training last."""
    skipping = arm["model"] == SKIPPING
    return arm["temperature"], skipping, 0 if skipping else arm["exit"], arm["chain"], arm["model"]


def _quality(lines: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for each in lines:
        right = [f"{each[f'right_{name}']} of {each['answers']}" if f"right_{name}" in each else "" for name in MODELS]
        both = [
            with_interval(list(zip(each[f"loss_{name}"], each["tokens"], strict=True)), _perplexity, 1000)
            for name in MODELS
        ]
        total = sum(each["tokens"])
        task = TITLES.get(each["task"], each["task"])
        rows.append([task, str(each["answers"]), str(total), *both, f"{sum(each['equal']) / total:.3f}", *right])
    head = ["answers of", "answers", "tokens", "perplexity: original", "trained", "same likeliest token"]
    head += ["right numbers: original", "trained"]
    return ["Quality of the trained model beside the original's:", "", *markdown_table(head, rows), ""] if rows else []


def _perplexity(answers: Sequence[tuple[float, int]]) -> float:
    losses, tokens = map(sum, zip(*answers, strict=True))
    return math.exp(losses / tokens)


PARTS = [*MODELS, SKIPPING, "quality"]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {json.loads(line).get("name") for line in lines}
    for part in (cell["part"] for cell in cells):
        yield from quality(args, done) if part == "quality" else arms(part, args, done)


def facts(args: Namespace) -> dict[str, Any]:
    args.answer_count = args.answer_count or args.count
    found = {"target": Path(args.model).name, "training": training(Path(args.trained))}
    found |= {name: getattr(args, name) for name in ("count", "new_tokens", "weights")}
    if args.skips:
        found["skips"] = read_skip_config(args.skips).facts
    found["layers"] = json.loads((Path(args.trained) / "config.json").read_text("utf-8"))["num_hidden_layers"]
    on_gpu = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu")).type == "cuda"
    return found | {"target_device": torch.cuda.get_device_name() if on_gpu else processor()}


def _commands(inputs: Inputs) -> list[list[str]]:
    """LayerSkip's training of the real model, a search for layers to skip, and what both accept."""
    answers, parts, model = inputs.state / "answers", inputs.state / "answers-split", inputs.smollm2
    files, run, skips = [answers / "T0.jsonl", answers / "T1.jsonl"], inputs.state / "exit", inputs.state / "skips.json"
    held = [parts / f"held_{file.name}" for file in files]
    prompts = inputs.questions(*ALL_TASKS)
    train = ["--data", parts / "train.jsonl", "--out", run, "--tokens", "400000", "--batch", "4"]
    some = ["--count", "1", "--chat", "--max-new-tokens", "32", *repeated("--prompts", prompts)]
    words = ["--model", model, "--trained", run / "model", "--skips", skips, "--prompts", *prompts]
    words += ["--answers", *held, "--answer-count", "100", "--count", "8", "--weights", "int8"]
    words += ["--exits", "8", "15", "23", "--chains", "2", "4", "6", "--temperatures", "0"]
    first, open_end = "early_exit", "assistant_confidence_threshold=0"
    early = {
        f"early_exit {n} tokens by {e} layers": f"{first},{open_end},assistant_early_exit={e},num_assistant_tokens={n}"
        for e, n in ((8, 2), (15, 2), (15, 4), (23, 2))
    }
    skipping = {f"layer_skip {n} tokens": f"layer_skip:{skips},{open_end},num_assistant_tokens={n}" for n in (2, 4)}
    return [
        inputs.answers(),
        command("benchmarks.tools.held_out", *files, "--out", parts),
        command("foredraft", "skip", "-m", model, "--weights", "int8", *some, "--out", skips),
        command("foredraft", "train", "early_exit", "-m", model, *train, "--recipe", "share=0.25"),
        measured("early_exit", *words),
        fixed_sizes.command_of("early_exit", run / "model", inputs, early, "--weights", "int4", count=2),
        fixed_sizes.command_of("layer_skip", model, inputs, skipping, "--weights", "int4", count=2),
    ]


EXPERIMENT = Experiment(
    name="early_exit",
    question="LayerSkip's training of a real model, and layers to skip: methods/early_exit.md, methods/layer_skip.md",
    options={
        "model": option(str, "folder or hub name", required=True),
        "trained": option(str, "folder model of a run of train early_exit", required=True),
        "prompts": PROMPTS,
        "count": option(80, "prompts of each file"),
        "new_tokens": option(64),
        "answer_tokens": option(256, "of answers whose number is looked at"),
        "exits": option([], "layers; by default a quarter and half of the model's", type=int),
        "chains": option([2, 4]),
        "temperatures": option([0.0, 1.0]),
        "skips": option(str, "file of foredraft skip for the original"),
        "weights": option(FLOAT, "int8 or int4: chains run on the native engine, quantised"),
        "answers": option([], "held-out answers of the original", type=Path),
        "answer_count": option(int, "of each file; by default as many as prompts"),
        "parts": option(PARTS, choices=PARTS),
        "device": option(str, "such as cuda; by default a GPU if there is one"),
        "kv_cache_memory_bytes": option(int),
    },
    cells=lambda args: [{"part": part} for part in args.parts if part != SKIPPING or args.skips],
    measure=measure,
    facts=facts,
    threads=None,
    tables={"docs/methods/early_exit.md": {"measured": table}},
    hours=2.0,
    needs=lambda i: (Path(i.smollm2), i.prompts),
    commands=_commands,
    results=("early_exit.jsonl", "early_exit_speed.jsonl", "layer_skip_speed.jsonl"),
)
