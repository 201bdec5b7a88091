"""HTML from Python: whatever is no HTML yet is escaped."""

from __future__ import annotations

import html


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def el(name: str, *children: object, **attributes: object) -> Html:
    """An element. Children that are not ``Html`` are escaped; those that are None are left out, as are attributes.

    >>> el("p", "a < b ", el("b", "so"), class_="note", data_x=3, title=None)
    '<p class="note" data-x="3">a &lt; b <b>so</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: object) -> Html:
    """One behind the other."""
    return Html(
        "".join(
            child if isinstance(child, Html) else html.escape(str(child)) for child in children if child is not None
        )
    )
