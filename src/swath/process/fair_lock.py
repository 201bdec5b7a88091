"""A lock that nobody is kept from by who takes it again and again."""

from __future__ import annotations

import threading
from collections import deque

#: The owner, between two: who was handed the lock has not run yet.
_HANDED_OVER = -1


class FairLock:
    """As ``threading.RLock``, but those who wait get it in the order in which they came.

    A trainer's thread that does nothing but send weights would otherwise hold it nearly always, and the thread that
    iterates would get it by luck.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        #: One for each who waits; its release is the handing over.
        self._queue: deque[threading.Lock] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        with self._mutex:
            if self._owner == me:
                self._depth += 1
                return True
            if self._owner is None:
                self._owner, self._depth = me, 1
                return True
            if not blocking:
                return False
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        try:
            came = turn.acquire(timeout=timeout)
        except BaseException:  # Ctrl-C, pressed twice
            if not self._leave_queue(turn):
                self._hand_over()
            raise
        if not came and self._leave_queue(turn):
            return False
        self._owner, self._depth = me, 1
        return True

    def _leave_queue(self, turn: threading.Lock) -> bool:
        """False: it was handed over just now."""
        with self._mutex:
            if turn not in self._queue:
                return False
            self._queue.remove(turn)
            return True

    def release(self) -> None:
        if self._owner != threading.get_ident():
            raise RuntimeError("release of a lock that another thread holds, or nobody")
        self._depth -= 1
        if not self._depth:
            self._hand_over()

    def _hand_over(self) -> None:
        with self._mutex:
            if self._queue:
                self._owner = _HANDED_OVER
                self._queue.popleft().release()
            else:
                self._owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
