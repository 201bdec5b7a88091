"""Workers that write to a replay buffer by themselves; their owner only gives orders, and watches."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swath import platforms
from swath.collectors.background import Work
from swath.data.episode_ends import mark_ends
from swath.data.postprocessing import Processing, Stored
from swath.data.replay_buffer import ReplayBuffer
from swath.data.storages import TensorStorage
from swath.process import pickling
from swath.remote.blocks import BlockLayout
from swath.remote.requests import INTO_BUFFER, CollectRequest, CollectResult, random_in_lanes, random_in_rows
from swath.rollout.layout import Field
from swath.workers.pool import WorkerHandle
from swath.workers.status_page import Ledger

if TYPE_CHECKING:
    from swath.collectors.multi import MultiCollector

_ORDERS_PER_WORKER = 2
#: An order is so many steps at least, so that small batches do not keep its owner busy with messages.
_STEPS_PER_ORDER = 64
_SECONDS_BETWEEN_LOOKS = 0.1
#: While the learner is behind, which nobody tells.
_SECONDS_TO_HOLD = 0.002


@dataclass
class _Pending:
    order: CollectRequest
    frames: int
    #: How many of them are random.
    random_frames: int


class FreeRun(Work):
    """``Work`` of workers: every env of a multi-process collector has a track of the buffer, which its worker writes.

    Orders are frames, not batches: whoever is fast gets more of them. A worker has two at a time, so that it never
    waits for its owner.
    """

    writes_elsewhere = True

    def __init__(self, collector: MultiCollector, buffer: ReplayBuffer) -> None:
        super().__init__(collector)
        self._lock = collector.lock
        self._workers = collector._workers
        self._buffer = buffer
        size = collector._description.env_size
        self._each = size.numel()
        self._processing: bytes | None = None
        kept = Stored(tuple(Field(f.key, f.shape, f.dtype) for f in collector._description.fields), by_env=True)
        processing = Processing(collector._postprocessing, collector._assembler is not None)
        if not processing.is_nothing:
            self._processing = _pickled(processing)
            (kept,) = self._workers.call("stored", self._processing, handles=self._workers.handles[:1])
        self._by_env = kept.by_env
        #: Of each worker.
        self._tracks = [range(worker, worker + 1) for worker in range(collector.num_workers)]
        if kept.by_env:
            self._tracks = [
                range(m.start * self._each, m.stop * self._each) for m in collector._assignment.layout.members
            ]
        self._pending: list[dict[int, _Pending]] = [{} for _ in self._tracks]
        self._is_hurried = False
        self._layouts = []
        for worker in range(collector.num_workers):
            frames = collector._assignment.of_worker(worker)[0].frames
            steps = -(-frames // self._each)
            if collector._may_order_more:
                steps = max(steps, _STEPS_PER_ORDER)
            count = len(collector._assignment.layout.members[worker])
            self._layouts.append(BlockLayout(collector._description.fields, size, (steps,) * count))
        self._memory = _lay_out(buffer, collector, kept)
        #: Frames in each worker's ledger that were counted.
        self._counted = [0] * collector.num_workers
        for handle in self._workers.handles:
            self._map(handle)

    def _stored(self, handle: WorkerHandle) -> int:
        """Frames of a worker's ledger."""
        tracks = self._tracks[handle.number]
        return Ledger(handle.page).frames(int(self._memory.tracks.committed[tracks.start : tracks.stop].sum()))

    def _map(self, handle: WorkerHandle) -> None:
        """Give a worker that does nothing its tracks, and an empty ledger."""
        worker, memory = handle.number, self._memory
        assert memory.descriptor is not None
        Ledger(handle.page).clear()
        self._counted[worker] = 0
        about = memory.layout, self._tracks[worker], self._by_env, self._layouts[worker], self._processing
        self._workers.send_descriptor(handle, memory.descriptor, "buffer", *about)

    # -- background.Work -------------------------------------------------------------------------------------------

    def do_some(self) -> bool:
        collector = self._collector
        started = time.perf_counter()
        try:
            return self._attend()
        except Exception:
            with suppress(Exception):  # what failed first is what the user must see
                self._take_rest()
            raise
        finally:
            collector._seconds += time.perf_counter() - started

    def _attend(self) -> bool:
        collector = self._collector
        while True:
            with collector.lock:
                self._take_arrived()
                collector._warn_if_waiting()
                holds = not self._give_orders()
                if not any(self._pending) and (self._is_hurried or collector._complete):
                    return not collector._complete
            self._workers.wait(timeout_s=_SECONDS_TO_HOLD if holds else _SECONDS_BETWEEN_LOOKS)
            if not self._is_hurried:  # else this is over when all workers are still
                return True

    def _take_rest(self) -> None:
        """Before it is said that a worker failed: the others store what steps they have taken, if they do so soon."""
        self.hurry()
        self._workers.wait_for_rest(self._busy_members)
        with self._lock:
            self._take_arrived()
            for handle in self._workers.handles:
                self._count_unreported(handle)

    def _busy_members(self) -> list[WorkerHandle]:
        with self._lock:
            self._take_arrived()
        return [handle for handle in self._workers.handles if self._pending[handle.number]]

    def is_still(self) -> bool:
        return not any(self._pending)

    def hurry(self) -> None:
        with self._lock:
            if self._is_hurried:
                return
            self._is_hurried = True
            for worker, pending in enumerate(self._pending):
                for number in pending:
                    self._workers.send(self._workers.handles[worker], "stop", number, wake=True)

    def go_on(self) -> None:
        self._is_hurried = False

    # -- orders ----------------------------------------------------------------------------------------------------

    def _give_orders(self) -> bool:
        """False where the learner is behind."""
        if self._is_hurried:
            return True
        if not self._buffer.may_write():
            return False
        for rank in range(_ORDERS_PER_WORKER):
            for handle in self._workers.handles:
                if len(self._pending[handle.number]) == rank:
                    left = self._frames_to_order
                    if left is not None and left <= 0:
                        return True
                    if left is None or self._may_take(handle, left):
                        self._give_order(handle, left)
        return True

    def _may_take(self, handle: WorkerHandle, left: int) -> bool:
        """Whether all its envs have a step to take. What is less is the last order of all: a step that is not stored
        would be missed if there were another one, and what is under way may come back to the budget."""
        return left >= self._layouts[handle.number].num_envs or not any(self._pending)

    @property
    def _frames_to_order(self) -> int | None:
        total = self._collector._budget.total_frames
        if total is None:
            return None
        under_way = sum(each.frames for pending in self._pending for each in pending.values())
        return total - self._collector._frames - under_way

    def _give_order(self, handle: WorkerHandle, left: int | None) -> None:
        collector, layout = self._collector, self._layouts[handle.number]
        steps, num_rows = layout.steps[0], None
        if left is not None and left < steps * layout.num_envs:
            steps = left // layout.num_envs
            if not steps:
                steps, num_rows = 1, left
        frames = steps * layout.num_envs if num_rows is None else num_rows
        random_frames = min(collector._random_frames_left, frames)
        collector._random_frames_left -= random_frames
        collector._num_orders += 1
        count = layout.num_members
        order = CollectRequest(
            collector._num_orders, INTO_BUFFER, (steps,) * count, range(count), 0, random_frames, num_rows
        )
        self._pending[handle.number][order.number] = _Pending(order, frames, random_frames)
        self._workers.send(handle, "collect", tuple(order))

    def _take_arrived(self) -> None:
        while self._workers.arrived:
            handle, ready = self._workers.arrived.popleft()
            pending = self._pending[handle.number].pop(ready.number, None)
            if pending is not None:
                self._count(handle.number, self._frames_of(handle.number, pending, ready))
                # It may have been stopped.
                taken = random_in_lanes(pending.random_frames, ready.steps, self._layouts[handle.number].num_envs)
                self._collector._random_frames_left += pending.random_frames - taken

    def _frames_of(self, worker: int, pending: _Pending, ready: CollectResult) -> int:
        rows = self._layouts[worker].num_envs // len(ready.steps)
        if pending.order.num_rows is None:
            return sum(ready.steps) * rows
        left = [pending.order.num_rows - lane * rows for lane in range(len(ready.steps))]
        return sum(min(rows, max(0, own)) for own, taken in zip(left, ready.steps, strict=True) if taken)

    def _count(self, worker: int, frames: int) -> None:
        self._collector._frames += frames
        self._collector._iter += 1
        self._counted[worker] += frames

    def _count_unreported(self, handle: WorkerHandle) -> int:
        """What a worker has committed, and has not reported."""
        unreported = self._stored(handle) - self._counted[handle.number]
        if unreported:
            self._count(handle.number, unreported)
        return unreported

    def resume(self, handle: WorkerHandle) -> None:
        """A worker was started again: what its predecessor committed counts, and what it had not is ordered again."""
        self._take_arrived()  # what it has reported
        worker = handle.number
        pending, layout = self._pending[worker], self._layouts[worker]
        unreported = self._count_unreported(handle)
        for number in sorted(pending):  # that was of the oldest: it reports each before it goes on with the next
            each = pending.pop(number)
            rows = -(-unreported // each.order.steps[0])
            taken = random_in_rows(each.random_frames, range(rows), layout.num_envs)
            self._collector._random_frames_left += each.random_frames - taken
            unreported = 0
        tracks = self._tracks[worker]
        self._memory.tracks.settle(slice(tracks.start, tracks.stop))
        mark_ends(self._memory, tracks)
        self._map(handle)


def _pickled(processing: Processing) -> bytes:
    try:
        return pickling.dumps(processing)
    except Exception as error:
        raise TypeError(
            f"postproc cannot be sent to a worker process: {type(error).__name__}: {error}. With a replay buffer it is "
            "called where frames are collected"
        ) from error


def _lay_out(buffer: ReplayBuffer, collector: MultiCollector, kept: Stored) -> Any:
    """The buffer's memory, shared, with a track for each env, or for each worker."""
    from swath.collectors.multi import WORKER

    num_tracks = collector._num_envs if kept.by_env else collector.num_workers
    constant = tuple(Field(key, torch.Size(), torch.int64) for key in collector._tracked)
    storage = buffer.storage
    assert isinstance(storage, TensorStorage)
    buffer.share_tracks(kept.fields + constant, num_tracks)
    memory = storage.laid_out()
    each = collector._description.env_size.numel()
    for key in collector._tracked:  # the same for all of a track
        for track in range(num_tracks):
            number = collector._assignment.layout.worker_of(track // each) if key == WORKER else track
            memory.rows[key][track] = number
    return memory


def can_run_free(collector: MultiCollector, buffer: Any) -> bool:
    """Whether workers can write by themselves: to a buffer that processes can share, and without asking their owner."""
    post = collector._postprocessing
    asks = post.pre_collect_hook or post.post_collect_hook or collector._interruptor or collector.update_at_each_batch
    # Which worker or env a frame is from is not known of what a postproc makes of it.
    mixed = collector._tracked and not Processing(post, collector._assembler is not None).is_nothing
    storing = collector._storing
    return (
        not (asks or mixed)
        and isinstance(buffer, ReplayBuffer)
        and isinstance(buffer.storage, TensorStorage)
        and buffer.storage.can_be_shared
        and buffer.writer.appends
        and not buffer.changes_what_is_written
        and (storing is None or storing.type == "cpu")
        and platforms.are_met(platforms.ORDERED_STORES)
    )
