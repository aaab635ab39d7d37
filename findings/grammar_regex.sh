#!/usr/bin/env bash
# xgrammar 0.2.8 (torch 2.13.0, transformers 5.23.0): one pattern means two things. As the element Regex("...") of an EBNF
# grammar, and as "pattern" of a JSON schema, it accepts texts that the same pattern given to compile_regex refuses.
#
# `([a-z]*:)?` is an optional prefix that ends in a colon. In a JSON schema it lets a model write "abc". The second part of
# the table has an alternative whose end can go on: `b|b{1,2}` accepts any number of b.
#
# Seen (Regex: in EBNF; schema: as a JSON string; compile: compile_regex; re: Python's re.fullmatch):
#     pattern                text   Regex  schema  compile  re
#     ([a-z]*:)?             ab:    True   True    True     True
#     ([a-z]*:)?             abc    True   True    False    False
#     ([0-9]*[.])?[0-9]      1.5    True   True    True     True
#     ([0-9]*[.])?[0-9]      15     True   True    False    False
#     b|b{1,2}               bb     True   True    True     True
#     b|b{1,2}               bbb    True   True    False    False
# 0.2.7 is as 0.2.8; 0.2.0 has no Regex.
#
# foredraft gives neither patterns nor schemas to xgrammar. A pattern becomes rules without Regex, and one of a JSON string an
# automaton with a rule for each state: `matching` and `quoted` in src/foredraft/model/text/ebnf.py; "Grammars" in docs/python.md.
#
# Usage: findings/grammar_regex.sh [version of xgrammar]
set -u
place="$(mktemp -d)" || exit 2
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONHOME
"${PYTHON:-python3}" -m venv "$place/venv" &&
    "$place/venv/bin/pip" install -q --disable-pip-version-check \
        "xgrammar==${1:-0.2.8}" torch==2.13.0 transformers==5.23.0 || exit 2
cd "$place" && cat > finding.py <<'PY' || exit 2
import importlib.metadata
import json
import re
import sys

import xgrammar

vocabulary = ["</s>", *map(chr, range(32, 127))]
tokens = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[0])
compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


def accepts(grammar, text):
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.is_completed()


def row(pattern, text):
    schema = {"type": "string", "pattern": f"^({pattern})$"}
    return (
        accepts(compiler.compile_grammar(f"root ::= Regex({json.dumps(pattern)})"), text),
        accepts(compiler.compile_json_schema(schema), json.dumps(text)),
        accepts(compiler.compile_regex(pattern), text),
        re.fullmatch(pattern, text) is not None,
    )


RIGHT, WRONG = (True, True, True, True), (True, True, False, False)
EXPECTED = {
    ("([a-z]*:)?", "ab:"): RIGHT,
    ("([a-z]*:)?", "abc"): WRONG,
    ("([0-9]*[.])?[0-9]", "1.5"): RIGHT,
    ("([0-9]*[.])?[0-9]", "15"): WRONG,
    ("b|b{1,2}", "bb"): RIGHT,
    ("b|b{1,2}", "bbb"): WRONG,
}
print("xgrammar", importlib.metadata.version("xgrammar"))
print(f"{'pattern':22} {'text':6} {'Regex':6} {'schema':7} {'compile':8} re")
found = {case: row(*case) for case in EXPECTED}
for (pattern, text), (ebnf, schema, compiled, python) in found.items():
    print(f"{pattern:22} {text:6} {ebnf!s:6} {schema!s:7} {compiled!s:8} {python}")
if found != EXPECTED:
    sys.exit("The behaviour has changed.")
print("As described: Regex and schemas accept texts that the pattern does not match.")
PY
TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" finding.py
