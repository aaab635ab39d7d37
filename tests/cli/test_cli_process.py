"""What needs a process of its own: signals, closed pipes, terminals, and what is imported."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import PROMPT

COMMAND = [sys.executable, "-m", "foredraft"]
LONG = ["--max-new-tokens", "3900", "--eos-token-id", "8191"]
PATIENCE = 60


def test_help_and_version_import_neither_torch_nor_transformers(environment):
    code = (
        "import sys; from foredraft.cli import COMMANDS, main\n"
        "assert main(['--help']) == main(['--version']) == main([]) == 0\n"
        "assert all(main([name, '--help']) == 0 for name in COMMANDS)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "foredraft 0" in done.stdout


WAITING = """
import contextlib, sys
from foredraft.cli import console, main

class Torch(BaseException):
    pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Torch(doing)

doing = []

@contextlib.contextmanager
def busy(what):
    doing.append(what)
    yield lambda text: None
    doing.pop()

console.busy = busy
sys.meta_path.insert(0, Finder())
for line in sys.argv[1:]:
    doing.clear()
    try:
        status = main(line.split())
        print(line, "ended", status)
    except Torch as found:
        print(line, "says", *found.args[0])
"""
SLOW = [
    *("generate hi", "generate hi --record new.jsonl", "generate hi --num-beams 2", "demo", "demo hi -m absent"),
    *("chat", "serve --port 0", "batch in.jsonl out.jsonl", "bench", "tune", "check", "skip"),
    *("capacity -m absent --concurrency 1 --context 9 --memory 1", "train eagle3 --data x", "answers out --data x"),
    *("quantize absent out", "export absent --to vllm --out out", "methods eagle3"),
    "inspect absent",
]


def test_tables_of_methods_theory_and_results_need_no_torch(environment, tmp_path: Path):
    run = str(Path(__file__).parents[2] / "benchmarks/results/early_exit_speed.jsonl")
    code = (
        "import sys; from foredraft.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    assert main(line.split()) == 0, line\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), line"
    )
    tables = [f"report {run}{option}" for option in ("", " --json", " --markdown")]
    lines = ["methods", "theory --alpha .8 --cost .1", f"theory --run {run}", *tables]
    done = subprocess.run([sys.executable, "-c", code, *lines], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "prompt_lookup" in done.stdout and "Best: 6 drafted tokens per step" in done.stdout


def test_inspect_of_a_head_imports_no_modelling_code(environment):
    code = (
        "import sys; from foredraft.cli import main\n"
        "assert main(['inspect', 'sample-eagle3']) == 0\n"
        "assert not {'transformers.modeling_utils', 'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "eagle3" in done.stdout


def test_every_command_says_something_before_it_imports_torch(environment, tmp_path: Path):
    """The import takes seconds, and minutes on a busy machine."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING, *SLOW], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    silent = [line for line in done.stdout.splitlines() if not re.search(r" says (Starting|Loading)", line)]
    assert silent == [] and len(done.stdout.splitlines()) == len(SLOW)


COMPLETED = {
    "ch": ["chat", "check"],
    "generate --drafter eagle": ["eagle1", "eagle2", "eagle3"],
    "chat --max": ["--max-batch-size", "--max-model-len", "--max-prefill-tokens", "--max-new-tokens"],
    "bench -d transformers_": ["transformers_assisted", "transformers_lookup"],
    "tune -d seq": ["sequoia"],
    "check -d early": ["early_exit"],
    "skip --tri": ["--trials"],
    "train me": ["medusa", "medusa2"],
    "answers out --drafter max": ["max_gram"],
    "export --to s": ["sglang", "speculators"],
    "export --to v": ["vllm"],
    "methods opt": ["opt_tree"],
    "demo --verif": ["--verifier"],
    "check --verifier t": ["target_sampling", "token", "traversal", "typical"],
    "report run.jsonl --figures out --format p": ["png", "pdf"],
    "train eagle3 --precision b": ["bf16"],
    "tune -d bandit:pr": ["bandit:prompt_lookup"],
    "bench -d relay:[draft_model:PATH]+[max": ["relay:[draft_model:PATH]+[max_gram"],
    "generate -d draft_model:ea": [],
}


def test_completion_imports_neither_torch_nor_transformers_nor_pydantic(environment):
    code = (
        "import os, sys; from foredraft.cli import main\n"
        f"for line in {list(COMPLETED)!r}:\n"
        "    words = ['foredraft', *line.split()]\n"
        "    os.environ.update(COMP_WORDS=' '.join(words), COMP_CWORD=str(len(words) - 1))\n"
        "    try:\n"
        "        main([])\n"
        "    except SystemExit:\n"
        "        print('--')\n"
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    asking = {**environment, "_FOREDRAFT_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", code], env=asking, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [each.split() for each in done.stdout.split("--\n")[:-1]]
    assert dict(zip(COMPLETED, found, strict=True)) == COMPLETED


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True)


def test_ctrl_c_in_the_middle_of_a_stream(environment, model: Path):
    with start(environment, "generate", "-m", str(model), *LONG, PROMPT) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert len(first) == 20 and rest.endswith("\n")
    assert re.fullmatch(r"foredraft: Interrupted after \d+ tokens\.\n", said)


def test_a_pipe_that_is_closed_ends_it_quietly(environment, model: Path):
    with start(environment, "generate", "-m", str(model), *LONG, PROMPT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.read(5)) == 5
        process.stdout.close()
        assert (process.stderr.read(), process.wait(PATIENCE)) == ("", 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(environment):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "--help"], env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
        )
    assert done.returncode == 1
    assert done.stderr.startswith("foredraft: ") and done.stderr.count("\n") == 1


ON_A_TERMINAL = (
    "import fcntl, sys, termios; from foredraft.cli import main\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # from now on it is this terminal's Ctrl-C that counts\n"
    "sys.exit(main())"
)


class Terminal:
    """A command on a terminal of its own, and what a person would see of it."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *arguments],
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""
        self._waited = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._ours)
        self._process.kill()
        self._process.wait(PATIENCE)

    def wait_for(self, text: str) -> None:
        """Read on until there is another ``text``."""
        while (place := self.seen.find(text, self._waited)) < 0:
            assert self._read(), f"no {text!r} in {self.seen[-1000:]!r}"
        self._waited = place + len(text)

    def wait_for_text(self) -> None:
        """Read on until there is anything new but control sequences."""
        while not re.sub(r"\x1b\[[?\d;]*\w|\s", "", self.seen[self._waited :]):
            assert self._read()

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def reply(self, keys: str, prompt: str = "you>") -> None:
        """Type when the prompt is there."""
        self.wait_for(prompt)
        self.type(keys)

    def end(self) -> int:
        """Wait for the command to end by itself, and return its status."""
        while self._read():
            pass
        return self._process.wait(PATIENCE)

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], PATIENCE)[0]:
            return False
        try:
            data = os.read(self._ours, 4096)
        except OSError:  # the other side has gone
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def test_a_talk_on_a_terminal(environment, model: Path):
    with Terminal(["chat", "-m", str(model), "-d", "none", *LONG], environment) as terminal:
        terminal.reply("Hello\n")
        terminal.wait_for("\x1b[?2004l")  # the line is typed: what follows is the answer
        terminal.wait_for_text()
        terminal.type("\x03")
        terminal.wait_for(" · interrupted")
        terminal.reply("/stats\n")
        terminal.wait_for("1 turn, ")
        terminal.wait_for("you>")
        terminal.type("\x03")
        terminal.wait_for("Ctrl-D or /quit quits.")
        terminal.reply("/set max_new_tokens 3\n")
        terminal.wait_for("max_new_tokens 3\r\n")
        terminal.reply('"""\n')
        terminal.reply('/of two\\\nlines"""\n', prompt="...>")
        terminal.wait_for("3 tokens · ")
        terminal.wait_for(" · cut at max_new_tokens")
        terminal.reply("/nonsense\n")
        terminal.wait_for("Unknown command '/nonsense'")
        terminal.reply("\x04")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_the_arrow_keys_bring_the_lines_of_an_earlier_chat(environment, model: Path):
    chat = ["chat", "-m", str(model), "-d", "none", "--max-new-tokens", "3"]
    with Terminal(chat, environment) as terminal:
        terminal.reply("What is the time?\n")
        terminal.wait_for("3 tokens")
        terminal.reply("/quit\n")
        assert terminal.end() == 0
    with Terminal([*chat, "--quiet"], environment) as terminal:
        terminal.reply("\x1b[A\x1b[A")
        terminal.wait_for("What is the time?")
        terminal.type("\x15/exit\n")
        assert terminal.end() == 0
    assert "tokens/s" not in terminal.seen
