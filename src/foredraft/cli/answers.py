"""``foredraft answers``."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.choices import HEAT, MODEL, NEW_TOKENS, ModelChoice, loaded_uncollected
from foredraft.cli.console import busy, errors, starting
from foredraft.cli.exit_status import Interrupted, terminable
from foredraft.cli.flags import FlagGroup, flags
from foredraft.cli.train_progress import Progress
from foredraft.core.errors import OptionError

_PROMPTS = ".prompts.jsonl"
EXAMPLES = (
    "foredraft answers run/answers -m PATH --weights int4 --own-prompts 20000 --temperature 0 --temperature 1",
    "foredraft answers run/answers -m PATH --data chats.jsonl --exclude humaneval.jsonl",
    "foredraft train eagle3 -m PATH --data run/answers --out run",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPrompts:
    """What is answered."""

    own_prompts: int = field(default=0, metadata={"help": "User turns that the model writes itself, as in Magpie."})
    data: tuple[str, ...] = field(
        default=(), metadata={"help": "Chats or texts: JSON Lines, folder, or datasets:NAME; repeatable."}
    )
    exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Prompt file of a benchmark, whose prompts are left out; repeatable."}
    )
    count: int = field(default=20_000, metadata={"help": "Most prompts, chosen at random."})
    prompt_tokens: int = field(default=48, metadata={"help": "Tokens of a text that are the prompt."})


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSampling:
    """How answers are made."""

    temperature: tuple[float, ...] = field(
        default=(0.0, 1.0),
        metadata={"names": HEAT, "help": "Of the answers; repeatable: each prompt is answered at each [0 and 1]."},
    )
    max_new_tokens: int = field(default=256, metadata={"names": NEW_TOKENS, "help": "Maximum tokens of an answer."})


@flags(choice=MODEL, prompts=FlagGroup(AnswerPrompts, "Prompts"), sampling=FlagGroup(AnswerSampling, "Answers"))
def command(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the answers, a file for a temperature.")],
    *,
    choice: ModelChoice,
    prompts: AnswerPrompts,
    sampling: AnswerSampling,
) -> None:
    """Write a model's answers to many prompts, as training data of its drafters.

    The folder is --data of foredraft train. The same command continues an interrupted run. Prompts that occur twice,
    or share 13 words in a row with an excluded one, are left out. Processes of torchrun answer a part each.
    """
    if not prompts.own_prompts and not prompts.data:
        raise OptionError("There is nothing to answer: give --own-prompts COUNT or --data FILE.")
    progress, leads = Progress(), os.environ.get("RANK", "0") == "0"
    with terminable():
        try:
            files = _answer(out, choice, prompts, sampling, progress)
        except KeyboardInterrupt as error:
            raise Interrupted(_kept(progress, out) if leads else "", error) from None
    if leads:
        errors().print(f"Wrote {', '.join(map(str, files))}.", style="dim", markup=False, soft_wrap=True)


def _answer(
    out: Path, choice: ModelChoice, prompts: AnswerPrompts, sampling: AnswerSampling, progress: Progress
) -> Sequence[Path]:
    from foredraft.core.sampling.params import SamplingParams

    with starting():
        from foredraft.files.write import check_writable_folder
        from foredraft.train.data.answers import AnswerOptions
        from foredraft.train.data.prompts import Benchmarks, PromptOptions, choose, own_prompts, write_all
        from foredraft.train.devices import accelerator

    for heat in sampling.temperature:  # before hours are spent
        SamplingParams(max_new_tokens=sampling.max_new_tokens, temperature=heat)
    options = AnswerOptions(new_tokens=sampling.max_new_tokens, batch=choice.max_batch_size)
    benchmarks = Benchmarks(_texts(prompts.exclude))
    check_writable_folder(out)
    processes = accelerator(cpu=choice.device == "cpu") if os.environ.get("WORLD_SIZE", "1") != "1" else None
    if processes is not None:
        choice = replace(choice, device=str(processes.device))
    report = progress.report if processes is None or processes.is_main_process else lambda line: None
    with (
        choice.load(split=processes is not None) as generator,
        loaded_uncollected(),
        busy("Reading the prompts") as progress.update,
    ):
        written: list[str] = []
        if prompts.own_prompts:
            file = out / _PROMPTS
            written = own_prompts(generator, prompts.own_prompts, file, options.batch, report, processes)
        which = PromptOptions(count=prompts.count, prompt_tokens=prompts.prompt_tokens)
        chosen = choose(generator, written, prompts.data, which, options, benchmarks=benchmarks, report=report)
        kinds = [replace(options, temperature=heat) for heat in dict.fromkeys(sampling.temperature)]
        return write_all(generator, chosen, out, kinds, report, processes)


def _texts(files: Sequence[str]) -> list[str]:
    """What users say in the prompts of benchmark files."""
    from foredraft.bench.prompts import read_prompts

    return [turn for file in files for prompt in read_prompts(file) for turn in prompt.turns]


def _kept(progress: Progress, out: Path) -> str:
    """What an interrupted run has kept, and what the same command does with it."""
    if progress.of:
        return f"Interrupted after {progress.answers} of {progress.of} answers; the same command continues from there."
    if any(file.stat().st_size for file in out.glob("*.jsonl*")):  # of an earlier run
        return f"Interrupted; the same command continues from what {out} holds."
    return "Interrupted before an answer was begun; the same command starts over."
