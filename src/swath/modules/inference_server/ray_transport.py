"""RayTransport: for clients anywhere in a Ray cluster, of a server that is no actor itself."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from concurrent.futures import Future
from typing import Any

from tensordict import TensorDictBase

from swath.integrations.ray import import_ray
from swath.modules.inference_server.ray_client import RayClient
from swath.modules.inference_server.replies import was_shut_down
from swath.modules.inference_server.transport import InferenceTransport
from swath.process.channel import Packed, pack


class RayTransport(InferenceTransport):
    """For clients in any process of a Ray cluster, over an actor that passes on what is asked and answered.

    A server that is itself an actor (``service_backend="ray"``) is asked directly, which is quicker.

    Args:
        max_queue_size: how many requests may wait to be taken, before clients are refused; 0: any number.
    """

    transport_kind = "ray"

    def __init__(self, *, max_queue_size: int = 0) -> None:
        self._ray = import_ray()
        # Every request that is under way is a call of the actor, which waits without a thread.
        actor: Any = self._ray.remote(_Broker).options(num_cpus=0, max_concurrency=10_000)
        self._broker = actor.remote(max_queue_size)
        self._taken: list[tuple[int, TensorDictBase]] = []

    def client(self) -> RayClient:
        return RayClient(self._broker, None)

    def submit(self, td: TensorDictBase) -> Future[TensorDictBase]:
        return self.client().submit(td)

    def wait_for_work(self, timeout: float) -> None:
        if not self._taken:
            self._taken = self._take(timeout)

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[int]]:
        self._taken.extend(self._take(0.0))
        now, self._taken = self._taken[:max_items], self._taken[max_items:]
        return [tensordict for _, tensordict in now], [number for number, _ in now]

    def _take(self, timeout_s: float) -> list[tuple[int, TensorDictBase]]:
        return self._ray.get(self._broker.take.remote(timeout_s))

    def resolve(self, callback: int, result: TensorDictBase) -> None:
        self._broker.reply.remote(callback, ("answer", result))

    def resolve_exception(self, callback: int, exc: BaseException) -> None:
        self._broker.reply.remote(callback, ("failed", pack(exc)))

    def server_ended(self) -> None:
        """Whoever asks from now on is told so."""
        self._ray.get(self._broker.close.remote(pack(was_shut_down())))


class _Broker:
    """The actor. All of it runs in one thread."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._waiting: deque[tuple[int, TensorDictBase]] = deque()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._has_arrived = asyncio.Event()
        self._closed: Packed | None = None

    async def ask(self, tensordict: TensorDictBase) -> tuple[str, Any]:
        if self._closed is not None:
            return "failed", self._closed
        if 0 < self._max_waiting <= len(self._waiting):
            full = RuntimeError(f"{len(self._waiting)} requests wait already; give RayTransport another max_queue_size")
            return "failed", pack(full)
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, tensordict))
        self._has_arrived.set()
        return await self._replies[number]

    async def take(self, timeout_s: float) -> list[tuple[int, TensorDictBase]]:
        if not self._waiting and timeout_s > 0:
            try:
                await asyncio.wait_for(self._has_arrived.wait(), timeout_s)
            except TimeoutError:
                return []
        taken = list(self._waiting)
        self._waiting.clear()
        self._has_arrived.clear()
        return taken

    async def reply(self, number: int, reply: tuple[str, Any]) -> None:
        waiting = self._replies.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def close(self, why: Packed) -> None:
        self._closed = why
        for number in list(self._replies):
            await self.reply(number, ("failed", why))
