"""What a server counts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np


class ServerStats:
    """Counters since the start (or the last reset), and times of the last ``window_size`` requests and batches.

    >>> stats = ServerStats(window_size=8)
    >>> stats.count([0.001, 0.003], num_rows=2, forward_s=0.002)
    >>> now = stats.read()
    >>> now["requests"], now["batches"], now["avg_batch_size"], round(now["queue_p50_ms"], 3)
    (2, 1, 2.0, 2.0)
    """

    def __init__(self, window_size: int, is_on: bool = True) -> None:
        self._is_on = is_on
        self._queue_s: deque[float] = deque(maxlen=window_size)
        self._forward_s: deque[float] = deque(maxlen=window_size)
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._since = perf_counter()
        self._requests = self._rows = self._batches = self._failed = 0
        self._queue_s.clear()
        self._forward_s.clear()

    def count(self, queue_s: Sequence[float], num_rows: int, forward_s: float, *, failed: bool = False) -> None:
        """One forward: how long each of its requests had waited, and how long it took."""
        if not self._is_on:
            return
        with self._lock:
            self._requests += len(queue_s)
            self._rows += num_rows
            self._batches += 1
            self._failed += len(queue_s) if failed else 0
            self._queue_s.extend(queue_s)
            self._forward_s.append(forward_s)

    def read(self, *, reset: bool = False) -> dict[str, Any]:
        with self._lock:
            seconds = max(perf_counter() - self._since, 1e-9)
            read = {
                "requests": self._requests,
                "rows": self._rows,
                "batches": self._batches,
                "failed_requests": self._failed,
                "requests_per_s": self._requests / seconds,
                "batches_per_s": self._batches / seconds,
                "avg_batch_size": self._rows / self._batches if self._batches else 0.0,
            }
            for name, window in (("queue", self._queue_s), ("forward", self._forward_s)):
                for percent in (50, 95):
                    ms = 1e3 * float(np.percentile(window, percent)) if window else 0.0
                    read[f"p{percent}_{name}_ms"] = read[f"{name}_p{percent}_ms"] = ms  # TorchRL's name, and swath's
            if reset:
                self._restart()
        return read
