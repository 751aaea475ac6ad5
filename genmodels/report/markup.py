"""HTML and SVG put together from parts, with everything that is not markup escaped."""

from __future__ import annotations

from html import escape

#: Elements that have no content and no end tag.
_VOID = {"meta", "link", "img", "br", "hr", "col"}


class Markup(str):
    """Text that is markup already, made by this module alone: everything else is escaped when it is put in."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Any value as markup: what is markup stays, the rest is escaped; None is nothing, a list is its items in turn.

    Example:
        >>> text("a < b"), text(tag("b", "fat")), text(["x", None, 3])
        ('a &lt; b', '<b>fat</b>', 'x3')
    """
    if value is None:
        return Markup("")
    if isinstance(value, Markup):
        return value
    if isinstance(value, list | tuple):
        return Markup("".join(text(each) for each in value))
    return Markup(escape(_legal(str(value)), quote=True))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element; in names of attributes `_` stands for `-`, and a trailing one is dropped (`class_`).

    An attribute that is None or False is left out, one that is True stands without a value.

    Example:
        >>> tag("p", "1 < 2", class_="note", hidden=False)
        '<p class="note">1 &lt; 2</p>'
        >>> tag("img", src="data:,", alt='a "picture"')
        '<img src="data:," alt="a &quot;picture&quot;">'
    """
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown.append(key if value is True else f'{key}="{escape(_legal(str(value)), quote=True)}"')
    start = " ".join([name, *shown])
    if name in _VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{text(list(content))}</{name}>")


def _legal(words: str) -> str:
    """Characters that no HTML document may hold, shown as what they are: one that is out of place."""
    return "".join("\ufffd" if (ord(c) < 32 and c not in "\t\n") or 0xD800 <= ord(c) < 0xE000 else c for c in words)
