"""Which threads are using something that another one wants to close."""

from __future__ import annotations

import threading


class InUse:
    """Which threads are using something that another one wants to close."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[int] = []

    def __enter__(self) -> None:
        with self._changed:
            self._threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._threads.remove(threading.get_ident())
            self._changed.notify_all()

    def wait_for_others(self, timeout_s: float) -> bool:
        """This thread itself may be within, in a signal's handler, say."""
        me = threading.get_ident()
        with self._changed:
            return self._changed.wait_for(lambda: all(thread == me for thread in self._threads), timeout_s)
