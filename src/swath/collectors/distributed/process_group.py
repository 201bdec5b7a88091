"""DistributedCollector: nodes that are reached by torch.distributed.

Driver and node have a process group of the two of them, so that nodes cannot disturb each other: one that is lost
breaks its own group only, and there are as many connections as nodes. Both sides say every few seconds that they are
there; whoever hears nothing for ``node_timeout_s`` gives the other up.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from swath.addresses import (
    LOOPBACK,
    is_loopback,
    listen,
    own_address,
    resolve,
)
from swath.collectors.distributed.launchers import (
    Launcher,
    NodeProcess,
    Ticket,
)
from swath.collectors.distributed.node import Node
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.collectors.distributed.wire import (
    CALL,
    CLOSE,
    COLLECT,
    DONE,
    FAILED,
    HELLO,
    PING,
    WEIGHTS,
    Link,
    LinkBroken,
    Message,
    describe_error,
    pack_value,
    proof,
    revive_error,
    unpack_value,
)
from swath.data.payload import Bytes
from swath.errors import NodeLost, told
from swath.process import pickling
from swath.rollout.layout import Field

#: As in other libraries of this kind.
DEFAULT_PORT = 10003
_PINGS_PER_TIMEOUT = 4
_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_TO_SAY_WHY = 1.0


def body_device(backend: str, rank: int) -> torch.device | None:
    if backend != "nccl":
        return None
    if not torch.cuda.is_available():
        raise RuntimeError("backend='nccl' needs CUDA, which this machine (or this build of torch) has not; use 'gloo'")
    return torch.device("cuda", rank % torch.cuda.device_count())


def make_device(address: str) -> Any:
    try:
        return ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError:
        raise ValueError(
            f"address={address!r} is not an address of this machine: give one that nodes can reach it by (`ip addr`)"
        ) from None


def connect_to_store(address: str, port: int, timeout_s: float) -> Any:
    return TCPStore(address, port, None, False, timeout=timedelta(seconds=timeout_s))


def _describe(about: NodeDescription) -> dict[str, Any]:
    fields = [[list(f.key), list(f.shape), str(f.dtype).removeprefix("torch.")] for f in about.fields]
    return {**asdict(about), "fields": fields, "lead": list(about.lead)}


def _described(about: dict[str, Any]) -> NodeDescription:
    fields = tuple(
        Field(tuple(key), torch.Size(shape), getattr(torch, dtype)) for key, shape, dtype in about.pop("fields")
    )
    return NodeDescription(fields=fields, lead=tuple(about.pop("lead")), **about)


def _reported(about: dict[str, Any]) -> Report:
    return Report(**{**about, "shape": tuple(about["shape"]), "fragments": tuple(about["fragments"])})


# -- the driver's side -------------------------------------------------------------------------------------------------


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
                future.set_result((_reported(message.about), message.body))
            elif kind == HELLO:
                future.set_result(_described(message.about))
            else:
                future.set_result(None if message.body is None else unpack_value(message.body))
        except Exception as error:
            with self.lock:  # whoever waits is told with the others
                self.asked[message.number] = kind, future
            raise error

    def lose(self, why: str) -> None:
        deadline = time.monotonic() + _SECONDS_TO_SAY_WHY
        while (how := self.process.has_ended()) is None and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self.give_up(NodeLost(how or why, self.number))

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
        while not self._closed.wait(self._timeout_s / _PINGS_PER_TIMEOUT):
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
            engine=__name__,
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
            nonce = secrets.token_hex(16)
            if self._secret is not None:
                self._check_secret(node, nonce)
            hello = node.ask(HELLO, None)
            node.listener = threading.Thread(target=node.listen, name=f"swath-node-{node.number}", daemon=True)
            node.listener.start()
            hello.add_done_callback(lambda done: _pass_on(done, future))
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

    def _check_secret(self, node: _RemoteNode, nonce: str) -> None:
        """Each side proves to the other that it knows the secret; nobody says it."""
        link, secret = node.link, self._secret
        assert link is not None
        assert secret is not None
        link.send(HELLO, 0, {"nonce": nonce})
        answer = link.receive().about
        expected = proof(secret, nonce, f"node{node.number}")
        if not secrets.compare_digest(answer["proof"], expected):
            raise PermissionError("it does not know the secret")
        link.send(HELLO, 0, {"proof": proof(secret, answer["nonce"], "driver")})

    # -- asking ----------------------------------------------------------------------------------------------------

    def collect(self, node: int, order: Order) -> Future[tuple[Report, Bytes | None]]:
        return self._ask(node, COLLECT, list(order))

    def share(self, weights: Bytes) -> Bytes:
        return weights

    def _ask(self, node: int, kind: int, about: Any = None, body: Any = None) -> Future[Any]:
        known = self._nodes.get(node)
        if known is not None:
            return known.ask(kind, about, body)
        gone: Future[Any] = Future()
        gone.set_exception(NodeLost("it was ended", node))
        return gone

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


def _pass_on(done: Future[Any], future: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)


# -- the node's side ---------------------------------------------------------------------------------------------------


def serve(ticket: Ticket) -> None:
    """Be a node until the driver says that it is done, or is gone."""
    where = ticket.where
    address = where["address"]
    own = LOOPBACK if is_loopback(address) else own_address(address, where["port"])
    store = connect_to_store(address, where["port"], where["start_timeout_s"])
    store.set(f"{where['name']}/here", own)
    link = Link(
        store,
        where["name"],
        1,
        make_device(own),
        timeout_s=where["node_timeout_s"],
        start_timeout_s=where["start_timeout_s"],
        body_device=body_device(where["backend"], ticket.node + 1),
    )
    _NodeServer(link, ticket).run()


class _NodeServer:
    """The main thread collects; others listen, apply weights, and say that all is well."""

    def __init__(self, link: Link, ticket: Ticket) -> None:
        self._link = link
        self._ticket = ticket
        self._node: Node | None = None
        self._work: SimpleQueue[Message | None] = SimpleQueue()
        self._weights: SimpleQueue[Message] = SimpleQueue()
        self._left = threading.Event()
        self._lost: str | None = None

    def run(self) -> None:
        secret = self._ticket.where["secret"]
        if secret is not None:
            self._check_secret(secret)
        for target in (self._listen, self._apply_weights, self._ping):
            threading.Thread(target=target, name=f"swath{target.__name__}", daemon=True).start()
        while (message := self._work.get()) is not None:
            self._do(message)
        self._left.set()
        if self._node is not None:
            self._node.close()
        self._link.close()
        if self._lost is not None:
            where = self._ticket.where
            driver = f"its driver ({where['address']}, port {where['port']})"
            raise NodeLost(f"node {self._ticket.node} has lost {driver}: {self._lost}", self._ticket.node)

    def _check_secret(self, secret: str) -> None:
        nonce = secrets.token_hex(16)
        asked = self._link.receive().about
        mine = proof(secret, asked["nonce"], f"node{self._ticket.node}")
        self._link.send(HELLO, 0, {"proof": mine, "nonce": nonce})
        if not secrets.compare_digest(self._link.receive().about["proof"], proof(secret, nonce, "driver")):
            raise PermissionError("the driver does not know the secret")

    def _ping(self) -> None:
        while not self._left.wait(self._link.timeout_s / _PINGS_PER_TIMEOUT):
            with suppress(LinkBroken):
                self._link.send(PING)

    def _listen(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if message.kind == CLOSE:
                    break
                if message.kind == WEIGHTS:
                    self._weights.put(message)
                elif message.kind != PING:
                    self._work.put(message)
        except LinkBroken as broken:
            self._lost = str(broken)
        except Exception as error:
            self._lost = told(error)
        self._leave()

    def _leave(self) -> None:
        self._left.set()
        if self._node is not None:
            self._node.ask_to_stop()
        self._work.put(None)
        # A step that does not end must not keep the process.
        threading.Thread(target=self._leave_anyway, name="swath-leave", daemon=True).start()

    def _leave_anyway(self) -> None:
        time.sleep(5.0)
        os._exit(1)

    def _apply_weights(self) -> None:
        while True:
            self._answer(self._weights.get(), self._set_weights)

    def _set_weights(self, message: Message) -> tuple[Any, Any]:
        version, model_id = message.about
        assert self._node is not None
        self._node.set_weights(message.body, version, model_id)  # type: ignore[arg-type]
        return None, None

    def _do(self, message: Message) -> None:
        if message.kind == COLLECT:
            self._answer(message, self._collect)
        elif message.kind == CALL:
            self._answer(message, self._call)
        else:
            self._answer(message, self._make)

    def _answer(self, message: Message, do: Any) -> None:
        try:
            try:
                about, body = do(message)
            except BaseException as error:
                self._link.send(FAILED, message.number, describe_error(error))
            else:
                self._link.send(DONE, message.number, about, body)
        except LinkBroken:
            pass  # whoever listens knows

    def _make(self, message: Message) -> tuple[Any, Any]:
        self._node = Node(self._ticket.make_plan())
        return _describe(self._node.describe()), None

    def _collect(self, message: Message) -> tuple[Any, Any]:
        assert self._node is not None
        report, payload = self._node.collect(Order(*message.about))
        return asdict(report), payload

    def _call(self, message: Message) -> tuple[Any, Any]:
        assert self._node is not None
        args, kwargs = unpack_value(message.body)  # type: ignore[arg-type]
        value = self._node.call(message.about, args, kwargs)
        return None, None if value is None else pack_value(value)


# -- the collectors ----------------------------------------------------------------------------------------------------
