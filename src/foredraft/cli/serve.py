"""``foredraft serve``."""

from foredraft.cli.choices import MODEL, ModelChoice
from foredraft.cli.flags import Group, flags
from foredraft.core.errors import OptionError
from foredraft.serve.options import ServeOptions

EXAMPLES = (
    "foredraft serve --model PATH --drafter eagle3:HEAD",
    "foredraft serve --host 0.0.0.0 --port 8080",
)


@flags(choice=MODEL, server=Group(ServeOptions, "Server"))
def command(*, choice: ModelChoice, server: ServeOptions) -> None:
    """Serve a model over OpenAI's HTTP interface.

    Ctrl-C and SIGTERM drain the server: it ends accepted requests and refuses new ones. Needs
    pip install 'foredraft[serve]'.
    """
    try:
        from foredraft.serve.logs import log_to_stderr
        from foredraft.serve.server import Server
    except ModuleNotFoundError as error:
        raise OptionError(f"The server needs the package {error.name}: pip install 'foredraft[serve]'.") from error
    generator = choice.load(prefix_cache=server.prefix_cache)
    log_to_stderr()
    Server(generator, server.served_model_name or (choice.model,), server).run()
