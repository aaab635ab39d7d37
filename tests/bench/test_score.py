"""Right answers are told from wrong ones, programs of strangers do no harm, and two arms are compared by the book."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest
from scipy import stats

from foredraft.bench import cell, sandbox
from foredraft.bench.prompts import Ask, Program, read_prompts
from foredraft.bench.quality import ScoresCompared, ShareRight, compare_scores, share_right
from foredraft.bench.sandbox import Trial, try_program
from foredraft.bench.score import normalised, programs_of, said_number, score, scorer_of
from foredraft.core.errors import OptionError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "prompts"
HELPER = "from typing import List\n\n\ndef half(n):\n    return n // 2\n\n\n"
PROMPT = HELPER + 'def halves(l: List[int]):\n    """Halve all."""\n'
TEST = "\n\ndef check(candidate):\n    assert candidate([4, 7]) == [2, 3]\n    assert candidate([]) == []\n"
GOOD, BAD = "    return [half(n) for n in l]\n", "    return [half(n) + 1 for n in l]\n"
WHOLE = "def halves(l: List[int]):\n" + GOOD
POSIX = pytest.mark.skipif(os.name != "posix", reason="programs are not executed here")
KERNEL = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in cell.SYSCALLS, reason="no seccomp filter for this machine"
)


def asked(prompt: str = PROMPT, chat: bool = False) -> Ask:
    cut = prompt.rstrip("\n")  # as read_prompts does
    program = Program("halves", TEST)
    if chat:
        return Ask([{"role": "user", "content": cut}], (cut,), "HumanEval", program=program)
    return Ask(cut, (prompt,), "HumanEval", program=program)


def question(*references: str) -> Ask:
    return Ask("How many?", ("How many?",), "math", references=references)


def tried(source: str, seconds: float = 10.0, memory: int = 256 << 20) -> Trial:
    """The identity, after something else."""
    program = f"{source}\n\ndef same(x):\n    return x\n"
    return try_program([program], "def check(f):\n    assert f(3) == 3\n", "same", seconds=seconds, memory=memory)


# Programs


@POSIX
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("\n" + GOOD, True),
        (GOOD, True),
        ("\n" + BAD, False),
        ("\n" + GOOD + "\n\ndef other(:", True),  # what comes after a stop sequence is not looked at
        ("\n" + GOOD + "\n# and so on, and so on\nwhat?", True),
        ("\n" + GOOD + "\nprint(halves(", True),
        ("\n" + GOOD + "\nif __name__ == '__main__':\n    raise SystemExit", True),
        ("\n" + GOOD + "```\nThat is all.", True),
        (f"Sure, here it is:\n\n```python\n{WHOLE}```\nIt halves.", True),
        (f"Sure.\n```\n{GOOD}```", True),
        (f"```python\n{WHOLE}", True),  # cut off before the fence was shut
        (f"Try:\n```python\nhalves([1])\n```\n```python\n{WHOLE}```", True),
        (f"```python\ndef halves(l):\n{BAD}```", False),
        (WHOLE, True),
        (f"Here it is.\n\n{WHOLE}\nIt halves.", True),
        ("", False),
        ("I cannot do that.", False),
        ("\n    return [half(n) for n in", False),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_programs(text: str, right: bool, chat: bool):
    assert score(asked(chat=chat), text, execute=True) is right


def test_programs_run_only_where_asked_for(tmp_path: Path):
    trace = tmp_path / "trace"
    assert score(asked(), f"\n    open({str(trace)!r}, 'w')") is None
    assert scorer_of(asked()) is None
    assert not trace.exists()


def test_the_likeliest_reading_is_first():
    assert programs_of(asked(), "\n" + GOOD)[0] == PROMPT.rstrip("\n") + "\n" + GOOD
    answer = programs_of(asked(chat=True), f"```python\n{WHOLE}```")[0]
    assert answer.startswith(HELPER) and answer.endswith(WHOLE)


@POSIX
def test_the_published_solutions_pass_and_others_do_not():
    path = SHARED / "human_eval" / "HumanEval.jsonl"
    if not path.exists():
        pytest.skip("HumanEval.jsonl is not here")
    solutions = [json.loads(line)["canonical_solution"] for line in path.read_text("utf-8").splitlines()]
    asks = read_prompts(path)
    for i in range(0, len(asks), 16):
        assert score(asks[i], solutions[i], execute=True) is True, asks[i].name
        assert score(asks[i], "    return 12345\n", execute=True) is False, asks[i].name


# Numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 and 4 make 7.", "7"),
        ("It costs $1,234.50.", "1234.5"),
        ("She owes -$5", "-5"),
        ("She owes $-5 now", "-5"),
        ("\u22127 degrees", "-7"),
        ("from 5-3", "3"),
        ("so 10 - 4", "4"),
        ("x=-7", "-7"),
        ("that is 50%", "50"),
        ("1,2,3", "3"),
        ("12,345,678 stars", "12345678"),
        (".5", "0.5"),
        ("\\boxed{18}", "18"),
        ("**18** apples", "18"),
        ("#### 1,000\n\nIn 2 steps.", "1000"),
        ("2 + 2\n#### 4\n#### 5", "4"),
        ("The answer is 18 because 3 times 6 is so.", "18"),
        ("The answer is 5? No: the answer is $6, by 2 ways.", "6"),
        ("**Answer:** 12, in 3 steps", "12"),
        ("To find the answer: 2 and 3 make 5", "2"),  # on the line of the marker it is taken for the answer
        ("Here is the answer:\n2 * 3 = 6", "6"),
        ("So 8.\n\nQuestion: Ann has 4 cats", "8"),
        ("Question: Ann has 4 cats", "4"),
        ("#### none, but 3", "3"),
    ],
)
def test_numbers_of_texts(text: str, number: str):
    assert said_number(text) == Decimal(number)


def test_a_text_without_numbers():
    assert said_number("none at all, x² and so on") is None
    assert score(question("#### 3"), "none at all") is False


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("2 + 16 = <<2+16=18>>18\n#### 18", "It is 18.00 dollars", "It is 19, not 18 or 17"),
        ("#### 1,200", "1200", "1,2"),
        ("#### -3", "so -3", "so 3"),
        ("42", "I think 42", "4 and 2"),
        ("$7.50", "7.5", "7.05"),
        ("50%", "the answer is 50 %", "0.5"),
        ("3.0", "3", "30"),
    ],
)
def test_numeric_references(reference: str, right: str, wrong: str):
    assert score(question(reference), right) is True
    assert score(question(reference), wrong) is False
    assert score(question("1000000", reference), right) is True  # any of them


# Phrases


def test_phrases_are_compared_as_squad_does():
    assert normalised("The  Eiffel-Tower, a\ttower!") == "eiffeltower tower"
    ask = question("The Nile", "River Nile")
    assert score(ask, " the nile.\nIt is long.") is True
    assert score(ask, "Nile, river") is False
    assert score(ask, "It is the Nile") is False
    assert score(ask, "") is False


def test_what_has_nothing_to_be_held_against_is_not_scored():
    assert score(question(), "anything") is None
    assert score(question("    return 1\n"), "    return 1\n") is None  # a solution without tests
    assert score(question("a\nb"), "a\nb") is None
    assert score(question("one two three four five six"), "one two three four five six") is None
    assert score(question("The"), "a") is None  # nothing is left of it
    several = Ask("first", ("first", "second"), "math", references=("1", "2"))
    assert score(several, "1") is None  # references of turns, not of one answer
    shots = [{"role": role, "content": "2?"} for role in ("user", "assistant", "user")]
    assert score(Ask(shots, ("2?", "2?"), "math", references=("2",)), "2") is True


@pytest.mark.parametrize(("name", "scored"), [("gsm8k", True), ("humaneval", False), ("sum", False), ("qa", False)])
def test_prompt_files_as_they_are(name: str, scored: bool):
    path = SHARED / "eagle" / name / "question.jsonl"
    if not path.exists():
        pytest.skip(f"the prompts of {name} are not here")
    for ask in read_prompts(path):
        assert (scorer_of(ask, execute=True) is not None) is scored
        if scored:
            assert score(ask, ask.references[0]) is True
            assert score(ask, ask.references[0] + "1") is False


# The sandbox


@POSIX
def test_a_right_program_passes_and_is_told_from_a_wrong_one():
    assert tried("import math, random, dataclasses, collections, time\ntime.sleep(0.001)") == Trial("passed")
    assert tried("assert False") == Trial("failed")
    assert tried("import numpy").reason == "failed"  # only the standard library


@POSIX
@pytest.mark.parametrize("source", ["while True: pass", "import time\ntime.sleep(60)"])
def test_loops_and_sleepers_are_stopped(source: str):
    began = time.monotonic()
    assert tried(source, seconds=0.5).reason == "timed out"
    assert time.monotonic() - began < 60  # on a machine that does other things


@POSIX
@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(0)",
        "exit(0)",
        "import os\nos._exit(0)",
        "raise KeyboardInterrupt",
        "import os, sys\nos.closerange(0, 64)",  # the channel is shut
        "import os\nfor i in range(3, 32):\n    try: os.write(i, b'ready\\n' + b'0' * 32)\n    except OSError: pass",
        "import os\nfor i in range(3, 32):\n    try: os.write(i, b'x' * 4000)\n    except OSError: pass",
        "import ctypes\nctypes.string_at(0)",
        "def f(): return f()\nf()",
        "x = [0] * 10**11",
        "x = []\nwhile True: x.append(bytes(10**7))",
        "\0",
        "(" * 10000,
    ],
)
def test_what_does_not_reach_the_end_of_the_tests_has_not_passed(source: str):
    assert tried(source).reason == "failed"


@POSIX
def test_leaving_from_inside_the_function_is_no_pass():
    for leave in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"):
        trial = try_program([f"def f():\n    {leave}"], "def check(f):\n    f()\n    assert False", "f")
        assert trial.reason == "failed"


@POSIX
def test_the_files_own_check_counts():
    cheat = "def check(f): pass\nimport builtins, os, sys\nbuiltins.exec = builtins.compile = print\nos.write = print\n"
    assert tried(cheat).passed  # the function is right, whatever else was bent
    wrong = [cheat + "def same(x):\n    return 4\n"]
    assert try_program(wrong, "def check(f):\n    assert f(3) == 3", "same").reason == "failed"
    assert try_program(["def other(): pass"], "def check(f): pass", "same").reason == "failed"


@POSIX
def test_output_is_thrown_away(capfd: pytest.CaptureFixture[str]):
    assert tried("import sys\nfor _ in range(2000): print('x' * 10000); sys.stderr.write('y' * 1000)").passed
    assert capfd.readouterr() == ("", "")


@POSIX
def test_nothing_comes_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "1")
    assert tried("import os, sys\nassert not os.environ and sys.stdin.read() == '' and len(sys.argv) == 1").passed
    assert tried(
        "import sys\nassert '' not in sys.path and not any('site-packages' in each for each in sys.path)"
    ).passed


@POSIX
def test_one_program_fares_the_same_each_time():
    odd = "import random\nassert random.random() == {} and hash('text') == {}"
    code = "import random; random.seed(0); print(random.random(), hash('text'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    )
    assert tried(odd.format(*done.stdout.split())).passed


FENCES = {  # what is taken out of the cell to see the other fence alone
    "both": {},
    "kernel": {"    fence_by_hook()\n": ""},
    "hook": {"not fence_by_kernel(libc)": "not True"},
}
ATTEMPTS = {
    "write": "open(victim, 'w')",
    "truncate": "open(victim, 'r+').truncate()",
    "remove": "os.remove(victim)",
    "rename": "os.rename(victim, victim + '2')",
    "chmod": "os.chmod(victim, 0)",
    "rmtree": "shutil.rmtree(os.path.dirname(victim))",
    "run": "subprocess.run(['rm', victim])",
    "system": "assert os.system('rm ' + victim) == 0",
    "fork": "os.fork() or os._exit(0)",
    "process": "multiprocessing.Process(target=print).start()",
    "kill": "os.kill(os.getppid(), 0)",
    "socket": "socket.socket()",
    "native": "assert ctypes.CDLL(None).unlink(victim.encode()) == 0",
    "thread": "threading.Thread(target=print).start()",
    "fifo": "os.mkfifo(victim + '2')",
    "memory": "assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) != -1",
}


def alter_cell(monkeypatch: pytest.MonkeyPatch, folder: Path, changes: dict[str, str]) -> None:
    text = Path(cell.__file__).read_text("utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "cell.py").write_text(text, "utf-8")
    monkeypatch.setattr(cell, "__file__", str(folder / "cell.py"))


@POSIX
@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_reaches_outside_is_refused(attempt: str, fence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if fence != "hook" and (sys.platform != "linux" or platform.machine() not in cell.SYSCALLS):
        pytest.skip("no seccomp filter for this machine")
    if fence == "hook" and attempt in ("thread", "fifo"):
        pytest.skip("not announced by Python: only the kernel refuses it")
    victim = tmp_path / "folder" / "victim"
    victim.parent.mkdir()
    victim.write_text("kept")
    alter_cell(monkeypatch, tmp_path, FENCES[fence])
    names = "ctypes, multiprocessing, os, shutil, socket, subprocess, threading"
    caught = "(OSError, RuntimeError, AssertionError)"
    source = f"import {names}\nvictim = {str(victim)!r}\ntry: {ATTEMPTS[attempt]}\nexcept {caught}: pass\nelse: 1 / 0"
    assert tried(source) == Trial("passed")
    assert victim.read_text() == "kept" and os.listdir(victim.parent) == ["victim"]


@KERNEL
def test_a_fork_bomb_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alter_cell(monkeypatch, tmp_path, FENCES["kernel"])
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    before = processes()
    assert tried(bomb, seconds=0.5).reason == "timed out"
    assert processes() <= before + 200  # other people's come and go


def processes() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc"))


def test_the_filter_knows_this_kernels_numbers():
    for machine, (_, openat, allowed) in cell.SYSCALLS.items():
        code = cell.seccomp_filter(machine)
        assert code is not None and len(code) == 8 * (4 + 2 * len(allowed) + 6)
        assert len(set(allowed)) == len(allowed) and openat not in allowed
    x86, arm = cell.SYSCALLS["x86_64"][2], cell.SYSCALLS["aarch64"][2]
    for forbidden in (56, 57, 58, 59, 62, 41, 82, 83, 84, 87, 101, 302, 435):  # clone, fork, execve, kill, socket, …
        assert forbidden not in x86
    for forbidden in (220, 221, 129, 130, 131, 198, 34, 35, 38, 276, 117, 261, 435):
        assert forbidden not in arm
    assert cell.seccomp_filter("m68k") is None


def test_where_nothing_can_be_limited_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="resource"):
        score(asked(), GOOD, execute=True)


@POSIX
def test_a_sandbox_that_does_not_stand_says_nothing_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alter_cell(monkeypatch, tmp_path, {'"NPROC": 0': '"NOTHING": 0'})
    trial = tried("")
    assert trial.reason == "refused" and not trial.passed
    with pytest.raises(OptionError, match="RLIMIT_NOTHING"):
        score(asked(), GOOD, execute=True)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert tried("") == Trial("refused", "it did not start")


@POSIX
def test_root_without_a_filter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Because the kernel lets root make any number of processes."""
    alter_cell(monkeypatch, tmp_path, {"not fence_by_kernel(libc)": "not False", "os.getuid() == 0": "True"})
    assert tried("").reason == "refused"


# Same quality


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (5, 1), (3, 3), (2, 12), (40, 60), (600, 700)])
def test_mcnemar_is_the_binomial_test(a: int, b: int):
    p = ScoresCompared(7, a, b, 3).p_value
    assert p == pytest.approx(stats.binomtest(a, a + b).pvalue if a + b else 1.0, rel=1e-9)


def test_mcnemar_by_hand():
    assert ScoresCompared(10, 5, 1, 4).p_value == pytest.approx(2 * (1 + 6) / 64)
    assert ScoresCompared(0, 0, 6, 0).p_value == pytest.approx(2 / 64)


@pytest.mark.parametrize(("right", "judged"), [(0, 10), (10, 10), (7, 20), (1, 3), (131, 164)])
def test_wilson(right: int, judged: int):
    expected = stats.binomtest(right, judged).proportion_ci(0.95, method="wilson")
    share = ShareRight(right, judged)
    assert share.interval == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert share.interval[0] <= share.share <= share.interval[1]


def test_nothing_judged():
    empty = compare_scores({}, {"p": True})
    assert empty.pairs == 0 and empty.p_value == 1.0 and empty.a.interval == (0.0, 1.0)
    assert empty.a.share != empty.a.share and empty.difference != empty.difference


def test_pairs_are_prompts_that_both_arms_were_judged_on():
    a = {"1": True, "2": True, "3": False, "4": False, "5": None, "6": True, "7": True}
    b = {"1": True, "2": False, "3": True, "4": False, "5": True, "6": None, "8": True, "7": False}
    found = compare_scores(a, b)
    assert found == ScoresCompared(both=1, only_a=2, only_b=1, neither=1)
    assert found.a == ShareRight(3, 5) and found.b == ShareRight(2, 5) and found.difference == pytest.approx(-0.2)
    assert share_right(a) == ShareRight(4, 6)


def test_the_interval_of_the_difference():
    same = ScoresCompared(10, 0, 0, 10).difference_interval
    assert same == pytest.approx((-1.959964 / 22, 1.959964 / 22), abs=1e-6)
    low, high = ScoresCompared(50, 5, 15, 30).difference_interval
    middle, half = 10 / 102, 1.959964 * (21 - 100 / 102) ** 0.5 / 102
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=1e-6)
