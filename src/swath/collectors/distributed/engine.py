"""Engine: where nodes run, and how the driver reaches them. Ray, torch.distributed and torch RPC are three of them.

docs/architecture.md, "Another engine", says what each method may rely on, and what is relied on.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.data.payload import Bytes


class Engine(Protocol):
    """A future of an engine ends with ``NodeLost`` when the node is gone, and with whatever the node raised.

    The text of that ``NodeLost`` is why; whoever knows the node says who.
    """

    #: What its users call it.
    name: str
    #: Whether a node that was lost can be started again.
    restarts: bool
    #: With two, a node that has collected one batch can go on with the next, and need not wait for the driver. The
    #: engine must keep their order.
    orders_per_node: int

    def launch(self, plan: NodePlan) -> Future[NodeDescription]:
        """Start a node, or start it again."""
        ...

    def collect(self, node: int, order: Order) -> Future[tuple[Report, Bytes | None]]: ...

    def share(self, weights: Bytes) -> Any:
        """Weights that are about to be sent to several nodes, in the form that ``set_weights`` takes."""
        ...

    def set_weights(self, node: int, shared: Any, version: int, model_id: str) -> Future[None]: ...

    def call(self, node: int, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """A method of the node's, between two orders."""
        ...

    def is_there(self, node: int) -> bool:
        """Whether nothing is known of its end; never blocks."""
        ...

    def end(self, node: int) -> None:
        """End a node that is not wanted any more, or was lost."""
        ...

    def close(self, timeout_s: float) -> None:
        """End all nodes and whatever the engine opened; harmless when called again."""
        ...
