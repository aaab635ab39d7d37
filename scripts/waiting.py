"""Run a command whose output is long or silent: python waiting.py WHAT COMMAND...

On a terminal one line says what is done, what the command last said, and for how long; elsewhere a line does so now and
then. A command that fails shows all that it said, and its exit status is passed on. For any Python 3, without packages.
"""

import shutil
import subprocess
import sys
import threading
import time

SHOWN, TOLD = 0.2, 15.0
"""Seconds between two changes of the line on a terminal, and between two lines elsewhere."""


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Said:
    """What a command has said so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.lines = ["starting"]
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, pipe) -> None:
        for line in pipe:
            if line.strip():
                self.lines.append(line.rstrip())

    def all(self) -> str:
        self._reader.join()
        return "\n".join(self.lines[1:])

    @property
    def last(self) -> str:
        """The latest line that is no warning, without lists of packages and addresses."""
        line = next(line for line in reversed(self.lines) if not line.startswith(("WARNING", "DEPRECATION")))
        return line.strip().split(" (from ")[0].partition(": ")[0]


def main(what: str, command: "list[str]") -> int:
    started, told, terminal = time.monotonic(), 0.0, sys.stdout.isatty()
    print(f"{what} ...", end="" if terminal else "\n", flush=True)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    said = Said(process)
    try:
        while process.poll() is None:
            time.sleep(SHOWN if terminal else 0.5)
            seconds = time.monotonic() - started
            line = f"{what}, {clock(seconds)}: {said.last}"
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r{line[:width]}\x1b[K", end="", flush=True)
            elif seconds - told >= TOLD:
                told = seconds
                print(line, flush=True)
    except KeyboardInterrupt:
        process.wait()
        print("\nInterrupted; the same command starts it again.")
        return 130
    status = process.returncode
    end = f"{what}, {clock(time.monotonic() - started)}: {'done' if status == 0 else f'failed, exit status {status}'}"
    print(f"\r{end}\x1b[K" if terminal else end, flush=True)
    if status:
        print(said.all(), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
