"""Messages between a worker and its owner: tuples over a pipe, with descriptors and exceptions among them."""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from swath.errors import WorkerRaised
from swath.workers import pickling
from swath.workers.ctrl_c import ctrl_c_waits


class Channel:
    """One end. Messages are pickled; functions in them go by value (cloudpickle). None is cut by a Ctrl-C."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        #: A trainer may send weights from another thread than the one that iterates.
        self._sending = threading.RLock()

    def send(self, *message: Any) -> None:
        """Plain data."""
        self.send_pickled(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_anything(self, *message: Any) -> None:
        """What may have functions and classes of a script in it."""
        self.send_pickled(pickling.dumps(message))

    @ctrl_c_waits
    def send_pickled(self, message: bytes) -> None:
        with self._sending:
            self.connection.send_bytes(message)

    @ctrl_c_waits
    def receive(self) -> tuple[Any, ...]:
        return pickle.loads(self.connection.recv_bytes())

    def answer(self, number: int, call: Callable[[], Any]) -> None:
        """Make a call that was asked for, and send what it returned, or raised."""
        try:
            answer = True, call()
        except Exception as error:
            answer = False, pack(error)
        try:
            self.send_anything("reply", number, *answer)
        except Exception as error:
            error.add_note("swath: what the call returned in the worker cannot be sent")
            self.send("reply", number, False, pack(error))

    def has_message(self) -> bool:
        return self.connection.poll(0)

    @ctrl_c_waits
    def send_descriptor(self, descriptor: int, *announcement: Any) -> None:
        """A descriptor, right behind the message that announces it."""
        with self._sending:
            if announcement:
                self.send(*announcement)
            reduction.send_handle(self.connection, descriptor, 0)

    def receive_descriptor(self) -> int:
        return reduction.recv_handle(self.connection)

    def close(self) -> None:
        self.connection.close()


class RemoteTraceback(Exception):
    """The traceback of an exception where it was raised: in a worker."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class Packed(NamedTuple):
    """An exception on its way."""

    pickled: bytes | None
    kind: str
    message: str
    notes: list[str]
    text: str


def pack(error: BaseException) -> Packed:
    pickled = None
    if isinstance(error, Exception):  # an env's sys.exit() must not end its owner, too
        with suppress(Exception):
            data = pickling.dumps(error)
            pickle.loads(data)  # some can be pickled and not be unpickled
            pickled = data
    text = "".join(traceback.format_exception(error))
    return Packed(pickled, type(error).__name__, str(error), getattr(error, "__notes__", []), text)


def unpack(packed: Packed, worker: int, who: str) -> BaseException:
    """The exception, with its own type and the remote traceback as its cause."""
    error: BaseException
    if packed.pickled is None:
        error = WorkerRaised(f"{packed.kind}: {packed.message} (an exception that cannot leave its process)", worker)
        for note in packed.notes:
            error.add_note(note)
    else:
        error = pickle.loads(packed.pickled)
        if not hasattr(error, "__notes__"):  # an exception with a __reduce__ of its own may lose them
            for note in packed.notes:
                error.add_note(note)
    error.add_note(f"swath: raised in {who}")
    error.__cause__ = RemoteTraceback(packed.text)
    return error
