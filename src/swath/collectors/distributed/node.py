"""Node: what runs on a node, whatever the engine. A collector, told what to do from elsewhere."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from swath.process.seeding import derived_seed, seed_process
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import ThreadControl
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import Field
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.shared_memory import SharedMemWeightSyncScheme
from swath.weight_update.strategy import WeightStrategy
from swath.weight_update.weights import has_weights
from swath.workers.status_page import env_share


@dataclass(frozen=True)
class IdSpace:
    """Which trajectory ids a node may use: ``first + k * stride`` for ``k`` of its own collector."""

    first: int
    stride: int

    @classmethod
    def of_node(cls, node: int, num_nodes: int) -> IdSpace:
        """Nodes that are there from the start share ids out evenly; each that is added later has a range of its own.

        >>> IdSpace.of_node(1, 4), IdSpace.of_node(4, 4).first == 2**40
        (IdSpace(first=1, stride=4), True)
        """
        if node < num_nodes:
            return cls(node, num_nodes)
        return cls((node - num_nodes + 1) << 40, 1)


@dataclass(frozen=True)
class NodePlan:
    """All that a node is made from; travels by cloudpickle, over ways that are the user's own."""

    node: int
    collector_class: Any
    factories: Sequence[Any]
    env_kwargs: Any
    policy: Any
    policy_factory: Callable[[], Any] | None
    frames: int
    collector_kwargs: Mapping[str, Any]
    ids: IdSpace
    base_seed: int
    num_threads: int = 1
    #: How often this node was started again.
    incarnation: int = 0
    #: No id of its own collector below this is used.
    first_own_id: int = 0
    #: Of a MultiCollector, which deals with them itself.
    random_frames: int = 0
    #: Parts of the envs that are sent weights, by their paths.
    part_ids: tuple[str, ...] = ()


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
    """A collector and its orders. ``collect`` is called from one thread at a time, all else from any."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        torch.set_num_threads(plan.num_threads)
        seed_process(plan.base_seed, plan.node, plan.incarnation)
        self._control = ThreadControl()
        self._ids = TrajectoryIds(plan.first_own_id)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "frames_per_batch=.* does not divide")  # the driver has said it
            self._collector = self._make(plan)
        # Flat leaves travel; the driver puts them together.
        self._structure, self._collector._structure = self._collector._structure, None
        #: Workers count from 0 in every incarnation.
        self._first_own_id = plan.first_own_id if isinstance(self._collector, MultiCollector) else 0
        self._stream: Iterator[TensorDictBase] | None = None
        #: Of a batch that was longer than what was asked for.
        self._rest: TensorDictBase | None = None
        #: Whether envs have taken a step that nobody asked for: a last order may be for some of them only.
        self._is_ahead = False
        self._num_rows = torch.Size(self.describe().lead).numel()
        self._fragments_told: set[int] = set()
        self._writer: OwnWriter | None = None
        self._busy = threading.Lock()
        self._closed = False

    def _make(self, plan: NodePlan) -> BaseCollector:
        kind, kwargs = plan.collector_class, dict(plan.collector_kwargs)
        common = {"frames_per_batch": plan.frames, "total_frames": -1, **kwargs}
        if not issubclass(kind, MultiCollector):
            return kind(
                plan.factories[0],
                plan.policy if plan.policy_factory is None else None,
                policy_factory=plan.policy_factory,
                create_env_kwargs=plan.env_kwargs,
                worker_idx=plan.node,
                traj_pool=self._ids,
                control=self._control,
                **common,
            )
        if kind is MultiCollector:
            kind = MultiSyncCollector
        return kind(
            list(plan.factories),
            plan.policy,
            policy_factory=plan.policy_factory,
            create_env_kwargs=plan.env_kwargs,
            init_random_frames=plan.random_frames,
            **{"weight_sync_schemes": _schemes(plan), **common},
        )

    @property
    def _own_rollout(self) -> Any:
        return self._collector._rollout if isinstance(self._collector, Collector) else None

    def describe(self) -> NodeDescription:
        collector = self._collector
        if isinstance(collector, Collector):
            lead, fields = tuple(collector.env.batch_size), tuple(collector.fields)
            env, has_weights = str(collector.env), isinstance(collector.policy, torch.nn.Module)
            whole, num_envs = True, collector.env.batch_size.numel()
        else:
            assert isinstance(collector, MultiCollector)
            about = collector._description
            whole = collector._is_shared
            lead = (len(collector._assignment.members), *about.env_size) if whole else tuple(about.env_size)
            fields, env, has_weights = about.fields, about.env, bool(collector._schemes)
            num_envs = collector._num_envs
        cpu = tuple(dataclasses.replace(f, device=torch.device("cpu")) for f in fields)
        structure = None if self._structure is None else self._structure.to_json()
        return NodeDescription(
            lead, cpu, env, socket.gethostname(), os.getpid(), has_weights, whole, num_envs, structure
        )

    # -- orders ----------------------------------------------------------------------------------------------------

    def collect(self, order: Order) -> tuple[Report, Bytes | None]:
        with self._busy:
            if self._closed:
                raise CollectorClosed("this node was told to close")
            started = time.perf_counter()
            batch, first_env, random_left = self._collect(order)
            busy_s = time.perf_counter() - started
            self._name_trajectories(batch)
            fragments = self._new_fragments()
            payload = None
            if order.into_buffer:
                assert self._writer is not None
                self._writer.write(batch, first_env, fragments)
            else:
                payload = pack_batch(self._fields, batch)
            return Report(
                order.number,
                tuple(batch.shape),
                batch.batch_size.numel(),
                first_env,
                self._next_id(),
                tuple(fragments),
                random_left,
                self._collector._policy_version,  # type: ignore[attr-defined]
                self._own_random_left(),
                busy_s,
                self._env_share(),
                time.perf_counter() - started - busy_s,
            ), payload

    @property
    def _fields(self) -> tuple[Field, ...]:
        if not hasattr(self, "_agreed_fields"):
            self._agreed_fields = self.describe().fields
        return self._agreed_fields

    def _collect(self, order: Order) -> tuple[TensorDictBase, int, int]:
        """A batch, the number of its first env, and how many of the random frames were not taken."""
        collector = self._collector
        if self._is_ahead:
            self._do_give_up()
        self._is_ahead = order.num_envs is not None and order.num_envs < self._num_rows
        if isinstance(collector, Collector):
            rollout = collector._rollout
            rollout.random_frames_left = order.random_frames
            batch = collector._collect_batch(order.steps, order.num_envs)
            collector._iter += 1
            left = max(0, rollout.random_frames_left)
            return batch, 0, left
        assert isinstance(collector, MultiCollector)
        if self._rest is not None and self._rest.shape[-1] < order.steps:  # it does not fit into this batch
            collector.reset()
            self._rest = None
        if self._rest is None:
            if self._stream is None:
                self._stream = iter(collector)
            self._rest = next(self._stream)
        batch, self._rest = self._rest, None
        first_env = collector._first_env
        if order.steps < batch.shape[-1]:  # at the end: what is left may be asked for by another order
            self._rest = batch[..., order.steps :]
            batch = batch[..., : order.steps]
        if order.num_envs is not None:
            batch = batch.reshape(-1, batch.shape[-1])[: order.num_envs]
        return batch, first_env, 0

    def _env_share(self) -> float:
        if isinstance(self._collector, MultiCollector):
            pages = [member.page for member in self._collector._workers.handles]
            return env_share(sum(p.seconds("env_s") for p in pages), sum(p.seconds("policy_s") for p in pages))
        timing = self._own_rollout.timing
        return env_share(timing.env_s, timing.policy_s)

    def _own_random_left(self) -> int:
        collector = self._collector
        if not isinstance(collector, MultiCollector):
            return 0
        # As it saves it: without what is under way.
        pending = getattr(collector, "_pending", ())
        under_way = sum(each.random_frames for orders in pending for each in orders.values())
        waiting = sum(piece.random_frames for piece in getattr(collector, "_pieces", ()))
        return collector._random_frames_left + under_way + waiting

    def _name_trajectories(self, batch: TensorDictBase) -> None:
        ids = batch.get(TRAJ_IDS, None)
        if ids is not None:
            ids.mul_(self._plan.ids.stride).add_(self._global_id(0))

    def _global_id(self, own: int) -> int:
        return (own + self._first_own_id) * self._plan.ids.stride + self._plan.ids.first

    def _new_fragments(self) -> list[int]:
        rollout = self._own_rollout
        if rollout is None:
            return []
        new = rollout.boundaries.fragments - self._fragments_told
        self._fragments_told |= new
        return [self._global_id(fragment) for fragment in new]

    def _next_id(self) -> int:
        if isinstance(self._collector, MultiCollector):
            return self._collector.next_traj_id + self._first_own_id
        return self._ids.next_id

    # -- weights ---------------------------------------------------------------------------------------------------

    def set_weights(self, data: Bytes, version: int, model_id: str = "policy") -> None:
        """Applied as a whole between two steps, also in the middle of a batch."""
        weights = unpack_tensors(data)
        collector = self._collector
        if isinstance(collector, MultiCollector):
            with collector.lock:
                collector._policy_version = version - 1
                collector.update_policy_weights_(weights=weights, model_id=model_id)
            return
        assert isinstance(collector, Collector)
        models = [collector.policy] if model_id == "policy" else parts_of(collector, model_id)

        def apply() -> None:
            for model in models:
                WeightStrategy().apply_weights(model, weights)
            if model_id.startswith("env."):
                collector.env_was_changed()
            collector._policy_version = self._control.policy_version = version

        self._control.run(apply)

    # -- calls: between two orders ---------------------------------------------------------------------------------

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """A method of this class, or else of its collector."""
        method = getattr(self, f"_do_{name}", None)
        if method is None:
            method = getattr(self._collector, name)
        with self._busy:
            return method(*args, **(kwargs or {}))

    def _do_set_seed(self, seed: int, static_seed: bool) -> int | None:
        collector = self._collector
        following = collector.set_seed(seed, static_seed)  # type: ignore[attr-defined]
        if isinstance(collector, Collector):  # as a worker process does it, so that the data are the same
            collector._random_stream.seed(derived_seed(seed, self._plan.node))
            seed_process(seed if following is None else following, self._plan.node)
        self._drop_episodes()
        return following

    def _do_reset(self, **kwargs: Any) -> None:
        self._collector.reset(**kwargs)  # type: ignore[attr-defined]
        self._drop_episodes()

    def _do_cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return _told(self._collector.cascade_execute(path, *args, **kwargs))  # type: ignore[attr-defined]

    def _do_give_up(self) -> None:
        """Frames were collected that nobody got: the episodes they are of must not go on."""
        if isinstance(self._collector, Collector):
            self._collector._rollout.give_up()
        elif isinstance(self._collector, MultiCollector):
            self._collector.reset()
        self._drop_episodes()

    def _do_begin_ids_at(self, first_own_id: int) -> None:
        if isinstance(self._collector, MultiCollector):
            self._first_own_id = max(self._first_own_id, first_own_id)
        else:
            self._collector._begin_ids_at(first_own_id)

    def _do_check_state(self, state: Any, strict: bool) -> None:
        self._collector._check_state(state, strict)  # type: ignore[attr-defined]

    def _do_load_state_dict(self, state: Mapping[str, Any], strict: bool, first_own_id: int) -> None:
        self._collector.load_state_dict(state, strict)  # type: ignore[attr-defined]
        self._do_begin_ids_at(first_own_id)
        self._control.policy_version = self._collector._policy_version  # type: ignore[attr-defined]
        self._stream = None
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
            self._collector.shutdown(timeout=2.0, raise_on_error=False)
