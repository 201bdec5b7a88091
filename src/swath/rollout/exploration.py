"""Which exploration type is in force while a policy computes.

Tensordict has one for all threads of a process. Where two threads each set it and put back what they found, one may
put back what the other had set, and leave it. So all of swath sets it here: the program's own type is remembered when
the first one begins, and put back when the last one ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type


@dataclass(frozen=True, eq=False)
class _Scope:
    kind: InteractionType | None
    thread: int
    #: What the program itself had set.
    outside: InteractionType | None


_lock = threading.Lock()
_scopes: list[_Scope] = []


@contextlib.contextmanager
def exploring(kind: InteractionType | None) -> Iterator[None]:
    """``kind`` is in force; what the program sets meanwhile, in another thread, is not undone."""
    with _lock:
        scope = _Scope(kind, threading.get_ident(), _scopes[-1].outside if _scopes else interaction_type())
        _scopes.append(scope)  # before it is set: should Ctrl-C come in between, end_scopes finds it
        _set(kind)
    try:
        yield
    finally:
        with _lock:
            _end(scope)


def open_scopes() -> tuple[_Scope, ...]:
    """For ``end_scopes``."""
    return tuple(_scopes)


def end_scopes(except_for: tuple[_Scope, ...]) -> None:
    """After Ctrl-C, which may have come anywhere: end those that this thread has begun since ``open_scopes``."""
    with _lock:
        for scope in reversed(tuple(_scopes)):
            if scope.thread == threading.get_ident() and scope not in except_for:
                _end(scope)


def _end(scope: _Scope) -> None:
    others = [other for other in _scopes if other is not scope]
    if interaction_type() is scope.kind:
        _set(others[-1].kind if others else scope.outside)
    _scopes[:] = others


def _set(kind: InteractionType | None) -> None:
    set_interaction_type(kind).__enter__()
