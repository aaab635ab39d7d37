"""Options of the server; importable without fastapi."""

import os
import socket
from dataclasses import dataclass, field

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds

API_KEY = "FOREDRAFT_API_KEY"
"""Environment variable with API keys, separated by commas."""
_LEAST = {
    "port": 0,
    "max_queue": 0,
    "default_max_tokens": 1,
    "max_prompt_tokens": 1,
    "max_body_bytes": 1,
    "max_connections": 1,
    "head_seconds": 1,
    "body_seconds": 1,
    "request_timeout": 1,
    "drain_seconds": 0,
    "stall_seconds": 1,
    "client_seconds": 1,
    "grammar_seconds": 0.01,
    "grammar_delay_seconds": 0,
    "grammar_memory_bytes": 2**20,
}
_LONGEST = 1_000_000  # seconds
_MOST = {
    "port": 65535,
    "max_queue": 2**31,
    "max_body_bytes": 2**40,
    "grammar_memory_bytes": 2**40,
    "max_connections": 2**20,
    "head_seconds": _LONGEST,
    "body_seconds": _LONGEST,
    "request_timeout": _LONGEST,
    "drain_seconds": _LONGEST,
    "stall_seconds": _LONGEST,
    "client_seconds": _LONGEST,
    "grammar_seconds": _LONGEST,
    "grammar_delay_seconds": _LONGEST,
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
    tool_prompt: bool = field(
        default=True, metadata={"help": "Refuse tools if the chat template has none; else the prompt describes them."}
    )
    max_body_bytes: int = field(default=4 * 2**20, metadata={"help": "Largest request body, in bytes."})
    max_connections: int = field(
        default=1024,
        metadata={
            "help": "Open connections; the one that has been silent the longest makes room, or new ones are refused."
        },
    )
    head_seconds: float = field(
        default=10.0, metadata={"help": "Seconds that a connection may take to send the head of its request."}
    )
    body_seconds: float = field(default=60.0, metadata={"help": "Seconds that the body of a request may take (408)."})
    request_timeout: float = field(default=600.0, metadata={"help": "Seconds until a request is cancelled (408)."})
    client_seconds: float = field(
        default=30.0, metadata={"help": "Seconds that a client may take nothing of its answer until it is cut off."}
    )
    grammar_seconds: float = field(
        default=10.0, metadata={"help": "CPU time that compiling a grammar may take; more is refused (400)."}
    )
    grammar_memory_bytes: int = field(
        default=512 * 2**20, metadata={"help": "Memory that compiling a grammar may take; more is refused (400)."}
    )
    grammar_delay_seconds: float = field(
        default=1.0, metadata={"help": "Time by which a grammar may delay the steps of others in all; then it ends."}
    )
    drain_seconds: int = field(
        default=120, metadata={"help": "Seconds that accepted requests have to end after SIGTERM."}
    )
    stall_seconds: float = field(default=120.0, metadata={"help": "Seconds without a new token until /health is 503."})
    require_lossless: bool = field(default=False, metadata={"help": "Refuse to start with a lossy rule."})
    shared_text: bool = field(
        default=False, metadata={"help": "Allow drafters that draft from other clients' text (see docs/serving.md)."}
    )

    def __post_init__(self) -> None:
        check_bounds(self, least=_LEAST, most=_MOST)
        texts = {"host": (self.host,), "served_model_name": self.served_model_name, "cors_origin": self.cors_origin}
        for name, values in {**texts, "api_key": self.api_key}.items():
            if any(not value.strip() for value in values):
                raise OptionError(f"{name} must not be empty: leave it out for the default.")

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys, those of the environment included; none: everybody may call.

        Raises:
            OptionError: the environment's variable is set, and holds none.
        """
        given = os.environ.get(API_KEY, "")
        own = [key.strip() for key in given.split(",") if key.strip()]
        if given and not own:
            raise OptionError(f"{API_KEY} is set and holds no key: unset it to let everybody call.")
        return (*self.api_key, *own)


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        OptionError: the port is in use, or the host is not this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as found:
            return found.getsockname()[1]
    except (OSError, ValueError) as error:  # ValueError: not a name at all
        reason = str(error.strerror if isinstance(error, OSError) else error).partition(" (")[0]
        raise OptionError(f"Cannot listen on {host}:{port}: {reason}; choose another --host or --port.") from None
