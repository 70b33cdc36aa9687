"""Text from outside, made safe to show: names in the source, messages of servers, paths.

A name may hold every character that Postgres allows, which is all but NUL. Written as it is, a newline in it forges a line of the
log, an escape sequence rewrites what a terminal shows, and an override of the writing direction reverses a name. So every
character that would not show as itself is written as an escape. What is stored or compared is not changed: this is for display
only.
"""

from __future__ import annotations

import re

# C0 and DEL, C1, line and paragraph separators, marks, embeddings, overrides and isolates of direction, invisible joiners,
# tags, the byte order mark, and halves of surrogate pairs, which no output can encode.
_HIDDEN = (
    r"\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f\ud800-\udfff"
)
_ONE_LINE = re.compile(f"[{_HIDDEN}]")
_LINES = re.compile(f"(?!\n)[{_HIDDEN}]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str) -> str:
    """On one line, with an escape (`\\n`, `\\x1b`, `\\u202e`) for each character that would not show as itself."""
    return _ONE_LINE.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """The same for a text whose newlines are our own and are kept."""
    return _LINES.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
