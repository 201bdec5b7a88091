"""The owner of a process, as the process sees it: when it is gone, there is nothing left to do.

Not by a pipe that ends with the owner, as ``multiprocessing`` does it: whatever was forked from the owner holds that,
too.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

_AT_ONCE: tuple[Callable[[], Any], float] = (lambda: None, 0.0)
#: What to do first, and how many seconds the process then has to end by itself.
_farewell = _AT_ONCE
#: The process that has a thread for it: this one, or one that this was forked from.
_watched_in: int | None = None


class Owner:
    """Goes with a process that is started, before anything that takes long to import: from there on it is watched.

    (None: this system has no descriptors of processes.)
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    @classmethod
    def this_process(cls) -> Owner:
        try:
            return cls(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError):
            return cls()

    def __reduce__(self) -> Any:
        return _arrive, (None if self._descriptor is None else reduction.DupFd(self._descriptor),)

    def watch(self) -> None:
        """In the process."""
        global _watched_in, _farewell
        if _watched_in != os.getpid():
            _watched_in, _farewell = os.getpid(), _AT_ONCE
            parent = multiprocessing.parent_process()
            end = self._descriptor if self._descriptor is not None or parent is None else parent.sentinel
            threading.Thread(target=_watch, args=(end,), name="swath-watch-owner", daemon=True).start()

    def close(self) -> None:
        """In the owner, once the process has its own."""
        if self._descriptor is not None:
            os.close(self._descriptor)


def _arrive(descriptor: Any) -> Owner:
    owner = Owner(None if descriptor is None else descriptor.detach())
    if descriptor is not None:
        owner.watch()
    return owner


def _watch(end: int) -> None:
    wait([end])
    act, seconds = _farewell
    act()
    time.sleep(seconds)
    os._exit(1)


def when_owner_is_gone(act: Callable[[], Any] = lambda: None, seconds: float = 0.0) -> None:
    """In a process that ``start_process`` started: what to do first, and how long it may then take to leave.

    It may be in a step, or in code of others, that does not end.
    """
    global _farewell
    _farewell = act, seconds
