"""Keys of a TensorDict, as tuples of strings: how users write them, and trees of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import unravel_key

Key = tuple[str, ...]


def as_key(key: Any) -> Key:
    """A nested key as a tuple of strings, however it was written."""
    flat: Any = unravel_key(key)
    return (flat,) if isinstance(flat, str) else tuple(flat)


def show(key: Key) -> str:
    """A key as a user would write it."""
    return repr(key[0]) if len(key) == 1 else repr(key)


def leaves_of(data: Any) -> Iterator[tuple[Key, Any]]:
    """The leaves of a TensorDict by their keys."""
    for key, leaf in data.items(True, True):
        yield as_key(key), leaf


def nested(leaves: dict[Key, Any]) -> dict[str, Any]:
    """``{("a", "b"): x}`` as ``{"a": {"b": x}}``.

    >>> nested({("a", "b"): 1, ("c",): 2})
    {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, Any] = {}
    for (*path, name), leaf in leaves.items():
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree
