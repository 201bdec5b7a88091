"""What every transport has: how requests get to a server, and answers back."""

from __future__ import annotations

import _thread
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

from tensordict import TensorDictBase, is_leaf_nontensor

from swath.copying import NotCopied
from swath.errors import InferenceError, ServerClosed
from swath.keys import Key, as_key
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.futures import InferenceFuture, SubmittedRequest
from swath.modules.inference_server.replies import not_started, was_shut_down
from swath.modules.inference_server.requests import Asked, Request, read_content

State = Literal["new", "open", "closed"]


class InferenceTransport(ABC):
    """How requests get to a server, and answers back: what there is to write for a transport of one's own.

    >>> class Direct(InferenceTransport):  # for requests of this thread, which are answered when they are drained
    ...     def __init__(self):
    ...         self._asked = queue.SimpleQueue()
    ...
    ...     def submit(self, td):
    ...         future = Future()
    ...         self._asked.put((td, future))
    ...         return future
    ...
    ...     def wait_for_work(self, timeout):
    ...         time.sleep(timeout if self._asked.empty() else 0)
    ...
    ...     def drain(self, max_items):
    ...         taken = [self._asked.get() for _ in range(min(max_items, self._asked.qsize()))]
    ...         return [td for td, _ in taken], [future for _, future in taken]
    ...
    ...     def resolve(self, callback, result):
    ...         callback.set_result(result)
    ...
    ...     def resolve_exception(self, callback, exc):
    ...         callback.set_exception(exc)
    >>> import queue, time
    >>> from concurrent.futures import Future
    >>> import torch
    >>> from tensordict import TensorDict
    >>> from swath.modules import InferenceServer
    >>> transport = Direct()
    >>> with InferenceServer(lambda observation: observation + 1, transport, policy_version_key=None):
    ...     transport.client()(TensorDict(observation=torch.ones(2)))["action"]
    tensor([2., 2.])
    """

    #: The caller's interaction type goes along with what is submitted; else ``PolicyClientModule`` puts it in.
    carries_interaction_type = False

    @abstractmethod
    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        """Called by clients: hand a request over; the future gets the answer."""

    @abstractmethod
    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Any]]:
        """Called by the server: the oldest requests, at most so many, and for each what ``resolve`` knows it by."""

    @abstractmethod
    def wait_for_work(self, timeout: float) -> None:
        """Called by the server: return when there are requests, or after ``timeout`` seconds."""

    @abstractmethod
    def resolve(self, callback: Any, result: TensorDictBase) -> None:
        """Called by the server: a request, as ``drain`` gave it, is answered."""

    @abstractmethod
    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        """Called by the server: a request has failed."""

    def client(self) -> InferenceClient:
        """What asks through this transport."""
        return InferenceClient(self)

    def server_ended(self) -> None:  # noqa: B027 - there need not be anything to do
        """Called when the server has ended, and all that it had drained has failed."""


class Transport(NotCopied, InferenceTransport):
    """Base of swath's own transports. Subclasses say what a client is, and how its requests come in.

    One server uses it once: ``open`` when it starts, ``close`` when it ends.
    """

    carries_interaction_type = True
    #: What it is called where servers are asked for it.
    transport_kind = "custom"

    _owns = "the requests that are under way"
    _instead_of_a_copy = "make another one for another server, and send its client() where it is needed"

    def __init__(self) -> None:
        self.state: State = "new"
        #: Why it was closed.
        self.reason: InferenceError | None = None
        #: The keys that the policy reads; where it is None, everything is sent.
        self.in_keys: tuple[Key, ...] | None = None
        #: What answers have; all that the policy writes where it is None.
        self.response_keys: tuple[Key, ...] | None = None
        #: What clients keep alive, since a server that can still be asked is not garbage.
        self.server: weakref.ref[Any] | None = None
        self._inbox: deque[Request] = deque()
        #: Drained by a loop of the user's own, and more than it wanted.
        self._left: deque[Asked] = deque()
        # A lock as a bell: taken by the server when it goes to sleep, released by whoever has something for it.
        self._bell = _thread.allocate_lock()
        #: How many requests must be there for a client to ring it.
        self._wanted = 1

    # -- for clients -----------------------------------------------------------------------------------------------

    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        """Ask from this process, and go on; also before there is a server."""
        request = SubmittedRequest(
            read_content(td, self.in_keys, copies=True), InferenceFuture(td.copy(), self._look_at_server)
        )
        self.put(request)
        return request.future

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
            raise not_started()

    def _look_at_server(self) -> None:
        """As ``look``; but what is submitted may wait for its server."""
        if self.state == "closed":
            raise self.closed_error()

    def closed_error(self) -> InferenceError:
        reason = self.reason or was_shut_down()
        return type(reason)(*reason.args)

    # -- for who serves without a server ---------------------------------------------------------------------------

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Asked]]:
        """The oldest requests, at most so many; for a loop of one's own, instead of an ``InferenceServer``."""
        tensordicts, requests, _ = self.drain_with_timing(max_items)
        return tensordicts, requests

    def drain_with_timing(self, max_items: int) -> tuple[list[TensorDictBase], list[Asked], list[float]]:
        """As ``drain``, with the times (``time.perf_counter()``) of when they were asked."""
        if self.state == "new":
            self.open()
        self._left.extend(self.take_requests())
        taken = [self._left.popleft() for _ in range(min(max_items, len(self._left)))]
        tensordicts = [request.content.as_tensordict() for request in taken]
        return tensordicts, taken, [request.submitted_at for request in taken]

    def wait_for_work(self, timeout: float) -> None:
        if self.state == "new":
            self.open()
        if not self._left and not self._inbox:
            self.wait(timeout)

    def resolve(self, callback: Asked, result: TensorDictBase) -> None:
        leaves = {as_key(key): value for key, value in result.items(True, True, is_leaf=is_leaf_nontensor)}
        callback.answer(tuple(leaves), list(leaves.values()))

    def resolve_exception(self, callback: Asked, exc: BaseException) -> None:
        callback.fail(exc)

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

    def take_requests(self) -> Sequence[Asked]:
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

    def close(self, reason: InferenceError | None = None, taken: Sequence[Asked] = ()) -> None:
        """Fail what is not answered (``taken``: what the server had drained), and whatever comes.

        A server that is shut down closes its transport; to do it by oneself, also again, does no harm.
        """
        if self.state != "closed":
            self.reason = reason or ServerClosed("the transport of the inference server was closed")
            self.state = "closed"
        for request in (*taken, *self._left, *self.take_requests()):
            request.fail(self.closed_error())
        self.ring()
