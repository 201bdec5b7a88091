"""What nodes do when, as their driver gets to know it: in its own time, and under their names."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from swath.collectors.distributed.node_pool import NodeHandle, NodePool
from swath.errors import NodeLost
from swath.timeline.clocks import clock_ahead
from swath.timeline.recording import Recording

#: How long a node may take to tell, when it is over: it has to end the batches that it was asked for.
_SECONDS_TO_TELL = 10.0


class NodeRecordings:
    """Of all nodes that there are. What a node did that was lost is lost with it."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        #: By node: how much this clock is ahead of its.
        self._ahead_s: dict[int, float] = {}

    def begin(self) -> None:
        for handle, (machine, _) in self._pool.ask_all("begin_trace"):
            self._know(handle, machine)

    def begin_again(self, handle: NodeHandle) -> None:
        """A node was started again."""
        machine, _ = self._pool.call(handle, "begin_trace")
        self._know(handle, machine)

    def _know(self, handle: NodeHandle, machine: str) -> None:
        self._ahead_s[handle.node] = clock_ahead(machine, partial(self._pool.call, handle, "clock"))

    def end(self) -> list[Recording]:
        """Of those that answer soon."""
        deadline = time.monotonic() + _SECONDS_TO_TELL
        asked = [(h, self._pool.engine.call(h.node, "end_trace")) for h in self._pool.alive if h.node in self._ahead_s]
        found: list[Recording] = []
        for handle, future in asked:
            try:
                own: list[dict[str, Any]] = future.result(max(0.0, deadline - time.monotonic()))
            except (NodeLost, TimeoutError):  # whoever needs it is told
                continue
            found += [self._of(handle, number, Recording.of_plain_data(data)) for number, data in enumerate(own)]
        return found

    def _of(self, handle: NodeHandle, number: int, recording: Recording) -> Recording:
        name = f"node {handle.node}" if number == 0 else f"node {handle.node}, {recording.name}"
        threads: dict[int, Any] = {} if number == 0 else recording.threads
        named = replace(recording, name=name, threads=threads, restarts=recording.restarts or handle.restarts)
        return named.moved(self._ahead_s[handle.node])
