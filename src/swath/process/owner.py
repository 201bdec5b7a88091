"""The owner of a process, as the process sees it: when it is gone, there is nothing left to do.

Not by a pipe that ends with the owner, as ``multiprocessing`` does it: whatever was forked from the owner holds that,
too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

#: A process whose owner is gone has so long to end by itself.
SECONDS_TO_LEAVE = 1.0

_AT_ONCE: tuple[Callable[[], Any], float] = (lambda: None, 0.0)
#: What to do first, and how many seconds the process then has to end by itself.
_farewell = _AT_ONCE
#: The process that has a thread for it: this one, or one that this was forked from.
_watched_in: int | None = None


def descriptor_of(pid: int) -> int | None:
    """Ready when the process has ended; None where the system has none, or if it is over."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class Owner:
    """Goes with a process that is started, before anything that takes long to import: from there on it is watched."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

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


def leave_with_owner(act: Callable[[], Any] = lambda: None, seconds: float = SECONDS_TO_LEAVE) -> None:
    """First of all in a process that ``start_process`` started: without its owner there is nothing left to do.

    Args:
        act: what to do then, at once.
        seconds: how long it may take to leave: it may be in a step, or in code of others, that does not end.
    """
    global _farewell
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who tells us what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _farewell = act, seconds
