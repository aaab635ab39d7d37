"""Options that the commands which run a model share: model, sampling, prompt."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.cli import completion_names as names
from foredraft.cli.console import busy
from foredraft.cli.flags import Group
from foredraft.core.errors import PromptError
from foredraft.core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.generator import Generator


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A target and a drafter as the command line names them; see ``foredraft.load``."""

    model: str = field(
        default="sample",
        metadata={
            "names": ("--model", "-m"),
            "help": "Folder, hub name, or sample (bundled).",
        },
    )
    drafter: str = field(
        default="auto",
        metadata={
            "names": ("--drafter", "-d"),
            "help": "NAME[:PATH][,option=value]; see foredraft methods.",
            "complete": names.drafters,
        },
    )
    dtype: str | None = field(
        default=None,
        metadata={"help": "Such as bfloat16; default: float32 on a CPU, else as the weights."},
    )
    device: str | None = field(default=None, metadata={"help": "Such as cuda:1 or cpu; default: a GPU if any."})
    verifier: str | None = field(
        default=None,
        metadata={"help": "Verification rule; default: the best that is lossless.", "complete": names.verifiers},
    )
    exact: bool = field(
        default=False,
        metadata={"help": "One shape for all forwards, so that drafts cannot flip near-ties."},
    )

    def load(self) -> "Generator":
        """Load the generator; a terminal shows that it is loading."""
        with busy(f"Loading {self.model}"):
            from foredraft.compose.load import load

            return load(
                self.model,
                self.drafter,
                dtype=self.dtype,
                device=self.device,
                verifier=self.verifier,
                exact=self.exact,
            )


MODEL = Group(ModelChoice, "Model")

_HELP = {
    "max_new_tokens": "Most tokens to generate.",
    "min_new_tokens": "Fewest tokens to generate.",
    "temperature": "0, the default, is greedy.",
    "top_k": "Sample from the k most likely tokens.",
    "top_p": "Sample from the top tokens with this total probability.",
    "min_p": "Drop tokens below this share of the top probability.",
    "typical_p": "Locally typical sampling with this probability mass.",
    "epsilon_cutoff": "Drop tokens below this probability.",
    "eta_cutoff": "Like epsilon, but lower at high entropy.",
    "repetition_penalty": "Above 1 penalizes repeated tokens.",
    "presence_penalty": "Subtracted once from tokens in the output.",
    "frequency_penalty": "Subtracted once per occurrence in the output.",
    "no_repeat_ngram_size": "Never repeat an n-gram of this size.",
    "bad_words_ids": "Never generate this id sequence; repeatable.",
    "seed": "The same seed gives the same output; random by default.",
    "stop_strings": "Stop before this string; repeatable.",
    "eos_token_id": "Stop id instead of the model's; repeatable.",
    "logprobs": "With --json: log-probabilities and N alternatives.",
    "speculate": "Plain decoding, with the drafter still loaded.",
}
_NAMES = {"speculate": ("--no-speculation",)}

SAMPLING = Group(SamplingParams, "Sampling", _HELP, _NAMES)
CHAT_SAMPLING = Group(SamplingParams, "Sampling", _HELP, _NAMES, without=("logprobs",))


def read_prompt(given: str | None, file: str | None) -> str:
    """Read the prompt from the argument, a file, or standard input (also for ``-``).

    One newline at the end of a file or of standard input is dropped: editors and echo add it.

    Raises:
        PromptError: there is no prompt, there are two, or it is not UTF-8 text.
    """
    if given is not None and file is not None:
        raise PromptError("The prompt was given twice: as an argument and with --prompt-file.")
    try:
        text = _read(given, file)
        text.encode()  # undecodable bytes of the command line arrive as lone surrogates
    except UnicodeError:
        raise PromptError("The prompt is not UTF-8 text.") from None
    except OSError as error:
        raise PromptError(f"Cannot read the prompt file {file!r}: {error.strerror}.") from None
    return text


def _read(given: str | None, file: str | None) -> str:
    if given is not None and given != "-":
        return given
    if file is not None and file != "-":
        return Path(file).read_text(encoding="utf-8").removesuffix("\n")
    if given is None and file is None and sys.stdin.isatty():
        raise PromptError("There is no prompt: pass an argument, --prompt-file, or standard input.")
    return sys.stdin.read().removesuffix("\n")
