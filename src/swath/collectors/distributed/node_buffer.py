"""Nodes and a replay buffer: whose frames go on where, and writing that is done on the nodes themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swath.collectors.background import Batches
from swath.collectors.distributed.node_pool import NodeHandle, NodePool
from swath.collectors.scheduler import Scheduler


class NodeTracks:
    """Episodes of a node that is gone, or was started again, do not go on in the buffer."""

    def __init__(self, buffer: Any, nodes: NodePool) -> None:
        self._end = getattr(buffer, "end_tracks", None)
        self._nodes = nodes
        #: Nodes that are gone for good, and may have sent what is not in the buffer yet.
        self.gone: list[NodeHandle] = []
        #: Of each node, how often it had been started again when it sent what was stored last.
        self._stored_of: dict[int, int] = {}

    def end(self, handle: NodeHandle) -> None:
        if self._end is not None:
            self._end(handle.first_env, handle.about.num_envs, self._nodes.num_envs)

    def end_gone(self) -> None:
        """Once all that they had sent is in the buffer."""
        while self.gone:
            self.end(self.gone.pop())

    def follow(self, delivered: Sequence[tuple[NodeHandle, int]]) -> None:
        """Before a batch of these nodes, and their incarnations, is written."""
        for handle, incarnation in delivered:
            if self._stored_of.setdefault(handle.node, incarnation) != incarnation:
                self.end(handle)
                self._stored_of[handle.node] = incarnation


class DirectWriting(Batches):
    """``Work`` of nodes that write to the buffer by themselves: it is still when none has a request."""

    writes_elsewhere = True

    def __init__(self, collector: Any, scheduler: Scheduler[Any]) -> None:
        super().__init__(collector, lambda: True)
        self._scheduler = scheduler

    def is_still(self) -> bool:
        return self._scheduler.is_idle

    def hurry(self) -> None:
        self._let_drain(True)

    def go_on(self) -> None:
        self._let_drain(False)

    def _let_drain(self, is_draining: bool) -> None:
        collector = self.owner()
        if collector is not None:  # it may be on its way out
            collector.is_draining = is_draining
