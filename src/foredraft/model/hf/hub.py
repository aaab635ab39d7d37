"""Folders of configs and weights, local or from the hub."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import __version__
from transformers.utils import logging as hf_logging

from foredraft.core.errors import ModelError, first_line
from foredraft.files.read import check_model_files, check_regular

TRANSFORMERS: str = __version__
"""The transformers version recorded in the configs that we write."""

_log = logging.getLogger(__name__)

_ALLOW = ["config.json", "*.safetensors", "*.bin", "*.pt", "*.safetensors.index.json", "*.bin.index.json"]
_IGNORE = ["*/*", "optimizer.*", "scheduler.*", "training_args.bin", "rng_state*"]

_TIMEOUT = 5.0
"""Seconds to wait for the hub."""
ACCESS = ("token", "cache_dir", "local_files_only")
"""Options of ``from_pretrained`` that say how to get at files, whichever these are."""


def local_path(name: str) -> Path | None:
    """The local file or folder of this name; None if there is none.

    Raises:
        ModelError: it cannot be looked at.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
        return path if name else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelError(f"Cannot read {name!r}: {error.strerror}.") from None
    except (RuntimeError, ValueError) as error:  # no such home folder; a null byte
        raise ModelError(f"{name!r} is no path: {first_line(error)}.") from None


def is_hub_name(name: str) -> bool:
    """Whether this may name a repository of the hub."""
    return bool(name) and not name.startswith((".", "/", "~")) and name.count("/") <= 1


def cached_only(name: str, options: Mapping[str, Any]) -> dict[str, bool]:
    """The option that keeps transformers to the cache, if the hub cannot be reached; else none.

    transformers would try for 24 seconds, also if all files are in the cache.
    """
    if (reason := _hub_error(name, options)) is None:
        return {}
    _log.warning("The hub cannot be reached (%s): looking for %s in the cache.", reason, name)
    return {"local_files_only": True}


def _hub_error(name: str, options: Mapping[str, Any]) -> str | None:
    """Why the hub cannot be reached; None if it can, or is not to be asked."""
    if options.get("local_files_only") or constants.HF_HUB_OFFLINE or not is_hub_name(name) or local_path(name):
        return None
    try:
        HfApi().model_info(name, revision=options.get("revision"), token=options.get("token"), timeout=_TIMEOUT)
    except (HfHubHTTPError, ValueError):  # an answer, or no name of the hub: transformers will say what is wrong
        return None
    except Exception as error:  # of the HTTP client, which differs between versions
        return first_line(error)
    return None


def fetch(name: str, options: Mapping[str, Any] | None = None) -> Path:
    """The local folder of a head or model: ``name`` itself if it is a folder, else a snapshot of the hub repository.

    Downloads only config.json and weights of the top folder.

    Args:
        options: those of ``ACCESS``.

    Raises:
        ModelError: there is no such folder, and the hub does not have the repository or is not reachable.
    """
    folder = local_path(name)
    if folder is not None:
        if folder.is_dir():
            with suppress(OSError):  # whoever reads it says what is wrong
                check_model_files(folder)
            return folder
        raise ModelError(f"{name!r} is a file; expected a folder with config.json and weights.")
    if not is_hub_name(name):
        raise ModelError(f"There is no folder {name!r}.")
    access = {key: value for key, value in (options or {}).items() if key in ACCESS}
    try:
        found = snapshot_download(name, allow_patterns=_ALLOW, ignore_patterns=_IGNORE, **access)
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
    path = local_path(name)
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if path is not None:
        check_regular(path)
        if path.is_file():
            return path
    if not file or not is_hub_name(f"{owner}/{repository}"):
        raise ModelError(f"There is no file {name!r}.")
    given = {key: value for key, value in (options or {}).items() if key != "trust_remote_code"}
    given |= cached_only(f"{owner}/{repository}", given)
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file, **given))
    except Exception as error:  # hub, network and disk errors of many types
        raise ModelError(
            f"There is no file {name!r}, and downloading it from the hub failed: {first_line(error).rstrip('.:')}."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log messages and progress bars within the context."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
