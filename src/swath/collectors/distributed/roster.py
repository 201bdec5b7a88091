"""Roster: the nodes of a collector, what they were asked for, and what is done when one of them is lost."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.data.payload import Bytes
from swath.errors import CollectorClosed, EnvError, NodeLost, add_note, message_of
from swath.process.ctrl_c import ctrl_c_waits, interruptible


@dataclass
class Member:
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
    pending: dict[int, Order] = field(default_factory=dict)
    batches_since_weights: int = 0
    frames: int = 0
    batches: int = 0
    busy_s: float = 0.0
    last: Report | None = None

    @property
    def node(self) -> int:
        return self.plan.node

    @property
    def who(self) -> str:
        return f"node {self.node} ({self.about.host}, pid {self.about.pid})"

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
            "orders_under_way": len(self.pending),
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

    member: Member
    order: Order
    report: Report
    payload: Bytes | None
    #: How often the node had been started again.
    incarnation: int


def _named(member: Member, error: Exception) -> Exception:
    """An engine's ``NodeLost`` says why; this one says who and where, too."""
    if not isinstance(error, NodeLost) or error.pid is not None:
        return error
    about = member.about
    return NodeLost(f"{member.who} was lost: {str(error).rstrip('.')}.", member.node, about.host, about.pid)


class Roster:
    """Talks to the nodes through an engine; several threads may do so.

    Args:
        lock: held while a loss is dealt with.
        welcome: called with a node that was started again, before it gets orders.
        forget: called with a node that is gone for good, and with the orders that it had.
    """

    def __init__(
        self,
        engine: Engine,
        loss: Loss,
        owner: str,
        lock: Any,
        start_timeout_s: float,
        welcome: Callable[[Member], None],
        forget: Callable[[Member, Sequence[Order]], None],
    ) -> None:
        self.engine = engine
        self.members: list[Member] = []
        self._loss = loss
        self._owner = owner
        self._lock = lock
        self._start_timeout_s = start_timeout_s
        self._welcome = welcome
        self._forget = forget
        self._order_numbers = itertools.count(1)
        self._arrivals: deque[tuple[int, int, Order, Future[Any]]] = deque()
        #: Something is in ``_arrivals``, or the roster is closed.
        self._news = threading.Event()
        self._closed = threading.Event()

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.alive]

    @property
    def num_envs(self) -> int:
        return sum(member.about.num_envs for member in self.members)

    @property
    def has_pending(self) -> bool:
        return any(member.pending for member in self.members if member.alive)

    # -- starting --------------------------------------------------------------------------------------------------

    def launch(self, plans: Sequence[NodePlan]) -> list[Member]:
        futures = [self.engine.launch(plan) for plan in plans]
        deadline = time.monotonic() + self._start_timeout_s
        new = []
        for plan, future in zip(plans, futures, strict=True):
            member = Member(plan, self._started(plan, future, deadline), self.num_envs)
            if self.members:
                self._require_alike(member)
            self.members.append(member)
            new.append(member)
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

    def _require_alike(self, member: Member) -> None:
        first, other = self.members[0].about, member.about
        if (other.lead, other.fields) != (first.lead, first.fields):
            mine = {f.key: (tuple(f.shape), f.dtype) for f in first.fields}
            theirs = {f.key: (tuple(f.shape), f.dtype) for f in other.fields}
            differing = next((key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key)), None)
            what = (
                f"batches of {first.lead} envs against {other.lead}"
                if differing is None
                else f"{differing}: {mine.get(differing)} against {theirs.get(differing)}"
            )
            raise EnvError(f"{member.who} delivers other data than node 0: {what}; all nodes must be alike")

    # -- orders ----------------------------------------------------------------------------------------------------

    def order(self, member: Member, steps: int, num_envs: int | None, random_frames: int, into_buffer: bool) -> None:
        self._submit(member, Order(next(self._order_numbers), steps, num_envs, random_frames, into_buffer))

    def _submit(self, member: Member, order: Order) -> None:
        member.pending[order.number] = order
        node, incarnation = member.node, member.plan.incarnation
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
            member = self.members[node]
            if incarnation != member.plan.incarnation or order.number not in member.pending:
                return None
            try:
                report, payload = future.result()
            except Exception as error:
                self._lost(member, error)
                return None
            del member.pending[order.number]
            member.last = report
            member.next_own_id = max(member.next_own_id, report.next_id)
            member.frames += report.frames
            member.batches += 1
            member.busy_s += report.busy_s
            member.batches_since_weights += 1
            return Arrival(member, order, report, payload, incarnation)

    # -- questions -------------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """A line for each node."""
        open_still = not self._closed.is_set()
        return [m.describe(open_still and m.alive and self.engine.is_there(m.node)) for m in self.members]

    def call(self, member: Member, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a node answers that was just started: if it is gone, nothing is done about it here."""
        try:
            return interruptible(self.engine.call(member.node, name, *args, **kwargs).result)
        except NodeLost as lost:
            raise _named(member, lost) from None

    @ctrl_c_waits
    def ask(self, member: Member, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What a node answers, in a list; an empty one if it is gone, and collection goes on. One that was started
        again is asked again."""
        return self._answer(
            member, member.plan.incarnation, self.engine.call(member.node, name, *args, **kwargs), name, args, kwargs
        )

    @ctrl_c_waits
    def ask_all(self, name: str, *args: Any, **kwargs: Any) -> list[tuple[Member, Any]]:
        """What each node answers; they are asked at the same time."""
        asked = [(m, m.plan.incarnation, self.engine.call(m.node, name, *args, **kwargs)) for m in self.alive]
        answers = [(m, self._answer(m, incarnation, future, name, args, kwargs)) for m, incarnation, future in asked]
        return [(member, answer[0]) for member, answer in answers if answer]

    def _answer(
        self, member: Member, incarnation: int, future: Future[Any], name: str, args: Any, kwargs: Any
    ) -> list[Any]:
        while True:
            try:
                return [interruptible(future.result)]
            except NodeLost as error:
                self.deal_with(member, incarnation, error)
            except Exception as error:
                add_note(error, f"swath: raised in {member.who} of {self._owner}")
                raise
            if not member.alive:
                return []
            incarnation, future = member.plan.incarnation, self.engine.call(member.node, name, *args, **kwargs)

    # -- losses ----------------------------------------------------------------------------------------------------

    def deal_with(self, member: Member, incarnation: int, error: Exception) -> None:
        """Somebody found out that a node of this incarnation is gone; somebody else may have, before."""
        with self._lock:
            if member.alive and member.plan.incarnation == incarnation:
                self._lost(member, error)

    def _lost(self, member: Member, error: Exception) -> None:
        """Start it again, or go on without it; raises where neither was asked for."""
        if self._closed.is_set():
            raise CollectorClosed("the collector was shut down") from None
        orders = list(member.pending.values())
        error = _named(member, error)
        while member.restarts < self._loss.restarts and self.engine.restarts:
            member.restarts += 1
            try:
                self._restart(member, error)
            except NodeLost as again:
                error = again
                continue
            for old in orders:
                self._submit(member, old._replace(number=next(self._order_numbers)))
            return
        if isinstance(error, NodeLost):
            if self._loss.goes_on and len(self.alive) > 1:
                self.engine.end(member.node)
                member.alive = False
                member.pending.clear()
                self._forget(member, orders)
                left = f"{len(self.alive)} of {len(self.members)}"
                warnings.warn(f"{message_of(error)} Collection goes on with {left}.", stacklevel=2)
                return
            advice = "on_node_loss='continue' goes on with the others"
            if self.engine.restarts:
                advice = f"restart_nodes=1 starts it again, {advice}"
            add_note(error, f"swath: {advice}")
        else:
            add_note(error, f"swath: raised in {member.who} of {self._owner}")
        raise error

    def _restart(self, member: Member, error: Exception) -> None:
        """Another node in the place of one that is gone."""
        self.engine.end(member.node)
        member.unfinished = error
        member.pending.clear()
        member.plan = dataclasses.replace(
            member.plan,
            incarnation=member.plan.incarnation + 1,
            first_own_id=member.next_own_id,
            random_frames=member.plan.random_frames if member.last is None else member.last.own_random_left,
        )
        deadline = time.monotonic() + self._start_timeout_s
        member.about = self._started(member.plan, self.engine.launch(member.plan), deadline)
        try:
            self._welcome(member)
        except NodeLost as again:
            raise _named(member, again) from None
        member.batches_since_weights = 0
        member.unfinished = None
        warnings.warn(
            f"{message_of(error)} It was started again as {member.who}; the episodes that it was in have ended without "
            "a done flag where they were delivered already, and go on under new ids",
            stacklevel=2,
        )

    def finish_restarts(self) -> None:
        """Those that Ctrl-C has interrupted."""
        for member in self.alive:
            if member.unfinished is not None:
                member.restarts -= 1
                self._lost(member, member.unfinished)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """End all nodes; whoever waits for one is told."""
        self._closed.set()
        self.engine.close(timeout_s)
        self._news.set()
