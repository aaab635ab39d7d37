"""What the server does under load, when clients go away, when steps fail, and when it stops."""

import asyncio
import io
import json
import logging
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import servers
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tiny
from foredraft.core.draft import Draft
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import DrafterError, LawError, OptionError
from foredraft.engine.generator import DrafterInfo, Generator
from foredraft.serve.logs import JsonLines, Lines, log_to_stderr
from foredraft.serve.options import API_KEY, ServeOptions
from foredraft.serve.render import CompletionRenderer
from foredraft.serve.service import Service

PROMPT = [5, 6, 7]
BODY: Any = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
LONG: Any = {**BODY, "max_tokens": 200}
SOME: Any = {**BODY, "max_tokens": 50}


def hooked(hook: Callable[[View], None], **options: Any) -> Generator:
    """A generator that calls ``hook`` in each step."""

    def propose(view: View, plan: Plan) -> Draft:
        hook(view)
        return tiny.Liar([])(view, plan)

    return servers.generator(drafter=tiny.ScriptedDrafter(propose, max_nodes=7), **options)


def slow(seconds: float = 0.02, **options: Any) -> Generator:
    return hooked(lambda view: time.sleep(seconds), **options)


def test_a_full_queue_refuses_with_429_and_when_to_come_back():
    with servers.served(slow(max_rows=1), max_queue=0) as running:
        thread = threading.Thread(target=running.post, args=(SOME,))
        thread.start()
        servers.until(lambda: running.generator.engine.running == 1)
        refused = running.post(BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "RateLimitError")
        assert refused.headers["retry-after"] == "1"
        assert running.get("/health").status_code == 200
        thread.join()
        assert running.post(BODY).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_no_row(stream: bool):
    with servers.served(slow()) as running:
        with pytest.raises(httpx.TimeoutException), httpx.Client(timeout=0.3) as client:
            with client.stream("POST", f"{running.url}/v1/completions", json={**LONG, "stream": stream}) as answer:
                for _ in answer.iter_lines():
                    servers.until(lambda: running.generator.engine.running == 1)
                    raise httpx.TimeoutException("enough")
        servers.until(lambda: running.generator.engine.running == 0 and running.service.idle)
        assert tiny.pending(running.generator) == 0
        assert running.post(BODY).status_code == 200


def test_a_request_that_takes_too_long_ends_with_an_error():
    with servers.served(slow(0.1), request_timeout=1.0) as running:
        late = running.post(LONG)
        assert (late.status_code, late.json()["error"]["type"]) == (408, "TimeoutError")
        assert late.headers["x-should-retry"] == "false"
        assert running.generator.engine.running == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_step_ends_its_requests_with_an_error_and_the_server_lives():
    broken = [True]

    def fail(view: View) -> None:
        if broken[0] and view.host_lengths.min() > len(PROMPT) + 3:
            raise RuntimeError("secret")

    with servers.served(hooked(fail)) as running:
        assert running.post(BODY).status_code == 500
        with running.client() as client, pytest.raises(openai.APIError) as raised:
            for _ in client.completions.create(model=servers.NAME, stream=True, **BODY):
                pass
        assert raised.value.type == "InternalServerError"
        broken[0] = False
        assert running.post(BODY).status_code == 200


def test_draining_ends_what_was_accepted_and_takes_nothing_new():
    answers: list[httpx.Response] = []
    with servers.served(slow(0.01)) as running:
        thread = threading.Thread(target=lambda: answers.append(running.post(SOME)))
        thread.start()
        servers.until(lambda: running.generator.engine.running == 1)
        assert running.get("/health").status_code == 200
        running.service.draining = True
        assert running.get("/health").status_code == 503
        refused = running.post(BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    thread.join()
    assert running.generator.engine.closed
    answer = answers[0].json()
    assert answer["usage"]["completion_tokens"] == 50
    assert answer["choices"][0]["text"] == servers.generator().generate(PROMPT, max_new_tokens=50).text


@pytest.mark.parametrize(
    ("signals", "options"),
    [([signal.SIGINT, signal.SIGINT], {}), ([signal.SIGTERM], {"drain_seconds": 0})],
    ids=["a second Ctrl-C", "no time to drain"],
)
def test_requests_that_the_end_cuts_off_get_an_error(
    signals: list[signal.Signals], options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    """Running and waiting requests, streams and plain ones; the log has one line, without a traceback."""
    caplog.set_level(logging.WARNING)
    with servers.served(slow(max_rows=2), **options) as running, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(running.post, {**LONG, "stream": stream}) for stream in (True, False) * 3]
        servers.until(lambda: running.generator.engine.running + running.generator.engine.waiting == 6)
        for each in signals:
            running.server.handle_exit(each, None)
        answers = [each.result() for each in asked]
    assert [answer.status_code for answer in answers] == [200, 503] * 3
    for answer in answers:
        lines = [line for line in answer.text.splitlines() if line]
        assert answer.status_code == 503 or lines.pop() == "data: [DONE]"
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["message"] == "The server stopped before the request ended." and error["code"] == 503
    assert [record.getMessage() for record in caplog.records] == ["Cut off requests at the end: 6."]
    assert not any(record.exc_info for record in caplog.records)


def test_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY, "one, two")
    with servers.served(servers.generator()) as running:
        for header in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic two"}):
            refused = running.post(BODY, headers=header)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "AuthenticationError")
        assert running.post(BODY, headers={"authorization": "Bearer two"}).status_code == 200
        assert running.get("/health").status_code == 200
        assert running.get("/metrics").status_code == 401
        assert "access-control-allow-origin" not in running.post(BODY).headers


def test_prompts_that_begin_alike_are_read_once_for_each_key():
    of = servers.generator(prefix_cache=True)
    with servers.served(of, api_key=("one", "two")) as running:
        found = []
        for key, end in (("one", "a"), ("one", "b"), ("two", "c"), ("two", "d")):
            with running.client(key) as client:
                answer = client.completions.create(
                    model=servers.NAME, prompt="abcdefgh" * 20 + end, max_tokens=4, extra_body={"priority": -1}
                )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            found.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        page = running.get("/metrics", headers={"authorization": "Bearer one"}).text
    assert found[0] == found[2] == 0, "another key's prompt is no one else's"
    assert found[1] > 100 and found[3] > 100
    for name, count in (("hits", found[1] + found[3]), ("queries", 4 * 160)):
        assert f"\nvllm:prefix_cache_{name}_total {float(count)}\n" in page


def test_each_request_is_a_span(monkeypatch: pytest.MonkeyPatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    with servers.served(servers.generator()) as running:
        running.post(BODY, headers={"x-request-id": "mine-1"})
        running.post({**BODY, "temperature": -1.0}, headers={"x-request-id": "mine-2"})
    first, second = exporter.get_finished_spans()
    assert first.name == "POST /v1/completions" and first.attributes == {
        "foredraft.request_id": "mine-1",
        "foredraft.status": 200,
        "foredraft.path": "/v1/completions",
    }
    assert second.attributes and second.attributes["foredraft.status"] == 400
    assert second.end_time and second.start_time and second.end_time > second.start_time


def test_ids_of_requests_and_origins(caplog: pytest.LogCaptureFixture):
    with servers.served(servers.generator(), cors_origin=("https://page.example",)) as running, caplog.at_level("INFO"):
        answer = running.post(BODY, headers={"x-request-id": "mine-1", "origin": "https://page.example"})
        assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        forged = running.post(BODY, headers={"x-request-id": 'a"b', "origin": "https://other.example"})
        assert '"' not in forged.headers["x-request-id"]
        assert "access-control-allow-origin" not in forged.headers
    facts: list[Any] = [getattr(record, "facts", None) for record in caplog.records]
    assert ("mine-1", 200) in [(each["request_id"], each["status"]) for each in facts if each]


def test_no_progress_is_unhealthy_until_there_is_some():
    stalled = threading.Event()

    async def main() -> None:
        generator = hooked(lambda view: stalled.wait(20) and None)  # type: ignore[func-returns-value]
        service = Service(generator, ServeOptions(stall_seconds=1.0))
        job: Any = servers.job(PROMPT, max_new_tokens=4)
        with await service.start(job) as outputs:
            task = asyncio.ensure_future(outputs.results())
            service.look()
            assert service.healthy
            await asyncio.sleep(1.1)
            service.look()
            assert not service.healthy
            stalled.set()
            await task
            service.look()
            assert service.healthy

    asyncio.run(main())


def test_lossy_rules_and_text_of_others_are_refused():
    lossy = servers.generator()
    lossy.kind = DrafterInfo("tiny", False)
    with pytest.raises(LawError, match="lossy"):
        Service(lossy, ServeOptions(require_lossless=True))
    Service(lossy, ServeOptions())
    shared = servers.generator(drafter=tiny.ScriptedDrafter(tiny.Liar([]), max_nodes=7))
    shared.engine.drafter.needs = Needs(max_nodes=7, learns=True, shares_text=True)
    with pytest.raises(DrafterError, match="text of all requests"):
        Service(shared, ServeOptions())
    Service(shared, ServeOptions(shared_text=True))
    with pytest.raises(OptionError, match="max_queue"):
        ServeOptions(max_queue=-1)


def test_metrics_count_what_was_served():
    truth = servers.generator().generate(PROMPT, max_new_tokens=12).tokens
    drafter = tiny.liar([[*PROMPT, *truth]])
    with servers.served(servers.generator(drafter=drafter)) as running:
        both = [running.post(BODY).json()["metrics"]["speculative_decoding"] for _ in range(2)]
        running.post({**BODY, "temperature": -1.0})
        page = running.get("/metrics").text
        running.post({**BODY, "stream": True})
        streamed = running.get("/metrics").text
    assert "foredraft_inter_token_latency_seconds_count 0.0" in page
    assert "foredraft_inter_token_latency_seconds_count 0.0" not in streamed
    accepted = sum(each["num_accepted_draft_tokens"] for each in both)
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values["vllm:spec_decode_num_accepted_tokens_total"]) == accepted
    assert (
        values['foredraft_spec_accepted_tokens_total{drafter="tiny"}']
        == values["vllm:spec_decode_num_accepted_tokens_total"]
    )
    assert float(values["vllm:spec_decode_num_draft_tokens_total"]) == sum(each["num_draft_tokens"] for each in both)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert sum(float(value) for each, value in values.items() if each.startswith(name)) == accepted
    assert float(values["foredraft_generation_tokens_total"]) == 24
    assert float(values["foredraft_time_to_first_token_seconds_count"]) == 2
    assert float(values['foredraft_errors_total{code="400"}']) == 1


def record(message: str, level: int = logging.INFO, **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("foredraft.serve", level, "", 0, message, (), None)
    made.facts = facts
    return made


def test_on_a_terminal_log_lines_are_for_people():
    def said(given: logging.LogRecord) -> str:
        clock, _, rest = Lines().format(given).partition("  ")
        assert re.fullmatch(r"\d\d:\d\d:\d\d", clock)
        return rest

    started = said(record("Serving on x.", page="http://127.0.0.1:8000/", api="http://127.0.0.1:8000/v1"))
    assert [line.split() for line in started.splitlines() if "http" in line] == [
        ["page", "http://127.0.0.1:8000/"],
        ["API", "http://127.0.0.1:8000/v1"],
    ]
    facts = {"request_id": "1", "method": "POST", "path": "/v1/responses", "status": 400, "seconds": 1.234}
    assert said(record("request", **facts)) == "400  POST /v1/responses  1.23 s"
    assert said(record("Cut off.", logging.WARNING)) == "Warning: Cut off." and said(record("Hello.")) == "Hello."


@pytest.mark.parametrize("terminal", [True, False])
def test_logs_are_json_unless_stderr_is_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool):
    """Also if a spinner takes the place of stderr meanwhile."""
    first, later = io.StringIO(), io.StringIO()
    monkeypatch.setattr(first, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr", first)
    log_to_stderr()
    monkeypatch.setattr("sys.stderr", later)
    logging.getLogger("foredraft.serve").info("Hello.")
    for path in ("/live", "/v1/models"):
        facts = {"path": path, "status": 200, "method": "GET", "seconds": 0.1}
        logging.getLogger("foredraft.serve").info("request", extra={"facts": facts})
    logging.getLogger("uvicorn").info("Started.")
    lines = later.getvalue().splitlines()
    assert first.getvalue() == ""
    if terminal:
        assert [line[10:] for line in lines] == ["Hello.", "200  GET /v1/models  0.10 s"]
    else:
        said = [json.loads(line) for line in lines]
        assert [each["message"] for each in said] == ["Hello.", "request", "request", "Started."]


def test_the_start_names_the_addresses_to_open(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="foredraft.serve")
    with servers.served(servers.generator()) as running:
        port = running.url.rpartition(":")[2]
    (started,) = [each.facts for each in caplog.records if each.getMessage().startswith("Serving on ")]
    assert started == {"page": f"http://127.0.0.1:{port}/", "api": f"http://127.0.0.1:{port}/v1"}


def test_log_lines_are_json_and_a_full_disk_does_not_matter():
    record = logging.LogRecord("foredraft.serve", logging.INFO, "", 0, "a %s", ("\ud800\n",), None)
    record.facts = {"request_id": "1"}
    line = json.loads(JsonLines().format(record))
    assert (line["message"], line["request_id"], line["level"]) == ("a \ud800\n", "1", "info")
    full = open("/dev/full", "w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", full)
        log_to_stderr()
        with servers.served(servers.generator()) as running:
            assert running.post(BODY).status_code == 200
    with pytest.raises(OSError):
        full.close()


def test_after_an_unexpected_error_its_connection_still_works(monkeypatch: pytest.MonkeyPatch):
    with servers.served(servers.generator()) as running:
        with httpx.Client(base_url=running.url, timeout=60) as client, monkeypatch.context() as patch:
            patch.setattr(CompletionRenderer, "whole", lambda *_: 1 // 0)
            failed = client.post("/v1/completions", json=BODY)
            assert failed.status_code == 500 and failed.json()["error"]["type"] == "InternalServerError"
            assert "division" not in failed.text
            port = failed.extensions["network_stream"].get_extra_info("client_addr")
            patch.undo()
            after = client.post("/v1/completions", json=BODY)
            assert after.status_code == 200
            assert after.extensions["network_stream"].get_extra_info("client_addr") == port, "it is the same"
