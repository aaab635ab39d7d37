"""The page in a real browser: no word on the console, nothing fetched, every figure there, nothing cut off."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_runs import made, page_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PROBE = """<script>
addEventListener("load", () => {
  const wide = document.documentElement;
  const seen = {
    figures: [...document.querySelectorAll("figure")].map(each => each.id),
    empty: [...document.querySelectorAll("figure svg")].filter(each => each.getBBox().width < 100).length,
    ids: document.querySelectorAll("[id]").length - new Set([...document.querySelectorAll("[id]")].map(e => e.id)).size,
    overflow: wide.scrollWidth - wide.clientWidth,
    fetched: performance.getEntriesByType("resource").map(each => each.name),
    clipped: [...document.querySelectorAll("figure svg text")].filter(text => {
      const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
      return inner.left < outer.left - 6 || inner.right > outer.right + 6;
    }).map(text => text.textContent),
    background: getComputedStyle(document.body).backgroundColor,
  };
  document.title = "SEEN" + JSON.stringify(seen) + "DONE";
});
</script>"""
"""What the browser makes of it, in the page's title; the page itself has no scripts."""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip(f"no browser: one of {', '.join(BROWSERS)} would open the page")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    _, text = page_of(made(prompts=2))
    (folder / "report.html").write_text(text, encoding="utf-8")
    (folder / "probed.html").write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    return folder


def opened(browser: str, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [browser, *fixed, profile, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def seen(browser: str, page: Path, *options: str) -> dict[str, object]:
    done = opened(browser, page, "--dump-dom", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r"<title>SEEN(.*?)DONE</title>", done.stdout, re.DOTALL)
    assert found is not None, done.stdout[:500]
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens(browser: str, folder: Path, scheme: str):
    from foredraft.bench.report.figures import KINDS

    dark = ("--blink-settings=preferredColorScheme=0",) if scheme == "dark" else ()
    found = seen(browser, folder / "probed.html", "--window-size=1100,900", *dark)
    assert found["figures"] == [kind.name for kind in KINDS]
    assert found["background"] == ("rgb(20, 23, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
    nothing: dict[str, object] = {"empty": 0, "ids": 0, "overflow": 0, "fetched": [], "clipped": []}
    assert {name: found[name] for name in nothing} == nothing


@pytest.mark.slow
def test_a_narrow_screen_scrolls_in_one_direction(browser: str, folder: Path):
    found = seen(browser, folder / "probed.html", "--window-size=500,900")
    assert (found["overflow"], found["clipped"]) == (0, [])


@pytest.mark.slow
def test_an_error_would_be_seen(browser: str, tmp_path: Path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><script>nobody()</script>", encoding="utf-8")
    assert "CONSOLE" in opened(browser, page, "--dump-dom").stderr
