"""Batches of workers: what is asked of them, what is given up, and what goes on when one was started again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.collectors.assignment import Assignment
from swath.collectors.remote import RemoteCollector, as_batch
from swath.collectors.standing import place_of_worker
from swath.insight.facts import Way
from swath.insight.reading import PlaceReading
from swath.keys import Key
from swath.process.ctrl_c import ctrl_c_waits
from swath.remote.blocks import BlockPool
from swath.remote.requests import CollectRequest, WorkerDescription
from swath.timeline.recorder import Gauge, Recorder
from swath.timeline.recording import Recording
from swath.workers.handle import WorkerHandle
from swath.workers.pool import WorkerPool
from swath.workers.recordings import WorkerRecordings


class WorkerBatches(RemoteCollector):
    """The part of a collector in worker processes that collects; how a batch is put together, subclasses know."""

    _inner = (
        *("batch_lead", "deliver_flat", "description", "first_env_of_batch"),
        *("look_at_workers", "seconds_of_workers", "wake_worker", "worker_answered"),
        *("worker_gone", "worker_sentinel"),
    )

    _place = "worker"
    _where = "in the workers"

    #: Whether a batch is put together from all envs.
    _is_shared = True
    _workers: WorkerPool
    #: Which env is in which worker.
    _assignment: Assignment
    #: Of each worker, which are alike.
    _description: WorkerDescription
    #: The blocks that batches are delivered in.
    _pools: Sequence[BlockPool] = ()

    # -- tracing ---------------------------------------------------------------------------------------------------

    def _begin_recording(self, recorder: Recorder) -> None:
        self._workers.record(WorkerRecordings())

    def _recordings_elsewhere(self) -> list[Recording]:
        return self._workers.stop_recording()

    def gauges(self) -> dict[Gauge, float]:
        applied = [handle.page.integer("policy_version") for handle in self._workers.handles]
        return {
            **super().gauges(),
            Gauge.POLICY_LAG: self._policy_version - min(applied),
            Gauge.SHARED_BYTES: self._shared_bytes,
        }

    # -- where it stands -------------------------------------------------------------------------------------------

    @property
    def _way(self) -> Way:
        return Way.SYNC if self._is_shared and not self.is_running() else Way.ASYNC

    @property
    def _env_in_words(self) -> str:
        return self._description.env

    @property
    def _layout_in_words(self) -> str:
        return str(self._assignment.layout)

    @property
    def _shared_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self._pools)

    def _places(self, now: float) -> Iterable[PlaceReading]:
        return [place_of_worker(handle, now) for handle in self._workers.handles]

    # -- asking ----------------------------------------------------------------------------------------------------

    def _ask_each(self, name: str, *args: Any, **kwargs: Any) -> list[tuple[int, Any]]:
        return list(enumerate(self._workers.call(name, *args, **kwargs)))

    def _ask_place(self, place: int, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._workers.call(name, *args, handles=[self._workers.handles[place]], **kwargs)

    def _call_idle(
        self, name: str, *args: Any, handles: Sequence[WorkerHandle] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of workers that changes what they are in: what is under way is discarded.

        Before they are called, so that one that is started again meanwhile is not given back what nobody wants.
        """
        self._require_open()
        self._require_still(name)
        chosen = self._workers.handles if handles is None else handles
        for handle in chosen:
            self._workers.send(handle, "void", self._has_work(handle), wake=True)
        self._discard(chosen)
        return self._workers.call(name, *args, handles=chosen, **kwargs)

    # -- what is under way -----------------------------------------------------------------------------------------

    def _discard_all(self) -> None:
        """What is under way for who iterates is not wanted any more, and its episodes do not go on in the buffer."""
        if self._iter or any(self._has_work(handle) for handle in self._workers.handles):
            for handle in self._workers.handles:
                self._workers.send(handle, "void", True, wake=True)
            self._discard(self._workers.handles)
            self._workers.call("state_dict")  # when this is answered, they have stopped

    @ctrl_c_waits
    def _gather(self) -> TensorDictBase | None:
        return super()._gather()

    def _give_up_episodes(self) -> None:
        """Workers may be ahead of what was delivered, and nobody waits for what they do."""
        for handle in self._workers.handles:
            self._workers.send(handle, "void", True, wake=True)
        self._abandon()
        self._drop_episodes()

    def _abandon(self) -> None:
        """Forget what is under way; workers may still write into its blocks, so those are not used again."""

    def _has_work(self, handle: WorkerHandle) -> bool:
        """Whether there are frames of a worker that were not delivered."""
        return False

    def _discard(self, handles: Sequence[WorkerHandle]) -> None:
        """Forget what these workers have under way; they were told so. They may be in the middle of it: their blocks
        are not used again before they have stopped, since only they would be told to."""

    def _resume(self, handle: WorkerHandle) -> None:
        """A worker was started again: give it back its orders."""
        raise NotImplementedError

    # -- requests, and what came -----------------------------------------------------------------------------------

    def _order(
        self,
        block: Any,
        steps: tuple[int, ...],
        members: range,
        random_frames: int,
        first_step: int = 0,
        anew: bool = False,
    ) -> CollectRequest:
        number = self._scheduler.next_number()
        return CollectRequest(number, block.number, steps, members, first_step, random_frames, anew=anew)

    @property
    def next_traj_id(self) -> int:
        """No trajectory has this id yet, or a higher one."""
        return max(handle.page.integer("next_traj_id") for handle in self._workers.handles)

    def _committed(self, handle: WorkerHandle, order: CollectRequest) -> int:
        """Up to which step of an order a worker that is gone has left frames in their final place."""
        lost = self._structure is not None and self._structure.has_objects  # with the worker, what they refer to
        begun = handle.page.integer("order") == order.number
        return handle.page.integer("committed") if begun and not lost else order.first_step

    #: What goes with the batch that was delivered last.
    _delivered_objects: Mapping[int, Any] = {}

    def _objects(self, batch: TensorDictBase) -> Mapping[int, Any]:
        return self._delivered_objects

    def _as_batch(self, leaves: Mapping[Key, torch.Tensor], lead: Sequence[int]) -> TensorDictBase:
        """Leaves ``[envs, steps, *shape]`` as a TensorDict ``[*lead, steps]``."""
        steps = next(iter(leaves.values())).shape[1]
        return as_batch(leaves, (*lead, steps), self._storing, num_dims=2)

    # -- what a node needs that hosts it ---------------------------------------------------------------------------

    @property
    def description(self) -> WorkerDescription:
        """What every worker says of itself."""
        return self._description

    @property
    def batch_lead(self) -> tuple[int, ...]:
        """Of a batch: ``[*lead, steps]``."""
        size = tuple(self._description.env_size)
        return (len(self._assignment.members), *size) if self._is_shared else size

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def first_env_of_batch(self) -> int:
        """Of the batch that was delivered last."""
        return self._first_env

    @property
    def sends_weights(self) -> bool:
        return bool(self._schemes)

    @property
    def seconds_of_workers(self) -> tuple[float, float]:
        """What envs and policies took, of the steps that were timed."""
        pages = [handle.page for handle in self._workers.handles]
        return sum(page.seconds("env_s") for page in pages), sum(page.seconds("policy_s") for page in pages)

    def deliver_flat(self) -> None:
        """From now on batches have flat leaves, and who gets them puts them together."""
        self._structure = None

    def set_weights(self, weights: Any, version: int, model_id: str) -> None:
        """As ``update_policy_weights_``, and they are of this version."""
        with self._lock:
            self._policy_version = version - 1
            self.update_policy_weights_(weights=weights, model_id=model_id)
