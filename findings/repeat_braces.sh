#!/usr/bin/env bash
# xgrammar 0.2.8 (torch 2.13.0, transformers 5.23.0): a repetition written as `{0,}` instead of `*` makes masks thousands of
# times dearer, for the same language and the same masks.
#
# Both are the same rule in EBNF: any number of letters, slashes or escapes ("%" and two digits), within quotes. With `*` a mask
# is looked up; with `{0,}` nearly every token of the vocabulary is tried again at each step. The likely reason: a star becomes
# a loop within one state machine, whose uncertain tokens are few and known, and braces become a rule that counts and refers to
# itself, which is only resolved while a text is read.
#
# Seen (20,040 entries; median of 38 masks within the text, CPU time of one thread, on a busy machine):
#   (...)*    0.003 ms a mask
#   (...){0,} 24.363 ms a mask
#
# foredraft wrote `{0,}` for the unlimited repetitions of regular expressions and formats, and writes `*` and `+` now:
# src/foredraft/model/text/ebnf.py.
#
# Usage: findings/repeat_braces.sh [version of xgrammar]
set -u
place="$(mktemp -d)" || exit 2
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONHOME
"${PYTHON:-python3}" -m venv "$place/venv" &&
    "$place/venv/bin/pip" install -q --disable-pip-version-check \
        "xgrammar==${1:-0.2.8}" torch==2.13.0 transformers==5.23.0 || exit 2
cd "$place" && cat > finding.py <<'PY' || exit 2
import importlib.metadata
import random
import statistics
import sys
import time

import xgrammar

REST = r'([a-z/] | "%" [0-9] [0-9])'
LETTERS = "abcdefghijklmnopqrstuvwxyz/"
draw = random.Random(1)
words = set()
while len(words) < 20_000:
    words.add("".join(draw.choices(LETTERS, k=draw.randint(2, 8))))
vocabulary = ["</s>", '"', "%", *"0123456789", *LETTERS, *sorted(words)]
text = ['"', *"abc/wiki/special/page/of/many/letters"]


def masks(repeat):
    """Median milliseconds for a mask, and the masks as lists of integers."""
    grammar = f'root ::= "\\"" text "\\""\ntext ::= {REST}{repeat}\n'
    tokens = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False).compile_grammar(grammar)
    matcher = xgrammar.GrammarMatcher(compiled)
    bits = xgrammar.allocate_token_bitmask(1, len(vocabulary))
    seconds, allowed = [], []
    for piece in text:
        assert matcher.accept_token(vocabulary.index(piece))
        begin = time.process_time()
        matcher.fill_next_token_bitmask(bits)
        seconds.append(time.process_time() - begin)
        allowed.append(bits[0].tolist())
    return statistics.median(seconds) * 1000, allowed


print("xgrammar", importlib.metadata.version("xgrammar"), "with", len(vocabulary), "entries")
(star, first), (braces, second) = masks("*"), masks("{0,}")
print(f"(...)*    {star:.3f} ms a mask")
print(f"(...){{0,}} {braces:.3f} ms a mask")
if first != second:
    sys.exit("The behaviour has changed: the masks differ.")
if braces < 10 * star:
    sys.exit("The behaviour has changed.")
print("As described: the masks are equal, and the same repetition in braces takes at least ten times as long.")
PY
TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" finding.py
