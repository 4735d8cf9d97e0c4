"""What is written to terminals."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """Return a text whose control characters are spelled out as numbers; line breaks and tabs stay.

    Names in files that somebody else wrote could else move the cursor, set the clipboard, or turn the direction of what
    follows.

    Args:
        text: The text.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if each in "\n\t" or not _is_control(each) else _spelled(each) for each in text)


def _is_control(character: str) -> bool:
    kind = unicodedata.category(character)
    # Cf has what turns the direction of text; joiners, which emoji are made with, are shown.
    return kind in ("Cc", "Cs") or (kind == "Cf" and character not in "\u200c\u200d")


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
