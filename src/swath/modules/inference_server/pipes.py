"""Clients in other processes that send whatever can be pickled."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from time import perf_counter, sleep
from typing import Any

from tensordict import TensorDictBase

from swath import platforms
from swath.errors import InferenceError, NoFreeSlot, ServerClosed, ServerDied
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.futures import InferenceFuture
from swath.modules.inference_server.reception import Address, Reception
from swath.modules.inference_server.replies import opened
from swath.modules.inference_server.requests import Answer, Asked, Content, Request, merge, read_content, wait_looking
from swath.modules.inference_server.transport import Transport
from swath.modules.inference_server.waiter_threads import WaiterThreads
from swath.process.channel import Channel, pack

#: Servers have room for so many clients, if nobody says otherwise.
DEFAULT_CLIENTS = 256
#: At its end a server tells those who wait, before it hangs up.
_SECONDS_FOR_LAST_REPLIES = 0.5


def no_free_slot(num_slots: int) -> NoFreeSlot:
    return NoFreeSlot(
        f"the inference server has {num_slots} slots, and all are taken: one by each client, and by each further "
        "request that a client has under way; give num_slots= to its transport, or num_clients= to the server"
    )


class RequestConnection:
    """A client's connection, over which one request at a time is under way."""

    def __init__(self, address: Address) -> None:
        try:
            self._channel = Channel(address.connect())
        except (OSError, EOFError) as error:
            raise ServerClosed(
                "there is no inference server where this client looks for it: it was not started, or it has ended"
            ) from error
        kind, *details = self._receive()
        if kind == "full":
            self.close()
            raise no_free_slot(details[0])
        self._welcomed(details)

    def _welcomed(self, details: Sequence[Any]) -> None:
        self.in_keys, self.number = details[:2]

    def has_ended(self) -> bool:
        """Whether the other side has closed the connection. (It says nothing without being asked.)"""
        try:
            return self._channel.connection.poll(0)
        except OSError:
            return True

    def ask(self, tensordict: TensorDictBase, *, waits: bool) -> None:
        self._send_content(read_content(tensordict, self.in_keys), waits=waits)

    def _send_content(self, content: Content, *, waits: bool) -> None:
        try:
            self._channel.send(
                "ask", content.batch_size, content.keys, content.tensors, content.kind, content.tensordict, waits
            )
        except OSError as error:
            raise self._gone() from error

    def is_done(self) -> bool:
        try:
            return self._channel.has_message()
        except OSError:
            return True

    def wait(self, timeout_s: float | None) -> bool:
        try:  # there is something to read also at the end of the connection
            return wait_looking(self._channel.connection.poll, timeout_s, lambda: None)
        except OSError as error:
            raise self._gone() from error

    def take(self) -> Answer:
        return opened(*self._receive())

    def _receive(self) -> tuple[Any, ...]:
        try:
            return self._channel.receive()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> InferenceError:
        return ServerDied("the inference server is gone: its process was killed, or it was shut down")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.close()


class ProcessClient(InferenceClient):
    """A client that works in any process of this machine, wherever it is unpickled.

    Each request that is under way at the same time, from other threads or by ``submit``, has a connection of its own.
    """

    _connection_type: type[RequestConnection] = RequestConnection

    carries_interaction_type = True

    def __init__(self, address: Address, server: Any = None) -> None:  # needs no transport: it has the address of one
        self._address = address
        # A server that can still be asked is not garbage; in another process there is none.
        self._server = server
        self._start_over()

    def _start_over(self) -> None:
        self._pid = os.getpid()
        self._idle: list[RequestConnection] = []
        self._waiters = WaiterThreads("swath-answers")

    def _free_connection(self) -> RequestConnection:
        if self._pid != os.getpid():  # a forked copy has connections that belong to its parent
            self._start_over()
        try:
            return self._idle.pop()
        except IndexError:
            return self._connection_type(self._address)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        connection = self._asked(td, waits=True)
        return merge(td, _take_answer(connection, self._idle))

    def submit(self, td: TensorDictBase) -> InferenceFuture:
        connection = self._asked(td, waits=False)
        future = InferenceFuture(td.copy())
        self._waiters.run(partial(_settle, future, connection, self._idle))
        return future

    def _asked(self, tensordict: TensorDictBase, *, waits: bool) -> RequestConnection:
        """A connection with this request under way."""
        connection = self._free_connection()
        try:
            connection.ask(tensordict, waits=waits)
        except BaseException:  # what was written of it, nobody knows
            connection.close()
            raise
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessClient:
        return type(self)(self._address, self._server)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._address,)


def _take_answer(connection: RequestConnection, idle: list[RequestConnection]) -> Answer:
    """Wait for the answer; then the connection is free for other requests."""
    try:
        connection.wait(None)
        answer = connection.take()
    except InferenceError:
        connection.close()
        raise
    except Exception:  # of the policy
        idle.append(connection)
        raise
    except BaseException:  # Ctrl-C: there may be an answer under way, for nobody
        connection.close()
        raise
    idle.append(connection)
    return answer


def _settle(future: InferenceFuture, connection: RequestConnection, idle: list[RequestConnection]) -> None:
    try:
        future.answer(_take_answer(connection, idle))
    except BaseException as error:
        future.fail(error)


class MPTransport(Transport):
    """For clients in any process of this machine; what they send is pickled, so it can be anything.

    A client can be pickled, at any time and by any pickler, and works wherever it is unpickled.

    Args:
        num_slots: how many requests can be under way at a time: one of each client, or thread of a client.
        ctx, use_manager: accepted for compatibility, and not needed: a client connects by itself, whatever started its
            process, and however it got there.
    """

    transport_kind = "process"
    client_type: type[ProcessClient] = ProcessClient

    def __init__(
        self,
        num_slots: int | BaseContext = DEFAULT_CLIENTS,
        *,
        ctx: BaseContext | None = None,
        use_manager: bool = False,
        address: Address | None = None,
    ) -> None:
        super().__init__()
        if isinstance(num_slots, BaseContext):  # TorchRL's first argument
            num_slots = DEFAULT_CLIENTS
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        platforms.require(type(self).__name__, (platforms.LOCAL_SOCKETS,), "use transport='threads'")
        self.num_slots = num_slots
        self.address = Address.new() if address is None else address
        self._num_made = 0
        self._reception: Reception | None = None
        self._free = set(range(num_slots))
        self._free_lock = threading.Lock()
        #: Clients whose request came through their connection and was not answered.
        self._replying: set[int] = set()
        self._is_elsewhere = False

    def settings(self) -> dict[str, Any]:
        """What it was made with, but for the address: to make the same where the server is."""
        return {"num_slots": self.num_slots}

    def serve_elsewhere(self, server: Any) -> None:
        """A server in another process listens at the address; here, clients are made."""
        super().open()
        self.server = weakref.ref(server)
        self._is_elsewhere = True

    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        if self._is_elsewhere:
            raise RuntimeError("the inference server is in another process: submit requests to a client()")
        return super().submit(td)

    def client(self) -> ProcessClient:
        if self._num_made >= self.num_slots:
            raise no_free_slot(self.num_slots)
        self._num_made += 1
        return self.client_type(self.address, None if self.server is None else self.server())

    def num_clients(self) -> int | None:
        # Copies of a client may be anywhere; one that was made here may be about to connect.
        return max(self._num_made, self.num_slots - len(self._free))

    def open(self) -> None:
        super().open()
        self._reception = Reception(self.address, self._attend)

    def close(self, reason: InferenceError | None = None, taken: Sequence[Asked] = ()) -> None:
        super().close(reason, taken)
        if self._reception is not None:
            deadline = perf_counter() + _SECONDS_FOR_LAST_REPLIES
            while self._replying and perf_counter() < deadline:
                sleep(0.001)
            self._reception.close()

    # -- one client, in a thread of its own ------------------------------------------------------------------------

    def _attend(self, connection: Connection) -> None:
        channel = Channel(connection)
        with self._free_lock:
            number = min(self._free, default=None)
            self._free.discard(number)  # type: ignore[arg-type]
        if number is None:
            channel.send("full", self.num_slots)
            return
        try:
            self._serve(channel, number)
        finally:
            self._replying.discard(number)
            with self._free_lock:
                self._free.add(number)

    def _serve(self, channel: Channel, number: int) -> None:
        channel.send("welcome", self.in_keys, number)
        while True:
            _, batch_size, keys, tensors, kind, tensordict, waits = channel.receive()
            request = Request(Content(batch_size, keys, tensors, kind, tensordict), waits=waits)
            self._replying.add(number)
            channel.send(*self._reply_to(request))
            self._replying.discard(number)

    def _reply_to(self, request: Request) -> tuple[Any, ...]:
        """Ask on behalf of a client."""
        try:
            self.put(request)
            request.wait(None, self.look)
            return ("answer", request.take())
        except Exception as error:
            return ("failed", pack(error))
