"""Folders of configs and weights, local or from the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from transformers import __version__

from foredraft.core.errors import ModelError, first_line

TRANSFORMERS: str = __version__
"""The transformers version recorded in the configs that we write."""

_ALLOW = ["config.json", "*.safetensors", "*.bin", "*.pt", "*.safetensors.index.json", "*.bin.index.json"]
_IGNORE = ["*/*", "optimizer.*", "scheduler.*", "training_args.bin", "rng_state*"]


def fetch(name: str) -> Path:
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
        found = snapshot_download(name, allow_patterns=_ALLOW, ignore_patterns=_IGNORE)
    except Exception as error:  # hub, network and disk errors of many types
        message = (
            f"There is no folder {name!r}, and downloading it from the hub failed: {first_line(error).rstrip('.:')}."
        )
        raise ModelError(message) from error
    return Path(found)


def fetch_file(name: str, options: Mapping[str, Any] | None = None) -> Path:
    """A local file, or "owner/name/file" of a hub repository, downloaded if need be.

    Args:
        options: of transformers' ``from_pretrained``, about the hub.

    Raises:
        ModelError: there is no such file, and the hub does not have it or is not reachable.
    """
    path = Path(name).expanduser()
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if path.is_file():
        return path
    if path.is_absolute() or not file or owner.startswith((".", "~")):
        raise ModelError(f"There is no file {name!r}.")
    given = {key: value for key, value in (options or {}).items() if key != "trust_remote_code"}
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file, **given))
    except Exception as error:  # hub, network and disk errors of many types
        raise ModelError(
            f"There is no file {name!r}, and downloading it from the hub failed: {first_line(error).rstrip('.:')}."
        ) from error
