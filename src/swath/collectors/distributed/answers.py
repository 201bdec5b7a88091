"""What nodes answer, for engines: as futures; and by pickles, where the engine itself sends whatever can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import cloudpickle

from swath.collectors.distributed.node import Node
from swath.collectors.distributed.requests import Order
from swath.data.payload import Bytes
from swath.errors import NodeLost
from swath.process import pickling
from swath.process.channel import Packed, returning_errors, unpack


def lost(node: int, why: str) -> Future[Any]:
    """The answer of a node that is gone."""
    gone: Future[Any] = Future()
    gone.set_exception(NodeLost(why, node))
    return gone


def pass_on(done: Future[Any], future: Future[Any]) -> None:
    """What became of one is what becomes of another, unless somebody has decided on that already."""
    if future.done():
        return
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)


def as_request(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """For ``PicklingNode.call``."""
    return pickling.dumps((name, args, kwargs))


def opened(answer: Any, node: int, read: Callable[[Any], Any] | None = None) -> Any:
    """What a ``PicklingNode`` answered; raises what it raised."""
    if isinstance(answer, Packed):
        raise unpack(answer, node, f"node {node}")
    return answer if read is None else read(answer)


class PicklingNode:
    """A node in a process that is sent pickles. Exceptions are returned, so that they come out with their own type."""

    def __init__(self) -> None:
        self.node: Node | None = None

    @returning_errors
    def make(self, plan: bytes) -> Any:
        self.node = Node(pickling.loads_with_path(plan))
        return self.node.describe()

    @returning_errors
    def collect(self, order: Order) -> Any:
        return self._made.collect(order)

    @returning_errors
    def set_weights(self, weights: Bytes, version: int, model_id: str) -> Any:
        return self._made.set_weights(weights, version, model_id)

    @returning_errors
    def call(self, request: bytes) -> Any:
        return pickling.dumps(self._made.call(*cloudpickle.loads(request)))

    def ask_to_stop(self) -> None:
        """From any thread; so is ``close``. Neither does anything to a node that was not made."""
        if self.node is not None:
            self.node.ask_to_stop()

    def close(self) -> None:
        if self.node is not None:
            self.node.close()

    @property
    def _made(self) -> Node:
        assert self.node is not None
        return self.node
