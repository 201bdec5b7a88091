"""Batches of nodes: what is asked of them, what came, and how it is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.collectors.distributed.node_buffer import NodeTracks
from swath.collectors.distributed.node_pool import Arrival, Loss, NodeHandle, NodePool
from swath.collectors.distributed.node_recordings import NodeRecordings
from swath.collectors.distributed.requests import Order
from swath.collectors.remote import WORKER, RemoteCollector, as_batch
from swath.collectors.standing import place_of_node
from swath.data.episodes import Ended
from swath.data.payload import join_batches
from swath.errors import NoLength
from swath.insight.facts import Way
from swath.insight.reading import PlaceReading
from swath.keys import Key
from swath.process.ctrl_c import ctrl_c_waits
from swath.rollout.layout import Field
from swath.timeline.recorder import Recorder
from swath.timeline.recording import Recording


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request that was not completed."""

    request: Order
    num_frames: int

    @property
    def random_frames(self) -> int:
        return self.request.random_frames


class NodeBatches(RemoteCollector):
    """The part of a collector on nodes that collects."""

    #: Whether batches are of all nodes, stacked, or of one at a time.
    _sync: bool
    _nodes: NodePool
    _tracks: NodeTracks
    #: Of a node's batch: ``[*lead, steps]``.
    _lead: torch.Size
    _fields: tuple[Field, ...]
    #: Which worker, which env: written into every frame.
    _tracked: Sequence[Key]
    _loss: Loss
    #: Whether nodes write to the replay buffer by themselves.
    _writes_itself = False
    _recordings: NodeRecordings | None = None
    #: Whether no more is asked for, since the background is to be still.
    is_draining = False
    #: Of a batch that is being put together: what has come. It is not lost if Ctrl-C is pressed meanwhile.
    _in_hand: list[Arrival]
    #: Nodes with frames that nobody got: their episodes do not go on.
    _to_give_up: set[int]

    def _weights_after_batch(self, handles: Sequence[NodeHandle]) -> None:
        """Send those of the policy, where that was asked for."""
        raise NotImplementedError

    @property
    def _engine(self) -> Any:
        return self._nodes.engine

    @property
    def _alive(self) -> list[NodeHandle]:
        return self._nodes.alive

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, those that were lost left out."""
        return len(self._alive)

    @property
    def num_workers(self) -> int:
        """How many nodes there are, those that were lost counted too, since weights are addressed by number."""
        return len(self._nodes.handles)

    @property
    def _num_envs(self) -> int:
        return self._nodes.num_envs

    # -- where it stands -------------------------------------------------------------------------------------------

    @property
    def _way(self) -> Way:
        return Way.SYNC if self._sync else Way.ASYNC

    @property
    def _env_in_words(self) -> str:
        return self._nodes.handles[0].about.env

    @property
    def _layout_in_words(self) -> str:
        return f"{self.num_nodes} nodes of {self._engine.name}"

    def _places(self, now: float) -> list[PlaceReading]:
        return [
            place_of_node(line, handle.about.num_envs, now - handle.made_at)
            for line, handle in zip(self._nodes.describe(), self._nodes.handles, strict=True)
        ]

    # -- tracing ---------------------------------------------------------------------------------------------------

    def _begin_recording(self, recorder: Recorder) -> None:
        self._recordings = NodeRecordings(self._nodes)
        self._recordings.begin()

    def _recordings_elsewhere(self) -> list[Recording]:
        recordings, self._recordings = self._recordings, None
        return [] if recordings is None else recordings.end()

    # -- orders ----------------------------------------------------------------------------------------------------

    def _request(self, handle: NodeHandle, steps: int, num_envs: int | None, random_frames: int) -> None:
        """Ask a node for a batch: of all its envs, or one step of the first ``num_envs``."""
        num_frames = steps * (self._lead.numel() if num_envs is None else num_envs)
        self._submit(handle, Order(0, steps, num_envs, random_frames, self._writes_itself), num_frames)

    def _submit(self, handle: NodeHandle, request: Order, num_frames: int) -> None:
        request = request._replace(number=self._scheduler.next_number())
        self._scheduler.begin(handle.node, request.number, _Asked(request, num_frames))
        self._nodes.submit(handle, request)

    def _next_arrival(self) -> Arrival | None:
        arrival = self._nodes.next_arrival()
        if arrival is None or self._scheduler.end(arrival.handle.node, arrival.order.number) is None:
            return None
        self._scheduler.random_frames_left += arrival.report.random_left
        self._know_fragments(arrival.report.fragments)
        return arrival

    def _count_stored(self, arrival: Arrival) -> None:
        """A node has written a batch to the replay buffer."""
        self._frames += arrival.report.frames
        self._count_lag(arrival)
        ended = Ended.of_lists(arrival.report.episodes)
        if ended is not None:
            handle = arrival.handle
            ended = dataclasses.replace(ended, envs=ended.envs + handle.first_env)  # counted over all nodes
            self._history.add(ended, np.full_like(ended.envs, handle.node), self.policy_version, self._frames)

    def _count_lag(self, arrival: Arrival) -> None:
        """A node says which weights it had at the end of a batch."""
        report = arrival.report
        self._progress.lags.add([(0, report.policy_version)], report.frames, 1, self._policy_version)

    def _drain(self) -> None:
        """Wait for what is under way, and throw it away: its random frames are still due."""
        while not self._scheduler.is_idle:
            arrival = self._next_arrival()
            if arrival is None:
                continue
            if arrival.order.into_buffer:  # it is there already
                self._count_stored(arrival)
            else:
                self._put_back_random(arrival)

    def _put_back_random(self, arrival: Arrival) -> None:
        self._scheduler.random_frames_left += arrival.order.random_frames - arrival.report.random_left

    # -- collecting ------------------------------------------------------------------------------------------------

    @ctrl_c_waits
    def _gather(self) -> TensorDictBase | None:
        if not self._writes_itself:
            return super()._gather()
        self._require_open()
        if self._sync:
            self._await_all()
        elif not self._await_one():
            return None
        self._weights_after_batch([arrival.handle for arrival in self._in_hand])
        for arrival in self._in_hand:
            self._count_stored(arrival)
        self._iter += 1
        self._in_hand = []
        return None

    def _collect(self) -> TensorDictBase:
        self._require_open()
        return self._collect_from_all() if self._sync else self._collect_from_one()

    def _collect_from_one(self) -> TensorDictBase:
        self._await_one()
        (arrival,) = self._in_hand
        self._weights_after_batch([arrival.handle])
        self._give_orders()  # before the consumer has its turn
        self._first_env = arrival.handle.first_env + arrival.report.first_env
        self._delivered = [(arrival.handle, arrival.incarnation)]
        batch = self._deliver([arrival], arrival.report.shape)
        self._in_hand = []
        return batch

    def _await_one(self) -> bool:
        """A batch of whichever node; False if none has an order, nor gets one."""
        if self._to_give_up:
            self._drop_interrupted()
        if not self._in_hand:
            self._tracks.end_gone()
        while not self._in_hand:
            if not self.is_draining:
                self._give_orders()
            if self._scheduler.is_idle:
                return False
            arrival = self._next_arrival()
            if arrival is not None:
                self._in_hand = [arrival]
        return True

    def _give_orders(self) -> None:
        with self._lock:
            self._nodes.finish_restarts()
            for node in self._scheduler.turns(handle.node for handle in self._alive):
                left = self._scheduler.frames_left(waiting=sum(arrival.report.frames for arrival in self._in_hand))
                if left is not None and left <= 0:
                    return
                self._give_order(self._nodes.handles[node], left)

    def _give_order(self, handle: NodeHandle, left: int | None) -> None:
        each, steps, num_envs = self._lead.numel(), self._budget.steps_per_batch, None
        if left is not None:
            steps = min(steps, left // each)
            if not steps:
                steps, num_envs = 1, left
        random_frames = self._scheduler.take_random(steps * each if num_envs is None else num_envs)
        self._request(handle, steps, num_envs, random_frames)

    def _collect_from_all(self) -> TensorDictBase:
        self._await_all()
        self._weights_after_batch(self._alive)
        parts = self._in_hand
        self._delivered = [(part.handle, part.incarnation) for part in parts]
        if len(parts[0].report.shape) == len(self._lead) + 1 and len({part.report.shape for part in parts}) == 1:
            batch = self._deliver(parts, (len(parts), *parts[0].report.shape))
        else:  # one step of the first envs, at the end: what each node has of it, one below the other
            batches = [self._deliver([part], (part.report.frames, 1)) for part in parts]
            self._envs_of_rows = np.concatenate([self._envs_of([part], part.report.frames) for part in parts])
            batch = batches[0] if len(batches) == 1 else torch.cat(batches)  # type: ignore[arg-type,assignment]
        self._in_hand = []
        return batch

    def _await_all(self) -> None:
        """One batch of every node, in their order."""
        self._drop_interrupted()
        self._tracks.end_gone()
        while not self._in_hand:  # who had the last order may be lost
            self._give_orders_to_all()
            while not self._scheduler.is_idle:
                arrival = self._next_arrival()
                if arrival is not None:
                    self._in_hand.append(arrival)
        self._in_hand.sort(key=lambda arrival: arrival.handle.node)

    def _give_orders_to_all(self) -> None:
        with self._lock:
            self._nodes.finish_restarts()
            each, members = self._lead.numel(), self._alive
            budget = dataclasses.replace(self._budget, num_envs=each * len(members))
            steps, num_envs = budget.next_batch(self._frames)
            rows_left = each * len(members) if num_envs is None else num_envs
            wanted = min(self._random_frames_left, steps * rows_left)
            for handle in members:
                rows = min(each, rows_left)
                if not rows:
                    return
                rows_left -= rows
                # Evenly over nodes; the last ones take what others have no room for.
                nodes_left = -(-(rows_left + rows) // each)
                share = min(-(-wanted // nodes_left), rows * steps)
                wanted -= share
                self._scheduler.random_frames_left -= share
                self._request(handle, steps, None if num_envs is None else rows, share)

    def _drop_interrupted(self) -> None:
        """After Ctrl-C: what was under way, or had come, is dropped, and episodes with a gap do not go on."""
        self._to_give_up |= {handle.node for handle in self._alive if self._scheduler.pending[handle.node]}
        dropped, self._in_hand = self._in_hand, []
        for arrival in dropped:
            if arrival.order.into_buffer:
                self._count_stored(arrival)
            else:
                self._put_back_random(arrival)
                self._to_give_up.add(arrival.handle.node)
        self._drain()
        for handle in self._alive if not self._writes_itself else ():
            if handle.node in self._to_give_up:  # until it has: Ctrl-C may come again
                self._nodes.ask(handle, "give_up")
                self._to_give_up.discard(handle.node)
        self._to_give_up.clear()

    def _give_up_episodes(self) -> None:
        if self._gathered is not None:  # else Ctrl-C came while it waited
            self._to_give_up |= {handle.node for handle in self._alive}

    def _deliver(self, parts: Sequence[Arrival], shape: Sequence[int]) -> TensorDictBase:
        frames = parts[0].report.frames
        for part in parts:
            self._count_lag(part)
        leaves = join_batches(self._fields, [part.payload for part in parts if part.payload is not None], frames)
        steps = shape[-1]
        num_rows = frames // max(1, steps)
        self._envs_of_rows = self._envs_of(parts, num_rows)
        nodes = np.repeat([part.handle.node for part in parts], num_rows)
        for key in self._tracked:
            leaves[key] = torch.from_numpy(nodes if key == WORKER else self._envs_of_rows).repeat_interleave(steps)
        return as_batch(leaves, shape, self._storing, num_dims=1)

    #: Of the batch that was delivered.
    _envs_of_rows: np.ndarray

    def _envs_in(self, batch: TensorDictBase) -> np.ndarray:
        return self._envs_of_rows

    def _envs_of(self, parts: Sequence[Arrival], num_rows: int) -> np.ndarray:
        firsts = [part.handle.first_env + part.report.first_env for part in parts]
        return np.concatenate([np.arange(first, first + num_rows) for first in firsts])

    def _workers_of(self, envs: np.ndarray) -> np.ndarray:
        return np.searchsorted([handle.first_env for handle in self._nodes.handles], envs, side="right") - 1

    #: The nodes that the batch in hand is of, and how often they had been started again when they sent it.
    _delivered: Sequence[tuple[NodeHandle, int]] = ()

    def _put(self, batch: Any, raw: TensorDictBase) -> None:
        """Each node's frames behind its earlier ones."""
        self._tracks.follow(self._delivered)
        self._put_each(batch, raw)
        if not self._in_hand:
            self._tracks.end_gone()

    def _put_each(self, batch: Any, raw: TensorDictBase) -> None:
        stacked = self._sync and raw.ndim == len(self._lead) + 2 and self._assembler is None
        if not stacked or getattr(batch, "shape", None) != raw.shape:
            super()._put(batch, raw)
            return
        assert self._buffer_writer is not None
        for (handle, _), own, own_raw in zip(self._delivered, batch.unbind(0), raw.unbind(0), strict=True):
            self._buffer_writer.write(own, own_raw, handle.first_env, [own])

    def __len__(self) -> int:
        if self._loss.goes_on:
            raise NoLength("with on_node_loss='continue' the number of batches depends on how many nodes are lost")
        return super().__len__()
