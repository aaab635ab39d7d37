#!/usr/bin/env bash
# xgrammar 0.2.8 (torch 2.13.0, transformers 5.23.0): a larger vocabulary makes masks cheaper, by a factor of 100.
#
# The grammar has two alternatives: free text, and quoted text of at most 300 characters (`Regex`). Within the text the first
# one allows nearly every token, so the second should cost nothing. It costs milliseconds a token, as long as the first
# rejects fewer than 1,000 entries of the vocabulary. Add entries that no text contains, which every state rejects: 900 change
# nothing, 1,024 remove the cost. The masks of all other tokens are the same. The likely reason: a state keeps what it
# rejects as a list while that is short, and as bits of what it accepts otherwise, and only from the bits is it seen that
# tokens uncertain in one alternative are allowed by another.
#
# Seen (20,030 entries; median of 40 masks within the text, CPU time of one thread, on a busy machine):
#        0 entries more: 9.532 ms a mask
#      900 entries more: 9.354 ms a mask
#     1024 entries more: 0.068 ms a mask
# 0.2.7 is as 0.2.8; 0.2.0 has no Regex.
#
# foredraft appends 1,024 such entries to every vocabulary that it gives to xgrammar, and writes long strings as two such
# alternatives: `_UNUSED` in src/foredraft/model/text/grammar.py, `string_of` in src/foredraft/model/text/ebnf.py.
#
# Usage: findings/mask_unused_tokens.sh [version of xgrammar]
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

GRAMMAR = r"""
root ::= "\"" (free | counted)
free ::= [a-z ]* "."
counted ::= Regex("[a-z ]{0,300}\"")
"""
LETTERS = "abcdefghijklmnopqrstuvwxyz "
draw = random.Random(1)
words = set()
while len(words) < 20_000:
    words.add("".join(draw.choices(LETTERS, k=draw.randint(2, 8))))
vocabulary = ["</s>", '"', ".", *LETTERS, *sorted(words)]


def masks(more):
    """Median milliseconds for a mask, and the masks: sets of tokens, without the ``more`` entries."""
    entries = [*vocabulary, *(f"\x00{number}" for number in range(more))]
    tokens = xgrammar.TokenizerInfo(entries, xgrammar.VocabType.RAW, stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False).compile_grammar(GRAMMAR)
    matcher = xgrammar.GrammarMatcher(compiled)
    assert matcher.accept_token(vocabulary.index('"'))
    bits = xgrammar.allocate_token_bitmask(1, len(entries))
    seconds, allowed = [], []
    for _ in range(40):
        begin = time.process_time()
        matcher.fill_next_token_bitmask(bits)
        seconds.append(time.process_time() - begin)
        words = bits[0].tolist()
        allowed.append({token for token in range(len(vocabulary)) if words[token // 32] >> token % 32 & 1})
        assert matcher.accept_token(vocabulary.index("a"))
    return statistics.median(seconds) * 1000, allowed


print("xgrammar", importlib.metadata.version("xgrammar"), "with", len(vocabulary), "entries")
found = {more: masks(more) for more in (0, 900, 1024)}
for more, (milliseconds, _) in found.items():
    print(f"{more:5} entries more: {milliseconds:.3f} ms a mask")
if not all(allowed == found[0][1] for _, allowed in found.values()):
    sys.exit("The behaviour has changed: the masks differ.")
if min(found[0][0], found[900][0]) < 10 * found[1024][0]:
    sys.exit("The behaviour has changed.")
print("As described: the masks are equal, and those of the largest vocabulary are the cheapest.")
PY
TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" finding.py
