"""JSON Schema's formats as patterns. Limits of a whole text's or a label's length are not among them."""

import functools

from foredraft.model.text.ebnf import Rules, matching
from foredraft.model.text.regex import Node
from foredraft.model.text.regex_reader import matched

_MONTHS = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"  # Python and pydantic know no year 0
_DATE = rf"({_YEAR}-{_MONTHS}|{_LEAP}-02-29)"
_OFFSET = r"([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?{_OFFSET}|23:59:60(\.\d+)?([Zz]|[+-]00:00))"
_TIMES = r"(T(\d+S|\d+M(\d+S)?|\d+H(\d+M(\d+S)?)?))"
_DAYS = r"(\d+D|\d+M(\d+D)?|\d+Y(\d+M(\d+D)?)?)"

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"([\x20\x21\x23-\x5B\x5D-\x7E]|\\[\x20-\x7E])*"'

_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_LAST_TWO = f"({_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    (
        f"({_GROUP}:){{6}}{_LAST_TWO}",
        f"::({_GROUP}:){{5}}{_LAST_TWO}",
        *(f"({_GROUP}(:{_GROUP}){{0,{left}}})?::({_GROUP}:){{{4 - left}}}{_LAST_TWO}" for left in range(5)),
        f"({_GROUP}(:{_GROUP}){{0,5}})?::{_GROUP}",
        f"({_GROUP}(:{_GROUP}){{0,6}})?::",
    )
)

_PERCENT = f"%{_HEX}{{2}}"
_PLAIN = r"\w.~!$&'()*+,;="
_PCHAR = f"([{_PLAIN}:@-]|{_PERCENT})"
_TEXT = f"([{_PLAIN}:@/?-]|{_PERCENT})*"  # segments and what stands behind ?, or behind #
_NAME = f"([{_PLAIN}-]|{_PERCENT})*"
_AUTHORITY = rf"(([{_PLAIN}:-]|{_PERCENT})*@)?(\[({_IPV6})\]|{_NAME})(:\d*)?"
_ABSOLUTE = rf"//{_AUTHORITY}([/?]{_TEXT})?|/(({_PCHAR}|\?){_TEXT})?|\?{_TEXT}"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:({_ABSOLUTE}|{_PCHAR}{_TEXT})?(#{_TEXT})?"
_REFERENCE = rf"({_ABSOLUTE}|([{_PLAIN}@-]|{_PERCENT})+([/?]{_TEXT})?)?(#{_TEXT})?"

_POINTER = r"(/([^/~]|~[01])*)*"
_LITERAL = rf"([\x21\x23\x24\x26\x28-\x3B\x3D\x3F-\x5B\x5D\x5F\x61-\x7A\x7E\u00A0-\u{{10FFFD}}]|{_PERCENT})"
_VARIABLE = rf"(\w|{_PERCENT})(\.?(\w|{_PERCENT}))*(:[1-9]\d{{0,3}}|\*)?"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P({_DAYS}{_TIMES}?|{_TIMES}|\\d+W)",
    "email": rf"({_ATOM}(\.{_ATOM})*|{_QUOTED})@({_LABEL}(\.{_LABEL})+|\[({_IPV4}|IPv6:({_IPV6}))\])",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": f"{_URI}|{_REFERENCE}",
    "uri-template": rf"({_LITERAL}|\{{[+#./;?&=,!@|]?{_VARIABLE}(,{_VARIABLE})*\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
}


@functools.cache
def format_of(name: str) -> Node | None:
    """What texts of a format match (RFC 3339, 3986, 4291, 5321, 6570, 6901); None if a grammar does not know it."""
    return matched(_PATTERNS[name]) if name in _PATTERNS else None


def uri_within(rules: Rules, most: int) -> str | None:
    """A JSON string of a URI of at most ``most`` characters; None for few.

    xgrammar counts the characters of a rule, and lets it go on where it cannot end: within ``%2F``. So the rules that
    count to ``most - 2`` end, but for these, before those that count to ``most``. What else cannot end is limited: the
    scheme has at most 32 characters, the user 64, and neither it nor the host has a ``%``.
    """
    if most < 128:
        return None
    begin = r"[A-Za-z][A-Za-z0-9+.-]{0,31}:"
    authority = rf"//(([{_PLAIN}-]|:){{0,64}}@)?(\[({_IPV6})\]|[{_PLAIN}-]*)(:\d*)?"
    start = rules.add(matching(matched(rf"{begin}({authority}[/?]|/?({_PCHAR}|\?))")))
    bare = rules.add(matching(matched(rf"{begin}({authority}|/)?")))
    text, plain = rules.add(matching(matched(_TEXT))), rules.add(matching(matched(f"[{_PLAIN}:@/?-]")))
    one = rules.limited(f"{start} {text}", most - 2)
    two = rules.limited(f'({start} {text} | {bare}) "#" {text}', most - 2)
    ends = f'({plain}{{0,2}} | {plain}? "#" | "#" {plain})'
    whole = rules.limited(f"{one} {ends} | {two} {plain}{{0,2}} | {bare}", most)
    return f'"\\"" {whole} "\\""'
