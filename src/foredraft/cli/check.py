"""``foredraft check``."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from foredraft.cli.choices import MODEL, SAMPLING, ModelChoice, PromptChoice
from foredraft.cli.console import busy, output, starting
from foredraft.cli.flags import FlagGroup, flags
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foredraft.bench.bits import BitsCheck
    from foredraft.bench.check import IdentityCheck, SampledCheck
    from foredraft.engine.generator import Generator


@dataclass(frozen=True, slots=True)
class CheckSampling:
    """Sampling options of the statistical test."""

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
    "temperature": "Temperature of the statistical test, above 0.",
    "max_new_tokens": "Tokens per output of the statistical test.",
    "seed": "Seed of all outputs; another seed is an independent trial.",
}


@dataclass(frozen=True, slots=True)
class CheckPrompts(PromptChoice):
    """What to check, on which prompts."""

    count: int = field(default=16, metadata={"help": "Prompts to use from each file; 0: all."})
    output_tokens: int = field(default=64, metadata={"help": "Tokens per output that is compared."})
    law: bool = field(default=False, metadata={"help": "Also test sampled tokens against the model's distribution."})
    bits: bool = field(
        default=False, metadata={"help": "Only compare logits, as integers, with plain decoding's (native engine)."}
    )
    tokens: int = field(default=6000, metadata={"help": "Sampled tokens of the statistical test."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object."})


EXAMPLES = (
    "foredraft check -m PATH -d eagle3:HEAD",
    "foredraft check -m PATH -d draft_model:PATH --verifier block --law",
    "foredraft check -m PATH -d eagle3:HEAD --weights int4 --bits",
)


@flags(choice=MODEL, what=FlagGroup(CheckPrompts, "Check"), sampling=FlagGroup(CheckSampling, "Sampling", _HELP))
def command(*, choice: ModelChoice, what: CheckPrompts, sampling: CheckSampling) -> None:
    """Check that a drafter is lossless on a model.

    Output at temperatures 0, 0.7, 1 and 1.3 must equal plain decoding of the same seed, alone and in a batch, except
    after near-ties (no exception with --exact, and none on the native engine). With --law, and always with a verifier
    that needs drawn drafts, a statistical test compares sampled tokens with the model's own distribution. With --bits,
    logits of the drafter's nodes, of chains and of random trees, in batches of 1 to 32 and with 1 and 2 threads, must
    have the bits of plain decoding's. Exit status: 0 lossless, 1 not.
    """
    with starting():
        from foredraft.bench.check import check_sampled, draft_always
        from foredraft.core.verify import rule_of

    if what.tokens < 1 or what.output_tokens < 1:
        raise OptionError("--tokens and --output-tokens must be 1 or more.")
    if sampling.temperature <= 0:
        raise OptionError("The statistical test needs --temperature above 0.")
    prompts = [prompt.prompt for prompt in what.read()]
    generator = choice.load()
    if what.bits:
        _check_bits(generator, prompts, what, sampling.seed)
        return
    draft_always(generator)
    exact = choice.exact or generator.engine.target.same_bits
    draws = choice.verifier is not None and rule_of(choice.verifier).draws
    compared = _compare(generator, prompts, what, sampling.seed, exact=exact, greedy=draws)
    sampled = None
    if what.law or draws:
        with busy("Statistical test"):
            sampled = check_sampled(generator, prompts, sampling.params(), what.tokens)
    passed = all(each.found.passed for each in compared) and (sampled is None or sampled.passed)
    if what.json:
        found = {"model": choice.model, "drafter": choice.drafter, "lossless": passed}
        texts = {"identity": [asdict(each) for each in compared]}
        typer.echo(json.dumps(found | texts | {"sampled": None if sampled is None else asdict(sampled)}))
    else:
        console = output()
        lines = [line for each in compared for line in _lines(each)]
        for line in (*lines, *([] if sampled is None else [_sampled(sampled)])):
            console.print(line, soft_wrap=True, highlight=False)
        verdict = "lossless" if passed else "NOT lossless"
        console.print(f"Verdict: {verdict}.", style="bold green" if passed else "bold red", highlight=False)
    if not passed:
        raise typer.Exit(1)


def _check_bits(generator: "Generator", prompts: Sequence[Any], what: CheckPrompts, seed: int) -> None:
    """Compare logits, print a table and a sentence, and exit if some differ."""
    from foredraft.bench.bits import BitsCheck, check_bits

    found = BitsCheck((), None)
    with busy("Comparing bits") as update:
        for found in check_bits(generator, prompts, what.output_tokens, seed):
            update(f"Comparing bits: {found.different} of {found.positions:,} positions differ")
    target = generator.engine.target
    if what.json:
        about = {"model": target.name, "weights": target.weights, "kv_cache_dtype": target.kv_cache_dtype}
        about |= {"drafter": generator.kind.method}
        counts = {"lossless": found.passed, "positions": found.positions, "different": found.different}
        cells = {"cells": [cell._asdict() for cell in found.cells]}
        typer.echo(json.dumps(about | counts | cells | {"first": found.first and found.first._asdict()}))
    else:
        console = output()
        console.print(_bits_table(found))
        style = "bold green" if found.passed else "bold red"
        console.print(_bits_sentence(found), style=style, soft_wrap=True)
    if not found.passed:
        raise typer.Exit(1)


def _bits_table(found: "BitsCheck") -> Table:
    """Positions that differ, of those compared, by drafts, threads and batch size."""
    batches = sorted({cell.batch for cell in found.cells})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("drafts", "threads", *(f"batch {batch}" for batch in batches)):
        table.add_column(name, justify="left" if name == "drafts" else "right")
    cells = {(cell.drafts, cell.threads, cell.batch): cell for cell in found.cells}
    for drafts, threads in dict.fromkeys((cell.drafts, cell.threads) for cell in found.cells):
        row = [cells[drafts, threads, batch] for batch in batches]
        shown = [
            Text(f"{cell.different} of {cell.positions:,}", style="bold red" if cell.different else "") for cell in row
        ]
        table.add_row(drafts, str(threads), *shown)
    return table


def _bits_sentence(found: "BitsCheck") -> str:
    first = found.first
    if first is None:
        return f"The logits of all {found.positions:,} positions have the bits of plain decoding's."
    rows = "1 row" if first.batch == 1 else f"{first.batch} rows"
    threads = "1 thread" if first.threads == 1 else f"{first.threads} threads"
    return (
        f"{found.different:,} of {found.positions:,} positions differ from plain decoding, first with {first.drafts}, "
        f"{rows} and {threads} after {first.place} tokens: {first.logits:,} logits, that of token {first.token} is "
        f"{first.found!r} instead of {first.expected!r}."
    )


@dataclass(frozen=True, slots=True)
class ComparedOutputs:
    """Outputs under one setting; ``together``: whether those with speculation ran in one batch."""

    setting: str
    together: bool
    found: "IdentityCheck"


def _compare(
    generator: "Generator", prompts: Sequence[Any], what: CheckPrompts, seed: int, *, exact: bool, greedy: bool
) -> list[ComparedOutputs]:
    """Compare outputs under every setting, or at temperature 0 alone: of all prompts in a batch, of some alone."""
    from foredraft.bench.check import SETTINGS, check_identity

    compared = []
    for setting in SETTINGS[:1] if greedy else SETTINGS:
        name = ", ".join(f"{key} {value}" for key, value in setting.items())
        params = SamplingParams(max_new_tokens=what.output_tokens, **setting)
        for together, some in ((True, prompts), (False, prompts[: max(len(prompts) // 4, 1)])):
            with busy(f"Outputs at {name}"):
                own = replace(params, seed=seed + (not together))
                found = check_identity(generator, some, own, exact, 0 if together else 1)
            compared.append(ComparedOutputs(name, together, found))
    return compared


def _lines(compared: ComparedOutputs) -> list[str]:
    found = compared.found
    same = found.outputs - len(found.differences)
    how = "in a batch" if compared.together else "alone"
    lines = [f"{compared.setting}, {how}: {same} of {found.outputs} outputs equal plain decoding's."]
    for each in found.differences:
        why = "a near-tie" if each.tied and not found.exact else "not a near-tie"
        lines.append(f"  output {each.output + 1} differs from token {each.place + 1}: {why}, {each.gap:.3g} apart.")
    if found.ties:
        lines.append(f"  near-ties: {1e4 * found.ties:.2g} in 10,000 tokens.")
    return lines


def _sampled(found: "SampledCheck") -> str:
    fits = "fit" if found.passed else "do not fit"
    return (
        f"Sampled: {found.tokens:,} tokens ({found.accepted:,} accepted drafts) {fits} the model's own distribution "
        f"in {found.contexts} contexts (p = {found.p_value:.2g}). The test detects a shift of {100 * found.shift:.1f}% "
        "of the probability between two tokens with probability 0.99."
    )
