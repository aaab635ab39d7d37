"""What cannot be is refused as docs/errors.md says, in one sentence."""

import ast
import functools
import re
from pathlib import Path

import pytest

from foredraft.compose.load import load
from foredraft.core.errors import UsageError
from foredraft.drafters import METHODS
from foredraft.engine.generator import Generator

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text("utf-8")
ROWS = re.findall(r"^\| `(.+?)` \| (?:`(\w+)`)? ?\| (\w+): (.+) \|$", PAGE, re.MULTILINE)
SYMPTOMS = [
    symptom
    for cell in re.findall(r"^\| (.+?) \|", PAGE.partition("## Every refused spec")[0], re.MULTILINE)
    for symptom in re.findall(r'"(.+?)"', cell)
]


@functools.cache
def bundled() -> Generator:
    return load("sample", drafter=None)


@pytest.mark.parametrize(("drafter", "verifier", "kind", "said"), ROWS, ids=[" ".join(row[:2]).strip() for row in ROWS])
def test_it_is_refused_in_these_words(drafter: str, verifier: str, kind: str, said: str):
    with pytest.raises(UsageError) as caught:
        load(bundled().engine.target, drafter, tokenizer=bundled().tokenizer, verifier=verifier or None)
    assert caught.type.__name__ == kind
    found = str(caught.value)
    assert found.startswith(said[:-3]) if said.endswith("...") else found == said
    assert "\n" not in found
    assert bundled().generate("1, 2,", max_new_tokens=2).tokens, "the target is as it was"


def test_the_page_has_something_on_every_method_that_can_be_asked_for_wrongly():
    named = {row[0].partition(":")[0].partition(",")[0] for row in ROWS}
    assert len(ROWS) > 30
    assert set(METHODS) - named <= {"eagle1", "eagle2", "medusa", "hydra", "blockwise", "max_gram"}


@functools.cache
def sentences() -> str:
    """The strings of the package without its docstrings, and the sentences that the last section of the page tests."""
    found = [said for *_, said in ROWS]
    for path in (ROOT / "src" / "foredraft").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        constants = [each for each in ast.walk(tree) if isinstance(each, ast.Constant) and id(each) not in docs]
        found += [each.value for each in constants if isinstance(each.value, str)]
    return "\n".join(found)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_on_the_page_is_what_the_package_says(symptom: str):
    assert len(SYMPTOMS) > 25
    parts = [part.strip() for part in symptom.split("...") if part.strip()]
    assert [part for part in parts if part not in sentences()] == []
