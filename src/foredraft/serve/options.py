"""Options of the server; importable without fastapi."""

from dataclasses import dataclass, field

from foredraft.core.errors import OptionError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the server.

    Raises:
        OptionError: a value is out of range.
    """

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0: all interfaces."})
    port: int = field(default=8000, metadata={"help": "Port; 0: a free one."})
    served_model_name: tuple[str, ...] = field(
        default=(), metadata={"help": "Name of the model in the API, instead of --model; repeatable."}
    )
    max_queue: int = field(default=256, metadata={"help": "Outputs that may wait for a row; more are refused (429)."})
    default_max_tokens: int = field(default=1024, metadata={"help": "max_tokens of chats that give none."})
    max_body_bytes: int = field(default=4 * 2**20, metadata={"help": "Largest body of a request."})

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("max_queue", 0), ("default_max_tokens", 1), ("max_body_bytes", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be {least} or more, not {getattr(self, name)}.")
