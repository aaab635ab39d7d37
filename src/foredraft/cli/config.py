"""Files with options of a command."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from foredraft.core.errors import OptionError, kind_of
from foredraft.core.sampling.params import check_known


def read_config(path: Path) -> dict[str, Any]:
    """A mapping from a file: TOML if its name ends in .toml, else YAML, which includes JSON. An empty file is one.

    Raises:
        OptionError: the file cannot be read or is not a mapping.
    """
    kind = "TOML" if path.suffix == ".toml" else "YAML"
    try:
        text = path.read_text("utf-8")
        found = _toml(text) if kind == "TOML" else yaml.safe_load(text)
    except OSError as error:
        raise OptionError(f"Cannot read {path}: {error.strerror}.") from None
    except RecursionError:
        raise OptionError(f"{path} is nested too deep.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise OptionError(f"{path} is not valid {kind}: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict | None):
        raise OptionError(f"{path} must be a mapping, not {kind_of(found)}.")
    return found or {}


def _toml(text: str) -> dict[str, Any]:
    try:
        return importlib.import_module("tomllib").loads(text)
    except ModuleNotFoundError:
        raise OptionError("A TOML file needs Python 3.11 or newer: write it in YAML.") from None


def defaults_from_file(context: typer.Context, path: Path | None) -> None:
    """Callback of an eager option: what the file says becomes the default of the command's other options.

    Keys are the long names of options, with dashes or underscores. A null keeps an option's own default.

    Raises:
        OptionError: a key is unknown or there twice, or a value has the wrong type.
    """
    if path is None:
        return
    params = {_long_name(each): each for each in context.command.params}
    options: dict[str, Any] = {name: each for name, each in params.items() if name not in ("config", "help")}
    given: dict[str, Any] = {}
    for key, value in read_config(path).items():
        name = str(key).replace("_", "-")
        check_known(f"option in {path}:", {name: value}, list(options))
        option = options[name]
        if option.name in given:
            raise OptionError(f"{path} has the option {name} twice.")
        if value is not None:
            values = value if option.multiple and isinstance(value, list) else [value]
            typed = [_as_typed(name, each, option) for each in values]
            given[option.name] = typed if option.multiple else typed[0]
    context.default_map = given


def _long_name(option: Any) -> str:
    return max(option.opts, key=len).removeprefix("--")


def _as_typed(name: str, value: Any, option: Any) -> str | bool:
    """A value as it would be typed, so that the option itself checks it; a flag is true or false."""
    if value is None or isinstance(value, dict | list):
        raise OptionError(f"{name} must be a single value, not {kind_of(value)}.")
    if option.is_flag != isinstance(value, bool):
        raise OptionError(f"{name} {'must be' if option.is_flag else 'takes a value, not'} true or false.")
    return value if option.is_flag else str(value)


_CONFIG = "YAML or TOML file with options, such as max-queue: 100; those of the command line go first."
CONFIG = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help=_CONFIG, is_eager=True, expose_value=False, callback=defaults_from_file),
]
"""The option of a command whose other options may be in a file."""
