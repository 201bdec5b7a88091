"""Clients in other processes whose requests have a fixed layout: slots of shared memory, nothing is pickled.

A client's first request goes through its connection, as with ``MPTransport``. Its answer comes with a slot: memory laid
out for requests and answers of just these keys, shapes and dtypes. From then on the client writes its request there,
sets a byte on the table and raises a semaphore; the server writes the answer into the same slot. A request of another
layout goes through the connection again, and gets another slot.

The server's loop never touches a connection, so a client that was stopped holds up nobody: what does not fit into a
slot (an exception, an answer of another shape) is left for the client to fetch.

::

    table   work semaphore | closed | for each slot: state, kind, waits, time | for each slot: ready semaphore
    slot    inputs | outputs
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath import platforms
from swath.errors import InferenceError, ServerClosed, ServerDied
from swath.keys import Key
from swath.modules.inference_server.pipes import DEFAULT_CLIENTS, MPTransport, ProcessClient, RequestConnection
from swath.modules.inference_server.reception import Address
from swath.modules.inference_server.replies import opened, was_shut_down
from swath.modules.inference_server.requests import Answer, Asked, Content, Request, keys_of, read_content, wait_looking
from swath.modules.inference_server.stamp import KINDS
from swath.process.channel import Channel, pack
from swath.process.memory import SharedMemory, map_and_close
from swath.process.semaphores import SEMAPHORE_BYTES, Semaphore
from swath.weight_update.shared_memory import WeightLayout

#: States of a slot: the client's turn, the server's, the client's with an answer in the slot, or one to be fetched.
IDLE, ASKED, ANSWERED, TO_FETCH = range(4)
#: What the table says of the server.
SERVING, SHUT_DOWN, DEAD = range(3)
_LINE_BYTES = 64


class SlotTable:
    """What all clients and the server see, without any of the data."""

    def __init__(self, memory: torch.Tensor, num_slots: int, *, is_new: bool) -> None:
        initial = 0 if is_new else None
        raw = memory.numpy()
        self._memory = memory
        self._semaphores_at = SEMAPHORE_BYTES + _LINE_BYTES * (1 + num_slots)
        self.work = Semaphore(memory[:SEMAPHORE_BYTES], initial)
        self.server_state = raw[SEMAPHORE_BYTES : SEMAPHORE_BYTES + 1]
        lines = raw[SEMAPHORE_BYTES + _LINE_BYTES : self._semaphores_at].reshape(num_slots, _LINE_BYTES)
        self.states = lines[:, 0]
        self.kinds = lines[:, 1]
        self.waits = lines[:, 2]
        self.times = lines[:, 8:16].view(np.float64)[:, 0]
        if is_new:
            for number in range(num_slots):
                self.ready(number, 0)

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        return SEMAPHORE_BYTES + _LINE_BYTES + (_LINE_BYTES + SEMAPHORE_BYTES) * num_slots

    def ready(self, number: int, initial: int | None = None) -> Semaphore:
        start = self._semaphores_at + number * SEMAPHORE_BYTES
        return Semaphore(self._memory[start : start + SEMAPHORE_BYTES], initial)


@dataclass(frozen=True)
class SlotLayout:
    """What one client's requests and answers look like."""

    batch_size: torch.Size
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...]
    tensors: WeightLayout

    @classmethod
    def of(cls, content: Content, answer: Answer) -> SlotLayout | None:
        """None where a slot would not do: there is more in it than tensors."""
        keys, values = answer
        if content.tensordict is not None or not all(isinstance(value, torch.Tensor) for value in values):
            return None
        if any(tensor.device.type != "cpu" for tensor in (*content.tensors, *values)):
            return None
        named: dict[Any, torch.Tensor] = {("in", *k): t for k, t in zip(content.keys, content.tensors, strict=True)}
        named.update({("out", *k): t for k, t in zip(keys, values, strict=True)})
        return cls(content.batch_size, content.keys, keys, WeightLayout.of(named))

    def views(self, memory: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        views: dict[Any, torch.Tensor] = self.tensors.views(memory, 0)  # type: ignore[assignment]
        return [views["in", *key] for key in self.in_keys], [views["out", *key] for key in self.out_keys]


class Slot:
    """A client's slot, as the server sees it."""

    def __init__(
        self, table: SlotTable, number: int, ready: Semaphore, layout: SlotLayout, memory: torch.Tensor
    ) -> None:
        self.table = table
        self.number = number
        self.ready = ready
        self.layout = layout
        self.inputs, self.outputs = layout.views(memory)
        #: What the client is to fetch.
        self.left: tuple[Any, ...] = ()
        self._contents: dict[int, Content] = {}
        self._is_left = False
        self._lock = threading.Lock()

    def give(self, state: int) -> None:
        """Let the client have its turn."""
        with self._lock:
            if not self._is_left:
                self.table.states[self.number] = state
                self.ready.release()

    def leave(self) -> None:
        """The client is gone, maybe with a request under way: its place on the table will be another one's."""
        with self._lock:
            self._is_left = True

    def request(self) -> SlotRequest:
        kind = int(self.table.kinds[self.number])
        content = self._contents.get(kind)
        if content is None:
            content = Content(self.layout.batch_size, self.layout.in_keys, self.inputs, KINDS[kind])
            self._contents[kind] = content
        return SlotRequest(self, content)


class SlotRequest:
    """A request in a slot; to the loop, the same as a ``Request``."""

    __slots__ = ("_is_open", "_slot", "content", "submitted_at", "waits")

    def __init__(self, slot: Slot, content: Content) -> None:
        self._slot = slot
        self.content = content
        self.waits = bool(slot.table.waits[slot.number])
        self.submitted_at = float(slot.table.times[slot.number])
        self._is_open = True

    def answer(self, keys: tuple[Key, ...], values: Sequence[Any]) -> None:
        if not self._is_open:
            return
        slot = self._slot
        fits = keys == slot.layout.out_keys and all(
            isinstance(value, torch.Tensor) and value.shape == view.shape and value.dtype == view.dtype
            for view, value in zip(slot.outputs, values, strict=True)
        )
        if fits:
            for view, value in zip(slot.outputs, values, strict=True):
                view.copy_(value)
        else:
            slot.left = "answer", (keys, values)
        self._finish(ANSWERED if fits else TO_FETCH)

    def fail(self, error: BaseException) -> None:
        if self._is_open:
            self._slot.left = "failed", pack(error)
            self._finish(TO_FETCH)

    def _finish(self, state: int) -> None:
        self._is_open = False
        self._slot.give(state)


class SlotConnection(RequestConnection):
    """A client's connection and, after its first request, its slot."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._layout: SlotLayout | None = None
        self._signature: tuple[Any, ...] = ()
        self._in_slot = False
        self._is_ready = False

    def _welcomed(self, details: Sequence[Any]) -> None:
        super()._welcomed(details)
        num_slots = details[2]
        memory = self._receive_memory(SlotTable.num_bytes(num_slots))
        self._table = SlotTable(memory, num_slots, is_new=False)
        self._ready = self._table.ready(self.number)

    def _receive_memory(self, num_bytes: int) -> torch.Tensor:
        try:
            descriptor = self._channel.receive_descriptor()
        except (EOFError, OSError, RuntimeError) as error:
            raise self._gone() from error
        return map_and_close(descriptor, num_bytes)

    def ask(self, tensordict: TensorDictBase, *, waits: bool) -> None:
        layout, table, number = self._layout, self._table, self.number
        if layout is not None:
            # Keys that the slot has no place for are dropped.
            content = read_content(tensordict, layout.in_keys)
            if content.batch_size == layout.batch_size and content.signature[1:] == self._signature:
                for view, tensor in zip(self._inputs, content.tensors, strict=True):
                    view.copy_(tensor)
                table.kinds[number] = KINDS.index(content.kind)
                table.waits[number] = waits
                table.times[number] = perf_counter()
                table.states[number] = ASKED  # last: what is asked is complete
                self._in_slot, self._is_ready = True, False
                table.work.release()
                return
        self._in_slot = False
        self._sent = read_content(tensordict, self.in_keys)
        self._send_content(self._sent, waits=waits)

    def is_done(self) -> bool:
        if not self._in_slot:
            return super().is_done()
        return self._have_answer(0)

    def wait(self, timeout_s: float | None) -> bool:
        if not self._in_slot:
            return super().wait(timeout_s)
        return wait_looking(self._have_answer, timeout_s, self._look)

    def _have_answer(self, timeout_s: float) -> bool:
        if not self._is_ready:
            self._is_ready = self._ready.acquire(timeout_s)
        return self._is_ready

    def _look(self) -> None:
        """Raise if nobody will answer. The connection has an end as soon as the server has."""
        is_over = self._table.server_state[0] != SERVING or self.has_ended()
        if is_over and not self._have_answer(0):  # it may be the last thing that it did
            raise self._gone()

    def take(self) -> Answer:
        if not self._in_slot:
            kind, content, *layout = self._receive()
            if layout:
                self._move_into(layout[0])
            return opened(kind, content)
        if self._table.states[self.number] == ANSWERED:
            assert self._layout is not None
            return self._layout.out_keys, [view.clone() for view in self._outputs]
        with contextlib.suppress(OSError):
            self._channel.send("fetch")
        return opened(*self._receive())

    def _move_into(self, layout: SlotLayout) -> None:
        memory = self._receive_memory(layout.tensors.slot_bytes)
        self._layout = layout
        self._signature = self._sent.signature[1:]
        self._inputs, self._outputs = layout.views(memory)

    def _gone(self) -> InferenceError:
        if hasattr(self, "_table") and self._table.server_state[0] == SHUT_DOWN:
            return was_shut_down()
        return ServerDied("the inference server is gone: its process was killed, or its thread has ended")


class SlotClient(ProcessClient):
    """A client that works in any process of this machine, wherever it is unpickled."""

    _connection_type = SlotConnection


def require_slots() -> None:
    platforms.require("transport='slots'", platforms.STEPPING_WORKERS, "use transport='mp'")


class SlotTransport(MPTransport):
    """For clients in any process of this machine whose requests keep their keys, shapes and dtypes.

    A client can be pickled, at any time and by any pickler, and works wherever it is unpickled.

    Args:
        num_slots: how many requests can be under way at a time: one of each client, or thread of a client.
        request_spec: the keys that are sent; others are dropped. By default those that the policy reads or, if it does
            not say, all that are in a client's first request.
        preallocate: accepted for compatibility: a slot is made with a client's first request, and used again.
    """

    transport_kind = "process_slot"
    client_type = SlotClient

    def __init__(
        self,
        num_slots: int = DEFAULT_CLIENTS,
        *,
        preallocate: bool = True,
        request_spec: Any = None,
        address: Address | None = None,
    ) -> None:
        super().__init__(num_slots, address=address)
        require_slots()
        self._request_keys = keys_of(request_spec)
        self._memory = SharedMemory(SlotTable.num_bytes(num_slots))
        self._table = SlotTable(self._memory.bytes_, num_slots, is_new=True)
        self._slots: dict[int, Slot] = {}
        # A client may come in while the server closes: its number must not be closed under it, and name another file.
        self._descriptor_lock = threading.Lock()

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "request_spec": self._request_keys}

    def ring(self) -> None:
        self._table.work.release()

    def wait(self, timeout_s: float) -> None:
        work = self._table.work
        if work.acquire(timeout_s):
            while work.acquire(0):  # one look finds what many clients have raised it for
                pass

    def take_requests(self) -> Sequence[Asked]:
        found: list[Asked] = list(super().take_requests())
        for number in np.flatnonzero(self._table.states == ASKED):
            slot = self._slots.get(int(number))
            if slot is not None:  # else its client has just gone
                self._table.states[number] = IDLE
                found.append(slot.request())
        return found

    def close(self, reason: InferenceError | None = None, taken: Sequence[Asked] = ()) -> None:
        if self.state != "closed":
            self._table.server_state[0] = SHUT_DOWN if reason is None or isinstance(reason, ServerClosed) else DEAD
        super().close(reason, taken)
        with self._descriptor_lock:
            self._memory.close_descriptor()

    def _serve(self, channel: Channel, number: int) -> None:
        table = self._table
        table.states[number] = IDLE
        ready = table.ready(number, 0)
        in_keys = self.in_keys if self._request_keys is None else self._request_keys
        with self._descriptor_lock:
            if self._memory.descriptor is None:
                return  # closed: the end of the connection tells the client
            channel.send_descriptor(self._memory.descriptor, "welcome", in_keys, number, self.num_slots)
        try:
            while True:
                message = channel.receive()
                if message[0] == "fetch":
                    channel.send(*self._slots[number].left)
                    continue
                _, batch_size, keys, tensors, kind, tensordict, waits = message
                content = Content(batch_size, keys, tensors, kind, tensordict)
                self._replying.add(number)
                reply = self._reply_to(Request(content, waits=waits))
                layout = SlotLayout.of(content, reply[1]) if reply[0] == "answer" else None
                if layout is None:
                    channel.send(*reply)
                    self._replying.discard(number)
                    continue
                memory = SharedMemory(layout.tensors.slot_bytes)
                self._slots[number] = Slot(table, number, ready, layout, memory.bytes_)
                assert memory.descriptor is not None
                channel.send_descriptor(memory.descriptor, *reply, layout)
                self._replying.discard(number)
        finally:
            slot = self._slots.pop(number, None)
            if slot is not None:
                slot.leave()
