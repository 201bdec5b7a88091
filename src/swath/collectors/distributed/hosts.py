"""What a node hosts: a ``Collector``, or a ``MultiCollector``. A node asks the same of either."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.collectors.distributed.requests import NodeDescription, NodePlan, Order
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.single import Collector
from swath.collectors.tracing import Session
from swath.insight.publishing import part_of_another
from swath.remote.host import CollectorHost, Lane
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import ThreadControl
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import Field
from swath.rollout.structure import Structure
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.shared_memory import SharedMemWeightSyncScheme
from swath.weight_update.strategy import apply_to_all
from swath.weight_update.weights import has_weights

#: Workers of a node that leaves have so long to take their last step.
_SECONDS_TO_STOP = 2.0


def make_host(plan: NodePlan, control: ThreadControl) -> SingleHost | MultiHost:
    """What a node asks; ids are those of its own collector, counted from 0."""
    return MultiHost(plan) if issubclass(plan.collector_class, MultiCollector) else SingleHost(plan, control)


def _describe(
    lead: Sequence[int],
    fields: Sequence[Field],
    env: str,
    has_weights: bool,
    num_envs: int,
    structure: Structure | None,
) -> NodeDescription:
    cpu = tuple(dataclasses.replace(field, device=torch.device("cpu")) for field in fields)
    as_text = None if structure is None else structure.to_json()
    return NodeDescription(tuple(lead), cpu, env, socket.gethostname(), os.getpid(), has_weights, num_envs, as_text)


class SingleHost(CollectorHost):
    """A ``Collector``: the rollout is in the node's own process."""

    #: It is told of them with each order.
    random_frames_due = 0

    def __init__(self, plan: NodePlan, control: ThreadControl) -> None:
        ids = TrajectoryIds(plan.first_own_id)
        self._collector: Collector = plan.collector_class(
            plan.factories[0],
            plan.policy if plan.policy_factory is None else None,
            policy_factory=plan.policy_factory,
            create_env_kwargs=plan.env_kwargs,
            worker_idx=plan.node,
            traj_pool=ids,
            control=control,
            **{"frames_per_batch": plan.frames, "total_frames": -1, **plan.collector_kwargs},
        )
        lane = Lane(self._collector, range(plan.node, plan.node + 1), ids)
        super().__init__(plan.node, [lane], [self._collector.env], control)

    def trace(self) -> Session:
        session = Session(self._collector)
        self._collector.record(session)
        return session

    def describe(self) -> NodeDescription:
        env, runner = self._collector.env, self._collector.runner
        return _describe(env.batch_size, runner.fields, str(env), self.has_weights, self.num_envs, runner.structure)

    def collect(self, order: Order) -> tuple[TensorDictBase, int, int]:
        batch, random_left = self._collector.collect_part(order.steps, order.num_envs, order.random_frames)
        return batch, 0, random_left

    def ask_to_stop(self) -> None:
        self._control.ask_to_stop()

    def set_weights(self, weights: Any, version: int, model_id: str) -> None:
        models = self.get_models(model_id)
        in_env = model_id.startswith("env.")
        self._collector.runner.change_weights(lambda: apply_to_all(models, weights), version, in_env=in_env)


class MultiHost:
    """A ``MultiCollector``: rollouts are in workers of the node, which are ahead of what the node is asked for."""

    def __init__(self, plan: NodePlan) -> None:
        kind = MultiSyncCollector if plan.collector_class is MultiCollector else plan.collector_class
        common = {"frames_per_batch": plan.frames, "total_frames": -1, **plan.collector_kwargs}
        with part_of_another():
            self._collector: MultiCollector = kind(
                list(plan.factories),
                plan.policy,
                policy_factory=plan.policy_factory,
                create_env_kwargs=plan.env_kwargs,
                init_random_frames=plan.random_frames,
                **{"weight_sync_schemes": _schemes(plan), **common},
            )
        self._collector.deliver_flat()
        #: Workers count from 0 each time that the node is started.
        self._first_id = plan.first_own_id
        self._stream: Iterator[TensorDictBase] | None = None
        #: Of a batch that was longer than what was asked for.
        self._rest: TensorDictBase | None = None

    def trace(self) -> Session:
        session = Session(self._collector)
        self._collector.record(session)
        return session

    def describe(self) -> NodeDescription:
        collector, about = self._collector, self._collector.description
        return _describe(
            collector.batch_lead,
            about.fields,
            about.env,
            collector.sends_weights,
            collector.num_envs,
            about.structure,
        )

    def __getattr__(self, name: str) -> Any:
        """What is not said here, the collector answers by itself."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._collector, name)

    @property
    def next_id(self) -> int:
        return self._collector.next_traj_id + self._first_id

    @property
    def seconds(self) -> tuple[float, float]:
        return self._collector.seconds_of_workers

    def collect(self, order: Order) -> tuple[TensorDictBase, int, int]:
        if self._rest is not None and self._rest.shape[-1] < order.steps:  # it does not fit into this batch
            self.give_up()
        if self._rest is None:
            if self._stream is None:
                self._stream = iter(self._collector)
            self._rest = next(self._stream)
        batch, self._rest = self._rest, None
        if order.steps < batch.shape[-1]:  # at the end: what is left may be asked for by another order
            self._rest = batch[..., order.steps :]
            batch = batch[..., : order.steps]
        if order.num_envs is not None:
            batch = batch.reshape(-1, batch.shape[-1])[: order.num_envs]
        ids = batch.get(TRAJ_IDS, None)
        if ids is not None:
            ids.add_(self._first_id)
        return batch, self._collector.first_env_of_batch, 0

    def ask_to_stop(self) -> None:
        """Its batch is its workers': it ends as they do. Nobody waits for them here."""
        threading.Thread(target=self.close, args=(_SECONDS_TO_STOP,), name="swath-stop-workers", daemon=True).start()

    def new_fragments(self) -> list[int]:
        return []

    def set_weights(self, weights: Any, version: int, model_id: str) -> None:
        self._collector.set_weights(weights, version, model_id)

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        following = self._collector.set_seed(seed, static_seed)
        self._rest = None
        return following

    def reset(self, **kwargs: Any) -> None:
        self._collector.reset(**kwargs)
        self._rest = None

    def give_up(self) -> None:
        self.reset()

    def begin_ids_at(self, first: int) -> None:
        self._first_id = max(self._first_id, first)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        self._collector.load_state_dict(state, strict)
        self._stream = self._rest = None

    def close(self, timeout_s: float | None = None) -> None:
        self._collector.shutdown(timeout_s, raise_on_error=False)


def _schemes(plan: NodePlan) -> dict[str, WeightSyncScheme] | None:
    """What a MultiCollector sends on to its workers; None for what it does by itself."""
    if not plan.part_ids:
        return None
    has_policy = has_weights(plan.policy) or plan.policy_factory is not None
    return {name: SharedMemWeightSyncScheme() for name in (*["policy"] * has_policy, *plan.part_ids)}
