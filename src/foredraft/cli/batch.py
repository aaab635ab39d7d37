"""``foredraft batch``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.cli.choices import MODEL, ModelChoice
from foredraft.cli.console import errors
from foredraft.cli.exit_status import Interrupted
from foredraft.cli.flags import flags
from foredraft.core.errors import OptionError

_NAME = "Name of the model in the requests; default: --model."
_SEED = "Of requests that give no seed; each gets one of its own from it."
_LIMIT = "max_tokens of chats that give none."
EXAMPLES = (
    "foredraft batch requests.jsonl answers.jsonl -m PATH -d eagle3:HEAD",
    "foredraft batch requests.jsonl answers.jsonl --name gpt-4o-mini",
)


@flags(choice=MODEL)
def command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one JSON object a line.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Answers, in the same order.")],
    *,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help=_NAME)] = None,
    seed: Annotated[int, typer.Option(metavar="INT", help=_SEED)] = 0,
    default_max_tokens: Annotated[int, typer.Option(metavar="INT", help=_LIMIT)] = 1024,
    choice: ModelChoice,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    The same command continues an interrupted run: no request is answered twice or left out. Requests that fail have
    an error object in the file. Needs pip install 'foredraft[serve]'.
    """
    try:
        from foredraft.scale.batch import BatchRun
    except ModuleNotFoundError as error:
        raise OptionError(f"Batches need the package {error.name}: pip install 'foredraft[serve]'.") from error
    if default_max_tokens < 1:
        raise OptionError("--default-max-tokens must be 1 or more.")
    generator = choice.load()
    run = BatchRun(generator, name or choice.model, source, out, seed=seed, default_max_tokens=default_max_tokens)
    console = errors()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with generator, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("Answers", total=run.total, completed=run.done)
            run.run(lambda done, failed: bar.update(task, completed=done))
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted after {run.done} answers; the same command continues from there.") from None
    except OSError as error:
        raise OptionError(f"Cannot write {out}: {error.strerror}.") from None
    console.print(f"{run.done} answers, {run.failed} of them errors, in {out}.", soft_wrap=True, markup=False)
