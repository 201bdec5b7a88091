"""Who gets a batch of a collector: one thread at a time."""

from __future__ import annotations

import threading


class OneThread:
    """For a ``with`` block: held by the thread that gets a batch, or begins to in the background. A second one is told.

    Nobody waits, and a thread that has it may have it again.

    Args:
        whose: what the batches are of.

    >>> with OneThread("Collector") as first, first:
    ...     print("two steps of one thread")
    two steps of one thread
    """

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._lock = threading.RLock()

    def __enter__(self) -> OneThread:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"another thread is getting a batch of this {self._whose}, and two at once would take steps in each "
                "other's episodes: let one thread iterate and hand on what it gets, or make a collector for each"
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
