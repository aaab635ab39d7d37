"""``foredraft batch``."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.choices import ASKED_MODEL, ModelChoice, loaded_uncollected
from foredraft.cli.console import errors, progress_bar, starting
from foredraft.cli.exit_status import interruptible, needing
from foredraft.cli.flags import flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.serve.batch_answers import Answered, BatchOptions, Numbered
    from foredraft.serve.batch_file import BatchFile

    Answers = Callable[[Iterable[Numbered]], Iterator[Answered]]

_NAME = "Name of the model in the requests; default: the last part of --model."
_SEED = "Requests without a seed derive theirs from this one."
_LIMIT = "Longest output of a chat without max_tokens."
SOURCE = Annotated[Path, typer.Argument(metavar="IN", help="Requests, one JSON object a line.")]
OUT = Annotated[Path, typer.Argument(metavar="OUT", help="Answers, in the same order.")]
NAME = Annotated[str | None, typer.Option(metavar="TEXT", help=_NAME)]
SEED = Annotated[int, typer.Option(metavar="INT", help=_SEED)]
LIMIT = Annotated[int, typer.Option(metavar="INT", help=_LIMIT)]
_LOADED = ("dtype", "weights", "kv_cache_dtype")
"""Options of the model that change its answers."""
EXAMPLES = (
    "foredraft batch requests.jsonl answers.jsonl -m PATH -d eagle3:HEAD",
    "foredraft batch requests.jsonl answers.jsonl --default-max-tokens 256",
)


@flags(choice=ASKED_MODEL)
def command(
    source: SOURCE,
    out: OUT,
    *,
    name: NAME = None,
    seed: SEED = 0,
    default_max_tokens: LIMIT = 1024,
    choice: ModelChoice,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Requests are those of /v1/chat/completions, /v1/completions and /v1/responses. The same command continues an
    interrupted run: no request is answered twice or left out. Requests that fail have an error object in the file. One
    that asks for another model than --name is refused before any is answered. Needs pip install 'foredraft[serve]'.
    """
    with starting(), needing("Batches need", "serve"):
        from foredraft.serve.batch_answers import BatchAnswers
    if default_max_tokens < 1:
        raise OptionError("--default-max-tokens must be 1 or more.")
    if os.environ.get("RANK", "0") != "0":
        choice.load()  # it works for the first process, and ends with it
        return

    @contextmanager
    def alone(options: "BatchOptions") -> "Iterator[Answers]":
        with choice.load() as generator, loaded_uncollected():
            yield BatchAnswers(generator, options).of

    answer_file(source, out, name or choice.name, choice, seed, default_max_tokens, answers_by=alone)


def answer_file(
    source: Path,
    out: Path,
    name: str,
    choice: ModelChoice,
    seed: int,
    default_max_tokens: int,
    *,
    answers_by: "Callable[[BatchOptions], AbstractContextManager[Answers]]",
) -> None:
    """Answer the requests of a file, or those that are left of an interrupted run.

    Args:
        answers_by: loads what answers requests, in their order.

    Raises:
        OptionError: a file cannot be read or written, or is of another run.
    """
    from foredraft.files.outputs import continued_file
    from foredraft.serve.batch_answers import BatchOptions
    from foredraft.serve.batch_file import BatchFile

    loaded = {each: value for each in _LOADED if (value := getattr(choice, each)) is not None}
    run = {"model": name, "seed": seed, "default_max_tokens": default_max_tokens, **loaded}
    with ExitStack() as stack:
        stack.enter_context(continued_file(out))
        file = BatchFile(source, out, run)
        file.check_model(name)
        options = BatchOptions(name, file.created, seed, default_max_tokens, run)
        _write(file, stack.enter_context(answers_by(options)), out)
    errors().print(f"{file.answered} answers, {file.failed} of them errors, in {out}.", soft_wrap=True, markup=False)


def _write(file: "BatchFile", answers: "Answers", out: Path) -> None:
    """Write the answers, with a bar on a terminal."""

    def kept() -> str:
        return f"Interrupted after {file.answered} of {file.total} answers; the same command continues from there."

    try:
        with interruptible(kept), progress_bar() as bar:
            task = bar.add_task("Answers", total=file.total, completed=file.answered)
            file.run(answers, lambda answered, failed: bar.update(task, completed=answered))
    except OSError as error:
        raise OptionError(f"Cannot write {out}: {error.strerror}.") from None
