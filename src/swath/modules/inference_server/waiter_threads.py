"""Threads that wait for something each, for who does not want to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_SECONDS_IDLE = 2.0


class WaiterThreads:
    """As many threads as there is waiting to do at a time; one that has had nothing to do for a while ends.

    They are daemons, unlike those of an executor: a program that ends does not wait for what they wait for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: Threads without a job, and without one on its way to them.
        self._num_idle = 0

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            needs_another = self._num_idle == 0
            self._num_idle -= not needs_another
        self._jobs.put(job)
        if needs_another:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_SECONDS_IDLE)
            except queue.Empty:
                with self._lock:
                    if self._num_idle:
                        self._num_idle -= 1
                        return
                continue  # a job is on its way
            job()
            del job
            with self._lock:
                self._num_idle += 1
