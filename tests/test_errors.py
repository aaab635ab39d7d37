"""What cannot be is refused as docs/errors.md and the pages of methods say, in one sentence."""

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
METHOD_PAGES = [(ROOT / "docs" / "methods" / f"{method}.md").read_text("utf-8") for method in METHODS]
ROWS = re.findall(r"^\| `(.+?)` \| (?:`(\w+)`)? ?\| (\w+): (.+) \|$", "\n".join([PAGE, *METHOD_PAGES]), re.MULTILINE)
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


REFUSED = {
    "bandit:prompt_lookup,exploration=-1": "exploration",
    "bandit:prompt_lookup,hold=1": "hold must be 2",
    "bandit:prompt_lookup+nothing": "Unknown drafter 'nothing'",
    "cape": "cape needs a small model",
    "cape:sample-draft,num_assistant_tokens=0": "num_assistant_tokens",
    "cascade": "a middle model and a drafter for it",
    "cascade:sample-draft+[relay:max_gram+medusa]": "medusa cannot be used inside relay",
    "cascade:sample-draft+max_gram,inner_tokens=0": "inner_tokens must be 1 or more",
    "cascade:sample-draft+max_gram,num_assistant_tokens=0": "1 or more",
    "cascade:sample-draft+nothing": "Unknown drafter 'nothing'",
    "cascade:sample-draft+prompt_lookup+none": "a middle model and a drafter for it",
    "early_exit,assistant_early_exit=0": "1 or more",
    "early_exit,assistant_early_exit=9": "1 to 8 of them",
    "layer_skip,skip_mlp=8": "layers 0 to 7",
    "lookahead,guess_set_size=-1": "guess_set_size",
    "lookahead,pool=mine": "Unknown pool 'mine'. Known: request, shared.",
    "lookahead,pool_size=2": "pool_size",
    "lookahead,window_size=0": "window_size",
    "lookahead,window_size=1,ngram_size=2,guess_set_size=0": "drafts nothing",
    "lookahead,guess_set_size=0,prompt_ngrams=yes": "guess_set_size must be 1 or more",
    "lookahead,window_size=2,window_size=3": "The option window_size is given twice: 2 and 3.",
    "max_gram,min_matching_ngram_size=0": "1 or more",
    "max_gram,num_assistant_tokens=0": "1 or more",
    "hybrid:eagle3,prompt_lookup_num_tokens=0": "prompt_lookup_num_tokens must be",
    "online:draft": "Unknown drafter 'draft'",
    "online:draft_model+eagle3": "online takes one inner drafter, not 2",
    "opt_tree:sample-draft,depth=0": "1 or more",
    "opt_tree:sample-draft,top_k=0": "1 or more",
    "partial,cache=h2o,budget=8,recent=9": "leaves no room for heavy hitters",
    "partial,cache=window,score=median": "Unknown score 'median'. Did you mean mean? Known: best, mean.",
    "partial,cache=window,budget=4": "leaves no room for a window in a budget of 4 tokens",
    "partial,score=median": "Unknown score 'median'. Did you mean mean? Known: best, mean.",
    "partial,room=0": "room must be 1 or more, not 0.",
    "partial,whole_layers=-1": "whole_layers must be 0 or more, not -1.",
    "partial,whole_layers=8": "has 8 layers, so whole_layers must be 7 or less, not 8: ",
    "relay": "two drafters or more",
    "relay:max_gram+[prompt_lookup,continuations=2]": "PromptLookup drafts trees",
    "sequoia:sample-draft,acceptance=0.5/x": "such as 0.62/0.14/0.06",
    "sequoia:sample-draft,depth=-1": "1 or more",
    "sequoia:sample-draft,nodes=0": "1 or more",
    "sequoia:sample-draft,sampled_acceptance=0.9/0.9": "sum to 1 or less",
    "specinfer:sample-draft,expansion=2x0": "such as 1x1x3x1",
    "triforce:[medusa]": "medusa cannot be used inside triforce",
    "triforce:sample-draft+[prompt_lookup]": "triforce takes one drafter for its middle level",
    "triforce:sample-draft,budget=8": "A budget of 8 must be a multiple of the chunk size 8, two chunks or more.",
    "triforce:sample-draft,gamma=0": "gamma must be 1 or more, not 0.",
    "triforce:sample-draft,window=18": "A window of 18 tokens is too short for 16 sinks and 3 drafted nodes",
    "triforce:sample-draft,window=4096": "longer than the draft's 2048",
    "universal:sample-draft,assistant_lookbehind=0": "assistant_lookbehind must be 1 or more, not 0.",
    "universal:sample-draft,method=text": "slem",
    "universal:sample-draft,sequences=0": "sequences must be 1 or more, not 0.",
    "universal:sample-draft,num_assistant_tokens=0": "num_assistant_tokens must be 1 or more",
}
"""Specs of which the page has another example, or none."""


@pytest.mark.parametrize("drafter", REFUSED)
def test_it_is_refused_in_one_sentence(drafter: str):
    with pytest.raises(UsageError) as caught:
        load(bundled().engine.target, drafter, tokenizer=bundled().tokenizer)
    assert REFUSED[drafter] in str(caught.value) and "\n" not in str(caught.value)


def test_the_pages_have_something_on_every_method():
    named = {row[0].partition(":")[0].partition(",")[0] for row in ROWS}
    assert len(ROWS) > 40
    assert set(METHODS) <= named


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
