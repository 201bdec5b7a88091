"""MultiAsyncCollector: batches from workers as they come. AsyncCollector: one worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.collectors.base import BaseCollector
from swath.collectors.budget import Budget
from swath.collectors.config import WorkersConfig
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_sync import mark_broken
from swath.collectors.remote import WORKER
from swath.errors import NoLength
from swath.keys import Key
from swath.remote.blocks import Block, BlockLayout, BlockPool
from swath.remote.requests import CollectRequest, CollectResult, random_in_rows, random_share
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.delivery import TRAJ_IDS
from swath.workers.handle import WorkerHandle

_SECONDS_BETWEEN_QUESTIONS = 0.02


@dataclass
class _Pending:
    """An order that a worker has not completed."""

    order: CollectRequest
    block: Block
    #: Frames of each member that will be delivered.
    frames: list[int]
    #: How many of them are random.
    random_frames: int
    #: And how many of all its steps, also of those that a predecessor has taken.
    random_in_steps: int
    #: Of the weights when it was given.
    version: int

    @property
    def num_frames(self) -> int:
        return sum(self.frames)


@dataclass(frozen=True)
class _Piece:
    """A batch that waits to be delivered: one member's part of a block."""

    worker: int
    #: The number of its first env.
    first_env: int
    leaves: dict[Key, torch.Tensor]
    lead: Sequence[int]
    versions: list[tuple[int, int]]
    frames: int
    random_frames: int
    objects: Mapping[int, Any]


class MultiAsyncCollector(MultiCollector):
    """Runs envs in worker processes and yields the batch of whichever env is first: ``[*env.batch_size, T]``.

    A worker goes straight on with its next batch, and stops when two are waiting. See ``MultiCollector`` for the
    arguments; and:

    Args:
        max_policy_lag: no frame is delivered whose weights are more than so many updates old.
        on_policy_lag: "hold" (the default) holds workers back so that their frames do not get that old, as long as
            there are not more updates per batch than there were before; "drop" lets them go on. Frames that are too old
            are dropped in either case, and others are collected instead.

    >>> collector = MultiAsyncCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=100)
    >>> [batch.shape for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    """

    _is_shared = False

    def _take_own(self, config: WorkersConfig) -> None:
        if config.cat_results not in (None, "stack"):
            raise ValueError(
                f"cat_results={config.cat_results!r} is for MultiSyncCollector: here each batch is from one env"
            )
        if config.preemptive_threshold not in (None, 1.0):
            raise ValueError("preemptive_threshold is for MultiSyncCollector: here no worker waits for another")
        lag = config.max_policy_lag
        if lag is not None and (isinstance(lag, bool) or not isinstance(lag, int) or lag < 0):
            raise ValueError(f"max_policy_lag is a number of updates, at least 0; got {lag!r}")
        self._max_lag: int | None = lag
        if lag is not None and config.trajs_per_batch is not None:
            raise ValueError(
                "max_policy_lag does not go with trajs_per_batch: an episode is delivered when it is complete, and its "
                "first frames may be older than any limit by then"
            )
        when = "hold" if config.on_policy_lag is None else config.on_policy_lag
        if when not in ("hold", "drop"):
            raise ValueError(f"on_policy_lag must be 'hold' or 'drop', got {when!r}")
        self._holds = when == "hold"
        self._names_trajectories = lag is not None

    def _set_up(self, total_frames: Any) -> Budget:
        size = self._description.env_size
        num_envs = size.numel()
        self._layouts: list[BlockLayout] = []
        for worker in range(self.num_workers):
            steps = tuple(-(-member.frames // num_envs) for member in self._assignment.of_worker(worker))
            self._layouts.append(BlockLayout(self._description.fields, size, steps))
        self._pools = [BlockPool(layout, worker, self.num_workers) for worker, layout in enumerate(self._layouts)]
        self._pieces: deque[_Piece] = deque()
        #: Workers whose envs have taken, or will take, steps in their last order that are not delivered.
        self._ahead: set[int] = set()
        self._dropped = 0
        #: For what follows on dropped frames: it is another trajectory.
        self._own_ids = TrajectoryIds(len(self._assignment.members), len(self._assignment.members) + 1)
        #: Of an env: the id that its worker gave to the trajectory that it was in, and the one that it has here.
        self._names: dict[int, tuple[int, int]] = {}
        #: The most updates between two deliveries.
        self._updates_per_batch = 1
        self._version_at_delivery = 0
        frames = [layout.steps[0] * num_envs for layout in self._layouts]
        self._warn_of_rounding(frames[0])
        return Budget.resolve(max(frames), total_frames, num_envs)

    def __len__(self) -> int:
        if self._max_lag is not None:
            raise NoLength("with max_policy_lag the number of batches depends on how many frames are too old")
        if len({layout.steps[0] for layout in self._layouts}) > 1:
            raise NoLength("with several frames_per_batch the number of batches depends on which worker is faster")
        return super().__len__()

    def _work(self) -> Any:
        return super()._work() if self._max_lag is None else BaseCollector._work(self)

    @property
    def random_frames_due(self) -> int:
        return super().random_frames_due + sum(piece.random_frames for piece in self._pieces)

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "dropped_frames": self._dropped}

    # -- collecting ------------------------------------------------------------------------------------------------

    def _collect(self) -> TensorDictBase:
        self._require_open()
        if self.update_at_each_batch and self._iter:
            self.update_policy_weights_()
        asks = None if self._interruptor is None else self._interruptor.collection_stopped
        told_to_stop = False
        while True:
            stopping = asks is not None and asks()
            with self._lock:  # another thread may start a worker again, and give it back its orders
                self._take_arrived()
                if not stopping:
                    self._give_orders()
                elif not told_to_stop:
                    told_to_stop = True
                    self._stop()
                while self._pieces:
                    batch = self._deliver(self._pieces.popleft())
                    if batch is not None:
                        self._waiting.look(self._iter)
                        return batch
                if stopping and self._scheduler.is_idle:
                    return self._nothing()
            if not self._scheduler.is_idle:  # else all that there was is too old, and there are orders to give
                self._workers.wait(timeout_s=_SECONDS_BETWEEN_QUESTIONS if asks else None)

    def _stop(self) -> None:
        """Let workers deliver the steps that they have taken."""
        for worker, number in self._scheduler.numbers_under_way:
            self._workers.send(self._workers.handles[worker], "stop", number, wake=True)

    def _nothing(self) -> TensorDictBase:
        """A batch without frames: an interruptor has stopped the workers, and all that they had was delivered."""
        num_envs = self._lead.numel()
        leaves = {f.key: torch.empty((num_envs, 0, *f.shape), dtype=f.dtype) for f in self._description.fields}
        leaves |= {key: torch.empty((num_envs, 0), dtype=torch.int64) for key in self._tracked}
        return self._as_batch(leaves, self._lead)

    # -- orders ----------------------------------------------------------------------------------------------------

    def _give_orders(self) -> None:
        for worker in self._scheduler.turns(range(self.num_workers)):
            left = self._scheduler.frames_left(waiting=sum(piece.frames for piece in self._pieces))
            if (left is not None and left <= 0) or self._must_hold_back():
                return
            self._give_order(self._workers.handles[worker], left)

    def _must_hold_back(self) -> bool:
        """Whether one more batch under way could make another one, or itself, too old."""
        if self._max_lag is None or not self._holds:
            return False
        under_way, waiting = self._scheduler.under_way, len(self._pieces)
        if not under_way and not waiting:
            return False
        oldest = min((each.version for each in under_way), default=self._policy_version)
        before = sum(len(each.frames) for each in under_way) + waiting
        return self._policy_version - oldest + before * self._updates_per_batch > self._max_lag

    def _give_order(self, handle: WorkerHandle, left: int | None) -> None:
        worker, layout = handle.number, self._layouts[handle.number]
        each = layout.envs_per_member
        full = layout.steps[0] * each
        frames = []
        for _ in layout.steps:
            frames.append(full if left is None else max(0, min(full, left)))
            left = None if left is None else left - frames[-1]
        steps = -(-frames[0] // each)
        wanted = self._scheduler.take_random(sum(frames))
        random_frames = random_share(frames, each, wanted) if wanted else 0
        block = self._pools[worker].take()
        all_steps = (steps,) * layout.num_members
        order = self._order(block, all_steps, range(layout.num_members), random_frames, anew=worker in self._ahead)
        self._ahead.discard(worker)
        if min(frames) < steps * each:
            self._ahead.add(worker)
        pending = _Pending(order, block, frames, wanted, random_frames, self._policy_version)
        self._scheduler.begin(worker, order.number, pending)
        self._send_order(handle, block, order)

    def _send_order(self, handle: WorkerHandle, block: Block, order: CollectRequest) -> None:
        pool = self._pools[handle.number]
        if pool.gone:
            self._workers.send(handle, "forget", list(pool.gone))
            pool.gone.clear()
        self._workers.send_block(handle, block, pool.layout)
        self._workers.send(handle, "collect", tuple(order))

    def _resume(self, handle: WorkerHandle) -> None:
        """A worker was started again: it goes on with what its predecessor had not completed."""
        self._take_arrived()  # what its predecessor had completed
        pending = self._scheduler.pending[handle.number]
        layout = self._layouts[handle.number]
        rows = layout.num_envs
        for old in list(pending.values()):
            del pending[old.order.number]
            steps = old.order.steps
            first = min(self._committed(handle, old.order), steps[0] - 1)
            spent = min(old.order.random_frames, (first - old.order.first_step) * rows)
            if first:
                leaves = layout.leaves(old.block.memory.bytes_, steps)
                mark_broken(layout.part(leaves, old.order.members, steps), first - 1)
            order = self._order(old.block, steps, old.order.members, old.order.random_frames - spent, first)
            pending[order.number] = replace(old, order=order)
            self._send_order(handle, old.block, order)

    def _give_up_episodes(self) -> None:
        if self._gathered is not None:  # else Ctrl-C came while it waited: what is under way will be delivered later
            super()._give_up_episodes()

    def _abandon(self) -> None:
        for worker, pool in enumerate(self._pools):
            for each in self._scheduler.take_back(worker):
                pool.forget(each.block)
        self._scheduler.random_frames_left += sum(piece.random_frames for piece in self._pieces)
        self._pieces.clear()
        self._workers.arrived.clear()

    def _has_work(self, handle: WorkerHandle) -> bool:
        is_waiting = any(piece.worker == handle.number for piece in self._pieces)
        return is_waiting or bool(self._scheduler.pending[handle.number])

    def _discard(self, handles: Sequence[WorkerHandle]) -> None:
        """Workers have forgotten their orders: their blocks are free, and their random frames are still due."""
        workers = {handle.number for handle in handles}
        for worker in workers:
            for each in self._scheduler.take_back(worker):
                self._pools[worker].give_back(each.block)
        self._workers.arrived = deque(entry for entry in self._workers.arrived if entry[0].number not in workers)
        given_up = [piece for piece in self._pieces if piece.worker in workers]
        self._scheduler.random_frames_left += sum(piece.random_frames for piece in given_up)
        self._pieces = deque(piece for piece in self._pieces if piece.worker not in workers)

    # -- delivering ------------------------------------------------------------------------------------------------

    def _take_arrived(self) -> None:
        """Turn what has arrived into batches, one for each member."""
        while self._workers.arrived:
            handle, ready = self._workers.arrived.popleft()
            pending = self._scheduler.end(handle.number, ready.number)
            if pending is None:
                continue
            self._know_fragments(ready.fragments)
            self._pieces.extend(self._cut(handle.number, pending, ready))

    def _cut(self, worker: int, pending: _Pending, ready: CollectResult) -> list[_Piece]:
        layout, order = self._layouts[worker], pending.order
        leaves = self._pools[worker].lend(pending.block, order.steps)
        for key in self._tracked:
            first_env = self._assignment.layout.members[worker].start * layout.envs_per_member
            numbers = torch.arange(first_env, first_env + layout.num_envs)
            numbers = torch.full_like(numbers, worker) if key == WORKER else numbers
            leaves[key] = numbers.unsqueeze(1).repeat(1, order.steps[0])
        each = layout.envs_per_member
        pieces = []
        first = self._assignment.layout.members[worker].start * each
        for index, frames in enumerate(pending.frames):
            env = first + index * each
            lane_steps = ready.steps[0] if len(ready.steps) == 1 else ready.steps[index]
            frames = min(frames, (lane_steps + order.first_step) * each)
            own = {key: leaf[index * each : (index + 1) * each] for key, leaf in leaves.items()}
            steps, rest = divmod(frames, each)
            rows = range(index * each, (index + 1) * each)
            random_frames = min(frames, random_in_rows(pending.random_in_steps, rows, layout.num_envs))
            if steps:
                cut = own if steps == order.steps[0] else {k: leaf[:, :steps].contiguous() for k, leaf in own.items()}
                pieces.append(
                    _Piece(
                        worker,
                        env,
                        cut,
                        layout.env_size,
                        ready.versions,
                        steps * each,
                        min(random_frames, steps * each),
                        ready.objects,
                    )
                )
            if rest:
                last = {key: leaf[:rest, steps : steps + 1].contiguous() for key, leaf in own.items()}
                random_rest = max(0, random_frames - steps * each)
                versions = [(0, ready.versions[-1][1])]
                pieces.append(_Piece(worker, env, last, (rest,), versions, rest, random_rest, ready.objects))
        # It may have been stopped: the rest is still due.
        self._scheduler.random_frames_left += pending.random_frames - sum(piece.random_frames for piece in pieces)
        return pieces

    def _salvage(self) -> TensorDictBase | None:
        """After a worker failed: what was complete and not delivered, its own steps too, joined in time."""
        if not any(handle.failure is not None or not handle.is_alive for handle in self._workers.handles):
            return None  # Ctrl-C: it will be delivered later
        self._take_rest()
        pieces = [self._as_batch(piece.leaves, piece.lead) for piece in self._pieces if piece.lead == self._lead]
        self._pieces.clear()
        return torch.cat(pieces, -1) if pieces else None  # type: ignore[arg-type,return-value]

    def _left_over(self) -> Iterable[TensorDictBase]:
        self._take_rest()
        while self._pieces:
            batch = self._deliver(self._pieces.popleft())
            if batch is not None:
                yield batch

    def _take_rest(self) -> None:
        """Before the end: let workers deliver the steps that they have taken, if they do so soon."""
        self._stop()
        self._workers.wait_for_rest(self._busy_members)
        self._take_arrived()
        for handle in self._workers.handles:
            if handle.failure is not None:
                _, number, steps = handle.failure
                pending = self._scheduler.end(handle.number, number)
                if pending is not None and any(steps):
                    done = [each - pending.order.first_step for each in steps]
                    rest = CollectResult(number, done, [(0, pending.version)], [])
                    self._pieces.extend(self._cut(handle.number, pending, rest))

    def _busy_members(self) -> list[WorkerHandle]:
        self._take_arrived()
        return [handle for handle in self._workers.handles if self._scheduler.pending[handle.number]]

    @property
    def _lead(self) -> torch.Size:
        return self._description.env_size

    def _deliver(self, piece: _Piece) -> TensorDictBase | None:
        """A batch without the frames that are too old; None if all are."""
        updates = self._policy_version - self._version_at_delivery
        leaves, first = piece.leaves, 0
        if self._max_lag is not None:
            oldest = self._policy_version - self._max_lag
            length = next(iter(leaves.values())).shape[1]
            first = next((step for step, version in piece.versions if version >= oldest), length)
            if first:
                num_envs = next(iter(leaves.values())).shape[0]
                self._dropped += min(first, length) * num_envs
                self._scheduler.random_frames_left += min(piece.random_frames, first * num_envs)
                self._rename(leaves, piece.first_env, min(first, length))
                if first >= length:
                    return None
                leaves = {key: leaf[:, first:].contiguous() for key, leaf in leaves.items()}
            elif self._names:
                self._rename(leaves, piece.first_env, 0)
        rows, steps = next(iter(leaves.values())).shape[:2]
        versions = [(step - first, version) for step, version in piece.versions]
        self._progress.lags.add(versions, steps, rows, self._policy_version)
        self._updates_per_batch = max(self._updates_per_batch, updates)
        self._version_at_delivery = self._policy_version
        self._first_env = piece.first_env
        self._delivered_objects = piece.objects
        return self._as_batch(leaves, piece.lead)

    def _rename(self, leaves: dict[Key, torch.Tensor], first_env: int, num_dropped: int) -> None:
        """A trajectory of which frames were dropped is another one behind them, in all that will come of it."""
        ids = leaves.get(TRAJ_IDS)
        if ids is None:
            return
        for env, own in enumerate(ids, first_env):
            if num_dropped:
                self._names[env] = int(own[num_dropped - 1]), self._own_ids.draw(1)[0]
                self._tally.fragments.add(self._names[env][1])
            if env in self._names:
                old, new = self._names[env]
                if int(own[-1]) != old:  # it has ended
                    del self._names[env]
                own[num_dropped:][own[num_dropped:] == old] = new

    @property
    def next_traj_id(self) -> int:
        return max(super().next_traj_id, self._own_ids.next_id if self._max_lag is not None else 0)


class AsyncCollector(MultiAsyncCollector):
    """Runs one env in one worker process, and collects while its owner does something else.

    >>> collector = AsyncCollector("CartPole-v1", frames_per_batch=50, total_frames=100)
    >>> [batch.shape for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    """

    def _build(self, config: WorkersConfig) -> None:
        envs = config.create_env_fn
        if isinstance(envs, (list, tuple)):
            if len(envs) != 1:
                raise ValueError(f"an AsyncCollector has one env, got {len(envs)}; use MultiAsyncCollector")
            (envs,) = envs
        for name in ("num_workers", "envs_per_worker"):
            if (given := getattr(config, name)) not in (None, 1, "auto"):
                raise ValueError(
                    f"an AsyncCollector has one env in one worker: {name}={given!r} is for a MultiAsyncCollector"
                )
        super()._build(config.but(create_env_fn=[envs]))
