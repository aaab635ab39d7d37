"""``foredraft skip``."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foredraft.bench.skip_search import Effort
from foredraft.cli.console import busy, errors, output
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.bench.skip_trials import Said, Trial
    from foredraft.engine.generate import Generator

_LENGTH = "num_assistant_tokens"


@dataclass(frozen=True, slots=True)
class Target:
    """Whose layers."""

    model: str = field(
        default="sample", metadata={"names": ("--model", "-m"), "help": "A folder, a hub name, or sample."}
    )
    dtype: str | None = field(default=None, metadata={"help": "Such as bfloat16; by default as for generate."})
    device: str | None = field(default=None, metadata={"help": "Such as cuda:1 or cpu; by default a GPU if there."})


@dataclass(frozen=True, slots=True)
class Texts:
    """On which texts: the target's own answers."""

    prompts: tuple[str, ...] = field(
        default=(),
        metadata={"help": "A prompt file like what you will ask; may be repeated. By default eight of ours."},
    )
    count: int = field(default=8, metadata={"help": "So many prompts of each file."})
    chat: bool = field(default=False, metadata={"help": "In the model's chat template."})
    max_new_tokens: int = field(default=64, metadata={"help": "Length of the answers."})
    min_new_tokens: int = field(default=0, metadata={"help": "No end of text before so many new tokens."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy."})
    longest: int = field(default=5, metadata={"help": "Drafts of up to so many tokens."})


@dataclass(frozen=True, slots=True)
class Output:
    """What comes out."""

    out: str = field(default="skips.json", metadata={"help": "What was found, for --drafter layer_skip:FILE."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object."})


_EFFORT = {"trials": "Sets of layers to try.", "seed": "Of the random part of the search."}


@flags(
    target=Group(Target, "Model"),
    texts=Group(Texts, "Texts"),
    effort=Group(Effort, "Search", help=_EFFORT),
    shown=Group(Output, "Output"),
)
def command(*, target: Target, texts: Texts, effort: Effort, shown: Output) -> None:
    """Which layers can a draft do without? Searched here, on your prompts, for layer_skip.

    The model answers the prompts. Then sets of attention and MLP parts are left out, and what is left says at every
    place of the answers what it would have said. The set that brings most tokens for the weights that it reads goes to
    a file. The same command, given again after it was cut off, goes on where it was.
    """
    if min(texts.count, texts.longest) < 1:
        raise OptionError("count and longest must be 1 or more.")
    if not Path(shown.out).parent.is_dir():  # said now, not after minutes of searching
        raise OptionError(f"Cannot write {shown.out}: there is no such folder.")
    from foredraft.bench.skip_search import search
    from foredraft.bench.skip_trials import Journal, Judge
    from foredraft.compose import load

    with busy(f"Loading {target.model}"):
        plain = load(target.model, "none", dtype=target.dtype, device=target.device)
    with busy("Answering the prompts"):
        said = _answers(plain, texts, effort.seed)
        judge = Judge(plain.engine.target, said, temperature=texts.temperature, longest=texts.longest)
    about = {"model": _short(target.model), "texts": _digest(said), **_facts(texts), "seed": effort.seed}
    journal = Journal(Path(f"{shown.out}.trials.jsonl"), about)
    with _telling(effort.trials) as tell:
        best = search(judge.parts, journal.through(judge), effort, tell)
    _write(shown.out, target.model, plain.engine.target.layers, best, {**about, "tokens": judge.tokens})
    _tell(best, judge.tokens, target.model, shown)


def _answers(plain: "Generator", texts: Texts, seed: int) -> "list[Said]":
    from foredraft.bench.prompts import read_prompts, standard_prompts
    from foredraft.bench.skip_trials import Said
    from foredraft.core.params import SamplingParams

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
    from foredraft.model.provenance import short

    return short(model)


class _telling:
    """On a terminal a line says how far the search is; elsewhere nothing is said."""

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
    from foredraft.drafters.skips import Skips, write_skips
    from foredraft.model.provenance import provenance

    facts = {**about, **_record(best), "provenance": provenance()}
    write_skips(path, Skips(_short(model), layers, facts=facts, **_layers(best)))


def _tell(best: "Trial", tokens: int, model: str, shown: Output) -> None:
    found = _layers(best)
    if shown.json:
        typer.echo(json.dumps({"skip_attention": found["attention"], "skip_mlp": found["mlp"], **_record(best)}))
        return
    console = output()
    for kind, name in (("attention", "Attention"), ("mlp", "MLP")):
        console.print(f"{name} left out in layers {', '.join(map(str, found[kind])) or '-'}", soft_wrap=True)
    console.print(f"{_said(best)}; judged by {tokens} tokens.", soft_wrap=True)
    if best.score > 1:
        style, said = "bold green", f"{best.score:.2f} times plain decoding, if reading weights is all that takes time."
    else:
        style, said = "bold yellow", "That does not pay: plain decoding reads fewer weights a token."
    console.print(said, style=style, soft_wrap=True)
    spec = shlex.quote(f"layer_skip:{shown.out},{_LENGTH}={best.best}")
    command = f"foredraft generate --model {shlex.quote(model)} --drafter {spec} ..."
    console.print(command, style="dim", soft_wrap=True, markup=False)
