"""The page in a real browser: it streams, draws the trees, works by keyboard, and shows texts as texts."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers

import tiny
from browser import Browser, browser
from foredraft.engine.generator import Generator
from foredraft.serve.page import page, policy

CHAT: Any = [{"role": "user", "content": "say something"}]
EVIL = "</script><script>document.title = 'broken'</script><img src=x onerror=alert(1)>"


def generator() -> Generator:
    """One whose drafts are trees, some of their tokens right."""
    texts = [servers.generator().encode(prompt) for prompt in ("abc", CHAT)]
    outputs = [servers.generator().generate(text, max_new_tokens=60).tokens for text in texts]
    truths = [[*text, *output] for text, output in zip(texts, outputs, strict=True)]
    return tiny.generator(servers.model(), tiny.liar(truths), tokenizer=servers.tokenizer())


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Running]:
    with servers.served(generator()) as running:
        yield running


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_steps_and_pieces_come_on_request_only(server: servers.Running):
    with server.client() as client:
        options: Any = {"model": servers.NAME, "max_tokens": 30, "temperature": 0.0}
        plain = client.completions.create(prompt="abc", **options).choices[0]
        assert plain.model_extra is not None and not {"steps", "pieces"} & plain.model_extra.keys()
        whole = client.completions.create(prompt="abc", extra_body={"return_steps": True}, **options).choices[0]
        chunks = client.completions.create(prompt="abc", stream=True, extra_body={"return_steps": True}, **options)
        parts = [chunk.choices[0].model_extra or {} for chunk in chunks]
    found = whole.model_extra or {}
    streamed = [step for part in parts for step in part["steps"]]
    assert "".join(piece["text"] for part in parts for piece in part["pieces"]) == whole.text
    assert sum(len(step["emitted"]) for step in streamed) >= 30 > len(streamed)
    assert "".join(piece["text"] for piece in found["pieces"]) == whole.text == plain.text
    assert {piece["by"] for piece in found["pieces"]} == {"target", "drafter"}
    for step in found["steps"]:
        on_path = [step["tokens"][node] for node in step["path"]]
        assert step["emitted"][:-1] == on_path and len(step["texts"]) == len(step["parents"]) == len(step["tokens"])
        ends = [0, *step["path"]]
        assert [step["parents"][node] for node in step["path"]] == ends[:-1]
    emitted = [token for step in found["steps"] for token in step["emitted"]]
    assert emitted[:30] == servers.generator().generate("abc", max_new_tokens=30).tokens


def test_the_page_is_served_with_a_policy_and_live_facts(server: servers.Running):
    answer = server.get("/")
    assert answer.text == page() and answer.headers["content-security-policy"] == policy(page())
    assert "innerHTML" not in answer.text
    assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace("HTTP", "")
    now = server.get("/live").json()
    assert now == {
        "model": servers.NAME,
        "drafter": "tiny",
        "lossless": True,
        "chat": True,
        "running": 0,
        "waiting": 0,
        "max_rows": 32,
    }


def outputs(server: servers.Running) -> float:
    """Outputs that have ended."""
    page = server.get("/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("foredraft_outputs_total{"))


def test_no_text_of_a_record_ends_its_element():
    text = page([{"prompt": EVIL}])
    assert EVIL not in text and text.count("</script>") == page().count("</script>")
    start = text.index('id="record">') + len('id="record">')
    assert json.loads(text[start : text.index("</script>", start)]) == [{"prompt": EVIL}]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")])
def test_a_chat_streams_and_its_steps_are_drawn(
    server: servers.Running, tab: Browser, width: int, scheme: str, tmp_path: Path
):
    before = outputs(server)
    tab.open(server.url, width, 900, scheme)
    tab.wait("document.getElementById('live').textContent.startsWith('batch ')")
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(16, 19, 23)" if scheme == "dark" else "rgb(246, 247, 249)")
    tab.run("document.getElementById('tokens').value = 60, document.getElementById('compare').click()")
    tab.run("""{
        window.lengths = new Set();
        new MutationObserver(() => lengths.add(document.querySelector(".run .text")?.textContent.length))
            .observe(document.getElementById("log"), {childList: true, subtree: true});
        document.getElementById("prompt").focus();
    }""")
    tab.type("say something")
    tab.press("Enter", "\r")
    tab.wait("!document.getElementById('send').disabled && document.querySelectorAll('.run').length === 2")
    assert tab.run("lengths.size") > 2, "the answer did not come in parts"
    first, second = tab.run("[...document.querySelectorAll('.run .text')].map(each => each.textContent)")
    assert first == second == servers.generator().generate(CHAT, max_new_tokens=60).text
    after = outputs(server)
    assert after - before == 4, "both arms were warmed up"
    assert "The texts are equal" in tab.run("document.getElementById('log').textContent")
    assert tab.run("document.querySelectorAll('.run .text .drafter').length") > 3
    tab.run("document.getElementById('step').focus()")
    tab.press("Home")
    tab.press("ArrowRight")
    assert tab.run("document.getElementById('step-title').textContent").startswith("Step 2 of ")
    nodes = "document.querySelectorAll('#tree .node')"
    drafted = int(tab.run("document.getElementById('step-facts').textContent").split()[0])
    assert tab.run(f"{nodes}.length") == drafted + 2
    assert tab.run("document.querySelectorAll('#bars i').length") >= 1
    assert tab.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    headings = tab.run("[...document.querySelectorAll('h1, h2, h3, h4')].map(each => Number(each.tagName[1]))")
    assert headings[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(headings))
    tab.screenshot(tmp_path / "page.png")
    assert tab.complaints == []


MARKDOWN = (
    "# Title of **it**\n\nSome *words*, __bold__, `x = a*b*c`, snake_case_name, 2 * 3 * 4 and [link](http://x/y).\n"
    "- one\n  - two **deep**\n1. first\n> quoted\n---\n"
    "```python\ndef f(a):\n    return a ** 2  # *i*\n```\n| a | b |\n*open"
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_answers_are_drawn_as_markdown_and_stay_the_text(server: servers.Running, tab: Browser, size: int):
    """In pieces of any size; marks are hidden, not left out."""
    tab.open(server.url)
    pieces = [MARKDOWN[place : place + size] for place in range(0, len(MARKDOWN), size)]
    tab.run(
        "window.run = new Run('x', document.getElementById('log'));"
        f"{json.dumps(pieces)}.forEach((text, i) => run.write({{text, tokens: 1, by: i % 2 ? 'drafter' : 'target'}}))"
    )

    def seen(selector: str) -> list[str]:
        """The texts of lines or parts as they are seen."""
        return tab.run(f"[...run.text.querySelectorAll('{selector}')].map(each => each.innerText)")

    assert tab.run("run.text.textContent") == MARKDOWN
    shown = [line.rstrip("\n") for line in seen(":scope > div")]
    plain = "Some words, bold, x = a*b*c, snake_case_name, 2 * 3 * 4 and link."
    lists = ["one", "two deep", "1. first", "quoted"]
    code = ["", "def f(a):", "    return a ** 2  # *i*", ""]
    assert shown == ["Title of it", "", plain, *lists, "", *code, "| a | b |", "*open"]
    for selector, text in ((".b", "itbolddeep"), (".c", "x = a*b*c"), (".a", "link"), (".i", "words")):
        assert "".join(seen(selector)) == text
    drafted = "".join(piece for place, piece in enumerate(pieces) if place % 2)
    assert tab.run("[...run.text.querySelectorAll('.drafter')].map(each => each.textContent).join('')") == drafted
    tab.run("document.getElementById('markdown').click()")
    assert [line.rstrip("\n") for line in seen(":scope > div")] == MARKDOWN.split("\n") and tab.complaints == []


@pytest.mark.slow
def test_an_answer_that_is_cut_says_so_and_no_token_is_an_empty_box(server: servers.Running, tab: Browser):
    tab.open(server.url)
    tab.run("document.getElementById('tokens').value = 5; document.getElementById('prompt').focus()")
    tab.type("abc")
    tab.press("Enter", "\r")
    tab.wait("!document.getElementById('send').disabled && document.querySelectorAll('.run').length === 1")
    assert "Cut after 5 tokens" in tab.run("document.querySelector('.run').textContent")
    step = {
        "tokens": [4, 0],
        "texts": ["a", ""],
        "parents": [-1, 0],
        "path": [1],
        "emitted": [0, 2],
        "emitted_texts": ["", "<|end|>"],
    } | {"by": "drafter", "seconds": 1.0, "rows": 1}
    tab.run(f"drawStep({json.dumps(step)}, 0, 1)")
    assert tab.run("[...document.querySelectorAll('#tree text')].map(each => each.textContent)") == ["a", "#0", "⟨end⟩"]
    tab.run("document.getElementById('tokens').value = ''")
    tab.run(
        "window.sent = []; window.realFetch = fetch;"
        "window.fetch = (path, given) => { if (given.body) sent.push(given.body); return realFetch(path, given); };"
    )
    tab.run("answer({add() {}, end() {}}, true, 'abc', 1, undefined)")
    (sent,) = tab.run("sent")
    assert "max_tokens" not in json.loads(sent), "the server's limit holds"
    assert tab.complaints == []


@pytest.mark.slow
def test_what_is_no_text_stays_text(server: servers.Running, tab: Browser):
    tab.open(server.url)
    tab.run("document.getElementById('tokens').value = 4; document.getElementById('prompt').focus()")
    tab.type(EVIL)
    tab.press("Enter", "\r")
    tab.wait("!document.getElementById('send').disabled && document.querySelectorAll('.run').length === 1")
    assert EVIL in tab.run("document.querySelector('.turn').textContent")
    assert tab.run("document.querySelectorAll('#log img, #log script').length") == 0
    assert tab.run("document.title") == "foredraft" and tab.complaints == []


@pytest.mark.slow
def test_an_error_is_shown_and_the_message_kept(server: servers.Running, tab: Browser):
    tab.open(server.url)
    tab.run("document.getElementById('temperature').value = -1; document.getElementById('prompt').focus()")
    tab.type("abc")
    tab.press("Enter", "\r")
    tab.wait("document.querySelector('[role=alert]') !== null && !document.getElementById('send').disabled")
    assert "temperature" in tab.run("document.querySelector('[role=alert]').textContent")
    assert tab.run("document.getElementById('prompt').value") == "abc"
    tab.complaints.clear()  # the browser notes the failed request


@pytest.mark.slow
def test_a_recorded_request_is_drawn(tab: Browser, tmp_path: Path):
    result = generator().generate("abc", max_new_tokens=30, record_steps=True)
    facts = {"model": "m", "drafter": "d", "lossless": True, "prompt": EVIL, "finish_reason": "length"}
    pieces, steps = [each.as_dict() for each in result.pieces], [each.as_dict(str) for each in result.steps]
    file = tmp_path / "run.html"
    file.write_text(page([{**facts, "stats": result.stats.as_dict(), "pieces": pieces, "steps": steps}]))
    tab.open(file.as_uri())
    assert tab.run("document.querySelector('.run .text').textContent") == result.text
    assert EVIL in tab.run("document.querySelector('.turn').textContent")
    assert tab.run("document.getElementById('step-title').textContent") == f"Step 1 of {len(steps)}"
    assert tab.run("document.querySelectorAll('#tree .node').length") == len(steps[0]["tokens"]) + 1
    assert tab.run("document.getElementById('form').hidden") and tab.complaints == []
