"""Clients that are threads of the server's own process: requests are handed over as they are."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from tensordict import TensorDictBase

from swath.errors import CannotCopy
from swath.modules.inference.client import InferenceClient, InferenceFuture
from swath.modules.inference.requests import Answer, Request, merge, read_content
from swath.modules.inference.transport import Transport


class ThreadingTransport(Transport):
    """For clients in the server's own process."""

    def __init__(self) -> None:
        super().__init__()
        self._clients: weakref.WeakSet[ThreadClient] = weakref.WeakSet()

    def client(self) -> ThreadClient:
        made = ThreadClient(self)
        self._clients.add(made)
        return made

    def num_clients(self) -> int | None:
        clients = list(self._clients)
        return None if any(client.is_shared for client in clients) else len(clients)


class ThreadClient(InferenceClient):
    """A client in the server's own process."""

    def __init__(self, transport: ThreadingTransport) -> None:
        self._transport = transport
        # A server that can still be asked is not garbage.
        self._server = None if transport.server is None else transport.server()
        self._is_busy = False
        #: Several threads ask through this one client.
        self.is_shared = False

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        transport = self._transport
        if self._is_busy:
            self.is_shared = True
        self._is_busy = True
        request = Request(read_content(tensordict, transport.in_keys), waits=True)
        transport.put(request)
        request.wait(None, transport.look)
        self._is_busy = False
        return merge(tensordict, request.take())

    def submit(self, tensordict: TensorDictBase) -> InferenceFuture:
        request = Request(read_content(tensordict, self._transport.in_keys, copies=True), waits=False)
        self._transport.put(request)
        return InferenceFuture(_Submitted(request, self._transport), tensordict.copy())

    def __copy__(self) -> ThreadClient:
        return self._transport.client()

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadClient:
        return self._transport.client()

    def __reduce__(self) -> NoReturn:
        raise CannotCopy(
            "this client of an InferenceServer is for threads of the server's own process; "
            "one that can be sent away is made by a server with transport=SlotTransport(), or MPTransport()"
        )


class _Submitted:
    def __init__(self, request: Request, transport: Transport) -> None:
        self._request = request
        self._transport = transport

    def is_done(self) -> bool:
        return self._request.is_done()

    def wait(self, timeout_s: float | None) -> bool:
        return self._request.wait(timeout_s, self._transport.look)

    def take(self) -> Answer:
        return self._request.take()
