"""Node: what runs on a node, whatever the engine. A host of a collector, told what to do from elsewhere."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.collectors.distributed.hosts import make_host
from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order, Report
from swath.collectors.tracing import Session
from swath.data.buffer_writer import BufferPlan, OwnWriter
from swath.data.episodes import EpisodeTally, Frames
from swath.data.payload import Bytes, pack_batch, unpack_tensors
from swath.envs.transforms.base import Transform
from swath.errors import CollectorClosed
from swath.process.seeding import seed_process
from swath.rollout.control import ThreadControl
from swath.rollout.delivery import TRAJ_IDS
from swath.timeline.clocks import this_machine
from swath.timeline.recorder import Kind
from swath.workers.status_page import env_share

#: A node that is told to close gives the step under way so long, and then its collector.
_SECONDS_TO_CLOSE = 2.0


def _told(result: Any) -> Any:
    """Of a method that returns its transform (``freeze``), that it was called."""
    if isinstance(result, list):
        return [_told(each) for each in result]
    return None if isinstance(result, Transform) else result


class Node:
    """A host and its orders. ``collect`` is called from one thread at a time, all else from any."""

    def __init__(self, plan: NodePlan) -> None:
        torch.set_num_threads(plan.num_threads)
        seed_process(plan.base_seed, plan.node, plan.incarnation)
        self._ids = plan.ids
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "frames_per_batch=.* does not divide")  # the driver has said it
            self._host = make_host(plan, ThreadControl())
        self._about = self._host.describe()
        #: Whether envs have taken a step that nobody asked for: a last order may be for some of them only.
        self._is_ahead = False
        self._writer: OwnWriter | None = None
        self._tally = EpisodeTally()
        self._busy = threading.Lock()
        self._leaves = False
        self._trace: Session | None = None
        self._idle_since = 0.0

    def describe(self) -> NodeDescription:
        return self._about

    # -- orders ----------------------------------------------------------------------------------------------------

    def collect(self, order: Order) -> tuple[Report, Bytes | None]:
        with self._busy:
            if self._leaves:
                raise CollectorClosed("this node was told to leave")
            host = self._host
            started = time.perf_counter()
            batch, first_env, random_left = self._collect(order)
            busy_s = time.perf_counter() - started
            self._record_order(started, busy_s)
            self._name_trajectories(batch)
            fragments = [self._global_id(fragment) for fragment in host.new_fragments()]
            payload = episodes = None
            if order.into_buffer:
                assert self._writer is not None
                episodes = self._count_episodes(batch, first_env, fragments)
                self._writer.write(batch, first_env, fragments)
            else:
                payload = pack_batch(self._about.fields, batch)
            return Report(
                order.number,
                tuple(batch.shape),
                batch.batch_size.numel(),
                first_env,
                host.next_id,
                tuple(fragments),
                random_left,
                host.policy_version,
                host.random_frames_due,
                busy_s,
                env_share(*host.seconds),
                time.perf_counter() - started - busy_s,
                episodes,
            ), payload

    def _record_order(self, started: float, busy_s: float) -> None:
        if self._trace is not None:
            recorder = self._trace.recorder
            recorder.add(Kind.WAIT_FOR_REQUEST, self._idle_since, started)
            recorder.add(Kind.COLLECT, started, started + busy_s)
            self._idle_since = started + busy_s

    def _count_episodes(self, batch: TensorDictBase, first_env: int, fragments: Sequence[int]) -> Any:
        """For the driver, which does not see this batch: a list, since reports may travel as text."""
        if batch.get(TRAJ_IDS, None) is None or not batch.batch_size.numel():
            return None
        self._tally.fragments.update(fragments)
        ended = self._tally.add(Frames.of_batch(batch), np.arange(first_env, first_env + batch.batch_size[:-1].numel()))
        return ended.as_lists() if len(ended) else None

    def _collect(self, order: Order) -> tuple[TensorDictBase, int, int]:
        if self._is_ahead:
            self._do_give_up()
        self._is_ahead = order.num_envs is not None and order.num_envs < torch.Size(self._about.lead).numel()
        return self._host.collect(order)

    def _name_trajectories(self, batch: TensorDictBase) -> None:
        ids = batch.get(TRAJ_IDS, None)
        if ids is not None:
            ids.mul_(self._ids.stride).add_(self._ids.first)

    def _global_id(self, own: int) -> int:
        return own * self._ids.stride + self._ids.first

    # -- weights ---------------------------------------------------------------------------------------------------

    def set_weights(self, data: Bytes, version: int, model_id: str = "policy") -> None:
        """Applied as a whole between two steps, also in the middle of a batch."""
        self._host.set_weights(unpack_tensors(data), version, model_id)

    # -- calls: between two orders ---------------------------------------------------------------------------------

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """A method of this class, or else of its host."""
        method = getattr(self, f"_do_{name}", None)
        if method is None:
            method = getattr(self._host, name)
        with self._busy:
            return method(*args, **(kwargs or {}))

    def _do_set_seed(self, seed: int, static_seed: bool) -> int | None:
        following = self._host.set_seed(seed, static_seed)
        self._drop_episodes()
        return following

    def _do_reset(self, **kwargs: Any) -> None:
        self._host.reset(**kwargs)
        self._drop_episodes()

    def _do_cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return _told(self._host.cascade_execute(path, *args, **kwargs))

    def _do_give_up(self) -> None:
        """Frames were collected that nobody got: the episodes they are of must not go on."""
        self._host.give_up()
        self._drop_episodes()

    def _do_load_state_dict(self, state: Mapping[str, Any], strict: bool, first_own_id: int) -> None:
        self._host.load_state_dict(state, strict)
        self._host.begin_ids_at(first_own_id)
        self._drop_episodes()

    def _do_write_to(self, plan: BufferPlan | None) -> None:
        self._writer = None if plan is None else OwnWriter(plan)

    def _do_begin_trace(self) -> tuple[str, float]:
        """Record what is done; which machine this is, and what time it is there."""
        self._trace = self._host.trace()
        self._idle_since = time.perf_counter()
        return this_machine(), self._idle_since

    def _do_clock(self) -> float:
        return time.perf_counter()

    def _do_end_trace(self) -> list[dict[str, Any]]:
        trace, self._trace = self._trace, None
        if trace is None:
            return []
        trace.recorder.add(Kind.WAIT_FOR_REQUEST, self._idle_since, time.perf_counter())
        return [recording.as_plain_data() for recording in trace.gather()]

    def _drop_episodes(self) -> None:
        if self._writer is not None:
            self._writer.drop()

    def ask_to_stop(self) -> None:
        """For good: the batch under way ends after the step that is being taken, no other begins. Returns at once."""
        self._leaves = True
        self._host.ask_to_stop()

    def close(self) -> None:
        """Ask to stop, and close the envs: not within a step, unless that does not end."""
        self.ask_to_stop()
        came = self._busy.acquire(timeout=_SECONDS_TO_CLOSE)
        try:
            with suppress(Exception):
                self._host.close(_SECONDS_TO_CLOSE)
        finally:
            if came:
                self._busy.release()
