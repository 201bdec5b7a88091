"""Messages between a worker and its owner: tuples over a pipe, with descriptors and exceptions among them."""

from __future__ import annotations

import functools
import os
import pickle
import select
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from swath.errors import WorkerRaised, add_note, message_of, notes_of, told
from swath.process import pickling
from swath.process.ctrl_c import ctrl_c_waits

_SECONDS_TO_SEND = 1.0


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

    def send_in_time(self, timeout_s: float, *message: Any) -> None:
        """Plain data; nothing where the other end is gone, or does not read: another thread may wait for it to."""
        if self._sending.acquire(timeout=timeout_s):
            try:
                with suppress(OSError):
                    poll = select.poll()
                    poll.register(self.connection, select.POLLOUT)
                    if poll.poll(timeout_s * 1000):
                        self.send(*message)
            finally:
                self._sending.release()

    @ctrl_c_waits
    def receive(self) -> tuple[Any, ...]:
        return pickle.loads(self.connection.recv_bytes())

    def answer(self, number: int, call: Callable[[], Any]) -> None:
        """Make a call that was asked for, and send what it returned, or raised."""
        try:
            answer = True, call()
        except BaseException as error:  # an env may call sys.exit
            answer = False, pack(error)
        try:
            self.send_anything("reply", number, *answer)
        except Exception as error:
            add_note(error, "swath: what the call returned in the worker cannot be sent")
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
        is_held = self._sending.acquire(timeout=_SECONDS_TO_SEND)  # not in the middle of another thread's message
        self.connection.close()
        if is_held:
            self._sending.release()


#: Owners' ends. A process that is forked from this one would hold them open, and who is at the other never hear that we
#: are gone: workers that were started with "fork" would each hold those of the ones before.
_not_for_children: weakref.WeakSet[Channel] = weakref.WeakSet()


@contextmanager
def new_pipe() -> Iterator[tuple[Channel, Connection]]:
    """The owner's end, and the one for a process that is to be started within."""
    ours, theirs = Pipe(duplex=True)
    channel = Channel(ours)
    _not_for_children.add(channel)
    try:
        yield channel, theirs
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


def _close_all() -> None:
    for channel in list(_not_for_children):
        with suppress(OSError):
            channel.connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


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
    """Whatever exception it is: one that cannot be told would be taken for a worker that died."""
    return Packed(_pickled(error), type(error).__name__, message_of(error), notes_of(error), traceback_of(error))


def _pickled(error: BaseException) -> bytes | None:
    if isinstance(error, Exception):  # an env's sys.exit() must not end its owner, too
        with suppress(Exception):
            data = pickling.dumps(error)
            if isinstance(pickle.loads(data), Exception):  # some can be pickled and not be unpickled
                return data
    return None


def traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return "".join(traceback.format_tb(error.__traceback__)) + told(error)


def returning_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns what it raises, packed, for whoever asked from another process."""

    @functools.wraps(method)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            return pack(error)

    return attempt


def unpack(packed: Packed, worker: int, who: str) -> BaseException:
    """The exception, with its own type and the remote traceback as its cause."""
    error = _unpickled(packed)
    if error is None:
        error = WorkerRaised(f"{packed.kind}: {packed.message} (an exception that cannot leave its process)", worker)
    elif message_of(error) != packed.message:  # its constructor makes a message of what it is given: a message
        add_note(error, f"swath: where it was raised, it said: {packed.message}")
    if not hasattr(error, "__notes__"):  # an exception with a __reduce__ of its own may lose them
        for note in packed.notes:
            add_note(error, note)
    add_note(error, f"swath: raised in {who}")
    with suppress(Exception):
        error.__cause__ = RemoteTraceback(packed.text)
    return error


def _unpickled(packed: Packed) -> BaseException | None:
    if packed.pickled is not None:
        with suppress(Exception):  # what could be read there may need something that is not here
            error = pickle.loads(packed.pickled)
            return error if isinstance(error, Exception) else None
    return None
