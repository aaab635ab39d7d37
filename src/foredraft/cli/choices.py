"""What the commands that run a model have in common: which model, which sampling, which prompt."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.cli.console import busy
from foredraft.cli.flags import Group
from foredraft.core.errors import PromptError
from foredraft.core.params import SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.generate import Generator


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A target and a drafter as the command line names them; see ``foredraft.load``."""

    model: str = field(
        default="sample",
        metadata={
            "names": ("--model", "-m"),
            "help": "A folder, a hub name, or sample, the bundled model.",
        },
    )
    drafter: str = field(
        default="auto",
        metadata={
            "names": ("--drafter", "-d"),
            "help": "none, NAME, NAME:PATH or NAME:PATH,option=value; foredraft methods lists them. auto: the bundled "
            "EAGLE-3 head for the bundled model, prompt_lookup for others.",
        },
    )
    dtype: str | None = field(
        default=None,
        metadata={"help": "Such as bfloat16. By default float32 on a CPU, else as the weights are."},
    )
    device: str | None = field(
        default=None, metadata={"help": "Such as cuda:1 or cpu. By default a GPU if there is one."}
    )
    verifier: str | None = field(
        default=None, metadata={"help": "Verification rule. By default the best for the law of the drafts."}
    )
    exact: bool = field(
        default=False,
        metadata={
            "help": "Run every forward in one shape, so that near-ties in half precision fall the same way with "
            "speculation on and off."
        },
    )

    def load(self) -> "Generator":
        """The generator; on a terminal something moves meanwhile."""
        with busy(f"Loading {self.model}"):
            from foredraft.compose import load

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
    "max_new_tokens": "Stop after so many new tokens.",
    "min_new_tokens": "No end of text before so many new tokens.",
    "temperature": "0 is greedy: always the likeliest token.",
    "top_k": "Sample from the k likeliest tokens only.",
    "top_p": "Sample from the likeliest tokens that make up this probability.",
    "min_p": "Leave out tokens with less than this share of the likeliest one's probability.",
    "typical_p": "Locally typical sampling, with this probability.",
    "epsilon_cutoff": "Leave out tokens with less probability than this.",
    "eta_cutoff": "Like epsilon, but lower where the law is broad.",
    "repetition_penalty": "Above 1: fewer tokens that were in the text or prompt.",
    "presence_penalty": "Taken off the logit of each token that was generated.",
    "frequency_penalty": "The same, for each time that it was.",
    "no_repeat_ngram_size": "No run of so many tokens twice; 0 is off.",
    "bad_words_ids": "Never say these token ids in a row. May be repeated.",
    "seed": "The same seed gives the same text; by default each run has another.",
    "stop_strings": "End before this text. May be repeated.",
    "eos_token_id": "End after this token id instead of the model's own. May be repeated.",
    "logprobs": "With --json: log-probabilities, and of so many alternatives.",
    "speculate": "Decode plainly, with the same model and drafter loaded.",
}
_NAMES = {"speculate": ("--no-speculation",)}

SAMPLING = Group(SamplingParams, "Sampling", _HELP, _NAMES)
CHAT_SAMPLING = Group(SamplingParams, "Sampling", _HELP, _NAMES, without=("logprobs",))


def read_prompt(given: str | None, file: str | None) -> str:
    """The prompt from where it was given: the argument, a file, or standard input (also for ``-``).

    One newline at the end of a file or of standard input is not part of it: editors and echo put it there.

    Raises:
        PromptError: none was given, or two, or what was given is not UTF-8 text.
    """
    if given is not None and file is not None:
        raise PromptError("The prompt was given twice, as an argument and with --prompt-file.")
    try:
        text = _read(given, file)
        text.encode()  # bytes of the command line that are no text arrive as lone surrogates
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
        raise PromptError("There is no prompt: give it as an argument, with --prompt-file, or on standard input.")
    return sys.stdin.read().removesuffix("\n")
