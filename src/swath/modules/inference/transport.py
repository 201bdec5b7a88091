"""What every transport has: how requests get to a server, and answers back."""

from __future__ import annotations

import _thread
import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from swath.copying import NotCopied
from swath.errors import InferenceError, ServerClosed
from swath.keys import Key
from swath.modules.inference.client import InferenceClient
from swath.modules.inference.requests import Asked, Request

State = Literal["new", "open", "closed"]


class Transport(NotCopied):
    """What a server needs of a transport. Subclasses say what a client is, and how its requests come in.

    One server uses it once: ``open`` when it starts, ``close`` when it ends.
    """

    _owns = "the requests that are under way"
    _instead_of_a_copy = "make another one for another server, and send its client() where it is needed"

    def __init__(self) -> None:
        self.state: State = "new"
        #: Why it was closed.
        self.reason: InferenceError | None = None
        #: The keys that the policy reads; where it is None, everything is sent.
        self.in_keys: tuple[Key, ...] | None = None
        #: What clients keep alive, since a server that can still be asked is not garbage.
        self.server: weakref.ref[Any] | None = None
        self._inbox: deque[Request] = deque()
        # A lock as a bell: taken by the server when it goes to sleep, released by whoever has something for it.
        self._bell = _thread.allocate_lock()
        #: How many requests must be there for a client to ring it.
        self._wanted = 1

    # -- for clients -----------------------------------------------------------------------------------------------

    def client(self) -> InferenceClient:
        raise NotImplementedError

    def put(self, request: Request) -> None:
        """Hand a request of this process to the server."""
        self._inbox.append(request)
        if len(self._inbox) >= self._wanted:
            self.ring()
        if self.state == "closed":  # after the append: either the server sees it when it clears up, or we see this
            raise self.closed_error()

    def look(self) -> None:
        """Raise if nobody will answer."""
        if self.state == "closed":
            raise self.closed_error()
        if self.state == "new":
            raise ServerClosed("the inference server was not started: call server.start(), or use it in a with block")

    def closed_error(self) -> InferenceError:
        reason = self.reason or ServerClosed("the inference server was shut down")
        return type(reason)(*reason.args)

    # -- for the server --------------------------------------------------------------------------------------------

    def ring(self) -> None:
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # another one was faster
                self._bell.release()

    def wait(self, timeout_s: float) -> None:
        """Until something may have come in."""
        self._bell.acquire(timeout=timeout_s)

    def wait_for(self, count: int, timeout_s: float) -> None:
        """Until so many requests have come in, without being woken for each."""
        self._wanted = count
        self._bell.acquire(blocking=False)  # it may have been rung for what was found without it
        if len(self._inbox) < count:
            self.wait(timeout_s)
        self._wanted = 1

    def drain(self) -> Sequence[Asked]:
        """What came in since."""
        inbox, found = self._inbox, []
        while inbox:
            found.append(inbox.popleft())
        return found

    def num_clients(self) -> int | None:
        """How many may ask, each one thing at a time; None: nobody knows."""
        return None

    def open(self) -> None:
        if self.state != "new":
            raise RuntimeError("this transport has been used by a server; make a new one for each server")
        self.state = "open"

    def close(self, reason: InferenceError, taken: Sequence[Asked] = ()) -> None:
        """Fail what is not answered (``taken``: what the server had drained), and whatever comes."""
        if self.state != "closed":
            self.reason = reason
            self.state = "closed"
        for request in (*taken, *self.drain()):
            request.fail(self.closed_error())
        self.ring()
