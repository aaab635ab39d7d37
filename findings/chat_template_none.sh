#!/usr/bin/env bash
# transformers 5.23.0 (jinja2 3.1.6, tokenizers 0.23.3): apply_chat_template drops message fields that are None.
#
# An assistant's message that only calls tools has "content": None, in OpenAI's format and in many chat templates, which ask
# `content is none`. The tokenizer's method removes every field of a message that is None before it renders the template. So
# that branch is never taken, and a test such as `'content' in message` answers differently, too. The same template in Jinja
# takes the branch. Fields within a field (the arguments of a call) keep their None.
#
# Seen, for a user's "hi" and a call:
#     apply_chat_template:  [hi][]
#     Jinja:                [hi]CALL
#     fields in a template: role,tool_calls
#     within a field:       {"city": null}
#
# 5.17.0 gives [hi]CALL by both ways; 5.24.0 is as 5.23.0.
#
# foredraft renders the template itself, with all fields: `_in_template` and `_rendered` in
# src/foredraft/model/text/tokenizer.py.
#
# Usage: findings/chat_template_none.sh [version of transformers]
set -u
place="$(mktemp -d)" || exit 2
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONHOME
"${PYTHON:-python3}" -m venv "$place/venv" &&
    "$place/venv/bin/pip" install -q --disable-pip-version-check \
        "transformers==${1:-5.23.0}" jinja2==3.1.6 tokenizers==0.23.3 || exit 2
cd "$place" && cat > finding.py <<'PY' || exit 2
import sys

import jinja2
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")), unk_token="?"
)
call = {"type": "function", "function": {"name": "weather", "arguments": {"city": None}}}
messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
CALLS = "{% for m in messages %}{% if m['content'] is none %}CALL{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
FIELDS = "{{ messages[-1] | list | join(',') }}"
INNER = "{{ messages[-1]['tool_calls'][0]['function']['arguments'] | tojson }}"


def rendered(template):
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


found = {
    "apply_chat_template": rendered(CALLS),
    "Jinja": jinja2.Environment().from_string(CALLS).render(messages=messages),
    "fields in a template": rendered(FIELDS),
    "within a field": rendered(INNER),
}
print("transformers", transformers.__version__)
for name, text in found.items():
    print(f"{name + ':':21} {text}")
if list(found.values()) != ["[hi][]", "[hi]CALL", "role,tool_calls", '{"city": null}']:
    sys.exit("The behaviour has changed.")
print("As described: fields that are None never reach the template.")
PY
TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" finding.py
