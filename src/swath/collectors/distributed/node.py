"""Node: what runs on a node, whatever the engine. A host of a collector, told what to do from elsewhere."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from swath.collectors.base import BaseCollector
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.single import Collector
from swath.data.buffer_writer import BufferPlan, OwnWriter
from swath.data.payload import Bytes, pack_batch, unpack_tensors
from swath.envs.paths import parts_of
from swath.envs.transforms.base import Transform
from swath.errors import CollectorClosed
from swath.process.seeding import seed_process
from swath.rollout.control import ThreadControl
from swath.rollout.delivery import TRAJ_IDS
from swath.workers.status_page import env_share

#: A node that is told to close gives its collector so long.
_SECONDS_TO_CLOSE = 2.0


@dataclass(frozen=True)
class NodeDescription:
    """What a node says of itself once it is ready."""

    #: Of a batch: ``[*lead, steps]``.
    lead: tuple[int, ...]
    fields: tuple[Field, ...]
    #: Of each env that the seeds are counted over.
    env: str
    host: str
    pid: int
    has_weights: bool
    #: Whether every batch has all its envs (else one after the other).
    whole: bool = True
    num_envs: int = 1
    #: ``Structure.to_json``: descriptions travel as text.
    structure: dict[str, Any] | None = None


class Order(NamedTuple):
    """Collect a batch."""

    number: int
    steps: int
    #: Deliver only the first envs; None for all.
    num_envs: int | None = None
    random_frames: int = 0
    into_buffer: bool = False


@dataclass(frozen=True)
class Report:
    """What became of an order."""

    number: int
    shape: tuple[int, ...]
    frames: int
    #: Of the node's first env in this batch.
    first_env: int
    #: Its own collector's next trajectory id.
    next_id: int
    #: Trajectories that are no whole episodes.
    fragments: tuple[int, ...] = ()
    #: Of the order's random frames, how many were not taken.
    random_left: int = 0
    policy_version: int = 0
    #: Of a MultiCollector: its random frames that are still to come.
    own_random_left: int = 0
    busy_s: float = 0.0
    #: How much of that envs took, as a share; the policy took the rest. Of all batches: one step in each is timed.
    env_share: float = 1.0
    pack_s: float = 0.0


def _schemes(plan: NodePlan) -> dict[str, WeightSyncScheme] | None:
    """What a MultiCollector sends on to its workers; None for what it does by itself."""
    if not plan.part_ids:
        return None
    has_policy = has_weights(plan.policy) or plan.policy_factory is not None
    return {name: SharedMemWeightSyncScheme() for name in (*["policy"] * has_policy, *plan.part_ids)}


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
        self._control = ThreadControl()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "frames_per_batch=.* does not divide")  # the driver has said it
            self._host = make_host(plan, self._control)
        self._about = self._host.describe()
        #: Whether envs have taken a step that nobody asked for: a last order may be for some of them only.
        self._is_ahead = False
        self._num_rows = torch.Size(self.describe().lead).numel()
        self._fragments_told: set[int] = set()
        self._writer: OwnWriter | None = None
        self._busy = threading.Lock()
        self._closed = False

    def describe(self) -> NodeDescription:
        return self._about

    # -- orders ----------------------------------------------------------------------------------------------------

    def collect(self, order: Order) -> tuple[Report, Bytes | None]:
        with self._busy:
            if self._closed:
                raise CollectorClosed("this node was told to close")
            host = self._host
            started = time.perf_counter()
            batch, first_env, random_left = self._collect(order)
            busy_s = time.perf_counter() - started
            self._name_trajectories(batch)
            fragments = [self._global_id(fragment) for fragment in host.new_fragments()]
            payload = None
            if order.into_buffer:
                assert self._writer is not None
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
            ), payload

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

    def _drop_episodes(self) -> None:
        self._rest = None
        if self._writer is not None:
            self._writer.drop()

    def ask_to_stop(self) -> None:
        """End the batch under way after the step that is being taken."""
        self._control.ask_to_stop()

    def close(self) -> None:
        self._closed = True
        self._control.ask_to_stop()
        with suppress(Exception):
            self._host.close(_SECONDS_TO_CLOSE)
