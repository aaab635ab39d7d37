"""The kernels' tests in C, ``native_driver.c``, for every instruction set; with sanitizers if SANITIZE is set."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from foredraft.model.native.build import COMMON, SOURCES, TARGETS, InstructionSet, compiler, targets
from native import needs_compiler

pytestmark = needs_compiler

DRIVER = Path(__file__).parent / "native_driver.c"
SANITIZERS = ("-g", "-O2", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ABSENT = 77
"""Exit status of the tests on a processor that lacks the instructions."""


def tools(target: InstructionSet) -> tuple[str, list[str], list[str]]:
    """Compiler, flags and emulator; Arm's on another machine are a cross compiler's."""
    if target in targets():
        return compiler() or "", list(SANITIZERS if os.environ.get("SANITIZE") else ("-O2",)), []
    cross, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if target.name != "dotprod" or cross is None or emulator is None or not os.environ.get("SANITIZE"):
        pytest.skip(f"{target.name} is for another processor; scripts/kernels emulates Arm's where it can")
    return cross, ["-O2", "-static"], [emulator, "-cpu", "max"]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_kernels(target, tmp_path):
    command, flags, emulator = tools(target)
    program = tmp_path / "driver"
    sources = [SOURCES / "forward.c", SOURCES / "cpu.c", DRIVER]
    needs = [f"-D{target.needs}"] if target.needs else []
    warnings = ["-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    compiled = subprocess.run(
        [command, *COMMON, *flags, *target.flags, *needs, *warnings, *sources, "-o", program, "-lm"],
        capture_output=True,
        text=True,
    )
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([*emulator, program], capture_output=True, text=True)
    if done.returncode == ABSENT:
        pytest.skip(f"this processor has no {target.name}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == target.name
