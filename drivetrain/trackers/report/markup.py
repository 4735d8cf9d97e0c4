"""HTML from Python: elements in which every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.runtime.terminal import visible

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;"})
_WITHIN_SCRIPTS = str.maketrans({"&": "\\u0026", "<": "\\u003c", ">": "\\u003e", "'": "\\u0027"})


class Markup(str):
    """A text that is HTML already: an element takes it as it is."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """A value as HTML: text escaped, its control characters spelled out, `Markup` as it is.

    Args:
        text: The value.
    """
    return text if isinstance(text, Markup) else Markup(visible(str(text)).translate(_ESCAPES))


def joined(parts: Iterable[object], between: str = "") -> Markup:
    """Values one after the other as HTML.

    Args:
        parts: The values, each as `escaped` takes it.
        between: HTML between two of them.
    """
    return Markup(between.join(map(escaped, parts)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element with its end tag.

    Args:
        tag: The tag's name.
        *children: What is in it, each as `escaped` takes it.
        **attributes: Attributes, escaped; `class_` is `class`, `_` in a name is `-`. Those that are empty are left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"' for name, value in attributes.items() if value
    )
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def json_within_script(text: str) -> Markup:
    """JSON as the content of a `<script>` element, which nothing in it ends.

    Args:
        text: The JSON.
    """
    return Markup(text.translate(_WITHIN_SCRIPTS))
