"""Results and generators as terminals and notebooks show them, and what is logged."""

import logging
from html import unescape

import pytest

import foredraft
import runs
import tiny
from foredraft.core.stats import DecodeStats
from foredraft.engine.request import Piece
from foredraft.engine.results import Result


def result(text: str, pieces: list[Piece], **stats) -> Result:
    tokens = [token for piece in pieces for token in piece.tokens]
    return Result(text, tokens, "stop", DecodeStats(tokens=len(tokens), **stats), [], 7, pieces)


def test_the_repr_of_a_result_is_short():
    pieces = [Piece("x" * 200, [1, 2, 3], True), Piece("y", [4], False)]
    shown = repr(result("x" * 200 + "y", pieces, target_forwards=2, seconds=2.0))
    assert shown == (
        f"Result('{'x' * 57}...', tokens=4, finish_reason='stop', acceptance_length=2.00, tokens_per_second=2.0)"
    )
    assert repr(result("a\nb", pieces, lossless=False)).startswith("Result('a\\nb', tokens=4")
    assert repr(result("a", pieces, lossless=False)).endswith(", lossless=False)")


def test_html_marks_drafts_and_escapes_everything():
    pieces = [Piece("<b>", [1], False), Piece("&x", [2], True), Piece("\n", [3], True), Piece("y", [4], False)]
    shown = result("<b>&x\ny", pieces, method="<i>")._repr_html_()
    assert "<b>" not in shown and "<i>" not in shown
    body = shown[shown.index("monospace'>") + len("monospace'>") : shown.index("</div>")]
    before, _, rest = body.partition("<mark")
    marked, _, after = rest.partition("</mark>")
    assert unescape(before) == "<b>" and unescape(marked.partition(">")[2]) == "&x\n" and after == "y"


def test_html_without_a_tokenizer_shows_token_ids():
    assert "5 6 " in result("", [Piece("", [5, 6], False)])._repr_html_()


def test_html_of_a_text_that_its_pieces_are_not():
    assert "shorter" in result("shorter", [Piece("longer than that", [1], True)])._repr_html_()


def test_a_generator_shows_what_it_is_made_of():
    g = tiny.generator(runs.model())
    assert repr(g) == "Generator(target=LlamaForCausalLM, drafter=tiny, device=cpu, dtype=float32, lossless=True)"
    assert "<td>LlamaForCausalLM</td>" in g._repr_html_()


def test_loading_is_logged_and_nothing_is_printed(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]):
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("foredraft").handlers)
    with caplog.at_level(logging.DEBUG, logger="foredraft"):
        g = foredraft.load(tiny.build("llama"), "auto")
        g.generate([1, 2, 3], max_new_tokens=2)
        g.close()
    said = caplog.text
    assert all(record.name.startswith("foredraft.") for record in caplog.records)
    for part in ("choice of a drafter is prompt_lookup", f"Loaded {g!r}, 32 rows", "Packed 15 linear", "The cache has"):
        assert part in said
    assert capsys.readouterr() == ("", "")
