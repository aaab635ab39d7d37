"""Options of the server; importable without fastapi."""

import os
import socket
from dataclasses import dataclass, field

from foredraft.core.errors import OptionError
from foredraft.core.options import check_least

API_KEY = "FOREDRAFT_API_KEY"
"""Environment variable with API keys, separated by commas."""
_LEAST = {
    "port": 0,
    "max_queue": 0,
    "default_max_tokens": 1,
    "max_prompt_tokens": 1,
    "max_body_bytes": 1,
    "request_timeout": 1,
    "drain_seconds": 0,
    "stall_seconds": 1,
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the server.

    Raises:
        OptionError: a value is out of range.
    """

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0: all interfaces."})
    port: int = field(default=8000, metadata={"help": "Port; 0: a free one."})
    served_model_name: tuple[str, ...] = field(
        default=(), metadata={"help": "Name of the model in the API; repeatable. Default: the last part of --model."}
    )
    api_key: tuple[str, ...] = field(
        default=(), metadata={"help": f"Key that clients must send; repeatable. Better: {API_KEY} in the environment."}
    )
    cors_origin: tuple[str, ...] = field(
        default=(), metadata={"help": "Origin of web pages that may call the server; repeatable. Default: none."}
    )
    max_queue: int = field(default=256, metadata={"help": "Outputs that may wait for a row; more are refused (429)."})
    default_max_tokens: int = field(default=1024, metadata={"help": "Longest output of a chat without max_tokens."})
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longest prompt; default: the model's context."}
    )
    prefix_cache: bool = field(default=True, metadata={"help": "Do not reuse the KV cache of earlier prompts."})
    max_body_bytes: int = field(default=4 * 2**20, metadata={"help": "Largest request body, in bytes."})
    request_timeout: float = field(default=600.0, metadata={"help": "Seconds until a request is cancelled (408)."})
    drain_seconds: int = field(
        default=120, metadata={"help": "Seconds that accepted requests have to end after SIGTERM."}
    )
    stall_seconds: float = field(default=120.0, metadata={"help": "Seconds without a new token until /health is 503."})
    require_lossless: bool = field(default=False, metadata={"help": "Refuse to start with a lossy rule."})
    shared_text: bool = field(
        default=False, metadata={"help": "Allow drafters that draft from other clients' text (see docs/serving.md)."}
    )

    def __post_init__(self) -> None:
        check_least(self, _LEAST)

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys, those of the environment included; none: everybody may call."""
        given = os.environ.get(API_KEY, "").split(",")
        return (*self.api_key, *(key.strip() for key in given if key.strip()))


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        OptionError: the port is in use, or the host is not this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as found:
            return found.getsockname()[1]
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise OptionError(f"Cannot listen on {host}:{port}: {reason}; choose another --host or --port.") from None
