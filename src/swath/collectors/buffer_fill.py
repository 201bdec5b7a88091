"""Workers that fill a replay buffer by themselves; their owner only makes requests, and watches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swath import platforms
from swath.collectors.background import Work
from swath.collectors.budget import Budget, Progress
from swath.collectors.remote import WORKER
from swath.collectors.scheduler import Scheduler
from swath.collectors.waiting import WaitingWatch
from swath.data.episode_ends import mark_ends
from swath.data.episodes import Ended, EpisodeHistory, needs_ids
from swath.data.postprocessing import Processing, Stored
from swath.data.replay_buffer import ReplayBuffer
from swath.data.storages import TensorStorage
from swath.keys import Key
from swath.process import pickling
from swath.remote.blocks import BlockLayout
from swath.remote.requests import (
    INTO_BUFFER,
    CollectRequest,
    CollectResult,
    WorkerDescription,
    random_in_lanes,
    random_in_rows,
)
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import Field
from swath.workers.handle import WorkerHandle
from swath.workers.layout import WorkerLayout
from swath.workers.pool import WorkerPool
from swath.workers.status_page import Ledger

#: A request is so many steps at least, so that small batches do not keep its owner busy with messages.
_STEPS_PER_REQUEST = 64
_SECONDS_BETWEEN_LOOKS = 0.1
#: While the learner is behind, which nobody tells.
_SECONDS_TO_HOLD = 0.002


@dataclass(frozen=True)
class FillPlan:
    """What workers are to do for the buffer."""

    buffer: ReplayBuffer
    description: WorkerDescription
    layout: WorkerLayout
    #: Steps of a batch, by worker.
    steps: Sequence[int]
    #: What is done to batches before they are stored.
    processing: Processing
    #: Which worker, which env: written into every frame.
    tracked: Sequence[Key]
    #: Whether it makes no difference to do several batches as one.
    may_join_batches: bool

    @property
    def envs_each(self) -> int:
        return self.description.env_size.numel()

    def blocks(self) -> list[BlockLayout]:
        """Where each worker collects, before it writes to the buffer."""
        least = _STEPS_PER_REQUEST if self.may_join_batches else 1
        about = self.description
        return [
            BlockLayout(about.fields, about.env_size, (max(steps, least),) * len(members))
            for steps, members in zip(self.steps, self.layout.members, strict=True)
        ]

    def tracks(self, by_env: bool) -> list[range]:
        """Of each worker: one for each env, or one for all of them."""
        if not by_env:
            return [range(worker, worker + 1) for worker in range(self.layout.num_workers)]
        return [range(m.start * self.envs_each, m.stop * self.envs_each) for m in self.layout.members]

    def lay_out(self, kept: Stored) -> Any:
        """The buffer's memory, shared, with those tracks."""
        num_tracks = self.layout.num_members * self.envs_each if kept.by_env else self.layout.num_workers
        constant = tuple(Field(key, torch.Size(), torch.int64) for key in self.tracked)
        storage = self.buffer.storage
        assert isinstance(storage, TensorStorage)
        self.buffer.share_tracks(kept.fields + constant, num_tracks)
        memory = storage.laid_out()
        for key in self.tracked:  # the same for all of a track
            for track in range(num_tracks):
                number = self.layout.worker_of(track // self.envs_each) if key == WORKER else track
                memory.rows[key][track] = number
        return memory


@dataclass
class _Pending:
    request: CollectRequest
    num_frames: int
    #: How many of them are random.
    random_frames: int


class BufferFill(Work):
    """``Work`` of workers: every env of a multi-process collector has a track of the buffer, which its worker writes.

    Requests are frames, not batches: whoever is fast gets more of them.
    """

    writes_elsewhere = True

    def __init__(
        self,
        collector: Any,
        pool: WorkerPool,
        scheduler: Scheduler[_Pending],
        progress: Progress,
        waiting: WaitingWatch,
        plan: FillPlan,
        budget: Budget,
        episodes: EpisodeHistory,
    ) -> None:
        super().__init__(collector)
        self._episodes = episodes
        if TRAJ_IDS not in {field.key for field in plan.description.fields}:
            episodes.refusal = needs_ids()
        self._lock = collector.lock
        self._pool = pool
        self._scheduler = scheduler
        self._progress = progress
        self._waiting = waiting
        self._budget = budget
        self._buffer = plan.buffer
        self._processing: bytes | None = None
        kept = Stored(tuple(Field(f.key, f.shape, f.dtype) for f in plan.description.fields), by_env=True)
        if not plan.processing.is_nothing:
            self._processing = _pickled(plan.processing)
            (kept,) = pool.call("stored", self._processing, handles=pool.handles[:1])
        self._by_env = kept.by_env
        self._tracks = plan.tracks(kept.by_env)
        self._layouts = plan.blocks()
        self._memory = plan.lay_out(kept)
        self._is_hurried = False
        #: Frames in each worker's ledger that were counted.
        self._counted = [0] * len(pool.handles)
        for handle in pool.handles:
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
        self._pool.send_descriptor(handle, memory.descriptor, "buffer", *about)

    # -- background.Work -------------------------------------------------------------------------------------------

    def do_some(self) -> bool:
        self._progress.begin_batch(in_background=True)
        try:
            return self._attend()
        except Exception:
            with suppress(Exception):  # what failed first is what the user must see
                self._take_rest()
            raise
        finally:
            self._progress.end_batch()

    def _is_complete(self) -> bool:
        return self._budget.is_spent(self._progress.frames)

    def _attend(self) -> bool:
        while True:
            with self._lock:
                self._take_arrived()
                self._waiting.look(self._progress.batches)
                holds = not self.make_requests()
                if self._scheduler.is_idle and (self._is_hurried or self._is_complete()):
                    return not self._is_complete()
            started = time.perf_counter()
            self._pool.wait(timeout_s=_SECONDS_TO_HOLD if holds else _SECONDS_BETWEEN_LOOKS)
            if holds:
                self._progress.held_back_s += time.perf_counter() - started
            if not self._is_hurried:  # else this is over when all workers are still
                return True

    def _take_rest(self) -> None:
        """Before it is said that a worker failed: the others store what steps they have taken, if they do so soon."""
        self.hurry()
        self._pool.wait_for_rest(self._busy)
        with self._lock:
            self._take_arrived()
            for handle in self._pool.handles:
                self._count_unreported(handle)

    def _busy(self) -> list[WorkerHandle]:
        with self._lock:
            self._take_arrived()
        return [handle for handle in self._pool.handles if self._scheduler.pending[handle.number]]

    def is_still(self) -> bool:
        return self._scheduler.is_idle

    def hurry(self) -> None:
        with self._lock:
            if self._is_hurried:
                return
            self._is_hurried = True
            for worker, number in self._scheduler.numbers_under_way:
                self._pool.send(self._pool.handles[worker], "stop", number, wake=True)

    def go_on(self) -> None:
        self._is_hurried = False

    # -- requests --------------------------------------------------------------------------------------------------

    def make_requests(self) -> bool:
        """False where the learner is behind."""
        if self._is_hurried:
            return True
        if not self._buffer.may_write():
            return False
        for worker in self._scheduler.turns(range(len(self._layouts))):
            left = self._scheduler.frames_left()
            if left is not None and left <= 0:
                return True
            if left is None or self._may_take(worker, left):
                self._request(worker, left)
        return True

    def _may_take(self, worker: int, left: int) -> bool:
        """Whether all its envs have a step to take. What is less is the last request of all: a step that is not stored
        would be missed if there were another one, and what is under way may come back to the budget."""
        return left >= self._layouts[worker].num_envs or self._scheduler.is_idle

    def _request(self, worker: int, left: int | None) -> None:
        layout = self._layouts[worker]
        steps, num_rows = layout.steps[0], None
        if left is not None and left < steps * layout.num_envs:
            steps = left // layout.num_envs
            if not steps:
                steps, num_rows = 1, left
        frames = steps * layout.num_envs if num_rows is None else num_rows
        random_frames = self._scheduler.take_random(frames)
        number, count = self._scheduler.next_number(), layout.num_members
        request = CollectRequest(number, INTO_BUFFER, (steps,) * count, range(count), 0, random_frames, num_rows)
        self._scheduler.begin(worker, number, _Pending(request, frames, random_frames))
        self._pool.send(self._pool.handles[worker], "collect", tuple(request))

    def _take_arrived(self) -> None:
        while self._pool.arrived:
            handle, result = self._pool.arrived.popleft()
            pending = self._scheduler.end(handle.number, result.number)
            if pending is not None:
                frames = self._frames_of(handle.number, pending, result)
                self._count(handle.number, frames)
                steps = max(result.steps)
                self._progress.lags.add(result.versions, steps, frames / max(1, steps), self._collector.policy_version)
                self._tell_of(result.episodes, handle)
                # It may have been stopped.
                taken = random_in_lanes(pending.random_frames, result.steps, self._layouts[handle.number].num_envs)
                self._scheduler.random_frames_left += pending.random_frames - taken

    def _tell_of(self, ended: Ended | None, handle: WorkerHandle) -> None:
        if ended is not None:
            version = handle.page.integer("policy_version")
            self._episodes.add(ended, np.full_like(ended.envs, handle.number), version, self._progress.frames)

    def _frames_of(self, worker: int, pending: _Pending, result: CollectResult) -> int:
        rows = self._layouts[worker].num_envs // len(result.steps)
        if pending.request.num_rows is None:
            return sum(result.steps) * rows
        left = [pending.request.num_rows - lane * rows for lane in range(len(result.steps))]
        return sum(min(rows, max(0, own)) for own, taken in zip(left, result.steps, strict=True) if taken)

    def _count(self, worker: int, frames: int) -> None:
        self._progress.frames += frames
        self._progress.batches += 1
        self._counted[worker] += frames

    def _count_unreported(self, handle: WorkerHandle) -> int:
        """What a worker has committed, and has not reported."""
        unreported = self._stored(handle) - self._counted[handle.number]
        if unreported:
            self._count(handle.number, unreported)
        return unreported

    def resume(self, handle: WorkerHandle) -> None:
        """A worker was started again: what its predecessor committed counts, and what it had not is asked for again."""
        self._take_arrived()  # what it has reported
        worker = handle.number
        layout = self._layouts[worker]
        unreported = self._count_unreported(handle)
        # That was of the oldest: it reports each before it goes on with the next.
        for request in sorted(self._scheduler.take_back(worker), key=lambda pending: pending.request.number):
            rows = -(-unreported // request.request.steps[0])
            taken = random_in_rows(request.random_frames, range(rows), layout.num_envs)
            self._scheduler.random_frames_left -= taken
            unreported = 0
        tracks = self._tracks[worker]
        self._memory.tracks.settle(slice(tracks.start, tracks.stop))
        mark_ends(self._memory, tracks)
        self._map(handle)


def _pickled(processing: Processing) -> bytes:
    advice = "With a replay buffer it is called where frames are collected"
    with pickling.to_be_sent("postproc", "a worker process", advice):
        return pickling.dumps(processing)


def workers_can_fill(buffer: Any, storing: torch.device | None) -> bool:
    """Whether processes can share this buffer, and write what goes into it without asking its owner."""
    return (
        isinstance(buffer, ReplayBuffer)
        and isinstance(buffer.storage, TensorStorage)
        and buffer.storage.can_be_shared
        and buffer.writer.appends
        and not buffer.changes_what_is_written
        and (storing is None or storing.type == "cpu")
        and platforms.are_met(platforms.ORDERED_STORES)
    )
