"""NodesCollector: rollouts on nodes, wherever an engine runs them. What all distributed collectors share."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType

from swath.collectors.arguments import make_assembler, refuse_unknown
from swath.collectors.background import Batches
from swath.collectors.base import BaseCollector, Budget, Postprocessing, positive_int
from swath.collectors.crew import for_each
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.node import BufferPlan, IdSpace, NodeDescription, NodePlan, Order, Report
from swath.collectors.distributed.payload import Bytes, join_batches, pack_tensors
from swath.collectors.multi import ENV, WORKER, MultiCollector
from swath.collectors.multi_async import MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.single import Collector
from swath.collectors.trajectories import TrajFormat
from swath.errors import CollectorClosed, EnvError, NodeLost, NoLength
from swath.rollout.layout import nested
from swath.weight_update.nodes import NodeWeightSyncScheme
from swath.weight_update.weights import choose_sources, fitting_weights, flat_weights
from swath.workers.seeding import derived_seed, draw_base_seed

_CLASSES = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}


@dataclass
class _Member:
    """A node, as the driver knows it."""

    plan: NodePlan
    about: NodeDescription
    first_env: int = 0
    alive: bool = True
    restarts: int = 0
    next_own_id: int = 0
    seed: tuple[int, bool] | None = None
    pending: dict[int, Order] = field(default_factory=dict)
    #: Batches since it got weights.
    batches_since_weights: int = 0
    frames: int = 0
    batches: int = 0
    last: Report | None = None
    busy_s: float = 0.0

    @property
    def who(self) -> str:
        return f"node {self.plan.node} ({self.about.host}, pid {self.about.pid})"


@dataclass(frozen=True)
class Loss:
    """What to do when a node is lost."""

    restarts: int
    goes_on: bool

    @classmethod
    def resolve(cls, restart_nodes: Any, on_node_loss: Any) -> Loss:
        if on_node_loss not in ("raise", "continue"):
            raise ValueError(f"on_node_loss must be 'raise' or 'continue', got {on_node_loss!r}")
        restarts = int(restart_nodes)
        if restarts < 0:
            raise ValueError(f"restart_nodes is how often a node may be started again; got {restart_nodes}")
        return cls(restarts, on_node_loss == "continue")


class NodesCollector(BaseCollector):
    """Base of the collectors whose rollouts run on nodes.

    Arguments are those of ``Collector``, and:

    Args:
        create_env_fn: a list with a factory for each node; or one factory, for ``num_collectors`` nodes.
        num_collectors: how many nodes, where ``create_env_fn`` is no list.
        frames_per_batch: of all nodes together (``sync``), or of each.
        sync: True yields batches of all nodes, stacked in their order: ``[nodes, *batch, T]``. False (the default)
            yields one node's batch at a time, as they come.
        collector_class: what runs on a node: ``Collector`` ("single"), ``MultiSyncCollector`` ("sync") or
            ``MultiAsyncCollector`` ("async").
        collector_kwargs: for it; a dict, or a list with one for each node.
        num_workers_per_collector: with more than 1, a node has so many of its envs, in worker processes.
        update_after_each_batch: send the policy's weights after every batch, to the node(s) that it came from.
        max_weight_update_interval: send them to a node at the latest after so many of its batches; -1 for never.
        update_interval: send them to all nodes after every so many batches.
        weight_sync_schemes: by model id; the engine's own for the policy by default.
        restart_nodes: how often a node that was lost, or raised, is started again.
        on_node_loss: "raise" (the default), or "continue" to go on with the others.
        start_timeout_s: how long nodes have to start.
        track_worker, track_env: write the node's, or the env's, number into ``("collector", "worker")`` or
            ``("collector", "env")``.

    Raises:
        NodeLost: a node is gone, or was not heard of for too long; what an env or a policy raises keeps its type.
    """

    #: What users call its weight scheme.
    _scheme_class: type[NodeWeightSyncScheme] = NodeWeightSyncScheme
    _both_update_rules_are_fine = False

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int | None = None,
        total_frames: int | None = -1,
        sync: bool = False,
        num_collectors: int | None = None,
        collector_class: Any = Collector,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        create_env_kwargs: Any = None,
        device: Any = None,
        storing_device: Any = None,
        env_device: Any = None,
        policy_device: Any = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        set_truncated: bool = False,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trust_policy: bool | None = None,
        compile_policy: bool | dict[str, Any] | None = None,
        cudagraph_policy: bool | dict[str, Any] | None = None,
        no_cuda_sync: bool = False,
        track_policy_version: bool = False,
        track_traj_ids: bool = True,
        track_worker: bool = False,
        track_env: bool = False,
        compact_obs: bool = False,
        trajs_per_batch: int | None = None,
        traj_format: TrajFormat | None = "padded",
        check_finite: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[Any], Any] | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        update_interval: int | None = None,
        weight_sync_schemes: Mapping[str, NodeWeightSyncScheme] | None = None,
        num_sub_threads: int = 1,
        restart_nodes: int = 0,
        on_node_loss: str = "raise",
        start_timeout_s: float = 120.0,
        **engine_arguments: Any,
    ) -> None:
        self._closed = True  # until there is something to close
        self.lock = threading.RLock()
        self._owner_pid = os.getpid()
        own = self._own_arguments(engine_arguments)
        refuse_unknown(engine_arguments, type(self), NodesCollector, also_known=own)
        if frames_per_batch is None:
            raise TypeError(f"{type(self).__name__} needs frames_per_batch")
        if split_trajs and not track_traj_ids:
            raise ValueError("split_trajs needs track_traj_ids=True")
        if policy is not None and policy_factory is not None and not isinstance(policy, torch.nn.Module):
            raise TypeError("with a policy_factory, policy is only where weights come from: it must be an nn.Module")
        both = update_after_each_batch and max_weight_update_interval >= 0
        if both and not self._both_update_rules_are_fine:
            raise RuntimeError("give either update_after_each_batch or max_weight_update_interval, not both")
        if update_interval is not None:
            positive_int("update_interval", update_interval)
        factories = list_nodes(create_env_fn, num_collectors)
        count = len(factories)
        frames = positive_int("frames_per_batch", frames_per_batch)
        if sync and frames % count:
            raise RuntimeError(
                f"frames_per_batch={frames} does not divide over {count} nodes; with sync=True each collects the same"
            )
        self._sync = bool(sync)
        self._loss = Loss.resolve(restart_nodes, on_node_loss)
        self._start_timeout_s = start_timeout_s
        self.update_after_each_batch = update_after_each_batch
        self._weights_every = update_interval
        self._most_batches_without = max_weight_update_interval if max_weight_update_interval >= 0 else None
        self._tracked = [key for key, wanted in ((WORKER, track_worker), (ENV, track_env)) if wanted]
        self._storing = None if storing_device is None and device is None else torch.device(storing_device or device)
        self.policy = policy
        self._policy_version = 0
        self._run = uuid.uuid4().hex
        self._num_orders = 0
        self._arrivals: queue.SimpleQueue[tuple[int, int, Order, Future[Any]]] = queue.SimpleQueue()
        self._members: list[_Member] = []
        self._draining = False
        common = {
            "env_device": device if env_device is None else env_device,
            "policy_device": device if policy_device is None else policy_device,
            "max_frames_per_traj": max_frames_per_traj,
            "exploration_type": exploration_type,
            "reset_at_each_iter": reset_at_each_iter,
            "trust_policy": trust_policy,
            "compile_policy": compile_policy,
            "cudagraph_policy": cudagraph_policy,
            "no_cuda_sync": no_cuda_sync,
            "track_policy_version": bool(track_policy_version),
            "track_traj_ids": track_traj_ids,
            "compact_obs": compact_obs,
        }
        kind = node_class(collector_class, positive_int("num_workers_per_collector", num_workers_per_collector))
        each_kwargs = for_each("collector_kwargs", collector_kwargs, count, ValueError)
        each_env_kwargs = for_each("create_env_kwargs", create_env_kwargs, count, ValueError)
        each_factory = for_each("policy_factory", policy_factory, count, ValueError)
        base_seed = draw_base_seed()

        def plan(node: int, factory: Any, env_kwargs: Any, make_policy: Any, kwargs: Any) -> NodePlan:
            listed = {n: v[node % count] for n, v in common.items() if n.endswith("device") and isinstance(v, list)}
            for name in ("replay_buffer", "total_frames", "frames_per_batch", "init_random_frames"):
                if name in (kwargs or {}):
                    raise ValueError(f"{name} is an argument of {type(self).__name__}, not of collector_kwargs")
            return NodePlan(
                node=node,
                collector_class=kind,
                factories=[factory] * num_workers_per_collector,
                env_kwargs=env_kwargs,
                policy=policy if make_policy is None else None,
                policy_factory=make_policy,
                frames=frames // count if self._sync else frames,
                collector_kwargs={**common, **listed, **(kwargs or {})},
                ids=IdSpace.of_node(node, count),
                base_seed=base_seed,
                num_threads=num_sub_threads,
            )

        self._make_plan = plan
        plans = [
            plan(i, *each)
            for i, each in enumerate(zip(factories, each_env_kwargs, each_factory, each_kwargs, strict=True))
        ]
        assembler = make_assembler(trajs_per_batch, traj_format, replay_buffer)
        self._by_episode = trajs_per_batch is not None
        self._schemes = self._make_schemes(weight_sync_schemes, policy, policy_factory)
        self._engine: Engine = self._make_engine(count, **own)
        try:
            self._launch(plans)
            first = self._members[0].about
            self._fields = first.fields
            self._lead = torch.Size(first.lead)
            each = self._lead.numel()
            shared = each * count if self._sync else each
            budget = Budget.resolve(frames, total_frames, shared)
            if set_truncated and ("next", "truncated") not in {f.key for f in self._fields}:
                raise RuntimeError("set_truncated needs an env with a truncated key; call env.add_truncated_keys()")
            post = Postprocessing(
                postproc, bool(split_trajs), set_truncated, check_finite, pre_collect_hook, post_collect_hook
            )
            super().__init__(budget, post, assembler, replay_buffer, extend_buffer)
            self.init_random_frames = self._random_frames_left = max(0, int(init_random_frames or 0))
            self._writes_itself = replay_buffer is not None and self._let_nodes_write(replay_buffer)
            if policy is not None and policy_factory is not None:
                self._send("policy", policy, None, 0)
        except BaseException:
            self._engine.close(5.0)
            raise

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _own_arguments(self, others: dict[str, Any]) -> dict[str, Any]:
        """Take what only this class knows out of the arguments, for ``_make_engine``."""
        return {}

    def _make_engine(self, num_nodes: int, **own: Any) -> Engine:
        raise NotImplementedError

    def _can_reach(self, replay_buffer: Any) -> bool:
        """Whether nodes can write to this buffer by themselves."""
        return False

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _launch(self, plans: Sequence[NodePlan]) -> None:
        futures = [self._engine.launch(plan) for plan in plans]
        deadline = time.monotonic() + self._start_timeout_s
        for plan, future in zip(plans, futures, strict=True):
            about = self._started(plan, future, deadline)
            first_env = sum(member.about.num_envs for member in self._members)
            member = _Member(plan, about, first_env)
            if self._members:
                self._agree(member)
            self._members.append(member)

    def _started(self, plan: NodePlan, future: Future[NodeDescription], deadline: float) -> NodeDescription:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise NodeLost(
                f"node {plan.node} of {self._engine.name} did not start within {self._start_timeout_s:g} s "
                "(start_timeout_s=); are there enough resources for all nodes?",
                plan.node,
            ) from None
        except Exception as error:
            if not isinstance(error, NodeLost):
                error.add_note(f"swath: raised while node {plan.node} of {type(self).__name__} was made")
            raise

    def _agree(self, member: _Member) -> None:
        first, other = self._members[0].about, member.about
        if (other.lead, other.fields) != (first.lead, first.fields):
            mine = {f.key: (tuple(f.shape), f.dtype) for f in first.fields}
            theirs = {f.key: (tuple(f.shape), f.dtype) for f in other.fields}
            differing = next((key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key)), None)
            what = (
                f"batches of {first.lead} envs against {other.lead}"
                if differing is None
                else f"{differing}: {mine.get(differing)} against {theirs.get(differing)}"
            )
            raise EnvError(f"{member.who} delivers other data than node 0: {what}; all nodes must be alike")

    def _make_schemes(self, given: Any, policy: Any, policy_factory: Any) -> dict[str, NodeWeightSyncScheme]:
        schemes: dict[str, NodeWeightSyncScheme] = dict(given or {})
        if given is None and (isinstance(policy, torch.nn.Module) or policy_factory is not None):
            schemes["policy"] = self._scheme_class()
        for model_id, scheme in schemes.items():
            if not isinstance(scheme, NodeWeightSyncScheme):
                raise TypeError(
                    f"{type(scheme).__name__} is for workers of one machine; {type(self).__name__} takes a "
                    f"{self._scheme_class.__name__}"
                )
            if model_id == "policy" and policy is not None and not isinstance(policy, torch.nn.Module):
                raise TypeError(f"the policy ({type(policy).__name__}) is no nn.Module, so it has no weights to send")
            scheme.init_on_sender(model_id=model_id, context=self)
        return schemes

    def _let_nodes_write(self, replay_buffer: Any) -> bool:
        post = self._postprocessing
        if not self._can_reach(replay_buffer) or post.pre_collect_hook or post.post_collect_hook:
            return False
        total = sum(member.about.num_envs for member in self._members)
        for member in self._members:
            self._let_node_write(member, total)
        return True

    def _let_node_write(self, member: _Member, total: int) -> None:
        shared: Any = self.replay_buffer
        if member.plan.life:  # what its predecessor was in does not go on
            shared.end_tracks(member.first_env, member.about.num_envs)
        buffer = shared.for_writer(f"{self._run}-{total}")
        plan = BufferPlan(buffer, member.first_env, total, self._postprocessing, self._by_episode)
        self._wait_for(member, self._engine.call(member.plan.node, "write_to", plan))

    # -- who is there ----------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, those that were lost left out."""
        return len(self._alive)

    @property
    def num_workers(self) -> int:
        """How many nodes there are, those that were lost counted, too: weights are addressed by their numbers."""
        return len(self._members)

    @property
    def _alive(self) -> list[_Member]:
        return [member for member in self._members if member.alive]

    @property
    def _num_envs(self) -> int:
        return sum(member.about.num_envs for member in self._members)

    def _require_open(self) -> None:
        if self._owner_pid != os.getpid():
            raise RuntimeError(
                f"this collector's nodes belong to process {self._owner_pid}, and this is {os.getpid()}; make the "
                "collector in the process that iterates over it (a DataLoader: num_workers=0)"
            )
        self._raise_failure()
        if self._closed:
            raise CollectorClosed(f"this collector was shut down after {self._frames:,} frames; make a new one")

    # -- losses ----------------------------------------------------------------------------------------------------

    def _lost(self, member: _Member, error: Exception) -> bool:
        """A node is gone, or raised: whether it was started again. Raises, where nothing else was asked for."""
        is_gone = isinstance(error, NodeLost)
        node = member.plan.node
        if member.restarts < self._loss.restarts and self._engine.restarts:
            self._engine.end(node)
            self._restart(member, error)
            return True
        if is_gone and self._loss.goes_on and len(self._alive) > 1:
            self._engine.end(node)
            member.alive = False
            self._forget_orders(member)
            warnings.warn(f"{error} Collection goes on with {len(self._alive)} of {len(self._members)}.", stacklevel=2)
            return False
        if is_gone:
            advice = "on_node_loss='continue' goes on with the others"
            if self._engine.restarts:
                advice = f"restart_nodes=1 starts it again, {advice}"
            error.add_note(f"swath: {advice}")
        else:
            error.add_note(f"swath: raised in {member.who} of {type(self).__name__}")
        raise error

    def _forget_orders(self, member: _Member) -> None:
        self._random_frames_left += sum(order.random_frames for order in member.pending.values())
        member.pending.clear()

    def _restart(self, member: _Member, error: Exception) -> None:
        """Another node in the place of one that is gone: newest weights, ids and a seed of its own."""
        member.restarts += 1
        node, life = member.plan.node, member.plan.life + 1
        self._forget_orders(member)
        member.plan = dataclasses.replace(member.plan, life=life, first_own_id=member.next_own_id)
        deadline = time.monotonic() + self._start_timeout_s
        member.about = self._started(member.plan, self._engine.launch(member.plan), deadline)
        for scheme in self._schemes.values():
            scheme.resend(node)
        if member.seed is not None:
            seed, static = member.seed
            self._engine.call(node, "set_seed", derived_seed(seed, node, life), static).result()
        if self.__dict__.get("_writes_itself"):
            self._let_node_write(member, self._num_envs)
        member.batches_since_weights = 0
        warnings.warn(
            f"{error} It was started again as {member.who}; the episodes that it was in have ended without a done flag "
            "where they were delivered already, and go on under new ids",
            stacklevel=2,
        )

    def _wait_for(self, member: _Member, future: Future[Any]) -> Any:
        """What a node answers; None if it is gone, and need not answer."""
        try:
            return future.result()
        except Exception as error:
            self._lost(member, error)
            return None

    # -- orders ----------------------------------------------------------------------------------------------------

    def _order(self, member: _Member, steps: int, num_envs: int | None, random_frames: int) -> None:
        self._num_orders += 1
        order = Order(self._num_orders, steps, num_envs, random_frames, self._writes_itself)
        member.pending[order.number] = order
        node, life = member.plan.node, member.plan.life
        future = self._engine.collect(node, order)
        future.add_done_callback(lambda done: self._arrivals.put((node, life, order, done)))

    def _next_arrival(self, timeout_s: float | None = None) -> tuple[_Member, Order, Report, Bytes | None] | None:
        """The next batch that has come from a node; None if a node was lost instead, and collection goes on."""
        node, life, order, future = self._arrivals.get(timeout=timeout_s)
        member = self._members[node]
        if life != member.plan.life or order.number not in member.pending:
            return None
        try:
            report, payload = future.result()
        except Exception as error:
            again = list(member.pending.values())
            if self._lost(member, error):
                for old in again:
                    self._random_frames_left -= old.random_frames
                    self._order(member, old.steps, old.num_envs, old.random_frames)
            return None
        del member.pending[order.number]
        member.last, member.next_own_id = report, max(member.next_own_id, report.next_id)
        member.frames += report.frames
        member.batches += 1
        member.busy_s += report.busy_s
        member.batches_since_weights += 1
        self._random_frames_left += report.random_left
        if self._assembler is not None:
            self._assembler.fragments |= set(report.fragments)
        return member, order, report, payload

    def _drain(self) -> None:
        """Wait for what is under way, and throw it away: its random frames are still due."""
        while any(member.pending for member in self._alive):
            arrival = self._next_arrival()
            if arrival is not None:
                self._random_frames_left += arrival[1].random_frames - arrival[2].random_left

    def _take_random(self, frames: int) -> int:
        taken = min(self._random_frames_left, frames)
        self._random_frames_left -= taken
        return taken

    # -- collecting ------------------------------------------------------------------------------------------------

    def _gather(self) -> TensorDictBase | None:
        if not self._writes_itself:
            return super()._gather()
        self._require_open()
        frames = self._round() if self._sync else self._one_report()
        self._frames += frames
        self._iter += bool(frames)
        return None

    def _collect(self) -> TensorDictBase:
        self._require_open()
        return self._collect_from_all() if self._sync else self._collect_from_one()

    def _collect_from_one(self) -> TensorDictBase:
        while True:
            self._give_orders()
            arrival = self._next_arrival()
            if arrival is not None:
                member, _, report, payload = arrival
                assert payload is not None
                self._weights_after_batch([member])
                self._give_orders(in_hand=report.frames)  # before the consumer has its turn
                self._first_env = member.first_env + report.first_env
                return self._deliver([(member, report, payload)], report.shape)

    def _one_report(self) -> int:
        """The frames that a node has written to the replay buffer; 0 when there was nothing to wait for."""
        while True:
            if not self._draining:
                self._give_orders()
            if not any(member.pending for member in self._alive):
                return 0
            arrival = self._next_arrival()
            if arrival is not None:
                self._weights_after_batch([arrival[0]])
                return arrival[2].frames

    def _give_orders(self, in_hand: int = 0) -> None:
        """In turns, so that at the beginning and at the end all nodes have something to do.

        ``in_hand``: frames that have come and are not counted yet.
        """
        each, full = self._lead.numel(), self._budget.steps_per_batch
        for rank in range(self._engine.orders_per_node):
            for member in self._alive:
                if len(member.pending) != rank:
                    continue
                steps, num_envs = full, None
                left = self._frames_to_order
                if left is not None:
                    left -= in_hand
                    if left <= 0:
                        return
                    steps = min(full, left // each)
                    if not steps:
                        steps, num_envs = 1, left
                frames = steps * each if num_envs is None else num_envs
                self._order(member, steps, num_envs, self._take_random(frames))

    @property
    def _frames_to_order(self) -> int | None:
        if self._budget.total_frames is None:
            return None
        each = self._lead.numel()
        under_way = sum(
            order.steps * (each if order.num_envs is None else order.num_envs)
            for member in self._alive
            for order in member.pending.values()
        )
        return self._budget.total_frames - self._frames - under_way

    def _round(self) -> int:
        """As ``_collect_from_all``, where nodes write themselves."""
        return sum(report.frames for _, report, _ in self._await_all())

    def _collect_from_all(self) -> TensorDictBase:
        arrived = self._await_all()
        self._weights_after_batch(self._alive)
        parts = [(member, report, payload) for member, report, payload in arrived if payload is not None]
        shapes = {report.shape for _, report, _ in parts}
        self._first_env = 0
        if len(shapes) == 1 and len(parts[0][1].shape) == len(self._lead) + 1:
            return self._deliver(parts, (len(parts), *parts[0][1].shape))
        # One step of the first envs, at the end: what each node has of it, one below the other.
        batches = [self._deliver([part], (part[1].frames, 1)) for part in parts]
        return batches[0] if len(batches) == 1 else torch.cat(batches)  # type: ignore[arg-type,return-value]

    def _await_all(self) -> list[tuple[_Member, Report, Bytes | None]]:
        """One batch of every node, in their order."""
        self._drain_interrupted()
        each, members = self._lead.numel(), self._alive
        budget = dataclasses.replace(self._budget, num_envs=each * len(members))
        steps, num_envs = budget.next_batch(self._frames)
        left = each * len(members) if num_envs is None else num_envs
        wanted = self._take_random(steps * left)
        for i, member in enumerate(members):
            rows = min(each, left - i * each)
            if rows > 0:
                share = wanted // len(members) + (i < wanted % len(members))
                random_frames = min(share, rows * steps)
                wanted_back = share - random_frames
                self._random_frames_left += wanted_back
                self._order(member, steps, None if num_envs is None else rows, random_frames)
        arrived: dict[int, tuple[_Member, Report, Bytes | None]] = {}
        while any(member.pending for member in self._alive):
            arrival = self._next_arrival()
            if arrival is not None:
                member, _, report, payload = arrival
                arrived[member.plan.node] = member, report, payload
        return [arrived[node] for node in sorted(arrived)]

    def _drain_interrupted(self) -> None:
        """After Ctrl-C: what was under way is dropped, and episodes with a gap do not go on."""
        late = [member for member in self._alive if member.pending]
        if late:
            self._drain()
            for member in late:
                self._wait_for(member, self._engine.call(member.plan.node, "give_up"))

    def _deliver(self, parts: Sequence[tuple[_Member, Report, Bytes]], shape: Sequence[int]) -> TensorDictBase:
        frames = parts[0][1].frames
        leaves = join_batches(self._fields, [payload for _, _, payload in parts], frames)
        steps = shape[-1]
        for key in self._tracked:
            rows = []
            for member, report, _ in parts:
                first = member.first_env + report.first_env
                numbers = torch.arange(first, first + frames // steps)
                rows.append(torch.full_like(numbers, member.plan.node) if key == WORKER else numbers)
            leaves[key] = torch.cat(rows).repeat_interleave(steps)
        tree = nested({key: leaf.view(*shape, *leaf.shape[1:]) for key, leaf in leaves.items()})
        names: Any = [None] * (len(shape) - 1) + ["time"]
        storing = self._storing
        device = storing if storing is not None and storing.type == "cpu" else None
        batch = TensorDict(tree, batch_size=shape, names=names, device=device)
        return batch if device is not None or storing is None else batch.to(storing)

    def _parts(self, batch: Any, raw: TensorDictBase) -> Sequence[Any]:
        """Each node's own, where they are stacked."""
        stacked = self._sync and raw.ndim == len(self._lead) + 2
        if self._assembler is not None or not stacked or getattr(batch, "shape", None) != raw.shape:
            return [batch]
        return list(batch.unbind(0))

    def _salvage(self) -> TensorDictBase | None:
        return None

    def __len__(self) -> int:
        if self._loss.goes_on:
            raise NoLength("with on_node_loss='continue' the number of batches depends on how many nodes are lost")
        return super().__len__()

    # -- in the background -----------------------------------------------------------------------------------------

    def _work(self) -> Any:
        if not self.__dict__.get("_writes_itself"):
            return super()._work()
        return _DirectWriting(self)

    # -- weights ---------------------------------------------------------------------------------------------------

    def _weights_after_batch(self, members: Sequence[_Member]) -> None:
        """What ``update_after_each_batch`` and its like ask for."""
        if "policy" not in self._schemes or self.policy is None:
            return
        if self._weights_every is not None and (self._iter + 1) % self._weights_every == 0:
            members = self._alive
        elif not self.update_after_each_batch:
            most = self._most_batches_without
            members = [] if most is None else [m for m in members if m.batches_since_weights >= max(1, most)]
        if members:
            self.update_policy_weights_(worker_ids=[member.plan.node for member in members])

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Send weights to the nodes: a module's, a TensorDict's, a state dict's.

        Without arguments, those of the policy that the collector was made with. Returns when all nodes (or those of
        ``worker_ids``) have applied them, each between two steps.
        """
        if policy_weights is not None:
            warnings.warn("policy_weights= is now called weights=", DeprecationWarning, stacklevel=2)
            weights = policy_weights
        self._require_open()
        sources = choose_sources(policy_or_weights, weights, policy, weights_dict, model_id)
        for name, source in sources.items():
            self._check_source(name, source)
        sent = {name: source for name, source in sources.items() if name in self._schemes}
        nodes = None if worker_ids is None else [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        if nodes == []:
            return
        for node in nodes or ():
            if not 0 <= node < len(self._members):
                raise ValueError(f"there is no node {node}; there are {len(self._members)}, counted from 0")
        self._policy_version += bool(sent)
        for name, source in sent.items():
            self._send(name, source, nodes, self._policy_version)

    def _check_source(self, name: str, source: Any) -> None:
        if name not in self._schemes:
            if name != "policy":
                known = ", ".join(map(repr, self._schemes)) or "none"
                raise KeyError(f"there is no model {name!r} whose weights can be sent; weight_sync_schemes has {known}")
            if source is not None:
                raise TypeError(
                    f"the policy ({type(self.policy).__name__}) is no nn.Module, so it has no weights to update"
                )
            return
        if source is None and (name != "policy" or self.policy is None):
            raise RuntimeError(
                "update_policy_weights_: the policy was made by policy_factory on the nodes, so there are no weights "
                "here to send; give them, or give policy= as well as policy_factory="
            )
        if source is not None and name == "policy" and isinstance(self.policy, torch.nn.Module):
            fitting_weights(self.policy, source)  # before any node gets some of it

    def _send(self, name: str, source: Any, nodes: Sequence[int] | None, version: int) -> None:
        tensors = flat_weights(self.policy if source is None else source)
        self._schemes[name].send_to(
            {key: tensor for key, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}, nodes, version
        )

    # What a scheme needs of its collector.

    def share_weights(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self._engine.share(pack_tensors(tensors))

    def post_weights(self, node: int, shared: Any, version: int, model_id: str) -> Future[None] | None:
        member = self._members[node]
        if not member.alive:
            return None
        member.batches_since_weights = 0
        return self._engine.set_weights(node, shared, version, model_id)

    def weights_failed(self, node: int, error: Exception) -> None:
        """A node that was started again has them already."""
        with self.lock:
            if isinstance(error, NodeLost):
                self._lost_between_batches(self._members[node], error)
                return
        error.add_note(f"swath: raised in {self._members[node].who}, while it applied weights")
        raise error

    def _lost_between_batches(self, member: _Member, error: NodeLost) -> None:
        pending = list(member.pending.values())
        if self._lost(member, error):
            for old in pending:
                self._random_frames_left -= old.random_frames
                self._order(member, old.steps, old.num_envs, old.random_frames)

    def send_weights(self, weights: Any, worker_ids: int | Sequence[int] | None = None) -> None:
        self.update_policy_weights_(weights, worker_ids=worker_ids)

    @property
    def policy_version(self) -> int:
        """How often weights were sent."""
        return self._policy_version

    def get_policy_version(self) -> int:
        return self._policy_version

    def increment_version(self) -> None:
        self._policy_version += 1

    # -- control ---------------------------------------------------------------------------------------------------

    def _call_all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all nodes, at the same time."""
        self._require_open()
        futures = [(member, self._engine.call(member.plan.node, name, *args, **kwargs)) for member in self._alive]
        return [self._wait_for(member, future) for member, future in futures]

    def _call(self, member: _Member, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._wait_for(member, self._engine.call(member.plan.node, name, *args, **kwargs))

    def _still(self, what: str) -> None:
        self._require_open()
        self._require_still(what)
        self._drain()

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed envs, random actions and policies of all nodes, one after the other; new episodes start.

        Returns the seed for the next collector (the same one, if ``static_seed``).
        """
        self._still("set_seed")
        following: int | None = int(seed)
        for member in self._alive:
            member.seed = int(following or 0), static_seed
            following = self._call(member, "set_seed", member.seed[0], static_seed)
        if self._assembler is not None:
            self._assembler.drop_all()
        return following

    def reset(self, **kwargs: Any) -> None:
        """Start new episodes with the next batch, in all envs."""
        self._still("reset")
        self._call_all("reset", **kwargs)
        if self._assembler is not None:
            self._assembler.drop_all()

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what each node can save of itself (see ``Collector.state_dict``)."""
        with self._held():
            states = self._call_all("state_dict")
            state: dict[str, Any] = {
                f"node{member.plan.node}": own for member, own in zip(self._alive, states, strict=True)
            }
            under_way = [order.random_frames for member in self._alive for order in member.pending.values()]
            return {
                **state,
                "frames": self._frames,
                "iter": self._iter,
                "policy_version": self._policy_version,
                "random_frames_left": self._random_frames_left + sum(under_way),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where ``state_dict`` was taken, with as many nodes; new episodes start."""
        states = {name: own for name, own in state_dict.items() if name.startswith("node")}
        if not states:
            raise ValueError("this is not the state of a collector of nodes: it has no 'node0'")
        if len(states) != len(self._alive):
            raise ValueError(f"this state is of {len(states)} nodes, but there are {len(self._alive)}")
        self._still("load_state_dict")
        for member, own in zip(self._alive, states.values(), strict=True):
            self._call(member, "load_state_dict", own, strict)
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
        self._policy_version = state_dict["policy_version"]
        self._random_frames_left = state_dict["random_frames_left"]
        if self._assembler is not None:
            self._assembler.drop_all()
        self._iterator = None

    # -- looking into nodes ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Where the collector stands, with a line for each node; never blocks."""
        return {
            **super().stats(),
            "policy_version": self._policy_version,
            "num_envs": self._num_envs,
            "num_nodes": self.num_nodes,
            "engine": self._engine.name,
            "nodes": [_describe(member) for member in self._members],
        }

    def getattr_env(self, name: str) -> Any:
        """An attribute of the first node's env."""
        self._require_open()
        return self._call(self._alive[0], "getattr_env", name)

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the first node's policy."""
        self._require_open()
        return self._call(self._alive[0], "getattr_policy", name)

    def getattr_rb(self, name: str) -> Any:
        return getattr(self.replay_buffer, name)

    def get_distant_attr(self, path: str) -> list[Any]:
        """An attribute of each node's collector by its dotted path, such as ``"env.batch_size"``."""
        return [value for values in self._call_all("get_distant_attr", path) for value in values]

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``path`` (such as ``"env.set_level"``) on every node."""
        return self._call_all("cascade_execute", path, *args, **kwargs)

    def get_model(self, model_id: str) -> Any:
        if model_id != "policy":
            raise KeyError(f"there is no model {model_id!r} in this process; nodes have it")
        return self.policy

    # -- ending ----------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the nodes, in ``timeout`` seconds (10 by default) or so; harmless when called again."""
        self._shutdown_timeout = 10.0 if timeout is None else timeout
        super().shutdown(timeout, close_env, raise_on_error)

    def _close(self, close_env: bool) -> None:
        if self._owner_pid != os.getpid():
            return
        for scheme in self._schemes.values():
            scheme.shutdown()
        self._engine.close(self._shutdown_timeout)

    def __del__(self) -> None:
        self.shutdown(raise_on_error=False)

    def __repr__(self) -> str:
        if "_budget" not in self.__dict__:
            return f"{type(self).__name__}(not started)"
        policy = "policy_factory" if self.policy is None else type(self.policy).__name__
        return (
            f"{type(self).__name__}({self.num_nodes} nodes, policy={policy}, "
            f"frames_per_batch={self.requested_frames_per_batch}, total_frames={self.total_frames}, "
            f"frames so far={self._frames:,})"
        )


class _DirectWriting(Batches):
    """``Work`` of nodes that write to the buffer by themselves: it is still when none has an order."""

    writes_elsewhere = True

    def __init__(self, collector: NodesCollector) -> None:
        super().__init__(collector._next_batch, lambda: collector._complete, lambda: True)
        self._collector = collector

    def is_still(self) -> bool:
        return not any(member.pending for member in self._collector._alive)

    def hurry(self) -> None:
        self._collector._draining = True

    def go_on(self) -> None:
        self._collector._draining = False


def list_nodes(create_env_fn: Any, num_collectors: Any) -> list[Any]:
    """A factory for each node."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        factories = list(create_env_fn)
        if not factories:
            raise ValueError("create_env_fn is an empty list; give a factory for every node")
        if num_collectors is not None and len(factories) not in (1, num_collectors):
            raise ValueError(
                f"create_env_fn has {len(factories)} entries for num_collectors={num_collectors}; give one for each, "
                "or one for all"
            )
        if num_collectors is not None and len(factories) == 1:
            factories = factories * num_collectors
        return factories
    return [create_env_fn] * (1 if num_collectors is None else positive_int("num_collectors", num_collectors))


def node_class(given: Any, num_workers: int) -> type:
    """The collector that runs on a node."""
    if isinstance(given, str):
        if given not in _CLASSES:
            raise ValueError(f"collector_class must be a class or one of {', '.join(_CLASSES)}; got {given!r}")
        given = _CLASSES[given]
    if not (isinstance(given, type) and issubclass(given, (Collector, MultiCollector))):
        raise TypeError(f"collector_class must be Collector or a MultiCollector, got {given!r}")
    if num_workers > 1 and not issubclass(given, MultiCollector):
        return MultiSyncCollector
    return given


def _describe(member: _Member) -> dict[str, Any]:
    last = member.last
    return {
        "node": member.plan.node,
        "host": member.about.host,
        "pid": member.about.pid,
        "alive": member.alive,
        "restarts": member.restarts,
        "frames": member.frames,
        "batches": member.batches,
        "fps": member.frames / member.busy_s if member.busy_s else 0.0,
        "busy_s": member.busy_s,
        "env_s": 0.0 if last is None else last.env_s,
        "policy_s": 0.0 if last is None else last.policy_s,
        "policy_version": 0 if last is None else last.policy_version,
        "orders_under_way": len(member.pending),
    }
