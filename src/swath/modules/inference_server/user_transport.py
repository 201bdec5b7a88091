"""Transports that users wrote, as a server's loop sees them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from tensordict import TensorDictBase

from swath.errors import InferenceError
from swath.keys import Key
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.requests import Asked, asking_as, merge, read_content
from swath.modules.inference_server.stamp import take_stamp
from swath.modules.inference_server.transport import InferenceTransport, Transport


class UserTransport(Transport):
    """A transport that somebody wrote, with its five methods.

    Args:
        written: the user's.
        max_items: how many requests are drained at a time.
    """

    def __init__(self, written: InferenceTransport, max_items: int) -> None:
        super().__init__()
        self._written = written
        self._max_items = max_items

    def client(self) -> InferenceClient:
        return self._written.client()

    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        return self._written.submit(td)

    def ring(self) -> None:
        """It wakes by itself, within the time that it was told to wait."""

    def wait(self, timeout_s: float) -> None:
        self._written.wait_for_work(timeout_s)

    def wait_for(self, count: int, timeout_s: float) -> None:
        self._written.wait_for_work(timeout_s)

    def take_requests(self) -> Sequence[Asked]:
        tensordicts, callbacks = self._written.drain(self._max_items)
        return [
            UserRequest(self._written, tensordict, callback, self.in_keys)
            for tensordict, callback in zip(tensordicts, callbacks, strict=True)
        ]

    def close(self, reason: InferenceError | None = None, taken: Sequence[Asked] = ()) -> None:
        if self.state == "closed":
            return
        super().close(reason, taken)
        while waiting := self.take_requests():
            for request in waiting:
                request.fail(self.closed_error())
        self._written.server_ended()


class UserRequest:
    """A request that came through a user's transport; to the loop, the same as a ``Request``."""

    waits = False

    def __init__(
        self,
        written: InferenceTransport,
        tensordict: TensorDictBase,
        callback: Any,
        in_keys: tuple[Key, ...] | None,
    ) -> None:
        self._written = written
        self._tensordict, kind = take_stamp(tensordict)
        self._callback = callback
        self._is_open = True
        with asking_as(kind):
            self.content = read_content(self._tensordict, in_keys)
        self.submitted_at = perf_counter()

    def answer(self, keys: tuple[Key, ...], values: Sequence[Any]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._written.resolve(self._callback, merge(self._tensordict, (keys, values)))
        except Exception as error:
            self._written.resolve_exception(self._callback, error)

    def fail(self, error: BaseException) -> None:
        if self._is_open:
            self._is_open = False
            self._written.resolve_exception(self._callback, error)
