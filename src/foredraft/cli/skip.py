"""``foredraft skip``."""

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli.choices import TARGET, OutputChoice, TargetChoice, check_processes
from foredraft.cli.console import busy, output, starting
from foredraft.cli.exit_status import interruptible
from foredraft.cli.flags import FlagGroup, flags
from foredraft.core.errors import OptionError
from foredraft.drafters.layer_skip.search import SearchBudget, SkipTrial, layers_by_kind, search

if TYPE_CHECKING:
    from foredraft.drafters.layer_skip.trials import TrialSample
    from foredraft.engine.generator import Generator

_LENGTH = "num_assistant_tokens"


@dataclass(frozen=True, slots=True)
class Samples(OutputChoice):
    """The evaluation samples: prompts and the target's own outputs."""

    count: int = field(default=8, metadata={"help": "Prompts to use from each file; 0: all."})
    longest: int = field(default=5, metadata={"help": "Longest draft to consider."})


@dataclass(frozen=True, slots=True)
class SkipOutput:
    """What to write."""

    out: str = field(default="skips.json", metadata={"help": "File for the result; use --drafter layer_skip:FILE."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object."})


EXAMPLES = (
    "foredraft skip -m PATH --prompts mine.jsonl --out skips.json",
    "foredraft generate -m PATH -d layer_skip:skips.json,num_assistant_tokens=4 < prompt.txt",
)


@flags(
    target=FlagGroup(TargetChoice, "Model", first=("model", *TARGET), others=False),
    samples=FlagGroup(Samples, "Samples"),
    budget=FlagGroup(SearchBudget, "Search"),
    shown=FlagGroup(SkipOutput, "Output"),
)
def command(*, target: TargetChoice, samples: Samples, budget: SearchBudget, shown: SkipOutput) -> None:
    """Search for the layers that a layer_skip draft can skip.

    The model answers the prompts. Each trial skips a set of attention and MLP layers, and the rest of the model
    predicts every token of the answers. The set with the most accepted tokens per weight read is written to a file. The
    same command continues an interrupted search.
    """
    if samples.longest < 1:
        raise OptionError("--longest must be 1 or more.")
    check_processes()
    with starting():
        from foredraft.files.outputs import output_file

    with output_file(shown.out, "skip"):
        _search(target, samples, budget, shown)


def _search(target: TargetChoice, samples: Samples, budget: SearchBudget, shown: SkipOutput) -> None:
    """Search, write the result and print it."""
    with starting():
        from foredraft.drafters.layer_skip.trials import SkipEvaluator, TrialLog
        from foredraft.files.provenance import short

    with busy(f"Loading {target.model}"):
        plain = target.plain()
    begun = "Interrupted before a set was tried; the same command starts over."
    with busy("Answering the prompts"), interruptible(lambda: begun):
        answers = _answers(plain, samples, budget.seed)
        model = plain.engine.target
        evaluator = SkipEvaluator(model, answers, temperature=samples.temperature, longest=samples.longest)
    about = {
        "model": short(target.model),
        "weights": target.weights,
        "texts": _digest(answers),
        "temperature": samples.temperature,
    }
    about |= {"longest": samples.longest, "seed": budget.seed}
    log = TrialLog(Path(f"{shown.out}.trials.jsonl"), about)
    with busy("Searching") as update:

        def report(number: int, best: SkipTrial) -> None:
            update(f"{number} of {budget.trials} sets · best so far: {_describe(best)}")

        def kept() -> str:
            progress = f"{len(log.known)} of {budget.trials} sets"
            return f"Interrupted after {progress}; the same command continues from there."

        with interruptible(kept):
            best = search(evaluator.parts, log.cached(evaluator), budget, report)
    _write(shown.out, target.model, model.layers, best, {**about, "tokens": evaluator.tokens})
    _print(best, evaluator.tokens, target, shown)


def _answers(plain: "Generator", samples: Samples, seed: int) -> "list[TrialSample]":
    from foredraft.drafters.layer_skip.trials import TrialSample

    prompts = [plain.encode(prompt.prompt) for prompt in samples.read()]
    results = plain.batch(prompts, samples.params(seed))
    return [TrialSample((*prompt, *r.tokens), len(prompt)) for prompt, r in zip(prompts, results, strict=True)]


def _digest(answers: "list[TrialSample]") -> str:
    import hashlib

    return hashlib.sha256(json.dumps([asdict(answer) for answer in answers]).encode()).hexdigest()[:16]


def _describe(best: SkipTrial) -> str:
    return (
        f"{best.tokens[best.best - 1]:.2f} tokens per step at draft length {best.best}; a draft token reads "
        f"{best.cost:.0%} of the weights"
    )


def _to_json(best: SkipTrial) -> dict[str, Any]:
    return {
        "length": best.best,
        "tokens_a_step": best.tokens[best.best - 1],
        "cost": best.cost,
        "speed_by_weights": best.score,
    }


def _write(path: str, model: str, layers: int, best: SkipTrial, about: dict[str, Any]) -> None:
    from foredraft.drafters.layer_skip.config import SkipConfig, write_skip_config
    from foredraft.files.provenance import provenance, short

    facts = {**about, **_to_json(best), "provenance": provenance()}
    write_skip_config(path, SkipConfig(short(model), layers, facts=facts, **layers_by_kind(best.without)))


def _print(best: SkipTrial, tokens: int, target: TargetChoice, shown: SkipOutput) -> None:
    found = layers_by_kind(best.without)
    if shown.json:
        typer.echo(json.dumps({"skip_attention": found["attention"], "skip_mlp": found["mlp"], **_to_json(best)}))
        return
    console = output()
    for kind, name in (("attention", "Attention"), ("mlp", "MLP")):
        console.print(f"{name} skipped in layers: {', '.join(map(str, found[kind])) or 'none'}", soft_wrap=True)
    console.print(f"{_describe(best)}; measured on {tokens} tokens.", soft_wrap=True)
    if best.score > 1:
        verdict = f"Predicted: {best.score:.2f}x plain decoding, if time is proportional to the weights read."
        console.print(verdict, style="bold green", soft_wrap=True)
    else:
        verdict = "No gain: plain decoding reads fewer weights per token."
        console.print(verdict, style="bold yellow", soft_wrap=True)
    spec = shlex.quote(f"layer_skip:{shown.out},{_LENGTH}={best.best}")
    command = f"foredraft generate {target.arguments} --drafter {spec} ..."
    console.print(command, style="dim", soft_wrap=True, markup=False)
