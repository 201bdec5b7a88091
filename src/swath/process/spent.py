"""What a thread spends its time on: its core, or waiting."""

from __future__ import annotations

import time

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class Spent:
    """Seconds between ``begin`` and ``end``, of the thread that calls them, and how many of them it was on a core.

    >>> spent = Spent()
    >>> spent.begin(); spent.end()
    >>> 0 <= spent.cpu_s, spent.busy_s_at(time.monotonic()) == spent.busy_s
    (True, True)
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.cpu_s = 0.0
        #: How often it gave its core away, and how often it was taken from it.
        self._gave = self._lost = 0
        #: When what lasts has begun.
        self._since: float | None = None
        self._before = (0.0, 0, 0)

    def begin(self) -> None:
        self._before = _of_this_thread()
        self._since = time.monotonic()

    def end(self) -> None:
        since, self._since = self._since, None
        if since is not None:
            cpu_s, gave, lost = _of_this_thread()
            self.busy_s += time.monotonic() - since
            self.cpu_s += cpu_s - self._before[0]
            self._gave += gave - self._before[1]
            self._lost += lost - self._before[2]

    def busy_s_at(self, now: float) -> float:
        """What lasts counts, too."""
        since = self._since
        return self.busy_s + (max(0.0, now - since) if since is not None else 0.0)

    @property
    def on_core(self) -> float | None:
        """The share of the time on a core; None of a thread that would compute, but others had its core."""
        if not self.busy_s or self._gave <= self._lost:
            return None
        return min(1.0, self.cpu_s / self.busy_s)


def _of_this_thread() -> tuple[float, int, int]:
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):  # macOS counts switches of whole processes
        return time.thread_time(), 0, 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime, usage.ru_nvcsw, usage.ru_nivcsw
