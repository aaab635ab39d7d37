"""``foredraft check``."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import typer

from foredraft.cli.choices import MODEL, SAMPLING, ModelChoice, PromptChoice
from foredraft.cli.console import busy, output
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foredraft.bench.check import GreedyCheck, SampledCheck


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of the sampled check."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    max_new_tokens: int = 3
    seed: int = 0

    def params(self) -> SamplingParams:
        return SamplingParams(**asdict(self))


_HELP = {
    **SAMPLING.help,
    "temperature": "Temperature of the sampled check, above 0.",
    "max_new_tokens": "Tokens per sampled output.",
    "seed": "Seed; another seed is an independent trial.",
}


@dataclass(frozen=True, slots=True)
class What(PromptChoice):
    """What to check, on which prompts."""

    count: int = field(default=16, metadata={"help": "Prompts to use from each file; 0: all."})
    tokens: int = field(default=6000, metadata={"help": "Total sampled tokens; 0: check greedy only."})
    greedy_tokens: int = field(default=64, metadata={"help": "Tokens per greedy output."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object."})


EXAMPLES = (
    "foredraft check -m PATH -d eagle3:HEAD",
    "foredraft check -m PATH -d prompt_lookup --dtype bfloat16 --exact --tokens 0",
)


@flags(choice=MODEL, what=Group(What, "Check"), sampling=Group(Sampling, "Sampling", _HELP))
def command(*, choice: ModelChoice, what: What, sampling: Sampling) -> None:
    """Check that a drafter is lossless on a model.

    Greedy output must equal plain decoding, except after near-ties in the logits (no exception with --exact). A
    statistical test compares sampled tokens with the model's own distribution. Exit status: 0 lossless, 1 not.
    """
    from foredraft.bench.check import check_greedy, check_sampled, draft_always

    if what.tokens < 0:
        raise OptionError("--tokens must be 0 or more.")
    if what.tokens and sampling.temperature <= 0:
        raise OptionError("Sampling needs --temperature above 0; --tokens 0 checks greedy output only.")
    prompts = [prompt.prompt for prompt in what.read()]
    generator = choice.load()
    draft_always(generator)
    with busy("Greedy outputs"):
        params = replace(sampling.params(), temperature=0.0, max_new_tokens=what.greedy_tokens)
        greedy = check_greedy(generator, prompts, params, exact=choice.exact)
    sampled = None
    if what.tokens:
        with busy("Sampled outputs"):
            sampled = check_sampled(generator, prompts, sampling.params(), what.tokens)
    passed = greedy.passed and (sampled is None or sampled.passed)
    if what.json:
        found = {"model": choice.model, "drafter": choice.drafter, "lossless": passed, "greedy": asdict(greedy)}
        typer.echo(json.dumps(found | {"sampled": None if sampled is None else asdict(sampled)}))
    else:
        console = output()
        for line in (*_greedy(greedy), *([] if sampled is None else [_sampled(sampled)])):
            console.print(line, soft_wrap=True, highlight=False)
        verdict = "lossless" if passed else "NOT lossless"
        console.print(f"Verdict: {verdict}.", style="bold green" if passed else "bold red", highlight=False)
    if not passed:
        raise typer.Exit(1)


def _greedy(found: "GreedyCheck") -> list[str]:
    same = found.outputs - len(found.differences)
    lines = [f"Greedy: {same} of {found.outputs} outputs equal plain decoding ({found.tokens:,} tokens)."]
    for each in found.differences:
        why = "a near-tie" if each.tied and not found.exact else "not a near-tie"
        lines.append(
            f"  output {each.output + 1} differs from token {each.place + 1}: {why}, logits {each.gap:.3g} apart."
        )
    return lines


def _sampled(found: "SampledCheck") -> str:
    fits = "fit" if found.passed else "do not fit"
    return (
        f"Sampled: {found.tokens:,} tokens ({found.accepted:,} accepted drafts) {fits} the model's own distribution "
        f"in {found.contexts} contexts (p = {found.p_value:.2g}). The test detects a shift of {100 * found.shift:.1f}% "
        "of the probability between two tokens with probability 0.99."
    )
