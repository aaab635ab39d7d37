"""The page of the server and of the viewer: one HTML file, without network or build step."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from foredraft.files.outputs import generator_tag

_EMPTY = '<script type="application/json" id="record">null</script>'


def page(records: Sequence[dict[str, Any]] = ()) -> str:
    """The page; with ``records`` it shows these requests instead of a chat.

    Args:
        records: each with ``model``, ``drafter``, ``lossless``, ``prompt``, ``finish_reason``, ``stats``, ``pieces``,
            ``steps``; see ``engine/trace``.
    """
    text = files("foredraft.serve").joinpath("page.html").read_text(encoding="utf-8")
    if not records:
        return text
    data = json.dumps(list(records)).replace("<", "\\u003c")  # no text can end the element
    before, after = text.split(_EMPTY)
    before = before.replace("<head>", f"<head>\n{generator_tag('viewer')}", 1)
    return before + _EMPTY.replace("null", data) + after


def policy(text: str) -> str:
    """The content security policy that allows this page's own script and style alone."""
    own = f"script-src {_hash('script', text)}; style-src {_hash('style', text)}"
    return (
        f"default-src 'none'; {own}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(tag: str, text: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
