"""``foredraft serve``."""

import gc
import logging
import os
import signal
from dataclasses import replace

from foredraft.cli.choices import ASKED_MODEL, ModelChoice, loaded_uncollected
from foredraft.cli.config import CONFIG
from foredraft.cli.console import starting
from foredraft.cli.exit_status import needing
from foredraft.cli.flags import FlagGroup, flags
from foredraft.serve.options import ServeOptions, free_port

EXAMPLES = (
    "foredraft serve --model PATH --drafter eagle3:HEAD --served-model-name NAME",
    "foredraft serve --config serve.yaml --port 8001",
    "foredraft serve --host 0.0.0.0 --api-key KEY",
)


@flags(choice=ASKED_MODEL, server=FlagGroup(ServeOptions, "Server"))
def command(
    *,
    config: CONFIG = None,
    choice: ModelChoice,
    server: ServeOptions,
) -> None:
    """Serve a model over OpenAI's HTTP interface.

    Ctrl-C and SIGTERM drain the server: it ends accepted requests and refuses new ones. Needs
    pip install 'foredraft[serve]'.
    """
    run_server(choice, server)


def run_server(choice: ModelChoice, server: ServeOptions) -> None:
    """Serve until a signal."""
    with starting(), needing("The server needs", "serve"):
        from foredraft.serve.logs import log_to_stderr
        from foredraft.serve.server import Server
    if os.environ.get("RANK", "0") == "0":  # the one process that listens; fail before loading
        server = replace(server, port=free_port(server.host, server.port))
    log_to_stderr()
    generator = choice.load(prefix_cache=server.prefix_cache)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for what comes after the server, which has its own handler
    gc.set_threshold(10_000)  # else collections while a body of a million values is read take longer than the reading
    with loaded_uncollected():
        running = Server(generator, server.served_model_name or (choice.name,), server)
        running.run()
    if running.uninterruptible:  # the end of Python would wait for it
        logging.shutdown()
        os._exit(0)
