"""Folders of configs and weights, local or from the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import __version__

from foredraft.core.errors import ModelError

TRANSFORMERS: str = __version__
"""The transformers version recorded in the configs that we write."""

_ALLOW = ["config.json", "*.safetensors", "*.bin", "*.pt", "*.safetensors.index.json", "*.bin.index.json"]
_IGNORE = ["*/*", "optimizer.*", "scheduler.*", "training_args.bin", "rng_state*"]


def fetch(name: str, revision: str | None = None) -> Path:
    """The local folder of a head or model: ``name`` itself if it is a folder, else a snapshot of the hub repository.

    Downloads only config.json and weights of the top folder.

    Raises:
        ModelError: there is no such folder, and the hub does not have the repository or is not reachable.
    """
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if name and folder.exists():
        raise ModelError(f"{name!r} is a file; expected a folder with config.json and weights.")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"There is no folder {name!r}.")
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=_ALLOW, ignore_patterns=_IGNORE)
    except Exception as error:  # hub, network and disk errors of many types
        message = f"There is no folder {name!r}, and downloading it from the hub failed: {_first_line(error)}."
        raise ModelError(message) from error
    return Path(found)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else error.__class__.__name__).rstrip(".:")
