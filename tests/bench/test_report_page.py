"""The page in a real browser: no word on the console, nothing fetched, every figure there, nothing cut off."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import made, page_of

from browser import Browser, browser

SEEN = """(() => {
  const wide = document.documentElement;
  return {
    figures: [...document.querySelectorAll("figure")].map(each => each.id),
    empty: [...document.querySelectorAll("figure svg")].filter(each => each.getBBox().width < 100).length,
    ids: document.querySelectorAll("[id]").length - new Set([...document.querySelectorAll("[id]")].map(e => e.id)).size,
    labels: [...document.querySelectorAll("[role=region]")].map(each => each.getAttribute("aria-label"))
      .filter((label, place, all) => all.indexOf(label) !== place),
    overflow: wide.scrollWidth - wide.clientWidth,
    fetched: performance.getEntriesByType("resource").map(each => each.name),
    clipped: [...document.querySelectorAll("figure svg text")].filter(text => {
      const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
      return inner.left < outer.left - 6 || inner.right > outer.right + 6;
    }).map(text => text.textContent),
    background: getComputedStyle(document.body).backgroundColor,
  };
})()"""
"""What the browser makes of it; the page itself has no scripts."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(made(prompts=2))[1], encoding="utf-8")
    return path.as_uri()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "background"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")], ids=["light", "dark"]
)
def test_the_page_opens(tab: Browser, url: str, scheme: str, background: str):
    from foredraft.bench.report.figures import KINDS

    tab.open(url, 1100, 900, scheme)
    nothing: dict[str, object] = {"empty": 0, "ids": 0, "labels": [], "overflow": 0, "fetched": [], "clipped": []}
    assert tab.run(SEEN) == {**nothing, "figures": [kind.name for kind in KINDS], "background": background}
    assert tab.complaints == []


@pytest.mark.slow
def test_a_narrow_screen_scrolls_in_one_direction(tab: Browser, url: str):
    tab.open(url, 500, 900)
    found = tab.run(SEEN)
    assert (found["overflow"], found["clipped"]) == (0, [])


@pytest.mark.slow
def test_an_error_would_be_seen(tab: Browser, tmp_path: Path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><p>a</p><p>b</p><script>nobody()</script>", encoding="utf-8")
    tab.open(page.as_uri())
    assert any("exceptionDetails" in each for each in tab.complaints), tab.complaints
    tab.complaints.clear()
