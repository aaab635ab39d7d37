"""What runs inside ``sandbox``: a stranger's program behind limits, in an interpreter that holds nothing else.

The text of this file is handed to ``python -c``; it imports the standard library only and nothing at import that some
platform lacks. Three fences, each for what the others miss:

1. resource limits: processor time, memory, open files; no byte may be written to a file and, unless this is root, no
   process or thread made;
2. on Linux (x86-64, aarch64) a seccomp filter: system calls that a computation needs are allowed, files may be opened
   for reading, everything else is refused by the kernel, so that there are no processes, threads, signals to others,
   sockets, deletions or renamings, whoever runs it. A network namespace of its own too where the kernel gives one;
3. an audit hook of Python's, on every platform, that refuses the same by name.
"""

import ctypes
import json
import math
import os
import platform
import struct
import sys
import types
from typing import Any

READY = b"ready\n"
REFUSED = b"refused: "
READING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC  # none of these

SYSCALLS = {  # kernel's audit name of the architecture, openat, and what is allowed besides
    "x86_64": (0xC000003E, 257, (
        *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 24, 25, 28, 32, 33, 35, 36, 37, 38),
        *(39, 60, 63, 72, 79, 89, 96, 98, 99, 100, 102, 104, 107, 108, 110, 131, 186, 201, 202, 204, 217, 219, 228),
        *(229, 230, 231, 262, 267, 269, 270, 271, 292, 293, 318, 332, 439),
    )),
    "aarch64": (0xC00000B7, 56, (
        *(17, 23, 24, 25, 48, 57, 59, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 93, 94, 98, 101, 102, 103, 113),
        *(114, 115, 123, 124, 128, 132, 134, 135, 139, 153, 160, 165, 169, 172, 173, 174, 175, 176, 177, 178, 179),
        *(214, 215, 216, 222, 226, 233, 278, 291, 439),
    )),
}  # fmt: skip
HARMLESS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"}
FENCED = ("os.", "shutil.", "socket.", "subprocess.", "ctypes.", "pty.", "resource.", "signal.", "syslog.", "mmap.")


def seccomp_filter(machine: str) -> bytes | None:
    """The filter as the kernel's ``struct sock_filter`` (code, jump if true, jump if false, value), or None."""
    if sys.byteorder != "little" or struct.calcsize("P") != 8 or machine not in SYSCALLS:
        return None
    arch, openat, allowed = SYSCALLS[machine]
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # refused: EPERM
    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    for number in allowed:
        steps += [(equal, 0, 1, number), (give, 0, 0, allow)]
    steps += [(equal, 1, 0, openat), (give, 0, 0, refuse)]
    steps += [(load, 0, 0, 16 + 8 * 2), (any_bit, 0, 1, READING), (give, 0, 0, refuse), (give, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def part() -> ctypes.CDLL | None:
    """Die with the parent; a user and a network of its own where the kernel gives them. Linux's C library, or None."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]  # an address is longer than an int
    parent_death, new_user, new_network = 1, 0x10000000, 0x40000000
    libc.prctl(parent_death, 9, 0, 0, 0)
    libc.unshare(new_user | new_network)  # nobody asks whether it was done: the filter refuses sockets as well
    return libc


def fence_by_kernel(libc: ctypes.CDLL | None) -> bool:
    """Whether the kernel took the filter; it cannot be taken off."""
    code = seccomp_filter(platform.machine())
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    if libc is None or code is None or libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0:
        return False
    kept = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(kept)))
    return libc.prctl(set_seccomp, by_filter, ctypes.addressof(program), 0, 0) == 0


def limit(seconds: float, memory: int) -> str:
    """Set the limits; a sentence where one that must hold cannot be set."""
    import resource

    wanted = {"CPU": math.ceil(seconds), "AS": memory, "FSIZE": 0, "NOFILE": 32, "CORE": 0, "NPROC": 0}
    for name, value in wanted.items():
        most = value + 1 if name == "CPU" else value  # first a signal that tells what it was, then the end
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, most))
        except (AttributeError, ValueError, OSError) as error:
            if not (name == "AS" and sys.platform == "darwin"):  # macOS knows the name only
                return f"RLIMIT_{name} cannot be set ({error})"
    return ""


def fence_by_hook() -> None:
    """Refuse by name what Python announces (PEP 578); a hook cannot be taken off."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & READING:
            raise PermissionError("files are read-only here")
        if event.startswith(FENCED) and event not in HARMLESS:
            raise PermissionError(f"{event} is off here")

    sys.addaudithook(hook)


def first_python(programs: list[str]) -> types.CodeType:
    """The first of them that compiles; else the error of the last."""
    for source in programs[:-1]:
        try:
            return compile(source, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
    return compile(programs[-1], "<program>", "exec", dont_inherit=True)


def run(task: dict[str, Any]) -> None:
    """Run the first of the programs that is Python, then the tests; raises whatever they raise."""
    execute, module = exec, types.ModuleType("solution")
    names = module.__dict__
    sys.modules["solution"] = sys.modules["__main__"] = module
    tests = compile(task["test"], "<test>", "exec", dont_inherit=True)
    code = first_python(task["programs"])
    execute(code, names)
    names.pop("check", None)  # whatever the program did to builtins, only the tests' own check counts
    execute(tests, names)
    names["check"](names[task["entry_point"]])


def main() -> None:
    """Read the task, shut the doors, run it; write the nonce only after ``check`` has returned."""
    report, write, leave = int(sys.argv[1]), os.write, os._exit
    with open(0, "rb", closefd=False) as stdin:
        task = json.loads(stdin.read())
    nonce = task.pop("nonce").encode()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    sys.argv[:], sys.path[:], sys.dont_write_bytecode = [""], [each for each in sys.path if each], True
    import random  # the same program must fare the same in both arms

    random.seed(0)
    root = os.getuid() == 0  # with a user of its own it would not know
    libc = part()
    wrong = limit(task.pop("seconds"), task.pop("memory"))
    if not wrong and not fence_by_kernel(libc) and root:
        wrong = "the kernel takes no seccomp filter, and without one root may make any number of processes"
    if wrong:
        write(report, REFUSED + wrong.encode())
        leave(1)
    fence_by_hook()
    write(report, READY)
    try:
        run(task)
    except BaseException:  # SystemExit is one of them
        leave(1)
    write(report, nonce)
    leave(0)


if __name__ == "__main__":
    main()
