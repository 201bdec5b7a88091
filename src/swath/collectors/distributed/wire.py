"""Wire: messages between a driver and a node, over a ``torch.distributed`` process group of the two.

A message is a header of fixed size, with a line of JSON in it, and a body of bytes. What arrives is never unpickled:
reports are JSON, batches are bytes of an agreed layout, and all else is what ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import io
import json
import struct
import sys
import threading
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swath import errors
from swath.errors import WorkerRaised, add_note, message_of, notes_of
from swath.process.channel import RemoteTraceback, traceback_of

_HEADER_BYTES = 1024
_HEADER = struct.Struct("<qqqqq")  # kind, number, tag, length of the JSON, length of the body
_ROOM = _HEADER_BYTES - _HEADER.size
#: A link that is cut is noticed in the middle of a body, too: each piece must arrive in time.
_PIECE_BYTES = 1 << 24
#: Tags are used again after so many messages.
_TAGS = 1 << 16

PING, COLLECT, WEIGHTS, CALL, CLOSE, HELLO, DONE, FAILED = range(8)


class Message(NamedTuple):
    kind: int
    number: int
    about: Any
    body: np.ndarray | None


class LinkBroken(Exception):
    """The other side is gone, or was not heard of in time."""


class Link:
    """One end. Any thread may send; one receives.

    Args:
        rank: 0 for the driver, 1 for the node.
        timeout_s: whoever hears nothing for so long takes the link for broken.
        body_device: where bodies pass through; a CUDA device for NCCL.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        device: Any,
        *,
        timeout_s: float,
        start_timeout_s: float,
        body_device: torch.device | None = None,
    ) -> None:
        self._peer = 1 - rank
        self.timeout_s = timeout_s
        store = PrefixStore(name, store)
        store.set_timeout(timedelta(seconds=start_timeout_s))
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._threads = 1
        options._timeout = timedelta(seconds=start_timeout_s)
        self._group = self._bodies = dist.ProcessGroupGloo(store, rank, 2, options)
        self._body_device = body_device
        if body_device is not None and body_device.type == "cuda":
            self._bodies = dist.ProcessGroupNCCL(PrefixStore("bodies", store), rank, 2)  # type: ignore[call-arg]
        self._sending = threading.Lock()
        self._sent: deque[tuple[int, list[Any]]] = deque()
        self._tag = 0
        self._within = timedelta(seconds=timeout_s)
        self.num_bytes_sent = self.num_bytes_received = 0

    def send(self, kind: int, number: int = 0, about: Any = None, body: np.ndarray | None = None) -> None:
        """Returns before it has arrived; what is sent must not change until there is an answer."""
        text = b"" if about is None else json.dumps(about).encode()
        header = np.zeros(_HEADER_BYTES, np.uint8)
        with self._sending:
            self._tag = self._tag % _TAGS + 1
            size = 0 if body is None else body.nbytes
            _HEADER.pack_into(header.data, 0, kind, number, 2 * self._tag, len(text), size)
            inline = len(text) <= _ROOM
            if inline:
                header[_HEADER.size : _HEADER.size + len(text)] = np.frombuffer(text, np.uint8)
            try:
                works = [self._post(self._group, header, 0)]
                if not inline:
                    works.append(self._post(self._group, np.frombuffer(text, np.uint8).copy(), 2 * self._tag + 1))
                if body is not None and size:
                    works += [
                        self._post(self._bodies, body[start : start + _PIECE_BYTES], 2 * self._tag, self._body_device)
                        for start in range(0, size, _PIECE_BYTES)
                    ]
                self._sent.append((number, works))
                self.num_bytes_sent += _HEADER_BYTES + size
                while len(self._sent) > 16:
                    self._reap()
            except RuntimeError as error:
                raise LinkBroken(str(error)) from None

    def _post(self, group: Any, array: np.ndarray, tag: int, device: torch.device | None = None) -> tuple[Any, Any]:
        if not array.flags.writeable:  # torch knows no read-only tensors
            array = array.copy()
        tensor = torch.from_numpy(array)
        if device is not None:
            tensor = tensor.to(device)
        # The tensor is kept with its work: a work that is dropped is not done.
        return group.send([tensor], self._peer, tag), tensor

    def _reap(self) -> None:
        for work, _ in self._sent.popleft()[1]:
            work.wait(self._within)

    def answered(self, number: int) -> None:
        """The other side has read everything up to this message."""
        with self._sending:
            try:
                while self._sent and self._sent[0][0] <= number:
                    self._reap()
            except RuntimeError as error:
                raise LinkBroken(str(error)) from None

    def receive(self) -> Message:
        header = np.empty(_HEADER_BYTES, np.uint8)
        self._fetch(self._group, header, 0)
        kind, number, tag, length, size = _HEADER.unpack_from(header.data)
        if length <= _ROOM:
            text = header[_HEADER.size : _HEADER.size + length].tobytes()
        else:
            long = np.empty(length, np.uint8)
            self._fetch(self._group, long, tag + 1)
            text = long.tobytes()
        body = None
        if size:
            body = np.empty(size, np.uint8)
            for start in range(0, size, _PIECE_BYTES):
                self._fetch(self._bodies, body[start : start + _PIECE_BYTES], tag, self._body_device)
        self.num_bytes_received += _HEADER_BYTES + size
        return Message(kind, number, json.loads(text) if text else None, body)

    def _fetch(self, group: Any, array: np.ndarray, tag: int, device: torch.device | None = None) -> None:
        tensor = torch.from_numpy(array)
        there = tensor if device is None else tensor.to(device)
        try:
            group.recv([there], self._peer, tag).wait(self._within)
        except RuntimeError as error:
            raise LinkBroken(_first_line(error)) from None
        if there is not tensor:
            tensor.copy_(there)

    def close(self) -> None:
        """Whoever waits on either side gets a ``LinkBroken``."""
        with self._sending:
            self._sent.clear()
        for group in {self._group, self._bodies}:
            group.abort()


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0].partition(". This is typically")[0]
    return text.partition("] ")[2] or text


# -- values ------------------------------------------------------------------------------------------------------------


def pack_value(value: Any) -> np.ndarray:
    """Numbers, text, tensors, and lists, tuples, dicts and TensorDicts of them.

    Raises:
        TypeError: it is something else, which only an engine that pickles can send.
    """
    stream = io.BytesIO()
    torch.save(_plain(value), stream)
    data = np.frombuffer(stream.getbuffer(), np.uint8)
    try:
        unpack_value(data)
    except Exception:
        raise TypeError(
            f"a {_not_sent(value)} cannot be sent by torch.distributed, which takes numbers, text, tensors, and "
            "lists, tuples, dicts and TensorDicts of them; a RayCollector can"
        ) from None
    return data


def _not_sent(value: Any) -> str:
    """What kind of thing it is that cannot be, in lists and dicts."""
    for part in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ():
        try:
            pack_value(part)
        except TypeError:
            return _not_sent(part)
    return type(value).__name__


def unpack_value(data: np.ndarray) -> Any:
    return _restored(torch.load(io.BytesIO(data.tobytes()), weights_only=True))


_ARRAY = "__swath_numpy__"
_TENSORDICT = "__swath_tensordict__"


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays, and TensorDicts, as what may be loaded."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        flat = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "bytes": flat}
    if type(value) is TensorDict:
        return {_TENSORDICT: list(value.batch_size), "values": {key: _plain(each) for key, each in value.items()}}
    if isinstance(value, torch.Size):
        return tuple(value)
    if type(value) in (list, tuple):
        plain = [_plain(each) for each in value]
        return tuple(plain) if type(value) is tuple else plain
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return np.frombuffer(value["bytes"].numpy().tobytes(), value[_ARRAY]).reshape(value["shape"]).copy()
        if _TENSORDICT in value:
            return TensorDict(_restored(value["values"]), value[_TENSORDICT])
        return {key: _restored(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        restored = [_restored(each) for each in value]
        return tuple(restored) if type(value) is tuple else restored
    return value


# -- exceptions --------------------------------------------------------------------------------------------------------


def describe_error(error: BaseException) -> dict[str, Any]:
    return {
        "module": type(error).__module__,
        "kind": type(error).__name__,
        "message": message_of(error.args[0] if len(error.args) == 1 else error),
        "notes": notes_of(error),
        "traceback": traceback_of(error),
    }


def revive_error(about: dict[str, Any], node: int) -> Exception:
    """The exception with its own type where that is known here, and else a ``WorkerRaised`` with its text."""
    kind = _known_exception(about["module"], about["kind"])
    error: Exception
    try:
        assert kind is not None
        error = kind(about["message"])
    except Exception:
        error = WorkerRaised(f"{about['kind']}: {about['message']}", node)
    for note in about["notes"]:
        add_note(error, note)
    error.__cause__ = RemoteTraceback(about["traceback"])
    return error


def _known_exception(module: str, name: str) -> type[Exception] | None:
    """Only of modules that this program has imported already: nothing is imported because a message says so."""
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module == errors.__name__:
        found = getattr(errors, name, None)
    else:
        found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


# -- secrets -----------------------------------------------------------------------------------------------------------


def proof(secret: str, nonce: str, who: str) -> str:
    """That one knows a secret, without saying it."""
    return hmac.new(secret.encode(), f"{who}:{nonce}".encode(), hashlib.sha256).hexdigest()
