"""Makes texts that others have written safe to show in a terminal."""

from __future__ import annotations

_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Returns ``text`` without control characters, of which line feeds and tabs stay.

    With the others, a text could move the cursor, change the terminal or write to its clipboard.
    """
    return text.translate(_CONTROLS)


def printable_line(text: str) -> str:
    """Returns ``text`` as one line, with a question mark in place of each character that a terminal may obey."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
