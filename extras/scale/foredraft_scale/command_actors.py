"""``foredraft actors``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.batch import LIMIT, NAME, OUT, SEED, SOURCE, answer_file
from foredraft.cli.choices import ASKED_MODEL, ModelChoice, check_processes
from foredraft.cli.console import starting
from foredraft.cli.flags import flags
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.cli.batch import Answers
    from foredraft.serve.batch_answers import BatchOptions

_ACTORS = "Processes, each with a model; default: one per GPU."
_ADDRESS = "Ray cluster, or auto; default: start Ray on this machine."
EXAMPLES = (
    "foredraft actors requests.jsonl answers.jsonl -m PATH --actors 8",
    "foredraft actors requests.jsonl answers.jsonl -m PATH --address auto",
)


@flags(choice=ASKED_MODEL)
def command(
    source: SOURCE,
    out: OUT,
    *,
    actors: Annotated[int, typer.Option(metavar="INT", help=_ACTORS, show_default=False)] = 0,
    address: Annotated[str | None, typer.Option(metavar="TEXT", help=_ADDRESS)] = None,
    name: NAME = None,
    seed: SEED = 0,
    default_max_tokens: LIMIT = 1024,
    choice: ModelChoice,
) -> None:
    """Answer a file of requests by several processes.

    The file and its answers are those of foredraft batch; either command continues a run of the other.
    """
    if default_max_tokens < 1:
        raise OptionError("--default-max-tokens must be 1 or more.")
    if actors < 0:
        raise OptionError("--actors must be 1 or more.")
    if choice.tensor_parallel > 1:
        raise OptionError("An actor runs in one process: leave out --tensor-parallel.")
    check_processes()
    with starting():
        from foredraft_scale.actors import actor_count, by_actors
        from foredraft_scale.cluster import connected

    @contextmanager
    def spread(options: "BatchOptions") -> "Iterator[Answers]":
        with connected(address, actors):
            yield by_actors(choice.load, options, actor_count(actors))

    answer_file(source, out, name or choice.name, choice, seed, default_max_tokens, answers_by=spread)
