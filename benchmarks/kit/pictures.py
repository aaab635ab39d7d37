"""Pictures that do not depend on the page: their own ground, and their values as a description."""

import html
import re

GROUND, INK = "#161b22", "#d5dbe1"


def grounded(text: str) -> str:
    """A themed SVG on a dark ground of its own: an image does not know whether its page is light or dark."""
    ground = f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>'
    return re.sub(r"(<svg [^>]*)>", rf'\1 style="color:{INK}">{ground}', text, count=1)


def described(text: str, name: str, facts: str) -> str:
    """An SVG with a name for screen readers, unless it has one, and its provenance inside."""
    named = f' role="img" aria-label="{html.escape(name)}"' if name else ""
    return re.sub(r"<svg([^>]*)>", lambda m: f"<svg{named}{m[1]}>\n<desc>{html.escape(facts)}</desc>", text, count=1)
