"""Seven pairs of target and draft with different tokenizers, against plain decoding here and in transformers.

Arms take turns, prompt by prompt: plain decoding (``plain``), universal's methods at a fixed length (``slem``,
``slrs``, ``tli``) and by default (``auto``: the length by the policy), and transformers' ``generate``, plain (``hf``)
and with the same draft at the same length (``hf_universal``: SLEM if greedy, else TLI). So a speed-up over ``hf`` is
the loop's (``plain`` over ``hf``) times drafting's (over ``plain``). In samples transformers 5.23 takes a drafted
token's q from another token's place (docs/log/drafters.md), so the target's law judges samples, and ``hf_repaired`` is
``hf_universal`` without this fault.

    python -m benchmarks universal --smollm2 MODEL --smollm2-draft DRAFT --trained TRAINED --models ../shared/models \\
        --prompts ../shared/data/prompts/eagle/*/question.jsonl --only smollm2+sample-16m

A prompt of a pair at a temperature is a JSON line. With --acceptance, times are not used: arms that draft run alone, on
a machine that need not be quiet.
"""

import contextlib
import gc
import itertools
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import AssistantToTargetTranslator

import foredraft
from benchmarks.kit.experiment import (
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
from benchmarks.kit.reading import markdown_table, per_forward, read, with_interval
from foredraft.bench.measure.summary import grouped
from foredraft.bench.prompts import BenchPrompt, read_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.hf.baseline import HFBaseline
from foredraft.model.text.tokenizer import Tokenizer

FILE = RESULTS / "universal.jsonl"
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


def folder(args: Namespace, name: str) -> Path:
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


def questions(files: Sequence[Path], count: int) -> list[BenchPrompt]:
    """The first questions of each task, the tasks in turn."""
    by_task: dict[str, list[BenchPrompt]] = {}
    for each in itertools.chain.from_iterable(
        read_prompts(file, chat=True) for file in files if file.parent.name in TASKS
    ):
        by_task.setdefault(each.task, []).append(each)
    turns = itertools.zip_longest(*[found[:count] for found in by_task.values()])
    return [each for turn in turns for each in turn if each is not None]


def cells(args: Namespace) -> list[Cell]:
    return [
        {"kind": "run", "target": target, "draft": draft, "temperature": heat, "number": number, "task": each.task}
        | {"timed": not args.acceptance}
        for target, drafts in PAIRS.items()
        for draft in drafts
        if not args.only or f"{target}+{draft}" in args.only
        for number, each in enumerate(questions(args.prompts, args.count))
        for heat in args.temperature
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    prompts = [each.prompt for each in questions(args.prompts, args.count)]
    for (target, draft), own in grouped(cells, lambda cell: (cell["target"], cell["draft"])).items():
        pair = made(folder(args, target), folder(args, draft))
        run(pair, own[0], prompts, args, tokens=8)  # warms up
        for cell in own:
            yield line(pair, cell, *run(pair, cell, prompts, args, tokens=args.tokens))
        del pair
        gc.collect()


def run(
    pair: Pair, cell: Cell, prompts: Sequence[Any], args: Namespace, *, tokens: int
) -> tuple[list[int], dict[str, Any]]:
    """The prompt, and the output or the error of each arm; each prompt begins with another arm."""
    number, temperature = cell["number"], cell["temperature"]
    prompt = pair.encode(prompts[number])
    params = SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens, temperature=temperature, seed=number)
    every = [name for name in ARMS if not args.acceptance or name in (*DRAFTING, REPAIRED)]
    names = [name for name in every if temperature or name != REPAIRED]
    first = number % len(names)
    found: dict[str, Any] = {}
    for name in (*names[first:], *names[:first]):
        try:
            found[name] = pair.arms[name](prompt, params)
        except Exception as error:  # transformers' assisted generation may fail; the line says so
            if not name.startswith("hf"):
                raise
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return prompt, found


def line(pair: Pair, cell: Cell, prompt: list[int], found: dict[str, Any]) -> Line:
    own = [found[name].tokens for name in found if not name.startswith("hf")]
    assert own == own[:1] * len(own), "drafts change no text"
    arms = {
        name: {"error": each} if isinstance(each, str) else [len(each.tokens), each.forwards, each.seconds]
        for name, each in found.items()
    }
    record: Line = {**cell, "arms": arms}
    if heat := cell["temperature"]:
        texts = {name: output.tokens for name, output in found.items() if isinstance(output, Output)}
        judged = [name for name in JUDGED if name in texts]
        record["nats"] = {name: round(nats(pair.target, prompt, texts[name], heat), 4) for name in judged}
    return record


def _key(run: dict[str, Any]) -> tuple[str, str, float, int]:
    return run["target"], run["draft"], run["temperature"], run["number"]


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


def table(path: Path = FILE) -> str:
    """By temperature: acceptance lengths, speed-ups over our plain decoding and over transformers', and whether samples
    are the target's."""
    kinds = read(path)
    runs, parts = joined(kinds["run"]), []
    origin = kinds["provenance"][-1]
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
            f"default: the length by the policy. Our texts equal plain decoding's. "
            f"{origin_line(origin, among=kinds['provenance'])}. Made by `{origin['command']}`.",
        ]
    )


def _commands(inputs: Inputs) -> list[list[str]]:
    """One of the pairs has a draft that learns the target's answers."""
    answers, trained = inputs.state / "answers", inputs.state / "universal"
    size = ["--tokens", "1500000", "--length", "512", "--batch", "8", "--lr", "5e-4"]
    learn = ["-m", inputs.smollm2, "--draft", inputs.models / "sample-16m", "--recipe", "loss=text", "--data", answers]
    words = ["--smollm2", inputs.smollm2, "--smollm2-draft", inputs.heads / "smollm2" / "draft"]
    words += ["--trained", trained / "draft", "--models", inputs.models]
    return [
        inputs.answers(),
        command("foredraft", "train", "draft", *learn, *size, "--out", trained),
        measured("universal", *words, "--prompts", *inputs.questions()),
    ]


EXPERIMENT = Experiment(
    name="universal",
    question="pairs of tokenizers, with training: methods/universal.md",
    options={
        "smollm2": option(Path, "SmolLM2-135M-Instruct"),
        "smollm2_draft": option(Path, "a draft with its tokenizer"),
        "trained": option(Path, "sample-16m, trained on SmolLM2's answers"),
        "models": option(Path("../shared/models")),
        "prompts": option([], "question files; those of mt_bench, gsm8k and humaneval are used", type=Path),
        "only": option([], "pairs, as target+draft"),
        "temperature": option([0.0, 1.0]),
        "tokens": option(48),
        "count": option(3, "questions of a task"),
        "acceptance": option(False, "only acceptance, times are not used"),
    },
    cells=cells,
    measure=measure,
    facts=lambda args: {"tokens": args.tokens},
    shown=table,
    tables={"docs/methods/universal.md": {"measured": table}},
    hours=3.0,
    needs=lambda i: (i.models, i.prompts, Path(i.smollm2), i.heads / "smollm2" / "draft"),
    commands=_commands,
)
