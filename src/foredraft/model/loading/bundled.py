"""Models that ship with the package."""

from pathlib import Path

BUNDLED = {
    "sample": "sample-16m",
    "sample-draft": "draft-4m",
    "sample-eagle": "sample-eagle",
    "sample-eagle3": "sample-eagle3",
    "sample-medusa": "sample-medusa",
}
"""Models that ship with the package, by name."""


def resolve(name: str) -> str:
    """The folder of a bundled model's name; any other folder or hub name unchanged."""
    if name in BUNDLED:
        return str(Path(__file__).parents[2] / "models" / BUNDLED[name])
    return name
