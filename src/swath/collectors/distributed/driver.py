"""NodesCollector: rollouts on nodes, wherever an engine runs them. What all distributed collectors share."""

from __future__ import annotations

import dataclasses
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType

from swath.collectors.arguments import alike_or_each
from swath.collectors.assignment import list_nodes
from swath.collectors.background import Batches
from swath.collectors.base import BaseCollector, Budget, positive_int, truncated_keys
from swath.collectors.config import NodesConfig
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.node import BufferPlan
from swath.collectors.distributed.plans import NodePlans
from swath.collectors.distributed.requests import NodePlan, Order
from swath.collectors.distributed.roster import Arrival, Loss, Member, Roster
from swath.collectors.front_door import explains_unknown
from swath.collectors.multi import ENV, WORKER
from swath.collectors.saved import load_all_or_nothing
from swath.collectors.single import Collector
from swath.data.payload import join_batches, pack_tensors
from swath.data.trajectories import TrajFormat
from swath.envs.base import next_seed
from swath.errors import NodeLost, NoLength, add_note
from swath.keys import nested
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.fair_lock import FairLock
from swath.process.seeding import derived_seed
from swath.rollout.structure import Structure
from swath.states import count, mismatch, numbered, require_counters
from swath.weight_update.hidden import HiddenWeights
from swath.weight_update.nodes import NodeWeightSyncScheme
from swath.weight_update.weights import (
    choose_sources,
    copied_policy,
    flat_weights,
    has_weights,
    require_findable,
    require_no_weights,
    save_own_policy,
    weights_for_copies,
    weights_for_part,
)
from swath.workers.pool import weakly


class NodesCollector(BaseCollector):
    """Base of the collectors whose rollouts run on nodes.

    Arguments are those of ``Collector``, and:

    Args:
        create_env_fn: a list with a factory for each node; or one factory, for ``num_collectors`` nodes.
        frames_per_batch: of all nodes together (``sync``), or of each.
        sync: True yields batches of all nodes, stacked in their order: ``[nodes, *batch, T]``. False (the default)
            yields one node's batch at a time, as they come.

    All others are those of ``NodesConfig`` (``help()`` has all of it).

    Raises:
        NodeLost: a node is gone, or was not heard of for too long; what an env or a policy raises keeps its type.
    """

    #: What users call its weight scheme.
    _scheme_class: type[NodeWeightSyncScheme] = NodeWeightSyncScheme
    _both_update_rules_are_fine = False

    _config_class = NodesConfig

    @explains_unknown
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int | None = None,
        total_frames: float | None = -1,
        sync: bool | None = None,
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
        capture_policy: bool = True,
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
    ) -> None:
        self._closed = True  # until there is something to close
        self._build(NodesConfig.of(self, locals()))

    def _build(self, config: NodesConfig) -> None:
        self._lock = FairLock()
        self._owner_pid = os.getpid()
        policy = config.policy
        both = config.update_after_each_batch and config.max_weight_update_interval >= 0
        if both and not self._both_update_rules_are_fine:
            raise RuntimeError("give either update_after_each_batch or max_weight_update_interval, not both")
        factories = list_nodes(config.create_env_fn, config.num_collectors)
        count = len(factories)
        frames = positive_int("frames_per_batch", config.frames_per_batch)
        self._sync = bool(config.sync)
        if self._sync and frames % count:
            raise RuntimeError(
                f"frames_per_batch={frames} does not divide over {count} nodes; with sync=True each collects the same"
            )
        self._loss = loss = Loss.resolve(config.restart_nodes, config.on_node_loss)
        self._start_timeout_s = config.start_timeout_s
        self.update_after_each_batch = config.update_after_each_batch
        self._weights_every = config.update_interval
        interval = config.max_weight_update_interval
        self._most_batches_without = interval if interval >= 0 else None
        self._tracked = [key for key, wanted in ((WORKER, config.track_worker), (ENV, config.track_env)) if wanted]
        self._storing = storing(config.device if config.storing_device is None else config.storing_device)
        self.policy = policy
        self._policy_version = 0
        self._run = uuid.uuid4().hex
        self._draining = False
        #: Of a batch that is being put together: what has come. It is not lost if Ctrl-C is pressed meanwhile.
        self._in_hand: list[Arrival] = []
        #: Nodes that are gone for good, and may have sent what is not in the replay buffer yet.
        self._gone: list[Member] = []
        #: Of each node, how often it had been started again when it sent what was stored last.
        self._lives_stored: dict[int, int] = {}
        #: Nodes with frames that nobody got: their episodes do not go on.
        self._to_give_up: set[int] = set()
        self._random_frames_left = self._init_random_frames = config.init_random_frames or 0
        common = {
            "env_device": config.device if config.env_device is None else config.env_device,
            "policy_device": config.device if config.policy_device is None else config.policy_device,
            **config.for_workers(),
        }
        self._plans = plans = NodePlans.resolve(
            config.who,
            count,
            collector_class=config.collector_class,
            num_workers=config.num_workers_per_collector,
            policy=policy,
            frames=frames // count if self._sync else frames,
            common=common,
            random_frames=self._random_frames_left,
            num_threads=config.num_sub_threads,
            part_ids=tuple(name for name in config.weight_sync_schemes or () if name != "policy"),
        )
        self._random_frames_left -= sum(plans.random_frames)
        made = plans.all(factories, config.create_env_kwargs, config.policy_factory, config.collector_kwargs)
        assembler = config.assembler()
        self._by_episode = config.trajs_per_batch is not None
        self._schemes = self._make_schemes(config.weight_sync_schemes, policy, config.policy_factory)
        engine = self._make_engine(count)
        if loss.restarts and not engine.restarts:
            engine.close(0.0)
            raise ValueError(
                f"restart_nodes={loss.restarts}: {type(self).__name__} cannot start a node of this kind again (torch "
                "RPC, or nodes that others start); on_node_loss='continue' goes on with the rest"
            )
        self._roster = roster = Roster(
            engine, loss, config.who, self._lock, config.start_timeout_s, weakly(self._welcome), weakly(self._forget)
        )
        try:
            self._start(made)
            first = roster.members[0].about
            self._fields = first.fields
            self._structure = None if first.structure is None else Structure.from_json(first.structure)
            self._lead = torch.Size(first.lead)
            each = self._lead.numel()
            shared = each * count if self._sync else each
            budget = Budget.resolve(frames, config.total_frames, shared)
            if config.set_truncated and not truncated_keys((f.key, f) for f in self._fields):
                raise RuntimeError("set_truncated needs an env with a truncated key; call env.add_truncated_keys()")
            buffer = config.replay_buffer
            super().__init__(budget, config.postprocessing(), assembler, buffer, config.extend_buffer)
            self._extends = config.extend_buffer
            self._writes_itself = buffer is not None and self._let_nodes_write(buffer)
            # A network that a function finds by its name may be another one where the function is imported.
            if (
                policy is not None
                and "policy" in self._schemes
                and (config.policy_factory or HiddenWeights(policy).tensors)
            ):
                self._send("policy", policy, None, 0)
            elif loss.restarts and "policy" in self._schemes and policy is not None:
                # The policy may be trained by the time that a node is started again.
                self._schemes["policy"].remember(self.share_weights(_tensors(policy)), range(count), 0)
        except BaseException:
            roster.close(5.0)
            raise

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _make_engine(self, num_nodes: int) -> Engine:
        """By what only this class is asked for."""
        raise NotImplementedError

    @property
    def _is_processed_elsewhere(self) -> bool:
        return self.__dict__.get("_writes_itself", False)

    def _can_reach(self, replay_buffer: Any) -> bool:
        """Whether nodes can write to this buffer by themselves."""
        return False

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _start(self, plans: Sequence[NodePlan]) -> list[Member]:
        return self._roster.launch(plans)

    def _make_schemes(self, given: Any, policy: Any, policy_factory: Any) -> dict[str, NodeWeightSyncScheme]:
        schemes: dict[str, NodeWeightSyncScheme] = dict(given or {})
        if given is None and (has_weights(policy) or policy_factory is not None):
            schemes["policy"] = self._scheme_class()
        for model_id, scheme in schemes.items():
            if not isinstance(scheme, NodeWeightSyncScheme):
                raise TypeError(
                    f"{type(scheme).__name__} is for workers of one machine; {type(self).__name__} takes a "
                    f"{self._scheme_class.__name__}"
                )
            if model_id == "policy" and policy is not None and not has_weights(policy):
                raise TypeError(f"the policy ({type(policy).__name__}) is no nn.Module, so it has no weights to send")
            scheme.init_on_sender(model_id=model_id, context=self)
        return schemes

    def _let_nodes_write(self, replay_buffer: Any) -> bool:
        post = self._postprocessing
        if not self._can_reach(replay_buffer) or post.pre_collect_hook or post.post_collect_hook:
            return False
        for member in self._roster.members:
            self._let_node_write(member)
        return True

    def _let_node_write(self, member: Member) -> None:
        shared: Any = self.replay_buffer
        total = self._num_envs
        buffer = shared.for_writer(f"{self._run}-{total}")
        plan = BufferPlan(buffer, member.first_env, total, self._postprocessing, self._by_episode)
        self._roster.call(member, "write_to", plan)

    # -- who is there ----------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Any:
        return self._roster.engine

    @property
    def _alive(self) -> list[Member]:
        return self._roster.alive

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, those that were lost left out."""
        return len(self._alive)

    @property
    def num_workers(self) -> int:
        """How many nodes there are, those that were lost counted too, since weights are addressed by number."""
        return len(self._roster.members)

    @property
    def _num_envs(self) -> int:
        return self._roster.num_envs

    @property
    def lock(self) -> FairLock:
        """Of weight schemes. Whoever holds it, no other thread sends weights, gives orders or starts nodes again."""
        return self._lock

    def _require_open(self) -> None:
        if self._owner_pid != os.getpid():
            raise RuntimeError(
                f"this collector's nodes belong to process {self._owner_pid}, and this is {os.getpid()}; make the "
                "collector in the process that iterates over it (a DataLoader: num_workers=0)"
            )
        self._require_open_unless(False)

    def _welcome(self, member: Member) -> None:
        """A node was started again: the newest weights, a seed of its own, and where it writes to."""
        for scheme in self._schemes.values():
            scheme.resend(member.node)
        if member.seed is not None:
            seed, static = member.seed
            own = derived_seed(seed, member.node, member.plan.incarnation)
            self._roster.call(member, "set_seed", own, static)
        if self.__dict__.get("_writes_itself"):
            self._end_tracks(member)
            self._let_node_write(member)

    def _forget(self, member: Member, orders: Sequence[Order]) -> None:
        """A node is gone for good."""
        self._random_frames_left += sum(order.random_frames for order in orders)
        for scheme in self._schemes.values():
            scheme.forget(member.node)
        self._gone.append(member)

    def _end_tracks_of_gone(self) -> None:
        """Once all that they had sent is in the replay buffer."""
        while self._gone:
            self._end_tracks(self._gone.pop())

    def _end_tracks(self, member: Member) -> None:
        """What it was in does not go on in the replay buffer either."""
        end = getattr(self.__dict__.get("replay_buffer"), "end_tracks", None)
        if end is not None:
            end(member.first_env, member.about.num_envs, self._num_envs)

    # -- orders ----------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> Arrival | None:
        arrival = self._roster.next_arrival()
        if arrival is not None:
            self._random_frames_left += arrival.report.random_left
            if self._assembler is not None:
                self._assembler.fragments |= set(arrival.report.fragments)
        return arrival

    def _drain(self) -> None:
        """Wait for what is under way, and throw it away: its random frames are still due."""
        while self._roster.has_pending:
            arrival = self._next_arrival()
            if arrival is None:
                continue
            if arrival.order.into_buffer:  # it is there already
                self._frames += arrival.report.frames
            else:
                self._put_back_random(arrival)

    def _put_back_random(self, arrival: Arrival) -> None:
        self._random_frames_left += arrival.order.random_frames - arrival.report.random_left

    def _take_random(self, frames: int) -> int:
        taken = min(self._random_frames_left, frames)
        self._random_frames_left -= taken
        return taken

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
        self._weights_after_batch([arrival.member for arrival in self._in_hand])
        self._frames += sum(arrival.report.frames for arrival in self._in_hand)
        self._iter += 1
        self._in_hand = []
        return None

    def _collect(self) -> TensorDictBase:
        self._require_open()
        return self._collect_from_all() if self._sync else self._collect_from_one()

    def _collect_from_one(self) -> TensorDictBase:
        self._await_one()
        (arrival,) = self._in_hand
        self._weights_after_batch([arrival.member])
        self._give_orders()  # before the consumer has its turn
        self._first_env = arrival.member.first_env + arrival.report.first_env
        self._delivered = [(arrival.member, arrival.incarnation)]
        batch = self._deliver([arrival], arrival.report.shape)
        self._in_hand = []
        return batch

    def _await_one(self) -> bool:
        """A batch of whichever node; False if none has an order, nor gets one."""
        if self._to_give_up:
            self._drop_interrupted()
        if not self._in_hand:
            self._end_tracks_of_gone()
        while not self._in_hand:
            if not self._draining:
                self._give_orders()
            if not self._roster.has_pending:
                return False
            arrival = self._next_arrival()
            if arrival is not None:
                self._in_hand = [arrival]
        return True

    def _give_orders(self) -> None:
        """In turns, so that at the beginning and at the end all nodes have something to do."""
        with self._lock:
            self._roster.finish_restarts()
            for rank in range(self._engine.orders_per_node):
                for member in self._alive:
                    if len(member.pending) == rank and not self._give_order(member):
                        return

    def _give_order(self, member: Member) -> bool:
        """False: all that is to be collected is under way."""
        each, steps, num_envs = self._lead.numel(), self._budget.steps_per_batch, None
        left = self._frames_to_order
        if left is not None:
            if left <= 0:
                return False
            steps = min(steps, left // each)
            if not steps:
                steps, num_envs = 1, left
        frames = steps * each if num_envs is None else num_envs
        self._roster.order(member, steps, num_envs, self._take_random(frames), self._writes_itself)
        return True

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
        in_hand = sum(arrival.report.frames for arrival in self._in_hand)
        return self._budget.total_frames - self._frames - under_way - in_hand

    def _collect_from_all(self) -> TensorDictBase:
        self._await_all()
        self._weights_after_batch(self._alive)
        parts = self._in_hand
        self._delivered = [(part.member, part.incarnation) for part in parts]
        if len(parts[0].report.shape) == len(self._lead) + 1 and len({part.report.shape for part in parts}) == 1:
            batch = self._deliver(parts, (len(parts), *parts[0].report.shape))
        else:  # one step of the first envs, at the end: what each node has of it, one below the other
            batches = [self._deliver([part], (part.report.frames, 1)) for part in parts]
            batch = batches[0] if len(batches) == 1 else torch.cat(batches)  # type: ignore[arg-type,assignment]
        self._in_hand = []
        return batch

    def _await_all(self) -> None:
        """One batch of every node, in their order."""
        self._drop_interrupted()
        self._end_tracks_of_gone()
        while not self._in_hand:  # who had the last order may be lost
            self._give_orders_to_all()
            while self._roster.has_pending:
                arrival = self._next_arrival()
                if arrival is not None:
                    self._in_hand.append(arrival)
        self._in_hand.sort(key=lambda arrival: arrival.member.node)

    def _give_orders_to_all(self) -> None:
        with self._lock:
            self._roster.finish_restarts()
            each, members = self._lead.numel(), self._alive
            budget = dataclasses.replace(self._budget, num_envs=each * len(members))
            steps, num_envs = budget.next_batch(self._frames)
            rows_left = each * len(members) if num_envs is None else num_envs
            wanted = min(self._random_frames_left, steps * rows_left)
            for member in members:
                rows = min(each, rows_left)
                if not rows:
                    return
                rows_left -= rows
                # Evenly over nodes; the last ones take what others have no room for.
                nodes_left = -(-(rows_left + rows) // each)
                share = min(-(-wanted // nodes_left), rows * steps)
                wanted -= share
                self._random_frames_left -= share
                partly = None if num_envs is None else rows
                self._roster.order(member, steps, partly, share, self._writes_itself)

    def _drop_interrupted(self) -> None:
        """After Ctrl-C: what was under way, or had come, is dropped, and episodes with a gap do not go on."""
        self._to_give_up |= {member.node for member in self._alive if member.pending}
        dropped, self._in_hand = self._in_hand, []
        for arrival in dropped:
            if arrival.order.into_buffer:
                self._frames += arrival.report.frames
            else:
                self._put_back_random(arrival)
                self._to_give_up.add(arrival.member.node)
        self._drain()
        for member in self._alive if not self._writes_itself else ():
            if member.node in self._to_give_up:  # until it has: Ctrl-C may come again
                self._roster.ask(member, "give_up")
                self._to_give_up.discard(member.node)
        self._to_give_up.clear()

    def _give_up_episodes(self) -> None:
        if self._gathered is not None:  # else Ctrl-C came while it waited
            self._to_give_up |= {member.node for member in self._alive}

    def _deliver(self, parts: Sequence[Arrival], shape: Sequence[int]) -> TensorDictBase:
        frames = parts[0].report.frames
        leaves = join_batches(self._fields, [part.payload for part in parts if part.payload is not None], frames)
        steps = shape[-1]
        for key in self._tracked:
            rows = []
            for member, _, report, *_ in parts:
                first = member.first_env + report.first_env
                numbers = torch.arange(first, first + frames // steps)
                rows.append(torch.full_like(numbers, member.node) if key == WORKER else numbers)
            leaves[key] = torch.cat(rows).repeat_interleave(steps)
        tree = nested({key: leaf.view(*shape, *leaf.shape[1:]) for key, leaf in leaves.items()})
        names: Any = [None] * (len(shape) - 1) + ["time"]
        where = self._storing
        device = where if where is not None and where.type == "cpu" else None
        batch = TensorDict(tree, batch_size=shape, names=names, device=device)
        return batch if device is not None or where is None else batch.to(where)

    #: The nodes that the batch in hand is of, and how often they had been started again when they sent it.
    _delivered: Sequence[tuple[Member, int]] = ()

    def _put(self, batch: Any, raw: TensorDictBase) -> None:
        """Each node's frames behind its earlier ones."""
        for member, incarnation in self._delivered:  # those that were started again do not go on with what is there
            if self._lives_stored.setdefault(member.node, incarnation) != incarnation:
                self._end_tracks(member)
                self._lives_stored[member.node] = incarnation
        self._put_each(batch, raw)
        if not self._in_hand:
            self._end_tracks_of_gone()

    def _put_each(self, batch: Any, raw: TensorDictBase) -> None:
        stacked = self._sync and raw.ndim == len(self._lead) + 2 and self._assembler is None
        if not stacked or getattr(batch, "shape", None) != raw.shape:
            super()._put(batch, raw)
            return
        assert self._sink is not None
        for (member, _), own, own_raw in zip(self._delivered, batch.unbind(0), raw.unbind(0), strict=True):
            self._sink.put(own, own_raw, member.first_env, [own])

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

    def _weights_after_batch(self, members: Sequence[Member]) -> None:
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

    @ctrl_c_waits
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
        checked = {name: self._checked_source(name, source) for name, source in sources.items()}
        sent = {name: source for name, source in checked.items() if name in self._schemes}
        if not sent:
            return
        nodes = None if worker_ids is None else [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        if nodes == []:
            return
        for node in nodes or ():
            if not 0 <= node < self.num_workers:
                raise ValueError(f"there is no node {node}; there are {self.num_workers}, counted from 0")
        with self._lock:  # versions arrive in the order in which they were counted
            self._policy_version += 1
            for name, source in sent.items():
                self._send(name, source, nodes, self._policy_version)

    def _checked_source(self, name: str, source: Any) -> Any:
        """What is sent for a source: before any node gets some of it, that it fits."""
        if name not in self._schemes:
            if name != "policy":
                known = ", ".join(map(repr, self._schemes)) or "none"
                raise KeyError(
                    f"there is no model {name!r} whose weights can be sent; weight_sync_schemes has {known}: give a "
                    "scheme for it there"
                )
            if source is not None:
                raise TypeError(
                    f"the policy ({type(self.policy).__name__}) is no nn.Module, so it has no weights to update"
                )
            require_no_weights(self.policy)
            return None
        if source is None and (name != "policy" or self.policy is None):
            raise RuntimeError(
                "update_policy_weights_: the policy was made by policy_factory on the nodes, so there are no weights "
                "here to send; give them, or give policy= as well as policy_factory="
            )
        if source is None and name == "policy":
            require_findable(self.policy)
        if source is not None and name == "policy" and self.policy is not None:
            return weights_for_copies(self.policy, source)
        return source if name == "policy" else weights_for_part(source)

    def _send(self, name: str, source: Any, nodes: Sequence[int] | None, version: int) -> None:
        self._schemes[name].send_to(_tensors(self.policy if source is None else source), nodes, version)

    # What a scheme needs of its collector.

    def share_weights(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self._engine.share(pack_tensors(tensors))

    def post_weights(self, node: int, shared: Any, version: int, model_id: str) -> tuple[Future[None], int] | None:
        """What it came to, and the incarnation of the node that it was sent to; None if that is gone."""
        member = self._roster.members[node]
        if not member.alive:
            return None
        member.batches_since_weights = 0
        return self._engine.set_weights(node, shared, version, model_id), member.plan.incarnation

    def weights_failed(self, node: int, incarnation: int, error: Exception) -> None:
        """A node that was started again has them already."""
        member = self._roster.members[node]
        if isinstance(error, NodeLost):
            self._roster.deal_with(member, incarnation, error)
            return
        add_note(error, f"swath: raised in {member.who}, while it applied weights")
        raise error

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

    def _still(self, what: str) -> None:
        """Nothing is under way."""
        self._require_open()
        self._require_still(what)
        self._drain()
        for arrival in self._in_hand:
            self._put_back_random(arrival)
        self._in_hand = []

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed envs, random actions and policies of all nodes, one after the other; new episodes start.

        Returns the seed for the next collector (the same one, if ``static_seed``).
        """
        self._still("set_seed")
        following = int(seed)
        for member in self._roster.members:
            member.seed = following, static_seed
            answer = self._roster.ask(member, "set_seed", following, static_seed) if member.alive else []
            if answer and answer[0] is not None:
                following = answer[0]
            elif not answer and not static_seed:  # it is gone: the others get the seeds that they would have had
                for _ in range(member.about.num_envs):
                    following = next_seed(following)
        if self._assembler is not None:
            self._assembler.drop_all()
        return following

    def reset(self, **kwargs: Any) -> None:
        """Start new episodes with the next batch, in all envs."""
        self._still("reset")
        self._roster.ask_all("reset", **kwargs)
        if self._assembler is not None:
            self._assembler.drop_all()

    def state_dict(self) -> dict[str, Any]:
        """Counters, the policy's weights here, and what each node can save of itself (see ``Collector.state_dict``)."""
        with self._held():
            self._require_open()
            state: dict[str, Any] = {f"node{m.node}": own for m, own in self._roster.ask_all("state_dict")}
            under_way = [order.random_frames for member in self._alive for order in member.pending.values()]
            return {
                **state,
                **save_own_policy(self.policy),
                "frames": self._frames,
                "iter": self._iter,
                "policy_version": self._policy_version,
                "random_frames_left": self._random_frames_left + sum(under_way),
                "next_ids": {f"node{m.node}": m.next_own_id for m in self._alive},
            }

    def _begin_ids_at(self, first: int) -> None:
        for member in self._alive:
            member.next_own_id = max(member.next_own_id, -(-first // member.plan.ids.stride))
            self._roster.ask(member, "begin_ids_at", member.next_own_id)

    def _check_state(self, state_dict: Any, strict: bool) -> None:
        """Raise what nodes would raise, and change nothing."""
        who, expected = type(self).__name__, f"the state of a collector of {count(len(self._alive), 'node')}"
        require_counters(who, state_dict, expected)
        names, next_ids = numbered(state_dict, "node"), state_dict.get("next_ids")
        if len(names) != len(self._alive) or not isinstance(next_ids, Mapping) or next_ids.keys() != set(names):
            raise mismatch(who, state_dict, expected)
        for member, name in zip(self._alive, names, strict=True):
            self._roster.ask(member, "check_state", state_dict[name], strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where ``state_dict`` was taken, with as many nodes; new episodes start.

        The policy that this collector was made with has its weights again, too.

        Raises:
            StateMismatch: it is the state of something else. Whatever is raised, nothing was changed.
        """
        self._require_open()
        self._require_still("load_state_dict")
        self._check_state(state_dict, strict)
        states = {name: state_dict[name] for name in numbered(state_dict, "node")}
        load_all_or_nothing(self.policy, state_dict, strict)
        self._still("load_state_dict")
        self._policy_version = state_dict["policy_version"]
        for member, (name, own) in zip(self._alive, states.items(), strict=True):
            member.next_own_id = max(member.next_own_id, state_dict["next_ids"][name])
            self._roster.ask(member, "load_state_dict", own, strict, member.next_own_id)
            weights, _ = copied_policy(own)
            if weights is not None and "policy" in self._schemes and self._loss.restarts:
                shared = self.share_weights(_tensors(weights))
                self._schemes["policy"].remember(shared, [member.node], self._policy_version)
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
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
            "nodes": self._roster.describe(),
        }

    def getattr_env(self, name: str) -> Any:
        """An attribute of the first node's env."""
        return self._ask_first("getattr_env", name)

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the first node's policy."""
        return self._ask_first("getattr_policy", name)

    def _ask_first(self, method: str, name: str) -> Any:
        self._require_open()
        answer: list[Any] = []
        while not answer:
            answer = self._roster.ask(self._alive[0], method, name)
        return answer[0]

    def getattr_rb(self, name: str) -> Any:
        return getattr(self.replay_buffer, name)

    def get_distant_attr(self, path: str) -> list[Any]:
        """An attribute of each node's collector by its dotted path, such as ``"env.batch_size"``."""
        self._require_open()
        return [value for _, values in self._roster.ask_all("get_distant_attr", path) for value in values]

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``path`` (such as ``"env.set_level"``) on every node."""
        self._require_open()
        return [value for _, value in self._roster.ask_all("cascade_execute", path, *args, **kwargs)]

    def policy_plan(self) -> str:
        """How the policy is called in each node, and why not faster; see ``Collector.policy_plan``."""
        return alike_or_each(self.cascade_execute("policy_plan"), "node")

    def env_plan(self) -> str:
        """How each node's envs are stepped, and why not faster; see ``Collector.env_plan``."""
        return alike_or_each(self.cascade_execute("env_plan"), "node")

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
        self._roster.close(self._shutdown_timeout)
        self._end_tracks_of_gone()

    def __del__(self) -> None:
        self._say_that_it_is_gone()
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
        super().__init__(collector, lambda: True)
        self._roster = collector._roster

    def is_still(self) -> bool:
        return not self._roster.has_pending

    def hurry(self) -> None:
        self._drain(True)

    def go_on(self) -> None:
        self._drain(False)

    def _drain(self, draining: bool) -> None:
        collector = self.owner()
        if collector is not None:  # it may be on its way out
            collector._draining = draining


def storing(device: Any) -> torch.device | None:
    """Where batches are delivered: the first of several devices."""
    first = device[0] if isinstance(device, (list, tuple)) else device
    return None if first is None else torch.device(first)


def _tensors(source: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in flat_weights(source).items() if isinstance(tensor, torch.Tensor)}
