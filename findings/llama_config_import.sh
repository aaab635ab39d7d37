#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0): importing the class LlamaConfig imports torch._dynamo, torch.distributed.tensor and
# sympy; importing Qwen2Config does not.
#
# A config is a data class without modelling code. Llama's checks a number with `interval` of utils/type_validators.py, and
# that module imports the table of activation functions for another check. The table imports the kernels of the hub, those
# import the loading of weights (torch.distributed.tensor, sympy) and continuous batching (torch._dynamo). So the config of
# the commonest architecture takes five times as long to import as others: 1.5 and 0.3 CPU seconds on an AMD EPYC.
#
# Seen, of these three modules:
#     LlamaConfig    torch._dynamo torch.distributed.tensor sympy
#     Qwen2Config    -
#     MistralConfig  -
#
# foredraft needs the class for GGUF files of Llama's architecture; their start has this second in it, which those of Qwen2
# have not.
#
# Usage: findings/llama_config_import.sh [version of transformers]
set -u
place="$(mktemp -d)" || exit 2
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONHOME
"${PYTHON:-python3}" -m venv "$place/venv" &&
    "$place/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 "transformers==${1:-5.23.0}" || exit 2
cd "$place" && cat > finding.py <<'PY' || exit 2
import sys
import time

import torch
import transformers

begun = time.process_time()
getattr(transformers, sys.argv[1])
found = [name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules]
print(f"{sys.argv[1]:14} {' '.join(found) or '-'}")
print(f"{sys.argv[1]}: {time.process_time() - begun:.1f} CPU seconds", file=sys.stderr)
PY
printed="$(for name in LlamaConfig Qwen2Config MistralConfig; do "$place/venv/bin/python" finding.py "$name"; done)"
printf '%s\n' "$printed"
[ "$printed" = "LlamaConfig    torch._dynamo torch.distributed.tensor sympy
Qwen2Config    -
MistralConfig  -" ] || { echo "The behaviour has changed."; exit 1; }
echo "As described: Llama's config alone imports them."
