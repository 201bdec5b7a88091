"""Paths: how users write what they want of something that is elsewhere, such as ``"env.transform[0].loc"``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

#: ``name``, ``['name']``, ``["name"]``, or ``[0]`` and ``[name]``.
_PART = re.compile(r"""(?:^|\.)([^.\[\]]+)|\[(?:'([^']*)'|"([^"]*)"|([^\[\]'"]+))\]""")
_INDEX = re.compile(r"-?\d+")


class Item(NamedTuple):
    """Of a path: an index, or a key; strings are attributes."""

    key: int | str


Parts = Sequence[str | Item]


def parts_of_path(path: str) -> list[str | Item]:
    """The attributes and items of a path; an index may stand in brackets or behind a dot.

    >>> parts_of_path("env.transform[0].loc")
    ['env', 'transform', Item(key=0), 'loc']
    >>> parts_of_path("env.transform.0.loc") == parts_of_path("env.transform[0].loc")
    True
    """
    if not isinstance(path, str):
        raise TypeError(f"a path is a string, such as 'env.transform[0].loc'; got {type(path).__name__}")
    parts: list[str | Item] = []
    at = 0
    while at < len(path) or not path:
        found = _PART.match(path, at)
        if found is None:
            rest = f": what is {path[at:]!r}?" if at else "."
            raise ValueError(f"{path!r} is no path{rest} Write it as in 'env.transform[0].loc'")
        name, *quoted, bare = found.groups()
        plain = name or bare
        if plain is None:
            parts.append(Item(quoted[0] if quoted[1] is None else quoted[1]))
        elif _INDEX.fullmatch(plain):
            parts.append(Item(int(plain)))
        else:
            parts.append(plain if name else Item(plain))
        at = found.end()
    return parts


def resolve_path(root: Any, path: str) -> Any:
    """What a path leads to in an object; in envs side by side, to what in each, as a list.

    >>> resolve_path({"a": [[1, 2]]}, "[a][0].1")
    2
    """
    return follow(root, parts_of_path(path), path)


def follow(root: Any, parts: Parts, path: str) -> Any:
    """As ``resolve_path``. An object that stands for several has ``at_each``, which follows what it has not itself."""
    value = root
    for i, part in enumerate(parts):
        if isinstance(part, str) and hasattr(type(value), "at_each") and not _has(value, part):
            return value.at_each(parts[i:], path)
        value = _take(value, part, path)
    return value


def _has(value: Any, name: str) -> bool:
    return name in vars(value) or hasattr(type(value), name)


def _take(value: Any, part: str | Item, path: str) -> Any:
    who = type(value).__name__
    if isinstance(part, str):
        try:
            return getattr(value, part)
        except AttributeError as error:
            near = difflib.get_close_matches(part, [name for name in dir(value) if not name.startswith("_")], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"{path}: {who} has no attribute {part!r}{hint}") from error
    try:
        return value[part.key]
    except (IndexError, KeyError, TypeError) as error:
        many = f", which has {len(value)}" if hasattr(value, "__len__") else ""
        raise type(error)(f"{path}: there is no {part.key!r} in this {who}{many}") from error
