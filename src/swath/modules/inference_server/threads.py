"""Clients that are threads of the server's own process: requests are handed over as they are."""

from __future__ import annotations

import weakref
from typing import NoReturn

from tensordict import TensorDictBase

from swath.errors import CannotCopy
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.requests import Request, merge, read_content
from swath.modules.inference_server.transport import Transport


class ThreadingTransport(Transport):
    """For clients in the server's own process."""

    transport_kind = "thread"

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
        super().__init__(transport)
        # A server that can still be asked is not garbage.
        self._server = None if transport.server is None else transport.server()
        self._is_busy = False
        #: Several threads ask through this one client.
        self.is_shared = False

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        transport = self._transport
        if self._is_busy:
            self.is_shared = True
        self._is_busy = True
        try:
            request = Request(read_content(td, transport.in_keys), waits=True)
            transport.put(request)
            request.wait(None, transport.look)
        finally:
            self._is_busy = False
        return merge(td, request.take())

    def __copy__(self) -> ThreadClient:
        return self._transport.client()

    def __reduce__(self) -> NoReturn:
        raise CannotCopy(
            "this client of an InferenceServer is for threads of the server's own process; "
            "one that can be sent away is made by a server with transport=SlotTransport(), or MPTransport()"
        )
