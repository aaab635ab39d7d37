"""Folders of configs and weights, from this machine or from the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import __version__

from foredraft.core.errors import ModelError

TRANSFORMERS: str = __version__
"""The version that goes into the configs that we write."""

_WANTED = ["config.json", "*.safetensors", "*.bin", "*.pt", "*.safetensors.index.json", "*.bin.index.json"]
_UNWANTED = ["*/*", "optimizer.*", "scheduler.*", "training_args.bin", "rng_state*"]


def fetch(name: str, revision: str | None = None) -> Path:
    """The local folder of a head or model: the one of that name, else a snapshot of the hub's repository.

    Only config.json and weights are downloaded, and only those of the top folder.

    Raises:
        ModelError: there is no such folder, and the hub has none or cannot be asked.
    """
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if name and folder.exists():
        raise ModelError(f"{name!r} is a file, where a folder with config.json and weights was expected.")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"There is no folder {name!r}.")
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except Exception as error:  # the hub's own, the network's and the disk's; each becomes one sentence
        raise ModelError(f"There is no folder {name!r}, and the hub does not give it: {_first(error)}.") from error
    return Path(found)


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else error.__class__.__name__).rstrip(".:")
