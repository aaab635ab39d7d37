"""``foredraft batch``."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.choices import ASKED_MODEL, ModelChoice, loaded_uncollected
from foredraft.cli.console import errors, progress_bar, starting
from foredraft.cli.exit_status import interruptible, needing
from foredraft.cli.flags import flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.scale.answers import Answered, BatchOptions, Numbered
    from foredraft.scale.batch import BatchFile

_NAME = "Name of the model in the requests; default: the last part of --model."
_SEED = "Requests without a seed derive theirs from this one."
_LIMIT = "Longest output of a chat without max_tokens."
_RAY = "Spread the requests over processes; needs pip install 'foredraft[scale]'."
_ACTORS = "With --ray: processes, each with a model; default: one per GPU."
_ADDRESS = "With --ray: Ray cluster, or auto; default: start Ray on this machine."
_LOADED = ("dtype", "weights", "kv_cache_dtype")
"""Options of the model that change its answers."""
EXAMPLES = (
    "foredraft batch requests.jsonl answers.jsonl -m PATH -d eagle3:HEAD",
    "foredraft batch requests.jsonl answers.jsonl -m PATH --ray --actors 8",
)


@flags(choice=ASKED_MODEL)
def command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one JSON object a line.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Answers, in the same order.")],
    *,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help=_NAME)] = None,
    seed: Annotated[int, typer.Option(metavar="INT", help=_SEED)] = 0,
    default_max_tokens: Annotated[int, typer.Option(metavar="INT", help=_LIMIT)] = 1024,
    ray: Annotated[bool, typer.Option("--ray", metavar="", help=_RAY)] = False,
    actors: Annotated[int, typer.Option(metavar="INT", help=_ACTORS, show_default=False)] = 0,
    address: Annotated[str | None, typer.Option(metavar="TEXT", help=_ADDRESS)] = None,
    choice: ModelChoice,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Requests are those of /v1/chat/completions, /v1/completions and /v1/responses. The same command continues an
    interrupted run: no request is answered twice or left out. Requests that fail have an error object in the file. One
    that asks for another model than --name is refused before any is answered. Needs pip install 'foredraft[serve]'.
    """
    with starting(), needing("Batches need", "serve"):
        from foredraft.scale.answers import BatchAnswers, BatchOptions
        from foredraft.scale.batch import BatchFile
    if default_max_tokens < 1:
        raise OptionError("--default-max-tokens must be 1 or more.")
    if actors < 0:
        raise OptionError("--actors must be 1 or more.")
    if not ray and (actors or address is not None):
        raise OptionError("--actors and --address need --ray.")
    from foredraft.files.outputs import continued_file

    called = name or choice.name
    loaded = {each: value for each in _LOADED if (value := getattr(choice, each)) is not None}
    run = {"model": called, "seed": seed, "default_max_tokens": default_max_tokens, **loaded}
    if os.environ.get("RANK", "0") != "0":
        choice.load()  # it works for the first process, and ends with it
        return
    with ExitStack() as stack:
        stack.enter_context(continued_file(out))
        file = BatchFile(source, out, run)
        file.check_model(called)
        generator = None if ray else stack.enter_context(choice.load())
        options = BatchOptions(called, file.created, seed, default_max_tokens, run)
        if generator is not None:
            stack.enter_context(loaded_uncollected())
            answers = BatchAnswers(generator, options).of
        else:
            answers = stack.enter_context(_actors(choice, options, actors, address))
        _write(file, answers, out)
    errors().print(f"{file.answered} answers, {file.failed} of them errors, in {out}.", soft_wrap=True, markup=False)


@contextmanager
def _actors(
    choice: ModelChoice, options: "BatchOptions", actors: int, address: str | None
) -> "Iterator[Callable[[Iterable[Numbered]], Iterator[Answered]]]":
    """Answers by actors of a Ray cluster, to which the process is connected meanwhile."""
    with needing("Actors need", "scale"):
        from foredraft.scale.actors import actor_count, by_actors
        from foredraft.scale.cluster import connected
    if choice.tensor_parallel > 1:
        raise OptionError("An actor runs in one process: leave out --tensor-parallel or --ray.")
    with connected(address, actors):
        yield by_actors(choice.load, options, actor_count(actors))


def _write(file: "BatchFile", answers: "Callable[[Iterator[Numbered]], Iterable[Answered]]", out: Path) -> None:
    """Write the answers, with a bar on a terminal."""

    def kept() -> str:
        return f"Interrupted after {file.answered} of {file.total} answers; the same command continues from there."

    try:
        with interruptible(kept), progress_bar() as bar:
            task = bar.add_task("Answers", total=file.total, completed=file.answered)
            file.run(answers, lambda answered, failed: bar.update(task, completed=answered))
    except OSError as error:
        raise OptionError(f"Cannot write {out}: {error.strerror}.") from None
