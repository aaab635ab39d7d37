"""Seven pairs of target and draft with different tokenizers, against plain decoding here and in transformers.

Arms take turns, prompt by prompt: plain decoding (``plain``), universal's methods at a fixed length (``slem``,
``slrs``, ``tli``) and by default (``auto``: the length by the policy), and transformers' ``generate``, plain (``hf``)
and with the same draft at the same length (``hf_universal``: SLEM if greedy, else TLI). So a speed-up over ``hf`` is
the loop's (``plain`` over ``hf``) times drafting's (over ``plain``). In samples transformers 5.23 takes a drafted
token's q from another token's place (docs/log/drafters.md), so the target's law judges samples, and ``hf_repaired`` is
``hf_universal`` without this fault.

    python benchmarks/pairs.py --smollm2 MODEL --smollm2-draft DRAFT --trained TRAINED --models ../shared/models \\
        --prompts ../shared/data/prompts/eagle/*/question.jsonl
    python benchmarks/pairs.py ... --only smollm2+sample-16m --seconds 45     # some of it

A prompt of a pair at a temperature is a JSON line; none is made again. With --acceptance, times are not used: arms that
draft run alone, on a machine that need not be quiet.
"""

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from origin import origin_line, provenance
from reading import markdown_table, per_forward, read, with_interval
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import AssistantToTargetTranslator

import foredraft
from foredraft.bench.prompts import BenchPrompt, read_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.files.provenance import short_commit
from foredraft.model.hf.baseline import HFBaseline
from foredraft.model.text.tokenizer import Tokenizer

RESULTS = Path(__file__).resolve().parent / "results" / "universal.jsonl"
PAIRS = {
    "smollm2": ("sample-16m", "sample-16m-trained", "draft-6m", "draft-4m"),
    "target-65m": ("smollm2-draft", "draft-4m"),
    "sample-16m": ("draft-6m",),
}
LENGTH = 5
"""Drafted tokens at a fixed length."""
TASKS = ("mt_bench", "gsm8k", "humaneval")
METHODS = ("slem", "slrs", "tli")
DRAFTING = (*METHODS, "hf_universal")
REPAIRED = "hf_repaired"
"""For samples alone."""
ARMS = ("plain", "auto", *METHODS, "hf", "hf_universal", REPAIRED)
JUDGED = ("slem", "hf", "hf_universal", REPAIRED)
"""Arms whose sampled texts the target's law judges; all of ours have one text."""
TITLES = {"hf": "transformers plain", "hf_universal": "transformers universal", "auto": "default", "slem": "SLEM"}
TITLES |= {"slrs": "SLRS", "tli": "TLI", "plain": "plain", REPAIRED: "transformers repaired"}
SAMPLES = 2000
"""Of the bootstrap."""


class Output(NamedTuple):
    """Tokens, forwards of the target, seconds with the prompt, and the tokens themselves."""

    tokens: list[int]
    forwards: int
    seconds: float


Arm = Callable[[Sequence[int], SamplingParams], Output]


def folder(args: argparse.Namespace, name: str) -> Path:
    own = {"smollm2": args.smollm2, "smollm2-draft": args.smollm2_draft, "sample-16m-trained": args.trained}
    return own.get(name) or args.models / name


def ours(target: foredraft.Generator, drafter: str | None) -> Arm:
    g = foredraft.load(target.engine.target, drafter, tokenizer=target.tokenizer)

    def run(prompt: Sequence[int], params: SamplingParams) -> Output:
        started = time.perf_counter()
        result = g.generate(list(prompt), params)
        return Output(result.tokens, result.stats.target_forwards, time.perf_counter() - started)

    return run


def theirs(target: HFBaseline, draft: Path | None, *, repaired: bool = False) -> Arm:
    assistants = [None if draft is None else stock(draft) for _ in range(2)]  # sampling changes an assistant's layers

    def run(prompt: Sequence[int], params: SamplingParams) -> Output:
        with patch.object(AssistantToTargetTranslator, _MAPS, ordered) if repaired else contextlib.nullcontext():
            call = target.generate([prompt], params, assistant=assistants[params.greedy])
        return Output(call.tokens[0], len(call.blocks), call.seconds)

    return run


_MAPS = "_get_assistant_to_target_input_ids"
_maps = getattr(AssistantToTargetTranslator, _MAPS)


def ordered(translator: AssistantToTargetTranslator) -> tuple[torch.Tensor, dict[int, int]]:
    """Maps of both vocabularies to each other, the second in the order of the first, as its reader expects."""
    to_target, to_assistant = _maps(translator)
    return to_target, dict(sorted(to_assistant.items(), key=lambda pair: pair[1]))


def stock(path: Path) -> HFBaseline:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.num_assistant_tokens = LENGTH  # read of an assistant
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.4
    ends = model.generation_config.eos_token_id
    return HFBaseline(model, [ends] if isinstance(ends, int) else ends, Tokenizer(AutoTokenizer.from_pretrained(path)))


class Pair(NamedTuple):
    """What encodes prompts for the target, all arms, and the target in transformers."""

    encode: Callable[[Any], list[int]]
    arms: dict[str, Arm]
    target: HFBaseline


def made(target: Path, draft: Path) -> Pair:
    plain = foredraft.load(str(target), None, dtype="float32", device="cpu")
    fixed = f"num_assistant_tokens={LENGTH},num_assistant_tokens_schedule=constant"
    arms = {"plain": ours(plain, None), "auto": ours(plain, f"universal:{draft}")}
    arms |= {name: ours(plain, f"universal:{draft},method={name},{fixed}") for name in METHODS}
    model = stock(target)
    arms |= {"hf": theirs(model, None), "hf_universal": theirs(model, draft)}
    return Pair(plain.encode, arms | {REPAIRED: theirs(model, draft, repaired=True)}, model)


@torch.inference_mode()
def nats(target: HFBaseline, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> float:
    """Negative log-probability of a token of a text by the target's law, mean: as a sample's, its entropy."""
    logits = target.model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    law = (logits.float() / temperature).log_softmax(-1)
    return -float(law.gather(1, torch.tensor(tokens)[:, None]).mean())


def questions(files: Sequence[str], count: int) -> list[BenchPrompt]:
    """The first questions of each task, the tasks in turn."""
    by_task: dict[str, list[BenchPrompt]] = {}
    for each in itertools.chain.from_iterable(read_prompts(file, chat=True) for file in files):
        by_task.setdefault(each.task, []).append(each)
    turns = itertools.zip_longest(*[found[:count] for found in by_task.values()])
    return [each for turn in turns for each in turn if each is not None]


def measure(args: argparse.Namespace, pair: tuple[str, str], done: set[tuple], until: float) -> None:
    """The lines of a pair that are missing, until the time is over."""
    missing = [
        (temperature, number, each)
        for number, each in enumerate(questions(args.prompts, args.count))
        for temperature in args.temperature
        if (*pair, temperature, number) not in done
    ]
    if not missing or time.perf_counter() > until:
        return
    every = [name for name in ARMS if not args.acceptance or name in (*DRAFTING, REPAIRED)]
    own = made(folder(args, pair[0]), folder(args, pair[1]))
    for turn, (temperature, number, each) in enumerate([missing[0], *missing]):  # the first warms up
        if time.perf_counter() > until:
            break
        prompt = own.encode(each.prompt)
        tokens = 8 if not turn else args.tokens
        params = SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens, temperature=temperature, seed=number)
        names = [name for name in every if temperature or name != REPAIRED]
        first = number % len(names)
        found: dict[str, Any] = {}
        for name in (*names[first:], *names[:first]):
            try:
                found[name] = own.arms[name](prompt, params)
            except Exception as error:  # transformers' assisted generation may fail; the line says so
                if not name.startswith("hf"):
                    raise
                found[name] = f"{type(error).__name__}: {error}"[:200]
        if turn:
            record = line(pair, temperature, number, each.task, found)
            if temperature:
                texts = {name: output.tokens for name, output in found.items() if isinstance(output, Output)}
                judged = [name for name in JUDGED if name in texts]
                record["nats"] = {n: round(nats(own.target, prompt, texts[n], temperature), 4) for n in judged}
            write(args.out, record)
    del own
    gc.collect()


def line(pair: tuple[str, str], temperature: float, number: int, task: str, found: dict[str, Any]) -> dict[str, Any]:
    own = [found[name].tokens for name in found if not name.startswith("hf")]
    assert own == own[:1] * len(own), "drafts change no text"
    return {
        "kind": "run",
        "target": pair[0],
        "draft": pair[1],
        "temperature": temperature,
        "number": number,
        "task": task,
        "timed": "plain" in found,
        "arms": {
            name: {"error": each} if isinstance(each, str) else [len(each.tokens), each.forwards, each.seconds]
            for name, each in found.items()
        },
    }


def _key(run: dict[str, Any]) -> tuple[str, str, float, int]:
    return run["target"], run["draft"], run["temperature"], run["number"]


def write(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def speed(run: dict[str, Any], arm: str) -> float | None:
    """Tokens per second."""
    found = run["timed"].get(arm)
    return found[0] / found[2] if isinstance(found, list) else None


def estimate(values: Sequence[Any], of: Callable[[Sequence[Any]], float]) -> str:
    """A statistic with its interval over prompts, if there are several."""
    if len(values) < 2:
        return f"{of(values):.2f} (1 prompt)" if values else "-"
    return with_interval(values, of, SAMPLES)


def ratio(runs: Sequence[dict[str, Any]], arm: str, base: str) -> str:
    """Geometric mean of the speed-ups with its interval over prompts."""
    pairs = [(speed(run, arm), speed(run, base)) for run in runs]
    return estimate([fast / slow for fast, slow in pairs if fast and slow], statistics.geometric_mean)


def length(runs: Sequence[dict[str, Any]], arm: str) -> str:
    """Acceptance length with its interval over prompts."""
    return estimate([run["arms"][arm][:2] for run in runs if isinstance(run["arms"].get(arm), list)], per_forward)


def joined(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run of a prompt at a temperature: all arms, and under ``timed`` those with times."""
    found: dict[tuple, dict[str, Any]] = {}
    for each in lines:
        run = found.setdefault(_key(each), {**each, "arms": {}, "nats": {}, "timed": {}})
        run["arms"] |= each["arms"]
        run["nats"] |= each.get("nats", {})
        run["timed"] |= each["arms"] if each["timed"] else {}
    return sorted(found.values(), key=_key)


def surprise(runs: Sequence[dict[str, Any]], arm: str) -> str:
    """Nats a token by the target's law, with the interval over prompts."""
    return estimate([run["nats"][arm] for run in runs if arm in run["nats"]], statistics.fmean)


def table(path: Path = RESULTS) -> str:
    """By temperature: acceptance lengths, speed-ups over our plain decoding and over transformers', and whether samples
    are the target's."""
    kinds = read(path)
    runs, parts = joined(kinds["run"]), []
    commits = dict.fromkeys(short_commit(each["commit"]) for each in kinds["provenance"])
    origin = kinds["provenance"][-1] | {"commits": "commits " + ", ".join(commits)}
    measured = {(run["target"], run["draft"]) for run in runs}
    pairs = [pair for target, drafts in PAIRS.items() for draft in drafts if (pair := (target, draft)) in measured]
    for temperature in sorted({run["temperature"] for run in runs}):
        own = [run for run in runs if run["temperature"] == temperature]
        peer = REPAIRED if temperature else "hf_universal"
        for title, cell, names in (
            ("Acceptance length", length, (*METHODS, peer)),
            ("Speed over our plain decoding", lambda some, arm: ratio(some, arm, "plain"), ("auto", *METHODS)),
            (
                "Speed over transformers' plain decoding",
                lambda some, arm: ratio(some, arm, "hf"),
                ("plain", *METHODS[:1], "auto", peer),
            ),
            ("Nats a token by the target's law", surprise, JUDGED),
        ):
            if cell is surprise and not temperature:
                continue
            lines = [
                [
                    f"{pair[0]} + {pair[1]}",
                    *(cell([r for r in own if (r["target"], r["draft"]) == pair], n) for n in names),
                ]
                for pair in pairs
            ]
            titles = [TITLES[name] if cell is not surprise or name != "slem" else "ours" for name in names]
            head = [f"T={temperature:g}: {title}", *titles]
            parts += [*markdown_table(head, lines), ""]
    counts = sorted(Counter(_key(run)[:3] for run in runs).values())
    timed = sorted(Counter(_key(run)[:3] for run in runs if run["timed"]).values()) or [0]
    return "\n".join(
        [
            *parts,
            f"{counts[0]} prompts or more of {', '.join(TASKS)} a cell, {timed[0]} to {timed[-1]} of them with times, "
            f"{origin['tokens']} tokens each; 95 % bootstrap intervals over prompts. Speeds: geometric means of ratios"
            f" by prompt, reading it included. Drafts of {LENGTH} tokens, threshold 0.4, in transformers too; "
            f"default: the length by the policy. Our texts equal plain decoding's. {origin_line(origin)}. Made by "
            f"`{origin['command']}`.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct")
    parser.add_argument("--smollm2-draft", type=Path, help="a draft with its tokenizer")
    parser.add_argument("--trained", type=Path, help="sample-16m, trained on SmolLM2's answers")
    parser.add_argument("--models", type=Path, default=Path("../shared/models"))
    parser.add_argument("--prompts", nargs="+", help="question files; those of mt_bench, gsm8k and humaneval are used")
    parser.add_argument("--only", nargs="+", help="pairs, as target+draft")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--count", type=int, default=3, help="questions of a task")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no prompt after this time")
    parser.add_argument("--acceptance", action="store_true", help="only acceptance, times are not used")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    torch.set_num_threads(args.threads)
    args.prompts = [file for file in args.prompts or [] if any(f"/{task}/" in file for task in TASKS)]
    given = (
        "--smollm2 MODEL --smollm2-draft DRAFT --trained TRAINED --models ../shared/models --prompts .../question.jsonl"
    )
    origin = provenance(f"python benchmarks/pairs.py {given}", tokens=args.tokens)
    found = read(args.out) if args.out.exists() else {}
    if origin["commit"] not in {each["commit"] for each in found.get("provenance", ())}:
        write(args.out, origin)
    own = [run for run in found.get("run", ()) if run["timed"] or args.acceptance]
    done = {_key(run) for run in own if not run["temperature"] or REPAIRED in run["arms"]}
    for target, drafts in PAIRS.items():
        for draft in drafts:
            if not args.only or f"{target}+{draft}" in args.only:
                measure(args, (target, draft), done, until)
    print(table(args.out))


if __name__ == "__main__":
    main()
