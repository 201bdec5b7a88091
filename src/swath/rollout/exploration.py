"""Which exploration type is in force while a policy computes.

Tensordict has one for all threads of a process. Where two threads each set it and put back what they found, one may
put back what the other had set, and leave it. So all of swath sets it here: the program's own type is remembered when
the first one begins, and put back when the last one ends.

A thread that computes beside the program, such as one that evaluates, must neither see what the program has set nor
change it: ``own_exploration`` gives it a type of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch.compiler import is_compiling

from swath.rollout.tensordict_internals import INTERACTION_TYPE


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
    if _own.is_separate:
        with set_interaction_type(kind):
            yield
        return
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


# -- a thread with a type of its own ---------------------------------------------------------------------------------


class _Own(threading.local):
    is_separate = False
    kind: InteractionType | None = None


_own = _Own()
_shared: Any = INTERACTION_TYPE


class _SharedOrOwn(type(_shared)):
    """Where tensordict keeps the type, with a place for each thread that wants one."""

    def get_mode(self) -> Any:
        return _own.kind if not is_compiling() and _own.is_separate else super().get_mode()

    def set_mode(self, type: Any) -> None:
        if not is_compiling() and _own.is_separate:
            _own.kind = type
        else:
            super().set_mode(type)


@contextlib.contextmanager
def own_exploration() -> Iterator[None]:
    """While this lasts, this thread has an exploration type of its own; other threads have the one that they share.

    >>> with set_interaction_type("random"), own_exploration():
    ...     interaction_type() is None
    True
    """
    # Tensordict's own object learns it, once: to put another in its place could lose what is being set just now.
    _shared.__class__ = _SharedOrOwn
    before = _own.is_separate, _own.kind
    _own.is_separate, _own.kind = True, None
    try:
        yield
    finally:
        _own.is_separate, _own.kind = before
