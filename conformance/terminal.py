"""Text of strangers on a terminal: messages of implementations, and whatever a record says.

A control sequence could move the cursor, clear the screen or rename the window, and a bidirectional
mark could show a line backwards; so what does not print is shown as Python writes it.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every character that does not print, but line feed, as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )
