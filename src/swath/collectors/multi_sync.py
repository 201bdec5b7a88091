"""MultiSyncCollector: one batch from all workers, in one block of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.collectors.budget import Budget
from swath.collectors.config import WorkersConfig
from swath.collectors.multi import MultiCollector
from swath.collectors.remote import WORKER
from swath.errors import NoLength
from swath.keys import Key
from swath.remote.blocks import Block, BlockLayout, BlockPool
from swath.remote.requests import CollectRequest, CollectResult, random_in_lanes, random_in_rows
from swath.rollout.delivery import TRAJ_IDS
from swath.workers.handle import WorkerHandle

MASK: Key = ("collector", "mask")
_ENV_OF_FRAME: Key = ("_env_of_frame",)
#: How often an interruptor is asked.
_SECONDS_BETWEEN_QUESTIONS = 0.02


@dataclass
class _Batch:
    """The batch under way."""

    block: Block
    steps: tuple[int, ...]
    #: By worker.
    orders: dict[int, CollectRequest] = field(default_factory=dict)
    ready: dict[int, list[int]] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [worker for worker in self.orders if worker not in self.ready]


class MultiSyncCollector(MultiCollector):
    """Runs envs in worker processes and yields batches of all of them: ``[envs, *env.batch_size, T]``.

    Nothing is collected between two batches, so all of a batch is from the newest weights. See ``MultiCollector`` for
    the arguments; and:

    Args:
        cat_results: "stack" (the default) for ``[envs, *batch_size, T]``, 0 to join the envs in their first
            dimension, -1 in time.
        preemptive_threshold: when this share of the envs has finished, the others stop at their next step. What they
            lack has trajectory id -1 and is False in ``("collector", "mask")``; joined in time, it is left out.

    >>> collector = MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=100, cat_results=0)
    >>> [batch.shape for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    """

    _is_shared = True

    def _take_own(self, config: WorkersConfig) -> None:
        self._cat: str | int = "stack" if config.cat_results is None else config.cat_results
        is_dimension = isinstance(self._cat, int) and not isinstance(self._cat, bool)
        if not is_dimension and self._cat != "stack":
            raise ValueError(f"cat_results must be 'stack', 0 or -1; got {config.cat_results!r}")
        threshold = config.preemptive_threshold
        self._threshold = 1.0 if threshold is None else float(threshold)
        if not 0 <= self._threshold <= 1:
            raise ValueError(f"preemptive_threshold is a share of the envs, from 0 to 1; got {threshold}")
        for name in ("max_policy_lag", "on_policy_lag"):
            if getattr(config, name) is not None:
                raise TypeError(f"{name} is for MultiAsyncCollector: here all of a batch is from the newest weights")

    def _set_up(self, total_frames: Any) -> Budget:
        env_size, count = self._description.env_size, len(self._assignment.members)
        num_envs = env_size.numel()
        self._join_in_time = self._which_dimension(env_size)
        steps = tuple(-(-member.frames // num_envs) for member in self._assignment.members)
        self._has_equal_steps = len(set(steps)) == 1
        if not self._has_equal_steps and not self._join_in_time:
            raise ValueError(
                f"frames_per_batch gives batches of {min(steps)} to {max(steps)} steps, which cannot be stacked; "
                "cat_results=-1 joins them in time"
            )
        self._layout = BlockLayout(self._description.fields, env_size, steps, self._join_in_time)
        self._pool = BlockPool(self._layout)
        self._pools = [self._pool]
        self._batch: _Batch | None = None
        self._warn_of_rounding(self._layout.frames_per_batch)
        return Budget.resolve(
            self._layout.frames_per_batch, total_frames, num_envs * count if self._has_equal_steps else num_envs
        )

    def _which_dimension(self, env_size: torch.Size) -> bool:
        """Whether members are joined in time."""
        if self._cat == "stack":
            return False
        assert isinstance(self._cat, int)
        if self._cat in (-1, len(env_size)):  # a single env has no dimension but time
            return True
        if self._cat != 0:
            raise ValueError(f"cat_results={self._cat}: envs of batch size {tuple(env_size)} can be joined in 0 or -1")
        return False

    @property
    def _mixes_envs(self) -> bool:
        return self._join_in_time and len(self._assignment.members) > 1

    def _parts(self, batch: Any, raw: TensorDictBase) -> Sequence[Any]:
        """Each env's own, where they are stacked."""
        stacked = self._cat == "stack" and raw.shape[:1] == (len(self._assignment.members),)
        if self._assembler is not None or not stacked or getattr(batch, "shape", None) != raw.shape:
            return [batch]
        return list(batch.unbind(0))

    def __len__(self) -> int:
        if self._threshold < 1:
            raise NoLength("with a preemptive_threshold the number of batches depends on which workers are late")
        return super().__len__()

    # -- collecting ------------------------------------------------------------------------------------------------

    def _collect(self) -> TensorDictBase:
        self._require_open()
        if self.update_at_each_batch and self._iter:
            self.update_policy_weights_()
        steps, num_envs = self._plan()
        with self._lock:  # who sends weights may start a worker again, with its orders
            batch = self._batch = _Batch(self._pool.take(), steps)
            self._give_orders(batch, num_envs)
        try:
            self._await(batch, is_rest=num_envs is not None)
        except KeyboardInterrupt:
            self._abandon()
            raise
        self._batch = None
        self._delivered_objects = batch.objects
        self._waiting.look(self._iter)
        return self._deliver(batch, num_envs)

    def _plan(self) -> tuple[tuple[int, ...], int | None]:
        """Steps of each member in the next batch, and how many envs deliver it (None: all)."""
        count = len(self._assignment.members)
        num_steps, num_envs = self._budget.next_batch(self._frames)
        if self._has_equal_steps:
            return (num_steps,) * count, num_envs
        steps = []
        for full in self._layout.steps:  # ``num_steps`` are of all members together
            steps.append(min(full, num_steps))
            num_steps -= steps[-1]
        return tuple(steps), num_envs

    def _give_orders(self, batch: _Batch, num_envs: int | None) -> None:
        each = self._layout.envs_per_member
        rows = self._layout.num_envs if num_envs is None or not self._has_equal_steps else num_envs
        for handle in self._workers.handles:
            members = handle.spec.members
            own_rows = range(members.start * each, members.stop * each)
            if own_rows.start >= rows or not batch.steps[members.start]:
                continue  # a last batch of a few frames needs only the first envs
            own_random = random_in_rows(self._random_frames_left, own_rows, self._layout.num_envs)
            own_random = min(own_random, batch.steps[members.start] * len(own_rows))
            batch.orders[handle.number] = self._order(batch.block, batch.steps, members, own_random)
            self._send_order(handle, batch)

    def _send_order(self, handle: WorkerHandle, batch: _Batch) -> None:
        if self._pool.gone:
            for each in self._workers.handles:
                self._workers.send(each, "forget", list(self._pool.gone))
            self._pool.gone.clear()
        self._workers.send_block(handle, batch.block, self._layout)
        self._workers.send(handle, "collect", tuple(batch.orders[handle.number]))

    def _await(self, batch: _Batch, is_rest: bool) -> None:
        workers = self._workers
        enough = max(1, int(len(self._assignment.members) * self._threshold)) if self._threshold < 1 else None
        if is_rest:  # of one step: who is late for it would leave nothing
            enough = None
        asks = None if self._interruptor is None else self._interruptor.collection_stopped
        told_to_stop = False
        while missing := batch.missing:
            workers.wait([workers.handles[i] for i in missing], _SECONDS_BETWEEN_QUESTIONS if asks else None)
            asked_to_stop = not told_to_stop and asks is not None and asks()
            with self._lock:  # another thread may start a worker again, and give it back its order
                self._sort_in_arrived(batch)
                finished = sum(len(self._assignment.layout.members[worker]) for worker in batch.ready)
                if not told_to_stop and (asked_to_stop or (enough and finished >= enough)):
                    told_to_stop = True
                    self._stop(batch)

    def _stop(self, batch: _Batch) -> None:
        for worker in batch.missing:
            self._workers.send(self._workers.handles[worker], "stop", batch.orders[worker].number, wake=True)

    def _sort_in_arrived(self, batch: _Batch) -> None:
        while self._workers.arrived:
            self._sort_in(batch, *self._workers.arrived.popleft())

    def _sort_in(self, batch: _Batch, handle: WorkerHandle, ready: CollectResult) -> None:
        order = batch.orders.get(handle.number)
        if order is None or order.number != ready.number:
            return
        steps = [done + order.first_step for done in ready.steps]
        batch.ready[handle.number] = steps
        batch.objects.update(ready.objects)
        own_rows = len(handle.spec.members) * self._layout.envs_per_member
        self._scheduler.random_frames_left -= random_in_lanes(order.random_frames, ready.steps, own_rows)
        self._progress.lags.add(ready.versions, max(steps), own_rows, self._policy_version)
        self._know_fragments(ready.fragments)

    def _abandon(self) -> None:
        batch, self._batch = self._batch, None
        self._workers.arrived.clear()
        if batch is not None:
            self._pool.forget(batch.block)

    def _discard(self, handles: Sequence[WorkerHandle]) -> None:
        self._workers.arrived.clear()

    def _resume(self, handle: WorkerHandle) -> None:
        batch = self._batch
        if batch is not None:
            self._sort_in_arrived(batch)  # its predecessor may have completed it
        if batch is None or handle.number not in batch.orders or handle.number in batch.ready:
            return
        old = batch.orders[handle.number]
        own = handle.spec.members
        length = batch.steps[own.start]
        kept = min(self._committed(handle, old), length - 1)
        own_rows = len(own) * self._layout.envs_per_member
        spent = min(old.random_frames, (kept - old.first_step) * own_rows)
        self._scheduler.random_frames_left -= spent
        if kept:
            leaves = self._layout.leaves(batch.block.memory.bytes_, batch.steps)
            mark_broken(self._layout.part(leaves, own, batch.steps), kept - 1)
        order = self._order(batch.block, batch.steps, own, old.random_frames - spent, first_step=kept)
        batch.orders[handle.number] = order
        self._send_order(handle, batch)

    # -- delivering ------------------------------------------------------------------------------------------------

    def _deliver(self, batch: _Batch, num_envs: int | None) -> TensorDictBase:
        leaves = self._pool.lend(batch.block, batch.steps)
        for key in self._tracked:
            leaves[key] = self._numbers(key, batch.steps)
        mixed = self._stores_frames and (self._join_in_time or self._threshold < 1)
        if mixed or self._join_in_time:
            leaves[_ENV_OF_FRAME] = self._numbers(_ENV_OF_FRAME, batch.steps)
        delivered = self._arrange(batch, leaves, num_envs)
        numbers = delivered.pop("_env_of_frame", None)
        self._env_of_frame = numbers if mixed else None
        self._joined_envs = numbers if self._join_in_time else None
        return delivered

    def _arrange(self, batch: _Batch, leaves: dict[Key, torch.Tensor], num_envs: int | None) -> TensorDictBase:
        steps = self._steps_of_members(batch)
        if self._threshold < 1 and not self._join_in_time:
            leaves[MASK] = self._mask_missing(leaves, steps)
        elif any(steps[member] < batch.steps[member] for worker in batch.orders for member in self._members_of(worker)):
            if self._join_in_time and num_envs is None:
                return self._shortened(leaves, batch.steps, steps)
            return self._common(batch, leaves, steps)
        return self._as_batch(leaves, self._lead) if num_envs is None else self._few_envs(leaves, num_envs)

    def _members_of(self, worker: int) -> range:
        return self._assignment.layout.members[worker]

    def _common(self, batch: _Batch, leaves: dict[Key, torch.Tensor], steps: Sequence[int]) -> TensorDictBase:
        """The steps that all members have. Who has more was ahead: its episodes end with what is delivered."""
        common = min(steps[member] for worker in batch.orders for member in self._members_of(worker))
        for worker in batch.orders:
            members = self._members_of(worker)
            if max(steps[member] for member in members) > common:
                self._workers.send(self._workers.handles[worker], "void", True, wake=True)
                if common:
                    mark_broken(self._layout.part(leaves, members, batch.steps), common - 1)
        return self._first_steps(leaves, common)

    def _first_steps(self, leaves: dict[Key, torch.Tensor], count: int) -> TensorDictBase:
        return self._as_batch({key: leaf[:, :count].contiguous() for key, leaf in leaves.items()}, self._lead)

    #: Of the batch that was delivered, where frames of an env are no row of it: for the buffer, and for who counts.
    _env_of_frame: torch.Tensor | None = None
    _joined_envs: torch.Tensor | None = None

    def _envs_in(self, batch: TensorDictBase) -> np.ndarray:
        numbers = self._joined_envs
        return super()._envs_in(batch) if numbers is None else numbers.reshape(-1).cpu().numpy()

    def _put(self, batch: Any, raw: TensorDictBase) -> None:
        numbers = self._env_of_frame
        if numbers is None or self._assembler is not None or getattr(batch, "shape", None) != raw.shape:
            super()._put(batch, raw)
            return
        assert self._buffer_writer is not None
        there = raw.get(MASK, torch.ones(raw.shape, dtype=torch.bool)).reshape(-1).cpu()
        self._buffer_writer.write_mixed(batch.reshape(-1)[there], numbers.reshape(-1).cpu()[there].numpy())

    def _steps_of_members(self, batch: _Batch) -> list[int]:
        steps = [0] * len(self._assignment.members)
        for worker, per_lane in batch.ready.items():
            for index, member in enumerate(self._assignment.layout.members[worker]):
                steps[member] = per_lane[0] if len(per_lane) == 1 else per_lane[index]
        return steps

    @property
    def _lead(self) -> tuple[int, ...]:
        size, count = self._layout.env_size, len(self._assignment.members)
        if self._join_in_time:
            return tuple(size)
        return (count, *size) if self._cat == "stack" else (count * size[0], *size[1:])

    def _numbers(self, key: Key, steps: Sequence[int]) -> torch.Tensor:
        """Which worker, or which env, each frame is from, in the arrangement of a block."""
        each = self._layout.envs_per_member
        members = torch.arange(len(steps))
        numbers = members.unsqueeze(1) * each + torch.arange(each)  # [members, envs of each]
        if key == WORKER:
            numbers = torch.tensor(
                [self._assignment.layout.worker_of(member) for member in range(len(steps))]
            ).unsqueeze(1)
        numbers = numbers.expand(-1, each)
        if self._join_in_time:
            return numbers.repeat_interleave(torch.tensor(steps), 0).T.contiguous()
        return numbers.reshape(-1, 1).repeat(1, steps[0])

    def _few_envs(self, leaves: dict[Key, torch.Tensor], num_envs: int) -> TensorDictBase:
        """One step of the first few envs: what is left at the end."""
        if not self._join_in_time:
            return self._as_batch({key: leaf[:num_envs] for key, leaf in leaves.items()}, (num_envs,))
        if self._layout.env_size:
            rows = {key: leaf.transpose(0, 1).flatten(0, 1).unsqueeze(1) for key, leaf in leaves.items()}
            return self._as_batch({key: leaf[:num_envs] for key, leaf in rows.items()}, (num_envs,))
        return self._as_batch({key: leaf[:, :num_envs] for key, leaf in leaves.items()}, ())

    def _shortened(
        self, leaves: dict[Key, torch.Tensor], planned: Sequence[int], steps: Sequence[int]
    ) -> TensorDictBase:
        """Only what is there: each member's own steps, joined in time."""
        starts = [sum(planned[:member]) for member in range(len(planned))]
        kept = {
            key: torch.cat([leaf[:, start : start + done] for start, done in zip(starts, steps, strict=True)], 1)
            for key, leaf in leaves.items()
        }
        return self._as_batch(kept, self._lead)

    def _mask_missing(self, leaves: dict[Key, torch.Tensor], steps: Sequence[int]) -> torch.Tensor:
        """Blank what was not collected; where something was."""
        done = torch.tensor(steps).repeat_interleave(self._layout.envs_per_member).unsqueeze(1)
        mask = torch.arange(next(iter(leaves.values())).shape[1]) < done
        for key, leaf in leaves.items():
            leaf[~mask] = -1 if key == TRAJ_IDS else 0
        return mask

    def _salvage(self) -> TensorDictBase | None:
        """After a worker failed: the steps that all members have."""
        batch, self._batch = self._batch, None
        if batch is None or self._join_in_time:
            return None
        members = self._workers.handles
        self._stop(batch)

        def busy() -> list[WorkerHandle]:
            self._sort_in_arrived(batch)
            return [members[worker] for worker in batch.missing]

        self._workers.wait_for_rest(busy)
        for handle in busy():
            if handle.failure is not None and handle.failure[1] == batch.orders[handle.number].number:
                batch.ready[handle.number] = handle.failure[2]
        common = min(self._steps_of_members(batch))
        if not common:
            return None
        leaves = self._layout.leaves(batch.block.memory.bytes_, batch.steps)
        leaves |= {key: self._numbers(key, batch.steps) for key in self._tracked}
        self._env_of_frame = self._joined_envs = None  # each env is a row
        return self._first_steps(leaves, common)


def mark_broken(part: dict[Key, torch.Tensor], step: int) -> None:
    """The episodes that a dead worker was in end at this step, truncated."""
    for group in [key[:-1] for key in part if key[0] == "next" and key[-1] == "done"]:
        over = part[*group, "done"][:, step]
        truncated = part.get((*group, "truncated"))
        if truncated is not None:
            truncated[:, step] |= ~over
        over.fill_(True)
