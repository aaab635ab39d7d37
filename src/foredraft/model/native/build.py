"""Compiles the kernels, for each instruction set a library, and finds the one for this processor."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foredraft.core.errors import ModelError, first_line
from foredraft.files.write import user_cache

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
BUILT = Path(__file__).parent / "built"
"""Libraries that a wheel brings along."""
COMMON = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=default",
)


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set: its name, the machines that may have it, its compiler flags, and what ``cpu.c`` asks for."""

    name: str
    machines: tuple[str, ...]
    flags: tuple[str, ...] = ()
    needs: str = ""

    @property
    def filename(self) -> str:
        return f"kernels-{self.name}.so"


_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
TARGETS = (
    InstructionSet(
        "avx512",
        _X86,
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"),
        "NEEDS_AVX512",
    ),
    InstructionSet("avx2", _X86, ("-mavx2", "-mfma", "-mf16c"), "NEEDS_AVX2"),
    InstructionSet("dotprod", _ARM, ("-march=armv8.2-a+dotprod",), "NEEDS_DOTPROD"),
    InstructionSet("portable", ()),
)
"""Best first; the last one runs anywhere."""


def targets(machine: str | None = None) -> tuple[InstructionSet, ...]:
    """The instruction sets that a machine of this architecture may have, best first."""
    machine = (machine or platform.machine()).lower()
    return tuple(each for each in TARGETS if not each.machines or machine in each.machines)


def compiler() -> str | None:
    """The C compiler: the variable CC, or the first of cc, gcc and clang on the path; None if there is none."""
    return next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )


def compile_library(target: InstructionSet, output: Path, *, command: str, flags: tuple[str, ...] = ()) -> None:
    """Compile the kernels for an instruction set.

    Args:
        flags: more of them, such as those of a sanitizer.

    Raises:
        ModelError: the compiler failed; the message holds its first line.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        parts = [Path(folder) / name for name in ("cpu.o", "forward.o", target.filename)]
        check = (f"-D{target.needs}",) if target.needs else ()
        _run([command, *COMMON, *flags, *check, "-c", str(SOURCES / "cpu.c"), "-o", str(parts[0])])
        _run([command, *COMMON, *flags, *target.flags, "-c", str(SOURCES / "forward.c"), "-o", str(parts[1])])
        _run([command, *flags, "-shared", "-pthread", str(parts[0]), str(parts[1]), "-o", str(parts[2]), "-lm"])
        parts[2].replace(output)  # at once, since other processes may compile the same


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise ModelError(f"The C compiler {command[0]!r} cannot be run: {error.strerror}.") from error
    except subprocess.CalledProcessError as error:
        said = first_line(Exception(error.stderr.strip() or f"exit status {error.returncode}"))
        raise ModelError(f"The native kernels cannot be compiled with {command[0]!r}: {said}.") from error


def libraries() -> Iterator[Path]:
    """Libraries that may run here, best first: those that came with the package, then newly compiled ones.

    Raises:
        ModelError: nothing is compiled, and there is no compiler or it fails.
    """
    possible = [each for each in targets() if _may_run(each)]
    yield from (path for each in possible if (path := BUILT / each.filename).is_file())
    command = compiler()
    if command is None:
        raise ModelError(
            "Weights in int4 and int8 need the native kernels, which a C compiler builds once: install gcc or clang."
        )
    for each in possible:
        path = cache_folder() / each.filename
        if not path.is_file():
            _log.info("Compiling the native kernels for %s.", each.name)
            compile_library(each, path, command=command)
        yield path


def cache_folder() -> Path:
    """Where compiled kernels are kept: a folder of the user's cache, named by the sources and flags."""
    digest = hashlib.sha256(repr((TARGETS, COMMON)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return user_cache() / "native" / digest.hexdigest()[:16]


def _may_run(target: InstructionSet) -> bool:
    """Whether this processor lists the instructions of a target; True if unknown, since the library checks it, too."""
    wanted = {"avx512": "avx512_vnni", "avx2": "avx2", "dotprod": "asimddp"}.get(target.name)
    with suppress(OSError):
        words = Path("/proc/cpuinfo").read_text().split()
        return wanted is None or wanted in words
    return True
