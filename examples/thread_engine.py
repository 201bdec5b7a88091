"""Another engine: nodes that are threads of this process. A toy, and a pattern for engines that are none.

    python examples/thread_engine.py

Written from "Another engine" in docs/architecture.md; ``tests/test_thread_engine.py`` lets it pass what every collector
must. Torch and Python have one generator and one number of threads for all of a process, so nodes take turns where a
seed was given, and what they set is set for the program, too: use a ``Collector`` for envs in this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cloudpickle

from swath.collectors.distributed.answers import PicklingNode, as_request, lost, opened, pass_on
from swath.collectors.distributed.driver import NodesCollector
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.data.payload import Bytes
from swath.errors import NodeLost
from swath.process import pickling
from swath.rollout.exploration import own_exploration


class ThreadNode:
    """A node in two threads: one makes it, collects and answers, in turn; one applies weights, also meanwhile."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.served = PicklingNode()  # what is sent is copied, as it would be on its way to another machine
        self.loss: str | None = None
        self._work = ThreadPoolExecutor(1, f"node-{number}")
        self._weights = ThreadPoolExecutor(1, f"weights-{number}")
        self._promises: set[Future[Any]] = set()
        self._lock = threading.RLock()
        self.closed = threading.Event()

    def ask(self, do: Callable[..., Any], *args: Any, read: Any = None, meanwhile: bool = False) -> Future[Any]:
        """What the node answers; ``NodeLost`` if it is lost before."""
        promise: Future[Any] = Future()
        with self._lock:
            if self.loss is not None:
                return lost(self.number, self.loss)
            self._promises.add(promise)
            doing = (self._weights if meanwhile else self._work).submit(self._do, do, args, read)
        doing.add_done_callback(lambda done: self._keep(promise, done))
        return promise

    def _do(self, do: Callable[..., Any], args: tuple[Any, ...], read: Any) -> Any:
        with own_exploration():  # tensordict has one type for all threads
            return opened(do(*args), self.number, read)

    def _keep(self, promise: Future[Any], done: Future[Any]) -> None:
        with self._lock:
            self._promises.discard(promise)
            pass_on(done, promise)

    def lose(self, why: str) -> None:
        """Nothing is expected of it any more: whoever waits is told, and the batch under way ends after its step."""
        with self._lock:
            if self.loss is not None:
                return
            self.loss = why
            waiting, self._promises = self._promises, set()
            for promise in waiting:
                promise.set_exception(NodeLost(why, self.number))
            self._work.submit(self._close)
        self.served.ask_to_stop()
        self._work.shutdown(wait=False)
        self._weights.shutdown(wait=False)

    def _close(self) -> None:
        self.served.close()
        self.closed.set()


class ThreadEngine:
    """See ``Engine``."""

    name = "threads"
    restarts = True
    orders_per_node = 2

    def __init__(self) -> None:
        self.nodes: dict[int, ThreadNode] = {}
        self._ended: list[ThreadNode] = []

    def launch(self, plan: NodePlan) -> Future[NodeDescription]:
        node = self.nodes[plan.node] = ThreadNode(plan.node)
        return node.ask(node.served.make, pickling.dumps_with_path(plan))

    def collect(self, node: int, order: Order) -> Future[tuple[Report, Bytes | None]]:
        return self.nodes[node].ask(self.nodes[node].served.collect, order)

    def share(self, weights: Bytes) -> Bytes:
        return weights

    def set_weights(self, node: int, shared: Bytes, version: int, model_id: str) -> Future[None]:
        return self.nodes[node].ask(self.nodes[node].served.set_weights, shared, version, model_id, meanwhile=True)

    def call(self, node: int, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        request = as_request(name, args, kwargs)
        return self.nodes[node].ask(self.nodes[node].served.call, request, read=cloudpickle.loads)

    def is_there(self, node: int) -> bool:
        return self.nodes[node].loss is None

    def end(self, node: int) -> None:
        self.nodes[node].lose("it was told to leave")
        self._ended.append(self.nodes[node])  # another may come into its place

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for node in list(self.nodes):
            self.end(node)
        for ended in self._ended:
            ended.closed.wait(max(0.0, deadline - time.monotonic()))
        self._ended.clear()


class ThreadCollector(NodesCollector):
    """Collects in threads of this process. Arguments are those of ``NodesCollector``."""

    def _make_engine(self, num_nodes: int) -> Engine:
        return ThreadEngine()


if __name__ == "__main__":
    with ThreadCollector(["CartPole-v1"] * 2, frames_per_batch=200, total_frames=1000, sync=True) as collector:
        for batch in collector:
            print(tuple(batch.shape), f"{batch['next', 'reward'].sum():.0f}")
