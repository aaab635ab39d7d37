"""``foredraft skip``."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli.console import busy, errors, output
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.bench.tune.skip_trials import Sample, Trial
    from foredraft.engine.generator import Generator

_LENGTH = "num_assistant_tokens"


@dataclass(frozen=True, slots=True)
class Target:
    """The target."""

    model: str = field(default="sample", metadata={"names": ("--model", "-m"), "help": "Folder, hub name or sample."})
    dtype: str | None = field(default=None, metadata={"help": "E.g. bfloat16; default as for generate."})
    device: str | None = field(default=None, metadata={"help": "E.g. cuda:1 or cpu; default: a GPU if available."})


@dataclass(frozen=True, slots=True)
class Samples:
    """The evaluation samples: prompts and the target's own outputs."""

    prompts: tuple[str, ...] = field(
        default=(),
        metadata={"help": "File of representative prompts; repeatable. Default: eight built-in prompts."},
    )
    count: int = field(default=8, metadata={"help": "Number of prompts to use from each file."})
    chat: bool = field(default=False, metadata={"help": "Use the chat template."})
    max_new_tokens: int = field(default=64, metadata={"help": "Maximum tokens per output."})
    min_new_tokens: int = field(default=0, metadata={"help": "Minimum tokens per output."})
    temperature: float = field(default=0.0, metadata={"help": "0 (default): greedy decoding."})
    longest: int = field(default=5, metadata={"help": "Longest draft to consider."})


@dataclass(frozen=True, slots=True)
class Output:
    """What to write."""

    out: str = field(default="skips.json", metadata={"help": "File for the result; use --drafter layer_skip:FILE."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object."})


@dataclass(frozen=True, slots=True)
class Search:
    """The options of ``bench.tune.skip_search.SearchBudget``, without importing torch."""

    trials: int = field(default=250, metadata={"help": "Number of layer sets to try."})
    seed: int = field(default=0, metadata={"help": "Seed of outputs and search."})


EXAMPLES = (
    "foredraft skip -m PATH --prompts mine.jsonl --out skips.json",
    "foredraft generate -m PATH -d layer_skip:skips.json,num_assistant_tokens=4 < prompt.txt",
)


@flags(
    target=Group(Target, "Model"),
    samples=Group(Samples, "Samples"),
    limits=Group(Search, "Search"),
    shown=Group(Output, "Output"),
)
def command(*, target: Target, samples: Samples, limits: Search, shown: Output) -> None:
    """Search for the layers that a layer_skip draft can skip.

    The model answers the prompts. Each trial skips a set of attention and MLP layers, and the rest of the model
    predicts every token of the answers. The set with the most accepted tokens per weight read is written to a file. The
    same command continues an interrupted search.
    """
    if min(samples.count, samples.longest) < 1:
        raise OptionError("--count and --longest must be 1 or more.")
    if not Path(shown.out).parent.is_dir():  # fail before minutes of searching
        raise OptionError(f"Cannot write {shown.out}: there is no such folder.")
    from foredraft.bench.tune.skip_search import SearchBudget, search
    from foredraft.bench.tune.skip_trials import SkipEvaluator, TrialLog
    from foredraft.compose.load import load
    from foredraft.model.hf import CausalLM

    budget = SearchBudget(limits.trials, limits.seed)
    with busy(f"Loading {target.model}"):
        plain = load(target.model, "none", dtype=target.dtype, device=target.device)
    with busy("Answering the prompts"):
        answers = _answers(plain, samples, limits.seed)
        model = plain.engine.target
        assert isinstance(model, CausalLM)
        evaluator = SkipEvaluator(model, answers, temperature=samples.temperature, longest=samples.longest)
    about = {"model": _short(target.model), "texts": _digest(answers), **_facts(samples), "seed": limits.seed}
    log = TrialLog(Path(f"{shown.out}.trials.jsonl"), about)
    with _StatusLine(limits.trials) as report:
        best = search(evaluator.parts, log.cached(evaluator), budget, report)
    _write(shown.out, target.model, model.layers, best, {**about, "tokens": evaluator.tokens})
    _print(best, evaluator.tokens, target.model, shown)


def _answers(plain: "Generator", samples: Samples, seed: int) -> "list[Sample]":
    from foredraft.bench.prompts import read_prompts, standard_prompts
    from foredraft.bench.tune.skip_trials import Sample
    from foredraft.core.sampling.params import SamplingParams

    asks = [ask for path in samples.prompts for ask in read_prompts(path, samples.chat)[: samples.count]]
    prompts = [plain.encode(a.prompt) for a in asks or standard_prompts(samples.chat)[: samples.count]]
    params = SamplingParams(
        max_new_tokens=samples.max_new_tokens,
        min_new_tokens=samples.min_new_tokens,
        temperature=samples.temperature,
        seed=seed,
    )
    results = plain.batch(prompts, params)
    return [Sample((*prompt, *r.tokens), len(prompt)) for prompt, r in zip(prompts, results, strict=True)]


def _digest(answers: "list[Sample]") -> str:
    import hashlib

    return hashlib.sha256(json.dumps([asdict(answer) for answer in answers]).encode()).hexdigest()[:16]


def _facts(samples: Samples) -> dict[str, Any]:
    return {"temperature": samples.temperature, "longest": samples.longest}


def _short(model: str) -> str:
    from foredraft.core.io import short

    return short(model)


class _StatusLine:
    """On a terminal, a status line with the search's progress."""

    def __init__(self, total: int) -> None:
        self._total = total

    def __enter__(self) -> "Callable[[int, Trial], None]":
        console = errors()
        self._status = console.status("[dim]Searching[/dim]", refresh_per_second=2) if console.is_terminal else None
        if self._status is not None:
            self._status.start()
        return self._update

    def _update(self, number: int, best: "Trial") -> None:
        if self._status is not None:
            self._status.update(f"[dim]{number} of {self._total} sets · best so far: {_describe(best)}[/dim]")

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()


def _describe(best: "Trial") -> str:
    return (
        f"{best.tokens[best.best - 1]:.2f} tokens per step at draft length {best.best}; a draft token reads "
        f"{best.cost:.0%} of the weights"
    )


def _layers(best: "Trial") -> dict[str, tuple[int, ...]]:
    kinds = ("attention", "mlp")
    return {kind: tuple(sorted(part.layer for part in best.without if part.kind == kind)) for kind in kinds}


def _to_json(best: "Trial") -> dict[str, Any]:
    return {
        "length": best.best,
        "tokens_a_step": best.tokens[best.best - 1],
        "cost": best.cost,
        "speed_by_weights": best.score,
    }


def _write(path: str, model: str, layers: int, best: "Trial", about: dict[str, Any]) -> None:
    from foredraft.core.io import provenance
    from foredraft.drafters.common.skip_config import SkipConfig, write_skip_config

    facts = {**about, **_to_json(best), "provenance": provenance()}
    write_skip_config(path, SkipConfig(_short(model), layers, facts=facts, **_layers(best)))


def _print(best: "Trial", tokens: int, model: str, shown: Output) -> None:
    found = _layers(best)
    if shown.json:
        typer.echo(json.dumps({"skip_attention": found["attention"], "skip_mlp": found["mlp"], **_to_json(best)}))
        return
    console = output()
    for kind, name in (("attention", "Attention"), ("mlp", "MLP")):
        console.print(f"{name} skipped in layers: {', '.join(map(str, found[kind])) or 'none'}", soft_wrap=True)
    console.print(f"{_describe(best)}; measured on {tokens} tokens.", soft_wrap=True)
    if best.score > 1:
        style, verdict = (
            "bold green",
            f"Predicted: {best.score:.2f}x plain decoding, if time is proportional to the weights read.",
        )
    else:
        style, verdict = "bold yellow", "No gain: plain decoding reads fewer weights per token."
    console.print(verdict, style=style, soft_wrap=True)
    spec = shlex.quote(f"layer_skip:{shown.out},{_LENGTH}={best.best}")
    command = f"foredraft generate --model {shlex.quote(model)} --drafter {spec} ..."
    console.print(command, style="dim", soft_wrap=True, markup=False)
