"""Options shared by commands that run a model: model, sampling, prompt."""

import gc
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import completion_names as names
from foredraft.cli.console import busy
from foredraft.cli.flags import FlagGroup
from foredraft.compose.options import LoadOptions
from foredraft.core.errors import OptionError, PromptError
from foredraft.core.options import read_pairs
from foredraft.core.sampling.params import SamplingParams, check_count

if TYPE_CHECKING:
    from foredraft.bench.prompts import BenchPrompt
    from foredraft.engine.generator import Generator


TARGET = ("dtype", "device", "weights", "kv_cache_dtype")
"""Options of ``load`` about the target; commands that load nothing else have no others."""
MOST_THREADS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetChoice(LoadOptions):
    """A target by its name, with the options of ``load``."""

    model: str = field(
        default="sample",
        metadata={
            "names": ("--model", "-m"),
            "help": "Target: folder, hub name, GGUF file, installed package with one, or sample (bundled).",
        },
    )

    threads: int | None = field(
        default=None,
        metadata={"names": ("--threads", "-t"), "help": "CPU threads; default: OMP_NUM_THREADS, else one per core."},
    )

    def plain(self, max_batch_size: int = 32) -> "Generator":
        """The target without a drafter."""
        self.set_threads()
        from foredraft.compose.load import build_generators

        return build_generators(self.model, ["none"], replace(self, max_batch_size=max_batch_size))[0]

    def set_threads(self) -> None:
        """Give torch and the kernels so many threads.

        Raises:
            OptionError: fewer than one.
        """
        if self.threads is None:
            return
        check_count("threads", self.threads, MOST_THREADS)
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # a number that steps keep, and that processes inherit
        import torch

        torch.set_num_threads(self.threads)

    @property
    def arguments(self) -> str:
        """The model and how it is stored, as options of a command."""
        stored = {"weights": self.weights, "kv-cache-dtype": self.kv_cache_dtype}
        chosen = [f" --{name} {value}" for name, value in stored.items() if value]
        return f"--model {shlex.quote(self.model)}{''.join(chosen)}"

    @property
    def name(self) -> str:
        """What clients call the model: the last part of its path or hub name."""
        return Path(self.model).resolve().name or self.model

    @property
    def file_name(self) -> str:
        """``name``, or that of the GGUF file in a package."""
        from foredraft.model.loading.bundled import BUNDLED, resolve

        return self.name if self.model in BUNDLED else Path(resolve(self.model)).resolve().name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice(TargetChoice):
    """A target and a drafter by their names, with the options of ``load``."""

    drafter: str = field(
        default="auto",
        metadata={
            "names": ("--drafter", "-d"),
            "help": "NAME[:PATH][,option=value], see foredraft methods; auto: look-ups beside the head that is bundled "
            "for the target, if there is one, else look-ups alone.",
            "complete": names.drafters,
        },
    )
    model_option: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "NAME=VALUE for the target's from_pretrained, e.g. revision=v2; repeatable. VALUE may be JSON."
        },
    )
    draft_option: tuple[str, ...] = field(default=(), metadata={"help": "The same for the draft model."})

    def load(self, *, prefix_cache: bool = False, split: bool = False) -> "Generator":
        """Load the generator, with a spinner on a terminal.

        Args:
            split: each process of ``torchrun`` loads it, and does a part of the work.
        """
        return self.load_many([self.drafter], prefix_cache=prefix_cache, split=split)[0]

    def load_many(
        self, drafters: Sequence[str], *, prefix_cache: bool = False, split: bool = False
    ) -> "list[Generator]":
        """``load`` for several drafters that share the target, in place of the own one."""
        if not split:
            check_processes(self.tensor_parallel)
        options = replace(
            self,
            prefix_cache=prefix_cache,
            model_options=_pretrained_options(self.model_option),
            draft_options=_pretrained_options(self.draft_option),
        )
        with busy(f"Loading {self.model}"):
            self.set_threads()
            from foredraft.compose.load import build_generators

            return build_generators(self.model, drafters, options)


ASKED_MODEL = FlagGroup(
    ModelChoice, "Model", first=("model", "drafter", *TARGET, "threads"), complete={"verifier": names.verifiers}
)
"""Of commands whose requests leave options to the model."""
MODEL = replace(ASKED_MODEL, without=("generation_config",))
"""Of commands whose requests say everything."""


@contextmanager
def loaded_uncollected() -> Iterator[None]:
    """Leave what has been loaded out of garbage collections: a full one takes 0.25 s, in which no request goes on."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # else triton's native code lists on stderr all of its objects that are never collected


def check_processes(tensor_parallel: int | None = None) -> None:
    """Refuse to run a command once in each process of ``torchrun``.

    Args:
        tensor_parallel: the processes that share the work; None if the command has no such option.

    Raises:
        OptionError: there are several processes, and they do not share the work.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1" and tensor_parallel in (None, 1):
        shared = f"add --tensor-parallel {count}, or " if tensor_parallel else ""
        raise OptionError(
            f"torchrun started {count} processes, and each would run the whole command: {shared}leave torchrun out."
        )


def _pretrained_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Options from ``NAME=VALUE``; a value that is not JSON is a string."""
    found: dict[str, Any] = {**read_pairs(pairs)}
    for name, value in found.items():
        with suppress(json.JSONDecodeError):
            found[name] = json.loads(value)
    return found


NEW_TOKENS, HEAT = ("--max-new-tokens", "-n"), ("--temperature", "--temp")
"""Names of options that users of llama.cpp type too."""


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Prompts from files."""

    prompts: tuple[str, ...] = field(
        default=(), metadata={"help": "Prompt file; repeatable. Default: eight built-in prompts."}
    )
    count: int = field(default=0, metadata={"help": "Prompts to use from each file; 0: all."})
    chat: bool = field(default=False, metadata={"help": "Use the chat template."})

    def read(self) -> "list[BenchPrompt]":
        """The prompts.

        Raises:
            OptionError: negative count.
            DataError: a file cannot be read.
        """
        from foredraft.bench.prompts import read_prompts, standard_prompts

        if self.count < 0:
            raise OptionError("--count must be 0 or more.")
        files = [read_prompts(path, self.chat) for path in self.prompts] or [standard_prompts(self.chat)]
        return [prompt for prompts in files for prompt in prompts[: self.count or None]]


@dataclass(frozen=True, slots=True)
class OutputChoice(PromptChoice):
    """Prompts, and sampling options of the outputs."""

    max_new_tokens: int = field(default=64, metadata={"names": NEW_TOKENS, "help": "Maximum tokens per output."})
    min_new_tokens: int = field(default=0, metadata={"help": "Minimum tokens per output."})
    temperature: float = field(default=0.0, metadata={"names": HEAT, "help": "0 (default): greedy decoding."})

    def params(self, seed: int = 0) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            seed=seed,
        )


_HELP = {
    "max_new_tokens": "Maximum number of new tokens; default: 256.",
    "min_new_tokens": "Minimum number of new tokens.",
    "temperature": "0 is greedy; default: the model's (--generation-config), or 0.",
    "top_k": "Sample from the k most likely tokens.",
    "top_p": "Sample from the top tokens that sum to this probability.",
    "min_p": "Drop tokens below this fraction of the top probability.",
    "typical_p": "Locally typical sampling with this probability mass.",
    "epsilon_cutoff": "Drop tokens below this probability.",
    "eta_cutoff": "Like --epsilon-cutoff, but lower at high entropy.",
    "eta_alpha": "How much lower; default: the square root of --eta-cutoff.",
    "repetition_penalty": "Above 1: penalize repeated tokens.",
    "presence_penalty": "Subtracted from the logits of tokens in the output.",
    "frequency_penalty": "Subtracted per occurrence in the output.",
    "no_repeat_ngram_size": "Never repeat an n-gram of this size.",
    "bad_words_ids": "Never generate this id sequence; repeatable.",
    "seed": "Same seed, same output; default: random.",
    "stop_strings": "Stop before this string; repeatable.",
    "eos_token_id": "End-of-sequence id, instead of the model's; repeatable.",
    "logprobs": "With --json: log-probabilities of the output and of N top tokens.",
    "speculate": "Decode without drafts; the drafter is still loaded.",
    "num_assistant_tokens": "Longest draft; default: the policy decides.",
    "prediction": "Text that the output may repeat; drafts copy from it.",
}
_NAMES = {
    "max_new_tokens": NEW_TOKENS,
    "temperature": HEAT,
    "stop_strings": ("--stop-strings", "--stop"),
    "speculate": ("--no-speculation",),
}

SAMPLING = FlagGroup(SamplingParams, "Sampling", _HELP, _NAMES, without=("record_steps",), given=True)
CHAT_SAMPLING = FlagGroup(
    SamplingParams,
    "Sampling",
    {**_HELP, "max_new_tokens": "Maximum number of new tokens of an answer; default: 1024."},
    _NAMES,
    without=("logprobs", "prediction", "record_steps"),
    given=True,
)


AsChat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        metavar="",
        help="The prompt is a message in the chat template, or a text to continue; default: a message if there is a "
        "template.",
        show_default=False,
    ),
]
"""Whether a prompt is a message or a text, by option; see ``is_chat``."""


def is_chat(chosen: bool | None, generator: "Generator") -> bool:
    """Whether a prompt is a message of a chat: as chosen, else if the model has a chat template."""
    if chosen is not None:
        return chosen
    return generator.tokenizer is not None and bool(generator.tokenizer.chat_template)


def read_prompt(given: str | None, file: str | None) -> str:
    """Read the prompt from the argument, a file, or standard input (also for ``-``).

    One trailing newline of a file or of standard input is dropped: editors and echo add it.

    Raises:
        PromptError: no prompt, two prompts, or not UTF-8.
    """
    if given is not None and file is not None:
        raise PromptError("Two prompts were given: pass an argument, --prompt or --prompt-file.")
    try:
        text = _read(given, file)
        text.encode()  # undecodable argument bytes arrive as lone surrogates
    except UnicodeError:
        raise PromptError("The prompt is not valid UTF-8.") from None
    except OSError as error:
        raise PromptError(f"Cannot read the prompt file {file!r}: {error.strerror}.") from None
    return text


def _read(given: str | None, file: str | None) -> str:
    if given is not None and given != "-":
        return given
    if file is not None and file != "-":
        return Path(file).read_text(encoding="utf-8").removesuffix("\n")
    if given is None and file is None and sys.stdin.isatty():
        raise PromptError("No prompt: pass an argument, --prompt-file, or standard input.")
    return sys.stdin.read().removesuffix("\n")
