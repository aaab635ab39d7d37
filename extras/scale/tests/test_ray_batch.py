"""A batch by two actors of Ray, killed and continued, writes what one process writes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from processes import environment

EXTRA = Path(__file__).resolve().parents[1]


def started(command: str, source: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "foredraft", command, str(source), str(out), "-d", "prompt_lookup", *options]
    return subprocess.Popen(words, env=environment(EXTRA), stderr=subprocess.DEVNULL)


def wait_for_more(process: subprocess.Popen[bytes], out: Path, size: int) -> None:
    while process.poll() is None and (out.stat().st_size if out.exists() else 0) <= size:
        time.sleep(0.02)
    assert process.poll() is None


@pytest.mark.slow
def test_a_batch_by_actors_is_that_of_one_process_though_it_and_an_actor_are_killed(tmp_path: Path):
    source, whole, out = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for number in range(400):
            body = {"prompt": f"Count to {number}.", "max_tokens": 6, "temperature": number % 2}
            request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(request) + "\n")
    assert started("batch", source, whole).wait() == 0

    first = started("actors", source, out, "--actors", "2")
    wait_for_more(first, out, 0)
    first.kill()
    first.wait()
    assert 0 < out.read_bytes().count(b"\n") < 400

    second = started("actors", source, out, "--actors", "2")
    wait_for_more(second, out, out.stat().st_size)
    actors = [each for each in psutil.Process(second.pid).children(recursive=True) if "MapWorker" in each.name()]
    assert len(actors) == 2, [each.name() for each in actors]
    actors[0].kill()
    assert second.wait() == 0
    assert out.read_bytes() == whole.read_bytes()
