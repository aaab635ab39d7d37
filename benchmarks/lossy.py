"""Lossy rules of verification: acceptance and quality beside the exact rule, by temperature; and Medusa-2's target.

    python benchmarks/lossy.py --model MODEL --medusa HEAD --blockwise HEAD --prompts GSM8K.jsonl MT_BENCH.jsonl
    python benchmarks/lossy.py --answers T0.jsonl T1.jsonl --split FOLDER    # training data, and what is held out
    python benchmarks/lossy.py ... --medusa2 RUN/head --answers FOLDER/held_T0.jsonl FOLDER/held_T1.jsonl
    python benchmarks/lossy.py ... --speed --weights int8 --count 8 --new-tokens 64    # on a quiet machine

A cell is a drafter, a rule and a temperature: prompts run in batches, with everything drafted in every step. One JSON
line a cell, with each text's tokens, forwards of the target and quality. transformers scores the texts, by the law of
the original target in float32: log-likelihood at the cell's temperature and at 1, and how many tokens are the target's
best. GSM8K's answers are right if the last number is. With ``--medusa2``, that target's texts are scored by the
original's law, and ``--answers`` (of ``foredraft answers``, not of its training) by both. A finished cell is not run
again; ``--part 1/4`` runs every fourth cell, for several processes. Times do not matter: on a CPU, ``--weights int8
--rows 8`` is many times faster than float32. With ``--speed``, all rules of a drafter run beside plain decoding, one
request at a time, with as many tokens drafted as the policy says and with a fixed size: the arm with the fewest tokens
takes a step. Four prompts of a file are a line of a results file of their own.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from early_exit import last_number
from lossy_tables import EXACT, FIXED_ARM, FLOAT, JOINT, NONE, PLAIN, RESULTS, RULES, SPEEDS, Cell, row_of, rules_of
from origin import provenance
from policy import Arm
from reading import read
from seeded_texts import run_texts
from transformers import AutoModelForCausalLM, PreTrainedModel

import foredraft
from foredraft.bench.prompts import read_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.inputs import encode
from foredraft.files.provenance import shortened
from foredraft.model.loading.bundled import resolve

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


def cells(args: argparse.Namespace) -> list[Cell]:
    """All cells, or those of one part."""
    found = []
    sides = [(PLAIN, name) for name in RULES if getattr(args, name)] + ([(JOINT, "medusa")] if args.medusa2 else [])
    for heat in args.temperatures:
        for target, drafter in sides:
            rules = [EXACT] if target == JOINT else rules_of(drafter, heat)
            size = args.count, args.new_tokens, args.weights
            found += [Cell(target, drafter, rule, heat, *size) for rule in rules]
    part, parts = map(int, args.part.split("/"))
    return found[part - 1 :: parts]


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


def run(generator: Generator, some: Sequence[Question], cell: Cell, scorer: Scorer) -> list[dict[str, Any]]:
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


def measured(args: argparse.Namespace, todo: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Run these cells."""
    some = questions(args.prompts, args.count)
    rows = {"max_batch_size": min(args.rows, len(some)), "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    stored = {"dtype": FLOAT} if args.weights == FLOAT else {"weights": args.weights}
    options = {**stored, "device": args.device, **rows}
    paths = {PLAIN: args.model, JOINT: args.medusa2}
    heads = {(PLAIN, "medusa"): args.medusa, (PLAIN, "blockwise"): args.blockwise, (JOINT, "medusa"): args.medusa2}
    scorer = Scorer(args.model, args.device, args.score_rows)
    plain: dict[str, Generator] = {}
    for cell in todo:
        if cell.target not in plain:
            plain[cell.target] = foredraft.load(paths[cell.target], "none", **options)
        spec = f"{cell.drafter}:{heads[cell.target, cell.drafter]},{FIXED}"
        rule = None if cell.rule == EXACT else cell.rule
        target = plain[cell.target]
        with foredraft.load(target, spec, verifier=rule, **rows) as generator:
            yield {"kind": "cell", **cell._asdict(), "texts": run(generator, some, cell, scorer)}


def held_out(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Both targets' log-likelihood of given answers."""
    for name, model in ((PLAIN, args.model), (JOINT, args.medusa2)):
        scorer = Scorer(model, args.device, args.score_rows)
        for file in args.answers:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: args.answer_count]]
            pairs = [(row["ids"][: row["prompt_length"]], row["ids"][row["prompt_length"] :][:512]) for row in rows]
            scores = scorer(pairs, 1.0)
            texts = [
                {"tokens": len(output), "logp_1": own["logp_1"], "best": own["best"]}
                for (_, output), own in zip(pairs, scores, strict=True)
            ]
            yield {"kind": "answers", "target": name, "file": file.stem, "texts": texts}


def timed(args: argparse.Namespace, done: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Speeds of the rules and of plain decoding, GROUP prompts of a file a line; not those that are done."""
    names = ("drafter", "temperature", "task", "first", "weights", "tokens")
    ready = {tuple(line[name] for name in names) for line in done}
    asked = [(file, first) for first in range(0, args.count, GROUP) for file in args.prompts]
    heads = [(name, heat) for heat in args.temperatures for name in RULES if getattr(args, name)]
    todo = [(*head, *some) for head in heads for some in asked]
    part, parts = map(int, args.part.split("/"))
    stored = {"dtype": FLOAT} if args.weights == FLOAT else {"weights": args.weights}
    plain = foredraft.load(args.model, "none", device=args.device, **stored)
    for drafter, heat, file, first in todo[part - 1 :: parts]:
        some = questions([file], args.count)[first : first + GROUP]
        key = (drafter, heat, some[0].task, first, args.weights, args.new_tokens)
        if key not in ready:
            prompts = [each.prompt for each in some]
            runs = race(plain, drafter, getattr(args, drafter), heat, prompts, args.new_tokens)
            yield {"kind": "speed", **dict(zip(names, key, strict=True)), "runs": runs}


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


def split(files: Sequence[Path], folder: Path, count: int) -> None:
    """Write the answers without those to ``count`` prompts that all files have, and of each file those alone."""
    rows = {file: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files}
    prompts = {file: {_prompt(row): None for row in some} for file, some in rows.items()}
    common = [each for each in prompts[files[-1]] if all(each in own for own in prompts.values())]
    held = set(common[-count:])
    folder.mkdir(parents=True, exist_ok=True)
    kept = [row for some in rows.values() for row in some if _prompt(row) not in held]
    for name, some in {"train": kept, **{f"held_{file.stem}": own for file, own in rows.items()}}.items():
        chosen = some if name == "train" else [row for row in some if _prompt(row) in held]
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _prompt(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row["ids"][: row["prompt_length"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sample", help="folder or hub name, or sample")
    parser.add_argument("--medusa", help="head")
    parser.add_argument("--blockwise", help="blockwise or Medusa head")
    parser.add_argument("--medusa2", help="folder of train medusa2: another target, with its heads")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="files with turns")
    parser.add_argument("--answers", type=Path, nargs="+", default=[], help="held-out answers for both targets")
    parser.add_argument("--count", type=int, default=40, help="prompts of each file")
    parser.add_argument("--split", type=Path, help="folder for the parts of --answers; nothing else is done")
    parser.add_argument("--answer-count", type=int, default=200, help="answers of each file")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--speed", action="store_true", help="measure speeds instead of quality")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", default=FLOAT, help="int8 or int4: on the native engine, quantised")
    parser.add_argument("--rows", type=int, default=80, help="prompts in a batch")
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--score-rows", type=int, default=8, help="texts that are scored at once")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th cell from the I-th on")
    parser.add_argument("--out", type=Path, help="results file")
    args = parser.parse_args()
    if args.split:
        return split(args.answers, args.split, args.answer_count)
    if args.answers and not args.medusa2:
        parser.error("--answers compares with --medusa2: give both")
    args.out = args.out or (RESULTS.with_name(SPEEDS) if args.speed else RESULTS)
    if args.device == "cpu" and not args.speed:
        torch.set_num_threads(1)
    with args.out.open("a", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        kinds = read(args.out)
        command = " ".join(["python benchmarks/lossy.py", *map(shortened, sys.argv[1:])])
        where = {"device": torch.cuda.get_device_name(args.device)} if args.device != "cpu" else {}
        write(provenance(command, model=Path(args.model).name, weights=args.weights, **where))
        if args.speed:
            for line in timed(args, kinds.get("speed", [])):
                write(line)
            return
        done = {Cell.of(line) for line in kinds.get("cell", [])}
        for cell in measured(args, [cell for cell in cells(args) if cell not in done] if args.prompts else []):
            write(cell)
            print(*(cell[name] for name in Cell._fields), *row_of(cell["texts"]), sep=" | ", flush=True)
        scored = args.part.startswith("1/") and args.answers and "answers" not in kinds
        for line in held_out(args) if scored else ():
            write(line)


if __name__ == "__main__":
    main()
