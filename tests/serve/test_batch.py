"""Offline batches: answers are those of the generator, in order; a killed run continues as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.cli import main
from foredraft.core.errors import OptionError
from foredraft.engine.generator import Generator
from foredraft.files.outputs import locked
from foredraft.serve.batch_answers import BatchAnswers, BatchOptions
from foredraft.serve.batch_file import BatchFile, Report


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    with foredraft.load("sample", "prompt_lookup") as generator:
        yield generator


def chat(number: int, text: str = "Hello", **options: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **options}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(number: int, prompt: Any, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, requests: list[Any]) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in requests))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(generator: Generator, source: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    answer(generator, BatchFile(source, out), **options)
    return read(out)


def answer(generator: Generator, file: BatchFile, report: Report | None = None, **options: Any) -> None:
    file.run(BatchAnswers(generator, BatchOptions("sample", file.created, **options)).of, report)


def test_answers_are_those_of_the_generator_in_order(generator: Generator, tmp_path: Path):
    requests = [
        chat(0),
        completion(1, "Once upon a time", max_tokens=40),
        completion(2, ["a", "b"], n=2),
        chat(3, "Hi"),
    ]
    found = run(generator, write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    assert [each["custom_id"] for each in found] == ["r0", "r1", "r2", "r3"]
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found)
    bodies = [each["response"]["body"] for each in found]
    messages = [{"role": "user", "content": "Hello"}]
    assert bodies[0]["choices"][0]["message"]["content"] == generator.generate(messages, max_new_tokens=8).text
    assert bodies[1]["choices"][0]["text"] == generator.generate("Once upon a time", max_new_tokens=40).text
    assert len(bodies[2]["choices"]) == 4 and bodies[1]["usage"]["completion_tokens"] == 40
    assert len({body["id"] for body in bodies}) == 4


def test_requests_that_fail_have_an_error_object_and_stop_nobody(generator: Generator, tmp_path: Path):
    requests = [
        "{half a line",
        '"text"',
        chat(2, temperature=-1),
        {**chat(3), "url": "/v1/embeddings"},
        chat(4, stream=True),
        chat(5, model="gpt-4o"),
        completion(6, "x" * 20000),
        chat(7, colour="red"),
        {"method": "POST", "url": "/v1/completions", "body": {}},
        chat(9),
    ]
    file = BatchFile(write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    counts: list[tuple[int, int]] = []
    answer(generator, file, lambda done, failed: counts.append((done, failed)))
    found = read(tmp_path / "out.jsonl")
    assert [each["response"]["status_code"] for each in found] == [400, 400, 400, 400, 400, 404, 400, 400, 400, 200]
    assert counts == [(number, min(number, 9)) for number in range(1, 11)]
    assert [each["custom_id"] for each in found[:4]] == [None, None, "r2", "r3"]
    for each in found[:-1]:
        error = each["response"]["body"]["error"]
        assert error["code"] == each["response"]["status_code"] and error["message"]
    assert "colour" in found[7]["response"]["body"]["error"]["message"]


def test_prompts_are_repeated_and_scored(generator: Generator, tmp_path: Path):
    text = "Once upon a time"
    requests = [
        completion(0, [text, "Hello"], max_tokens=0, echo=True, logprobs=1),
        completion(1, text, max_tokens=3, echo=True, logprobs=0),
        completion(2, text, max_tokens=0, echo=True, n=2),
        completion(3, [10**6], max_tokens=0, echo=True),
    ]
    found = [each["response"] for each in run(generator, write(tmp_path / "in.jsonl", requests), tmp_path / "out")]
    assert [each["status_code"] for each in found] == [200, 200, 200, 400]
    scored, continued, repeated = (each["body"]["choices"] for each in found[:3])
    for choice, prompt, size in ((scored[0], text, 0), (scored[1], "Hello", 0), (continued[0], text, 3)):
        expected = [each and each.logprob for each in generator.score(prompt)]
        assert choice["text"].startswith(prompt) and (choice["text"] == prompt) == (size == 0)
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(expected) + size
        assert logprobs[1 : len(expected)] == pytest.approx(expected[1:], abs=1e-4)
    assert [each["text"] for each in repeated] == [text, text] and repeated[0]["logprobs"] is None
    assert [each["body"]["usage"]["completion_tokens"] for each in found[:3]] == [0, 3, 0]
    assert {each["body"]["object"] for each in found[:3]} == {"text_completion"}


def test_the_priority_reaches_the_engine(tmp_path: Path):
    priorities: list[int] = []
    with foredraft.load("sample", "none", max_batch_size=1) as generator:
        submit = generator.engine.submit

        def noted(*args: Any, **options: Any) -> Any:
            priorities.append(options["priority"])
            return submit(*args, **options)

        generator.engine.submit = noted  # type: ignore[method-assign]
        run(generator, write(tmp_path / "in.jsonl", [chat(0), chat(1, priority=-3)]), tmp_path / "out.jsonl")
    assert priorities == [0, -3]


def test_a_request_without_a_seed_has_one_of_its_own(generator: Generator, tmp_path: Path):
    requests = [completion(number, "The", temperature=1.0, max_tokens=24) for number in range(4)]
    source = write(tmp_path / "in.jsonl", requests)
    texts = [
        [each["response"]["body"]["choices"][0]["text"] for each in run(generator, source, tmp_path / name, seed=seed)]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 4


@pytest.mark.parametrize("cut", [0, 1, 200, 450, 10_000])
def test_a_file_that_was_cut_anywhere_is_completed(cut: int, generator: Generator, tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [chat(number, f"Say {number}") for number in range(3)])
    run(generator, source, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:cut])
    again = BatchFile(source, tmp_path / "cut")
    assert again.answered == whole[:cut].count(b"\n")
    answer(generator, again)
    assert (tmp_path / "cut").read_bytes() == whole


THEIRS = {"id": "batch_req_67", "custom_id": "r0", "response": {"status_code": 200, "body": {}}, "error": None}
OTHERS = {
    "a note": "my notes",
    "a line": "my notes\n",
    "an answer to another request": '{"custom_id": "other", "response": {"status_code": 200}}\n',
    "an answer of OpenAI": json.dumps(THEIRS) + "\n",
    "half an answer of OpenAI": json.dumps(THEIRS)[:70],
    "the id alone": '{"id": "batch_req_0", "custom_id": "r0"}\n',
    "no status": '{"id": "batch_req_0", "custom_id": "r0", "response": []}\n',
    "nested": "[" * 100_000 + "\n",
    "long": "x" * 3_000_000,
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS.keys())
def test_a_file_of_something_else_is_left_alone(content: str, tmp_path: Path):
    (tmp_path / "out").write_text(content)
    source = write(tmp_path / "in.jsonl", [chat(0)])
    for run in ({}, RUN):
        with pytest.raises(OptionError, match="choose another file"):
            BatchFile(source, tmp_path / "out", run)
    assert (tmp_path / "out").read_text() == content
    with pytest.raises(OptionError, match="choose another file"):
        BatchFile(source, source)
    with pytest.raises(OptionError, match="no file that could be read twice"):
        BatchFile(Path("/dev/zero"), tmp_path / "new")


RUN = {"model": "sample", "seed": 3, "default_max_tokens": 8}


def test_a_run_with_other_options_does_not_continue_a_file(generator: Generator, tmp_path: Path):
    source, out = write(tmp_path / "in.jsonl", [chat(0), chat(1)]), tmp_path / "out.jsonl"
    answer(generator, BatchFile(source, out, RUN), run=RUN)
    whole = out.read_bytes()
    assert [each["foredraft"] for each in read(out)] == [RUN, RUN]
    for cut in (len(whole), len(whole) // 2 + 40):
        out.write_bytes(whole[:cut])
        with pytest.raises(OptionError, match="was begun with seed 3, not seed 4: use the same options to continue it"):
            BatchFile(source, out, {**RUN, "seed": 4})
        with pytest.raises(OptionError, match="was begun with seed 3, weights None, not seed None, weights 'int4'"):
            BatchFile(source, out, {"model": "sample", "default_max_tokens": 8, "weights": "int4"})
        assert out.read_bytes() == whole[:cut]
    for cut in range(0, len(whole), 7):
        out.write_bytes(whole[:cut])
        assert BatchFile(source, out, RUN).answered == whole[:cut].count(b"\n")
        kept = out.read_bytes()
        assert kept == whole[: whole[:cut].rfind(b"\n") + 1]


def test_two_runs_never_write_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out = write(tmp_path / "in.jsonl", [chat(0)]), tmp_path / "out.jsonl"
    with locked(out):
        assert main(["batch", str(source), str(out), "-d", "none"]) == 2
    assert f"Another run uses {out}" in " ".join(capsys.readouterr().err.split()) and not out.exists()


def test_responses_are_answered_as_chats(generator: Generator, tmp_path: Path):
    body = {"input": "Hello", "max_output_tokens": 8, "temperature": 0}
    asked = {"custom_id": "r0", "method": "POST", "url": "/v1/responses", "body": body}
    sampled = {**asked, "custom_id": "r2", "body": {**body, "temperature": 1.0}}
    found = run(generator, write(tmp_path / "in.jsonl", [asked, chat(1), sampled, sampled]), tmp_path / "out.jsonl")
    first, second, *others = (each["response"]["body"] for each in found)
    assert first["object"] == "response" and first["id"] == "resp_0" and first["status"] == "completed"
    assert first["usage"]["output_tokens"] == second["usage"]["completion_tokens"]
    assert first["output"][0]["content"][0]["text"] == second["choices"][0]["message"]["content"]
    assert len({json.dumps(each["output"][0]["content"]) for each in others}) == 2, "each has a seed of its own"


def test_another_model_is_refused_before_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write(tmp_path / "in.jsonl", ["{", chat(0), chat(1, model="gpt-4o mini"), chat(2, model=3)])
    out = tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(out), "-d", "none"]) == 2
    sentence = "request 3 asks for the model 'gpt-4o mini', and this one is 'sample': give --name 'gpt-4o mini'"
    assert sentence in " ".join(capsys.readouterr().err.split()) and not out.exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out = write(tmp_path / "in.jsonl", [chat(0, model="mine"), "{"]), tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(out), "-d", "none", "--name", "mine"]) == 0
    assert [each["response"]["status_code"] for each in read(out)] == [200, 400]
    assert "2 answers, 1 of them errors" in " ".join(capsys.readouterr().err.split())
    assert main(["batch", str(tmp_path / "missing"), str(out)]) == 2
    assert "Cannot read" in capsys.readouterr().err


def killed_at_random(source: Path, out: Path, kills: int, pause: tuple[float, float]) -> int:
    """Run the command, kill it at random moments after its first new answers, and let it end at last, here."""
    arguments = ["batch", str(source), str(out), "-d", "prompt_lookup"]
    command = [sys.executable, "-m", "foredraft", *arguments]
    source_of_moments, done = random.Random(3), 0
    for _ in range(kills):
        size = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None and (out.stat().st_size if out.exists() else 0) <= size:
            time.sleep(0.01)
        time.sleep(source_of_moments.uniform(*pause))
        done += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert main(arguments) == 0
    return done


@pytest.mark.slow
def test_a_run_that_was_killed_ten_times_leaves_the_file_of_an_undisturbed_one(tmp_path: Path):
    numbers = random.Random(5)
    requests = [
        chat(number, f"Tell me about the number {number}.", max_tokens=numbers.randint(1, 4), temperature=number % 2)
        for number in range(2000)
    ]
    source = write(tmp_path / "in.jsonl", requests)
    assert main(["batch", str(source), str(tmp_path / "whole"), "-d", "prompt_lookup"]) == 0
    assert killed_at_random(source, tmp_path / "killed", 10, (0.0, 4.0)) >= 8, "most were killed while they ran"
    whole, killed = ((tmp_path / name).read_text().splitlines() for name in ("whole", "killed"))
    assert len(whole) == 2000 and killed == whole


def test_a_killed_run_continues(tmp_path: Path):
    requests = [chat(number, f"Count to {number}.", max_tokens=16, temperature=number % 2) for number in range(24)]
    source = write(tmp_path / "in.jsonl", requests)
    assert killed_at_random(source, tmp_path / "killed", 1, (0.0, 0.1)) == 1
    assert main(["batch", str(source), str(tmp_path / "whole"), "-d", "prompt_lookup"]) == 0
    assert (tmp_path / "killed").read_text() == (tmp_path / "whole").read_text()
