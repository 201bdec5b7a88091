"""What workers do when, while somebody wants to know: each writes to memory of its owner's, which outlives it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import perf_counter

from swath.process.memory import SharedMemory
from swath.timeline.recorder import BYTES_BY_DEFAULT, read
from swath.timeline.recording import Recording
from swath.workers.handle import WorkerHandle


class WorkerRecordings:
    """Of all workers of a pool, also of those that are gone.

    Args:
        name: what they are called.
    """

    def __init__(self, name: str = "worker", num_bytes: int = BYTES_BY_DEFAULT) -> None:
        self._name = name
        self._num_bytes = num_bytes
        #: By worker and incarnation: its process, and what it writes to.
        self._memory: dict[tuple[int, int], tuple[int, SharedMemory]] = {}

    def begin(self, handle: WorkerHandle) -> None:
        """A worker is to write from now on. (One that is gone: the next wait tells.)"""
        memory = SharedMemory(self._num_bytes)
        self._memory[handle.number, handle.incarnation.number] = handle.pid or 0, memory
        assert memory.descriptor is not None
        with contextlib.suppress(OSError):
            handle.channel.send_descriptor(memory.descriptor, "trace", memory.num_bytes)
        memory.close_descriptor()

    def read(self, handles: Sequence[WorkerHandle]) -> list[Recording]:
        """What is there now, and what lasts; of a worker that is gone, until the last that is known of it."""
        now = perf_counter()
        found = []
        for (worker, incarnation), (pid, memory) in self._memory.items():
            handle = handles[worker]
            lives = handle.incarnation.number == incarnation and handle.is_alive
            records = read(memory.bytes_, now if lives else 0.0)
            found.append(Recording(f"{self._name} {worker}", pid, records, restarts=incarnation))
        return found
