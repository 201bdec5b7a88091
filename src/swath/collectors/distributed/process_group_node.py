"""A node that its driver reaches by torch.distributed: its process."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from swath.addresses import LOOPBACK, is_loopback, own_address
from swath.collectors.distributed.launchers import Ticket
from swath.collectors.distributed.meeting import (
    PINGS_PER_TIMEOUT,
    body_device,
    connect_to_store,
    make_device,
    prove_secret,
)
from swath.collectors.distributed.node import Node
from swath.collectors.distributed.requests import Order
from swath.collectors.distributed.wire import (
    CALL,
    CLOSE,
    COLLECT,
    DONE,
    FAILED,
    PING,
    WEIGHTS,
    Link,
    LinkBroken,
    Message,
    describe_error,
    pack_value,
    unpack_value,
)
from swath.errors import NodeLost, told

#: After that, a step that does not end is left where it is.
_SECONDS_TO_LEAVE = 5.0


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
            prove_secret(self._link, secret, self._ticket.node)
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

    def _ping(self) -> None:
        while not self._left.wait(self._link.timeout_s / PINGS_PER_TIMEOUT):
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
        time.sleep(_SECONDS_TO_LEAVE)
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
        return self._node.describe().to_json(), None

    def _collect(self, message: Message) -> tuple[Any, Any]:
        assert self._node is not None
        report, payload = self._node.collect(Order(*message.about))
        return asdict(report), payload

    def _call(self, message: Message) -> tuple[Any, Any]:
        assert self._node is not None
        args, kwargs = unpack_value(message.body)  # type: ignore[arg-type]
        value = self._node.call(message.about, args, kwargs)
        return None, None if value is None else pack_value(value)
