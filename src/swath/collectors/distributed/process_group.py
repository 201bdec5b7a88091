"""ProcessGroupEngine: nodes that are reached by torch.distributed. (What runs there: ``process_group_node.py``.)

Driver and node have a process group of the two of them, so that nodes cannot disturb each other: one that is lost
breaks its own group only, and there are as many connections as nodes. Both sides say every few seconds that they are
there; whoever hears nothing for ``node_timeout_s`` gives the other up.
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swath.addresses import listen, resolve
from swath.collectors.distributed import process_group_node
from swath.collectors.distributed.answers import lost, pass_on
from swath.collectors.distributed.launchers import Launcher, NodeProcess, Ticket, how_it_ended
from swath.collectors.distributed.meeting import (
    PINGS_PER_TIMEOUT,
    body_device,
    connect_to_store,
    make_device,
    require_secret,
)
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.collectors.distributed.wire import (
    CALL,
    CLOSE,
    COLLECT,
    FAILED,
    HELLO,
    PING,
    WEIGHTS,
    Link,
    LinkBroken,
    Message,
    pack_value,
    revive_error,
    unpack_value,
)
from swath.data.payload import Bytes
from swath.errors import NodeLost
from swath.process import pickling

_SECONDS_BETWEEN_LOOKS = 0.02


class _RemoteNode:
    """A node, as the engine knows it: its process, its link, and what was asked of it."""

    def __init__(self, number: int, process: NodeProcess) -> None:
        self.number = number
        self.process = process
        self.link: Link | None = None
        self.asked: dict[int, tuple[int, Future[Any]]] = {}
        self.next_number = 1
        self.lock = threading.Lock()
        self.loss: NodeLost | None = None
        self.leaving = False
        self.listener: threading.Thread | None = None

    def ask(self, kind: int, about: Any = None, body: Any = None) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            if self.loss is not None:
                future.set_exception(_again(self.loss))
                return future
            number, self.next_number = self.next_number, self.next_number + 1
            self.asked[number] = kind, future
        link = self.link
        with suppress(LinkBroken):  # whoever listens will say so
            if link is not None:
                link.send(kind, number, about, body)
        return future

    def listen(self) -> None:
        assert self.link is not None
        try:
            while not self.leaving:
                message = self.link.receive()
                if message.kind != PING:
                    self._take(message)
        except LinkBroken as broken:
            if not self.leaving:
                self.lose(str(broken))
        except Exception as error:  # a message that is none of ours
            self.lose(f"it sent something that cannot be read ({type(error).__name__}: {error})")

    def _take(self, message: Message) -> None:
        assert self.link is not None
        with self.lock:
            kind, future = self.asked.pop(message.number)
        try:
            self.link.answered(message.number)
            if message.kind == FAILED:
                future.set_exception(revive_error(message.about, self.number))
            elif kind == COLLECT:
                future.set_result((Report.of_json(message.about), message.body))
            elif kind == HELLO:
                future.set_result(NodeDescription.of_json(message.about))
            else:
                future.set_result(None if message.body is None else unpack_value(message.body))
        except Exception as error:
            with self.lock:  # whoever waits is told with the others
                self.asked[message.number] = kind, future
            raise error

    def lose(self, why: str) -> None:
        self.give_up(NodeLost(how_it_ended(self.process) or why, self.number))

    def give_up(self, loss: NodeLost) -> None:
        """Whoever waits for an answer is told."""
        with self.lock:
            self.loss = loss
            asked, self.asked = list(self.asked.values()), {}
        for _, future in asked:
            if not future.done():
                future.set_exception(_again(loss))
        if self.link is not None:
            self.link.close()


def _again(loss: NodeLost) -> NodeLost:
    """Another one with the same words: notes are added to each."""
    return NodeLost(str(loss), loss.worker)


class ProcessGroupEngine:
    """See ``Engine``."""

    name = "torch.distributed"
    orders_per_node = 2

    def __init__(
        self,
        launcher: Launcher,
        *,
        backend: str,
        address: str,
        port: int,
        secret: str | None,
        node_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._launcher = launcher
        self.restarts = launcher.restarts
        self._backend = backend
        self._address = resolve(address)
        self._secret = secret
        self._timeout_s = node_timeout_s
        self._start_timeout_s = start_timeout_s
        self._nodes: dict[int, _RemoteNode] = {}
        self._closed = threading.Event()
        self._run = uuid.uuid4().hex
        self._device: Any = make_device(self._address)
        listening = listen(address, port)
        self.port = listening.getsockname()[1]
        self._store: Any = TCPStore(
            self._address,
            self.port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=start_timeout_s),
        )
        threading.Thread(target=self._ping, name="swath-ping", daemon=True).start()

    def _ping(self) -> None:
        while not self._closed.wait(self._timeout_s / PINGS_PER_TIMEOUT):
            for node in list(self._nodes.values()):
                if node.link is not None and node.loss is None and not node.leaving:
                    with suppress(LinkBroken):
                        node.link.send(PING)

    # -- starting --------------------------------------------------------------------------------------------------

    def launch(self, plan: NodePlan) -> Future[NodeDescription]:
        future: Future[NodeDescription] = Future()
        ticket = Ticket(
            node=plan.node,
            incarnation=plan.incarnation,
            engine=process_group_node.__name__,
            plan=pickling.dumps_with_path(plan),
            where={
                "address": self._address,
                "port": self.port,
                "name": f"{self._run}/{plan.node}/{plan.incarnation}",
                "backend": self._backend,
                "secret": self._secret,
                "node_timeout_s": self._timeout_s,
                "start_timeout_s": self._start_timeout_s,
            },
        )
        node = self._nodes[plan.node] = _RemoteNode(plan.node, self._launcher.start(ticket))
        threading.Thread(target=self._meet, args=(node, ticket, future), name="swath-meet", daemon=True).start()
        return future

    def _meet(self, node: _RemoteNode, ticket: Ticket, future: Future[NodeDescription]) -> None:
        try:
            name = ticket.where["name"]
            # A client of its own: whoever waits with a client keeps all others of it waiting.
            store = connect_to_store(self._address, self.port, self._start_timeout_s)
            self._await_arrival(node, store, name)
            node.link = Link(
                store,
                name,
                0,
                self._device,
                timeout_s=self._timeout_s,
                start_timeout_s=self._start_timeout_s,
                body_device=body_device(self._backend, 0),
            )
            if self._secret is not None:
                require_secret(node.link, self._secret, node.number)
            hello = node.ask(HELLO, None)
            node.listener = threading.Thread(target=node.listen, name=f"swath-node-{node.number}", daemon=True)
            node.listener.start()
            hello.add_done_callback(lambda done: pass_on(done, future))
        except Exception as error:
            how = node.process.has_ended()
            future.set_exception(NodeLost(how or str(error), node.number))

    def _await_arrival(self, node: _RemoteNode, store: Any, name: str) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        pause_s = _SECONDS_BETWEEN_LOOKS
        while not store.check([f"{name}/here"]):
            if self._closed.is_set():
                raise RuntimeError("the collector was shut down")
            if (how := node.process.has_ended()) is not None:
                raise RuntimeError(how)
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not come within {self._start_timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(0.5, 1.2 * pause_s)  # there may be a thousand who look

    # -- asking ----------------------------------------------------------------------------------------------------

    def collect(self, node: int, order: Order) -> Future[tuple[Report, Bytes | None]]:
        return self._ask(node, COLLECT, list(order))

    def share(self, weights: Bytes) -> Bytes:
        return weights

    def _ask(self, node: int, kind: int, about: Any = None, body: Any = None) -> Future[Any]:
        known = self._nodes.get(node)
        if known is not None:
            return known.ask(kind, about, body)
        return lost(node, "it was ended")

    def set_weights(self, node: int, shared: Bytes, version: int, model_id: str) -> Future[None]:
        return self._ask(node, WEIGHTS, [version, model_id], shared)

    def call(self, node: int, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._ask(node, CALL, name, pack_value([list(args), kwargs]))

    def is_there(self, node: int) -> bool:
        known = self._nodes.get(node)
        return known is not None and known.loss is None

    # -- ending ----------------------------------------------------------------------------------------------------

    def end(self, node: int) -> None:
        self._end([self._nodes.pop(node)], 1.0)

    def _end(self, nodes: list[_RemoteNode], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for node in nodes:
            node.leaving = True
            if node.link is not None and node.loss is None:
                with suppress(LinkBroken):
                    node.link.send(CLOSE)
        for node in nodes:
            if node.listener is not None and node.loss is None:  # the node closes its end when it has left
                node.listener.join(max(0.1, deadline - time.monotonic()))
            node.process.end(max(0.1, deadline - time.monotonic()))
            if node.link is not None:
                with suppress(Exception):
                    node.link.close()
            if node.listener is not None:
                node.listener.join(1.0)
            if node.loss is None:
                node.give_up(NodeLost("it was told to leave", node.number))
            node.link = None

    def close(self, timeout_s: float) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._end(list(self._nodes.values()), timeout_s)
        self._launcher.close()
        self._nodes.clear()
        self._device = self._store = None

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Sent, and received."""
        links = [node.link for node in self._nodes.values() if node.link is not None]
        return sum(link.num_bytes_sent for link in links), sum(link.num_bytes_received for link in links)
