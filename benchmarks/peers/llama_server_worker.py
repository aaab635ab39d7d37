"""Worker: llama.cpp's server. Options: server (the program), model, threads, arguments (more of its options).

Times are the server's own: HTTP is not in them. It returns no logits.
"""

import json
import subprocess
import time
import urllib.request
from collections.abc import Sequence

from protocol import Output, Worker, free_port, serve

CONTEXT = 4096


def command(options: dict, port: int) -> list[str]:
    """The server's command: one row, no cache of prompts over requests, as many threads as ours."""
    threads = str(options["threads"])
    words = ["-m", options["model"], "-c", str(CONTEXT), "-np", "1", "--cache-ram", "0", "--no-webui", "--offline"]
    words += ["-t", threads, "-tb", threads, "--host", "127.0.0.1", "--port", str(port)]
    return [options["server"], *words, *options["arguments"]]


def request(ids: Sequence[int], tokens: int) -> dict:
    """A greedy continuation of exactly so many tokens."""
    return {
        "prompt": list(ids),
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }


def parsed(answer: dict) -> Output:
    """An answer of ``/completion``. Drafted tokens are 0 where the server does not name them: then it drafted none."""
    timings = answer["timings"]
    first, rest = (timings[name] / 1000 for name in ("prompt_ms", "predicted_ms"))
    drafted, accepted = (timings.get(name, 0) for name in ("draft_n", "draft_n_accepted"))
    return Output(answer["tokens"], first, accepted=accepted, drafted=drafted, seconds=first + rest)


def load(options: dict) -> Worker:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command(options, port), stdout=subprocess.DEVNULL)  # its log goes to our stderr
    while not _ready(url):
        if server.poll() is not None:
            raise SystemExit(f"llama-server ended with status {server.returncode}.")
        time.sleep(0.02)

    def generate(ids: list[int], tokens: int) -> Output:
        found = parsed(_post(f"{url}/completion", request(ids, tokens)))
        return found if options["drafts"] else found._replace(accepted=None, drafted=None)

    return Worker(generate, pid=server.pid, close=server.kill)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as found:
            return found.status == 200
    except OSError:  # not there yet, or still loading
        return False


def _post(url: str, body: dict) -> dict:
    sent = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    serve(load)
