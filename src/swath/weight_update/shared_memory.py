"""Weights in shared memory: the default.

Two slots take turns, so that what a worker may still be reading is not written. The trainer's own parameters are
copied into a slot, and out of it into the worker's: an optimizer step that was not sent is seen by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swath import platforms
from swath.process.channel import Channel
from swath.process.memory import SharedMemory, map_and_close
from swath.rollout.placement import ALIGNMENT, aligned
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.strategy import WeightStrategy


@dataclass(frozen=True)
class WeightLayout:
    """Where in a slot each tensor lies."""

    entries: tuple[tuple[str, torch.Size, torch.dtype, int], ...]
    slot_bytes: int

    @classmethod
    def of(cls, weights: dict[str, torch.Tensor]) -> WeightLayout:
        entries, offset = [], 0
        for name, tensor in weights.items():
            entries.append((name, tensor.shape, tensor.dtype, offset))
            offset += aligned(tensor.numel() * tensor.dtype.itemsize)
        return cls(tuple(entries), max(offset, ALIGNMENT))

    def views(self, memory: torch.Tensor, slot: int) -> dict[str, torch.Tensor]:
        start = slot * self.slot_bytes
        return {
            name: memory[start + offset : start + offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, shape, dtype, offset in self.entries
        }


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weights through shared memory; workers are only told that they are there.

    ``per_worker_weights`` is accepted for compatibility: a dict from worker to weights can always be sent.
    """

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        *,
        sync: bool = True,
        timeout_s: float | None = None,
        per_worker_weights: bool = False,
    ) -> None:
        platforms.require(
            type(self).__name__, platforms.WORKERS, "use a MultiProcessWeightSyncScheme, which sends them through pipes"
        )
        super().__init__(strategy, sync=sync, timeout_s=timeout_s)

    def _start_over(self) -> None:
        super()._start_over()
        self._layout: WeightLayout | None = None
        self._memory: SharedMemory | None = None
        self._slots: list[dict[str, torch.Tensor]] = []
        self._slot = 0
        #: Workers that have mapped the memory.
        self._told: set[int] = set()

    def replace_worker(self, worker: int) -> None:
        super().replace_worker(worker)
        self._told.discard(worker)

    def _publish(self, weights: dict[str, torch.Tensor]) -> None:
        layout = WeightLayout.of(weights)
        if layout != self._layout or self._owed.is_somebody_late:  # who was not in time may read either slot yet
            self._layout = layout
            self._memory = SharedMemory(2 * layout.slot_bytes)
            self._slots = [layout.views(self._memory.bytes_, slot) for slot in (0, 1)]
            self._told.clear()
        self._slot = 1 - self._slot
        with torch.no_grad():
            for name, view in self._slots[self._slot].items():
                view.copy_(weights[name])

    def _published(self) -> dict[str, torch.Tensor]:
        return {name: view.clone() for name, view in self._slots[self._slot].items()}

    def _post(self, worker: int, channel: Channel, sequence: int, version: int | None) -> None:
        if worker not in self._told:
            assert self._memory is not None
            assert self._memory.descriptor is not None
            channel.send_descriptor(self._memory.descriptor, "layout", self._layout)
            self._told.add(worker)
        channel.send("weights", sequence, version, self._slot)

    def _unpack(self, channel: Channel, message: tuple[Any, ...]) -> tuple[Any, int, int | None] | None:
        if message[0] == "layout":
            layout: WeightLayout = message[1]
            memory = map_and_close(channel.receive_descriptor(), 2 * layout.slot_bytes)
            self._slots = [layout.views(memory, slot) for slot in (0, 1)]
            return None
        _, sequence, version, slot = message
        return self._slots[slot], sequence, version

    def shutdown(self) -> None:
        super().shutdown()
        self._memory, self._slots = None, []
