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
    from foredraft.bench.tune.skip_trials import Said, Trial
    from foredraft.engine.generator import Generator

_LENGTH = "num_assistant_tokens"


@dataclass(frozen=True, slots=True)
class Target:
    """The model."""

    model: str = field(default="sample", metadata={"names": ("--model", "-m"), "help": "Folder, hub name or sample."})
    dtype: str | None = field(default=None, metadata={"help": "Such as bfloat16; default as for generate."})
    device: str | None = field(default=None, metadata={"help": "Such as cuda:1 or cpu; default: a GPU if any."})


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that sets are judged on: the target's own answers."""

    prompts: tuple[str, ...] = field(
        default=(),
        metadata={"help": "File of prompts like yours; repeatable. Default: eight built-in prompts."},
    )
    count: int = field(default=8, metadata={"help": "Prompts used from each file."})
    chat: bool = field(default=False, metadata={"help": "Use the chat template."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens of each answer."})
    min_new_tokens: int = field(default=0, metadata={"help": "Fewest tokens of each answer."})
    temperature: float = field(default=0.0, metadata={"help": "0, the default, is greedy."})
    longest: int = field(default=5, metadata={"help": "Longest draft to consider."})


@dataclass(frozen=True, slots=True)
class Output:
    """What is written."""

    out: str = field(default="skips.json", metadata={"help": "The result, for --drafter layer_skip:FILE."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object."})


@dataclass(frozen=True, slots=True)
class Search:
    """``bench.tune.skip_search.SearchBudget`` for the command line, which does not import torch."""

    trials: int = field(default=250, metadata={"help": "Sets of layers to try."})
    seed: int = field(default=0, metadata={"help": "Seed of the random part."})


EXAMPLES = (
    "foredraft skip -m PATH --prompts mine.jsonl --out skips.json",
    "foredraft generate -m PATH -d layer_skip:skips.json,num_assistant_tokens=4 < prompt.txt",
)


@flags(
    target=Group(Target, "Model"),
    texts=Group(Texts, "Texts"),
    effort=Group(Search, "Search"),
    shown=Group(Output, "Output"),
)
def command(*, target: Target, texts: Texts, effort: Search, shown: Output) -> None:
    """Search for the layers that a layer_skip draft can leave out.

    The model answers the prompts. Then sets of attention and MLP layers are left out, and the rest predicts every token
    of the answers. The set with the most accepted tokens for the weights that it reads is written to a file. The same
    command continues an interrupted search.
    """
    if min(texts.count, texts.longest) < 1:
        raise OptionError("count and longest must be 1 or more.")
    if not Path(shown.out).parent.is_dir():  # before minutes of searching
        raise OptionError(f"Cannot write {shown.out}: there is no such folder.")
    from foredraft.bench.tune.skip_search import SearchBudget, search
    from foredraft.bench.tune.skip_trials import Journal, Judge
    from foredraft.compose.load import load
    from foredraft.model.hf import CausalLM

    budget = SearchBudget(effort.trials, effort.seed)
    with busy(f"Loading {target.model}"):
        plain = load(target.model, "none", dtype=target.dtype, device=target.device)
    with busy("Answering the prompts"):
        said = _answers(plain, texts, effort.seed)
        model = plain.engine.target
        assert isinstance(model, CausalLM)
        judge = Judge(model, said, temperature=texts.temperature, longest=texts.longest)
    about = {"model": _short(target.model), "texts": _digest(said), **_facts(texts), "seed": effort.seed}
    journal = Journal(Path(f"{shown.out}.trials.jsonl"), about)
    with _telling(effort.trials) as tell:
        best = search(judge.parts, journal.through(judge), budget, tell)
    _write(shown.out, target.model, model.layers, best, {**about, "tokens": judge.tokens})
    _tell(best, judge.tokens, target.model, shown)


def _answers(plain: "Generator", texts: Texts, seed: int) -> "list[Said]":
    from foredraft.bench.prompts import read_prompts, standard_prompts
    from foredraft.bench.tune.skip_trials import Said
    from foredraft.core.sampling.params import SamplingParams

    asks = [ask for path in texts.prompts for ask in read_prompts(path, texts.chat)[: texts.count]]
    prompts = [plain.encode(a.prompt) for a in asks or standard_prompts(texts.chat)[: texts.count]]
    params = SamplingParams(
        max_new_tokens=texts.max_new_tokens,
        min_new_tokens=texts.min_new_tokens,
        temperature=texts.temperature,
        seed=seed,
    )
    results = plain.batch(prompts, params)
    return [Said((*prompt, *r.tokens), len(prompt)) for prompt, r in zip(prompts, results, strict=True)]


def _digest(said: "list[Said]") -> str:
    import hashlib

    return hashlib.sha256(json.dumps([asdict(text) for text in said]).encode()).hexdigest()[:16]


def _facts(texts: Texts) -> dict[str, Any]:
    return {"temperature": texts.temperature, "longest": texts.longest}


def _short(model: str) -> str:
    from foredraft.core.io import short

    return short(model)


class _telling:
    """On a terminal, a line with the progress of the search."""

    def __init__(self, of: int) -> None:
        self._of = of

    def __enter__(self) -> "Callable[[int, Trial], None]":
        console = errors()
        self._status = console.status("[dim]Searching[/dim]", refresh_per_second=2) if console.is_terminal else None
        if self._status is not None:
            self._status.start()
        return self._tell

    def _tell(self, number: int, best: "Trial") -> None:
        if self._status is not None:
            self._status.update(f"[dim]{number} of {self._of} sets · best so far: {_said(best)}[/dim]")

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()


def _said(best: "Trial") -> str:
    return (
        f"{best.tokens[best.best - 1]:.2f} tokens a step with drafts of {best.best}, each for {best.cost:.0%} of the "
        "weights"
    )


def _layers(best: "Trial") -> dict[str, tuple[int, ...]]:
    kinds = ("attention", "mlp")
    return {kind: tuple(sorted(part.layer for part in best.without if part.kind == kind)) for kind in kinds}


def _record(best: "Trial") -> dict[str, Any]:
    return {
        "length": best.best,
        "tokens_a_step": best.tokens[best.best - 1],
        "cost": best.cost,
        "speed_by_weights": best.score,
    }


def _write(path: str, model: str, layers: int, best: "Trial", about: dict[str, Any]) -> None:
    from foredraft.core.io import provenance
    from foredraft.drafters.common.skip_config import SkipConfig, write_skip_config

    facts = {**about, **_record(best), "provenance": provenance()}
    write_skip_config(path, SkipConfig(_short(model), layers, facts=facts, **_layers(best)))


def _tell(best: "Trial", tokens: int, model: str, shown: Output) -> None:
    found = _layers(best)
    if shown.json:
        typer.echo(json.dumps({"skip_attention": found["attention"], "skip_mlp": found["mlp"], **_record(best)}))
        return
    console = output()
    for kind, name in (("attention", "Attention"), ("mlp", "MLP")):
        console.print(f"{name} left out in layers {', '.join(map(str, found[kind])) or '-'}", soft_wrap=True)
    console.print(f"{_said(best)}; measured on {tokens} tokens.", soft_wrap=True)
    if best.score > 1:
        style, said = (
            "bold green",
            f"{best.score:.2f} times plain decoding, if time is proportional to the weights read.",
        )
    else:
        style, said = "bold yellow", "No gain: plain decoding reads fewer weights per token."
    console.print(said, style=style, soft_wrap=True)
    spec = shlex.quote(f"layer_skip:{shown.out},{_LENGTH}={best.best}")
    command = f"foredraft generate --model {shlex.quote(model)} --drafter {spec} ..."
    console.print(command, style="dim", soft_wrap=True, markup=False)
