"""NodePool: the nodes of a collector, as their driver sees them, and what is done when one of them is lost."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.collectors.remote import Delivers, warn_started_again
from swath.data.payload import Bytes
from swath.errors import CollectorClosed, NodeLost, add_note, message_of
from swath.process.ctrl_c import ctrl_c_waits, interruptible
from swath.warn import warn_user


@dataclass
class NodeHandle:
    """A node, as the driver knows it."""

    plan: NodePlan
    about: NodeDescription
    #: The number of its first env among those of all nodes.
    first_env: int = 0
    alive: bool = True
    restarts: int = 0
    #: Why its restart must be made again: somebody pressed Ctrl-C in the middle of it.
    unfinished: Exception | None = None
    next_own_id: int = 0
    seed: tuple[int, bool] | None = None
    batches_since_weights: int = 0
    frames: int = 0
    batches: int = 0
    busy_s: float = 0.0
    made_at: float = field(default_factory=time.monotonic)
    last: Report | None = None

    @property
    def node(self) -> int:
        return self.plan.node

    @property
    def who(self) -> str:
        return f"node {self.node} ({self.about.host}, pid {self.about.pid})"

    @property
    def delivers(self) -> Delivers:
        return Delivers(tuple(self.about.lead), self.about.fields)

    def describe(self, is_there: bool) -> dict[str, Any]:
        last = self.last
        env_share = 0.0 if last is None else last.env_share
        return {
            "node": self.node,
            "host": self.about.host,
            "pid": self.about.pid,
            "alive": is_there,
            "restarts": self.restarts,
            "frames": self.frames,
            "batches": self.batches,
            "fps": self.frames / self.busy_s if self.busy_s else 0.0,
            "busy_s": self.busy_s,
            "env_s": self.busy_s * env_share,
            "policy_s": self.busy_s * (1 - env_share),
            "policy_version": 0 if last is None else last.policy_version,
        }


@dataclass(frozen=True)
class Loss:
    """What to do when a node is lost."""

    restarts: int
    goes_on: bool

    @classmethod
    def resolve(cls, restart_nodes: Any, on_node_loss: Any) -> Loss:
        if on_node_loss not in ("raise", "continue"):
            raise ValueError(f"on_node_loss must be 'raise' or 'continue', got {on_node_loss!r}")
        restarts = int(restart_nodes)
        if restarts < 0:
            raise ValueError(f"restart_nodes is how often a node may be started again; got {restart_nodes}")
        return cls(restarts, on_node_loss == "continue")


class Arrival(NamedTuple):
    """What came of an order."""

    handle: NodeHandle
    order: Order
    report: Report
    payload: Bytes | None
    #: How often the node had been started again.
    incarnation: int


def _named(handle: NodeHandle, error: Exception) -> Exception:
    """An engine's ``NodeLost`` says why; this one says who and where, too."""
    if not isinstance(error, NodeLost) or error.pid is not None:
        return error
    about = handle.about
    return NodeLost(f"{handle.who} was lost: {str(error).rstrip('.')}.", handle.node, about.host, about.pid)


class NodePool:
    """Talks to the nodes through an engine; several threads may do so.

    Args:
        lock: held while a loss is dealt with.
        welcome: called with a node that was started again: to send it what it needs, and its requests.
        forget: called with a node that is gone for good.
    """

    def __init__(
        self,
        engine: Engine,
        loss: Loss,
        owner: str,
        lock: Any,
        start_timeout_s: float,
        welcome: Callable[[NodeHandle], None],
        forget: Callable[[NodeHandle], None],
    ) -> None:
        self.engine = engine
        self.handles: list[NodeHandle] = []
        self._loss = loss
        self._owner = owner
        self._lock = lock
        self._start_timeout_s = start_timeout_s
        self._welcome = welcome
        self._forget = forget
        self._arrivals: deque[tuple[int, int, Order, Future[Any]]] = deque()
        #: Something is in ``_arrivals``, or the pool is closed.
        self._news = threading.Event()
        self._closed = threading.Event()

    @property
    def alive(self) -> list[NodeHandle]:
        return [handle for handle in self.handles if handle.alive]

    @property
    def num_envs(self) -> int:
        return sum(handle.about.num_envs for handle in self.handles)

    # -- starting --------------------------------------------------------------------------------------------------

    def launch(self, plans: Sequence[NodePlan]) -> list[NodeHandle]:
        futures = [self.engine.launch(plan) for plan in plans]
        deadline = time.monotonic() + self._start_timeout_s
        new = []
        for plan, future in zip(plans, futures, strict=True):
            handle = NodeHandle(plan, self._started(plan, future, deadline), self.num_envs)
            if self.handles:
                first = self.handles[0]
                handle.delivers.require_alike(first.delivers, handle.who, "node 0")
            self.handles.append(handle)
            new.append(handle)
        return new

    def _started(self, plan: NodePlan, future: Future[NodeDescription], deadline: float) -> NodeDescription:
        try:
            return interruptible(future.result, max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise NodeLost(
                f"node {plan.node} of {self.engine.name} did not start within {self._start_timeout_s:g} s "
                "(start_timeout_s=); are there enough resources for all nodes?",
                plan.node,
            ) from None
        except NodeLost as lost:
            raise NodeLost(f"node {plan.node} of {self.engine.name} did not start: {lost}", plan.node) from None
        except Exception as error:
            add_note(error, f"swath: raised while node {plan.node} of {self._owner} was made")
            raise

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, handle: NodeHandle, order: Order) -> None:
        """Ask for a batch; ``next_arrival`` has what came of it."""
        node, incarnation = handle.node, handle.plan.incarnation
        future = self.engine.collect(node, order)
        future.add_done_callback(lambda done: self._arrive((node, incarnation, order, done)))

    def _arrive(self, arrival: tuple[int, int, Order, Future[Any]]) -> None:
        self._arrivals.append(arrival)
        self._news.set()

    def next_arrival(self) -> Arrival | None:
        """The next batch that has come; None if a node was lost instead, and collection goes on."""
        while not self._arrivals:
            if self._closed.is_set():
                raise CollectorClosed("the collector was shut down")
            interruptible(self._news.wait)
            self._news.clear()
        node, incarnation, order, future = self._arrivals.popleft()
        with self._lock:
            handle = self.handles[node]
            if incarnation != handle.plan.incarnation or not handle.alive:
                return None
            try:
                report, payload = future.result()
            except Exception as error:
                self._lost(handle, error)
                return None
            handle.last = report
            handle.next_own_id = max(handle.next_own_id, report.next_id)
            handle.frames += report.frames
            handle.batches += 1
            handle.busy_s += report.busy_s
            handle.batches_since_weights += 1
            return Arrival(handle, order, report, payload, incarnation)

    # -- questions -------------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """A line for each node."""
        open_still = not self._closed.is_set()
        return [m.describe(open_still and m.alive and self.engine.is_there(m.node)) for m in self.handles]

    def call(self, handle: NodeHandle, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a node answers that was just started: if it is gone, nothing is done about it here."""
        try:
            return interruptible(self.engine.call(handle.node, name, *args, **kwargs).result)
        except NodeLost as lost:
            raise _named(handle, lost) from None

    @ctrl_c_waits
    def ask(self, handle: NodeHandle, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What a node answers, in a list; an empty one if it is gone, and collection goes on. One that was started
        again is asked again."""
        return self._answer(
            handle, handle.plan.incarnation, self.engine.call(handle.node, name, *args, **kwargs), name, args, kwargs
        )

    @ctrl_c_waits
    def ask_all(self, name: str, *args: Any, **kwargs: Any) -> list[tuple[NodeHandle, Any]]:
        """What each node answers; they are asked at the same time."""
        asked = [(m, m.plan.incarnation, self.engine.call(m.node, name, *args, **kwargs)) for m in self.alive]
        answers = [(m, self._answer(m, incarnation, future, name, args, kwargs)) for m, incarnation, future in asked]
        return [(handle, answer[0]) for handle, answer in answers if answer]

    def _answer(
        self, handle: NodeHandle, incarnation: int, future: Future[Any], name: str, args: Any, kwargs: Any
    ) -> list[Any]:
        while True:
            try:
                return [interruptible(future.result)]
            except NodeLost as error:
                self.deal_with(handle, incarnation, error)
            except Exception as error:
                add_note(error, f"swath: raised in {handle.who} of {self._owner}")
                raise
            if not handle.alive:
                return []
            incarnation, future = handle.plan.incarnation, self.engine.call(handle.node, name, *args, **kwargs)

    # -- losses ----------------------------------------------------------------------------------------------------

    def deal_with(self, handle: NodeHandle, incarnation: int, error: Exception) -> None:
        """Somebody found out that a node of this incarnation is gone; somebody else may have, before."""
        with self._lock:
            if handle.alive and handle.plan.incarnation == incarnation:
                self._lost(handle, error)

    def _lost(self, handle: NodeHandle, error: Exception) -> None:
        """Start it again, or go on without it; raises where neither was asked for."""
        if self._closed.is_set():
            raise CollectorClosed("the collector was shut down") from None
        error = _named(handle, error)
        while handle.restarts < self._loss.restarts and self.engine.restarts:
            handle.restarts += 1
            try:
                self._restart(handle, error)
            except NodeLost as again:
                error = again
                continue
            return
        if isinstance(error, NodeLost):
            if self._loss.goes_on and len(self.alive) > 1:
                self.engine.end(handle.node)
                handle.alive = False
                self._forget(handle)
                left = f"{len(self.alive)} of {len(self.handles)}"
                warn_user(f"{message_of(error)} Collection goes on with {left}.")
                return
            advice = "on_node_loss='continue' goes on with the others"
            if self.engine.restarts:
                advice = f"restart_nodes=1 starts it again, {advice}"
            add_note(error, f"swath: {advice}")
        else:
            add_note(error, f"swath: raised in {handle.who} of {self._owner}")
        raise error

    def _restart(self, handle: NodeHandle, error: Exception) -> None:
        """Another node in the place of one that is gone."""
        self.engine.end(handle.node)
        handle.unfinished = error
        handle.plan = dataclasses.replace(
            handle.plan,
            incarnation=handle.plan.incarnation + 1,
            first_own_id=handle.next_own_id,
            random_frames=handle.plan.random_frames if handle.last is None else handle.last.own_random_left,
        )
        deadline = time.monotonic() + self._start_timeout_s
        handle.about = self._started(handle.plan, self.engine.launch(handle.plan), deadline)
        try:
            self._welcome(handle)
        except NodeLost as again:
            raise _named(handle, again) from None
        handle.batches_since_weights = 0
        handle.unfinished = None
        warn_started_again(error, handle.who)

    def finish_restarts(self) -> None:
        """Those that Ctrl-C has interrupted."""
        for handle in self.alive:
            if handle.unfinished is not None:
                handle.restarts -= 1
                self._lost(handle, handle.unfinished)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """End all nodes; whoever waits for one is told."""
        self._closed.set()
        self.engine.close(timeout_s)
        self._news.set()
