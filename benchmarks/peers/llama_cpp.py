"""Builds llama.cpp for this machine from the source in the package llama-cpp-python.

    python benchmarks/peers/llama_cpp.py              # print the folder of the programs, after building what is missing
    python benchmarks/peers/llama_cpp.py --configure  # no more than CMake's first step

The archive, the source and the build are kept in the user's cache, so the same command continues after an interrupt.
``build.json`` beside the programs says what was built, by which compiler, with which flags. It needs CMake, a C++
compiler and, for speed, Ninja; two cores take 20 minutes.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from foredraft.files.provenance import processor
from foredraft.files.write import atomic_write, user_cache

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCE = "llama.cpp 0.5.0-dev, commit 0c1e570"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
PROGRAMS = ("llama-server", "llama-bench", "llama-quantize")


def folder() -> Path:
    """Where everything is kept."""
    return user_cache() / "llama.cpp" / VERSION


def source() -> Path:
    """llama.cpp's source, with its converter."""
    return folder() / "source" / "vendor" / "llama.cpp"


def programs() -> Path | None:
    """The folder of the programs; None unless all are built."""
    found = source() / "build" / "bin"
    return found if all((found / name).is_file() for name in PROGRAMS) else None


def fetched() -> Path:
    """The package's archive, downloaded unless it is there whole.

    Raises:
        SystemExit: it cannot be downloaded, or is another one.
    """
    archive = folder() / f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
    if not archive.is_file() or _digest(archive) != SHA256:
        words = ["-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder()), f"{PACKAGE}=={VERSION}"]
        if subprocess.run([sys.executable, "-m", "pip", "download", *words]).returncode:
            sys.exit(f"{PACKAGE}=={VERSION} cannot be downloaded.")
        if (found := _digest(archive)) != SHA256:
            sys.exit(f"{archive} has the checksum {found} and not {SHA256}.")
    return archive


def unpacked() -> Path:
    """The source, unpacked whole or not at all."""
    if not source().is_dir():
        partial = folder() / "source.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(fetched()) as archive:
            archive.extractall(partial, filter="data")
        (inner,) = partial.iterdir()
        shutil.rmtree(source().parents[1], ignore_errors=True)
        inner.rename(source().parents[1])
        partial.rmdir()
    return source()


def configured() -> Path:
    """The build folder after CMake's first step."""
    build = unpacked() / "build"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if not (build / "CMakeCache.txt").is_file():
        _run("cmake", "-S", str(source()), "-B", str(build), *generator, *FLAGS)
    return build


def built() -> Path:
    """The folder of the programs, after building what is missing."""
    if (found := programs()) is None:
        build = configured()
        cores = str(os.cpu_count() or 1)  # without a number, make starts all jobs at once
        _run("cmake", "--build", str(build), "--parallel", cores, "--target", *PROGRAMS)
        found = build / "bin"
    about = json.dumps(facts(found.parent), indent=1)
    atomic_write(found / "build.json", lambda file: file.write(about.encode()))
    return found


def facts(build: Path) -> dict[str, object]:
    """What was built from what, and how."""
    cache = (build / "CMakeCache.txt").read_text(encoding="utf-8").splitlines()
    entries = (line.split("=", 1) for line in cache if "=" in line and line[0] not in "#/")
    options = {name.partition(":")[0]: value for name, value in entries}
    compiler, asked = options["CMAKE_CXX_COMPILER"], (flag[2:].partition("=")[0] for flag in FLAGS)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    return {
        "source": SOURCE,
        "package": f"{PACKAGE}=={VERSION}",
        "sha256": SHA256,
        "flags": [f"-D{name}={options[name]}" for name in asked],
        "compiler": version,
        "device": processor(),
    }


def _digest(path: Path) -> str:
    if not path.is_file():
        return "none"
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _run(*command: str) -> None:
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"Failed: {' '.join(command)}. The same command continues.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configure", action="store_true", help="only fetch, check, unpack and configure")
    args = parser.parse_args()
    print(configured() if args.configure else built())


if __name__ == "__main__":
    main()
