"""Telling once that envs which share a worker wait rather than compute."""

from __future__ import annotations

from swath.warn import warn_user
from swath.workers.layout import WorkerLayout
from swath.workers.pool import WorkerPool

#: A step that computes for less than this share of its time is one that waits.
_BUSY_SHARE = 0.5
#: After so many batches it is looked at.
_BATCHES = (1, 4, 16)


class WaitingWatch:
    """Looks at what workers tell of their time."""

    def __init__(self, pool: WorkerPool, layout: WorkerLayout) -> None:
        self._pool = pool
        self._layout = layout
        self._has_told = False

    def look(self, num_batches: int) -> None:
        if self._has_told or num_batches not in _BATCHES:
            return
        for handle in self._pool.handles:
            page, count = handle.page, len(handle.spec.members)
            busy_s, cpu_s, steps = page.seconds("busy_s"), page.seconds("cpu_s"), page.integer("steps")
            waits = page.integer("switches") >= steps / 2  # one that is only kept from its core does not give it away
            if count > 1 and steps > 10 and cpu_s < _BUSY_SHARE * busy_s and waits:
                self._has_told = True
                each = busy_s / steps * 1000
                warn_user(
                    f"the envs wait rather than compute: a step of {count} envs takes {each:.3g} ms, "
                    f"{cpu_s / busy_s:.0%} of it on the core. {self._layout} step one after the other; "
                    f"num_workers={self._layout.num_members} lets all wait at the same time "
                    "(num_workers='auto' measures)"
                )
                return
