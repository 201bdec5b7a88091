"""NodesCollector: rollouts on nodes, wherever an engine runs them. What all distributed collectors share."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.collectors.assignment import list_nodes
from swath.collectors.budget import Budget
from swath.collectors.config import NodesConfig
from swath.collectors.distributed.engine import Engine
from swath.collectors.distributed.node_batches import NodeBatches
from swath.collectors.distributed.node_buffer import DirectWriting, NodeTracks
from swath.collectors.distributed.node_pool import Arrival, Loss, NodeHandle, NodePool
from swath.collectors.distributed.plans import NodePlans
from swath.collectors.distributed.requests import NodePlan
from swath.collectors.front_door import explains_unknown
from swath.collectors.numbers import positive_int, seed_number
from swath.collectors.remote import ENV, WORKER
from swath.collectors.saved import load_all_or_nothing
from swath.collectors.single import Collector
from swath.data.buffer_writer import BufferPlan
from swath.data.payload import pack_tensors
from swath.data.postprocessing import Processing
from swath.data.trajectories import TrajFormat
from swath.envs.base import next_seed
from swath.errors import NodeLost, add_note
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.seeding import derived_seed
from swath.rollout.structure import Structure
from swath.states import count, mismatch, numbered, require_counters
from swath.weakly import weakly
from swath.weight_update.nodes import NodeWeightSyncScheme
from swath.weight_update.weights import (
    copied_policy,
    flat_weights,
    has_weights,
)


class NodesCollector(NodeBatches):
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

    _inner = ("is_draining", "post_weights", "share_weights", "weights_failed")
    _place = "node"
    _where = "on the nodes"
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
        trajs_per_write: int | None = None,
        traj_format: TrajFormat | None = "padded",
        check_finite: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[Any], Any] | None = None,
        auto_register_policy_transforms: bool | None = None,
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
        self._begin()
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
        self._run = uuid.uuid4().hex
        self.is_draining = False
        #: Of a batch that is being put together: what has come. It is not lost if Ctrl-C is pressed meanwhile.
        self._in_hand: list[Arrival] = []
        #: Nodes with frames that nobody got: their episodes do not go on.
        self._to_give_up: set[int] = set()
        self._init_random_frames = config.init_random_frames or 0
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
            random_frames=self._init_random_frames,
            num_threads=config.num_sub_threads,
            part_ids=tuple(name for name in config.weight_sync_schemes or () if name != "policy"),
        )
        made = plans.all(factories, config.create_env_kwargs, config.policy_factory, config.collector_kwargs)
        assembler = config.assembler()
        self._episodes_per_write = 0 if assembler is None else assembler.most
        may_have_weights = has_weights(policy) or config.policy_factory is not None
        default = self._scheme_class if may_have_weights else None
        self._schemes = self._make_schemes(config.weight_sync_schemes, policy, default)
        engine = self._make_engine(count)
        if loss.restarts and not engine.restarts:
            engine.close(0.0)
            raise ValueError(
                f"restart_nodes={loss.restarts}: {type(self).__name__} cannot start a node of this kind again (torch "
                "RPC, or nodes that others start); on_node_loss='continue' goes on with the rest"
            )
        self._nodes = nodes = NodePool(
            engine, loss, config.who, self._lock, config.start_timeout_s, weakly(self._welcome), weakly(self._forget)
        )
        self._tracks = NodeTracks(config.replay_buffer, nodes)
        try:
            self._start(made)
            first = nodes.handles[0].about
            self._fields = first.fields
            self._structure = None if first.structure is None else Structure.from_json(first.structure)
            self._lead = torch.Size(first.lead)
            each = self._lead.numel()
            shared = each * count if self._sync else each
            budget = Budget.resolve(frames, config.total_frames, shared)
            postprocessing = config.postprocessing()
            postprocessing.require_flags(self._fields)
            buffer = config.replay_buffer
            super().__init__(budget, postprocessing, assembler, buffer, config.extend_buffer)
            random_frames = self._init_random_frames - sum(plans.random_frames)
            self._schedule(budget, count, random_frames, engine.orders_per_node)
            self._extends = config.extend_buffer
            self._writes_itself = buffer is not None and self._let_nodes_write(buffer)
            if self._must_send_first(config.policy_factory):
                self._send_one("policy", policy, None, 0)
            elif loss.restarts and "policy" in self._schemes and policy is not None:
                # The policy may be trained by the time that a node is started again.
                self._schemes["policy"].remember(self.share_weights(_tensors(policy)), range(count), 0)
        except BaseException:
            nodes.close(5.0)
            raise
        self._is_made()

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

    def _start(self, plans: Sequence[NodePlan]) -> list[NodeHandle]:
        return self._nodes.launch(plans)

    def _check_scheme(self, scheme: Any) -> None:
        if not isinstance(scheme, NodeWeightSyncScheme):
            raise TypeError(
                f"{type(scheme).__name__} is for workers of one machine; {type(self).__name__} takes a "
                f"{self._scheme_class.__name__}"
            )

    def _let_nodes_write(self, replay_buffer: Any) -> bool:
        post = self._postprocessing
        if not self._can_reach(replay_buffer) or post.pre_collect_hook or post.post_collect_hook:
            return False
        for handle in self._nodes.handles:
            self._let_node_write(handle)
        return True

    def _let_node_write(self, handle: NodeHandle) -> None:
        shared: Any = self.replay_buffer
        total = self._num_envs
        buffer = shared.for_writer(f"{self._run}-{total}")
        processing = Processing(self._postprocessing, self._episodes_per_write)
        plan = BufferPlan(buffer, handle.first_env, total, processing)
        self._nodes.call(handle, "write_to", plan)

    # -- who is there ----------------------------------------------------------------------------------------------

    def _welcome(self, handle: NodeHandle) -> None:
        """A node was started again: the newest weights, a seed of its own, and where it writes to."""
        for scheme in self._schemes.values():
            scheme.resend(handle.node)
        if handle.seed is not None:
            seed, static = handle.seed
            own = derived_seed(seed, handle.node, handle.plan.incarnation)
            self._nodes.call(handle, "set_seed", own, static)
        if self.__dict__.get("_writes_itself"):
            self._tracks.end(handle)
            self._let_node_write(handle)
        if self._recordings is not None:
            self._recordings.begin_again(handle)
        asked, self._scheduler.pending[handle.node] = self._scheduler.pending[handle.node], {}
        for each in asked.values():
            self._submit(handle, each.request, each.num_frames)

    def _forget(self, handle: NodeHandle) -> None:
        """A node is gone for good."""
        self._scheduler.take_back(handle.node)
        for scheme in self._schemes.values():
            scheme.forget(handle.node)
        self._tracks.gone.append(handle)

    # -- in the background -----------------------------------------------------------------------------------------

    def _work(self) -> Any:
        if not self.__dict__.get("_writes_itself"):
            return super()._work()
        return DirectWriting(self, self._scheduler)

    # -- weights ---------------------------------------------------------------------------------------------------

    def _weights_after_batch(self, handles: Sequence[NodeHandle]) -> None:
        """What ``update_after_each_batch`` and its like ask for."""
        if "policy" not in self._schemes or self.policy is None:
            return
        if self._weights_every is not None and (self._iter + 1) % self._weights_every == 0:
            handles = self._alive
        elif not self.update_after_each_batch:
            most = self._most_batches_without
            handles = [] if most is None else [h for h in handles if h.batches_since_weights >= max(1, most)]
        if handles:
            self.update_policy_weights_(worker_ids=[handle.node for handle in handles])

    @ctrl_c_waits
    def _send(self, sources: Mapping[str, Any], places: int | Sequence[int] | None) -> None:
        nodes = None if places is None else [places] if isinstance(places, int) else list(places)
        if not sources or nodes == []:
            return
        for node in nodes or ():
            if not 0 <= node < self.num_workers:
                raise ValueError(f"there is no node {node}; there are {self.num_workers}, counted from 0")
        self._policy_version += 1
        for name, source in sources.items():
            self._send_one(name, source, nodes, self._policy_version)

    def _send_one(self, name: str, source: Any, nodes: Sequence[int] | None, version: int) -> None:
        if source is None and name != "policy":
            raise RuntimeError(f"update_policy_weights_: give the weights of {name!r}; there are none here to send")
        self._schemes[name].send_to(_tensors(self.policy if source is None else source), nodes, version)

    # What a scheme needs of its collector.

    def share_weights(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self._engine.share(pack_tensors(tensors))

    def post_weights(self, node: int, shared: Any, version: int, model_id: str) -> tuple[Future[None], int] | None:
        """What it came to, and the incarnation of the node that it was sent to; None if that is gone."""
        handle = self._nodes.handles[node]
        if not handle.alive:
            return None
        handle.batches_since_weights = 0
        return self._engine.set_weights(node, shared, version, model_id), handle.plan.incarnation

    def weights_failed(self, node: int, incarnation: int, error: Exception) -> None:
        """A node that was started again has them already."""
        handle = self._nodes.handles[node]
        if isinstance(error, NodeLost):
            self._nodes.deal_with(handle, incarnation, error)
            return
        add_note(error, f"swath: raised in {handle.who}, while it applied weights")
        raise error

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
        following = self._seed = seed_number(seed)
        for handle in self._nodes.handles:
            handle.seed = following, static_seed
            answer = self._nodes.ask(handle, "set_seed", following, static_seed) if handle.alive else []
            if answer and answer[0] is not None:
                following = answer[0]
            elif not answer and not static_seed:  # it is gone: the others get the seeds that they would have had
                for _ in range(handle.about.num_envs):
                    following = next_seed(following)
        self._drop_episodes()
        return following

    def reset(self, **kwargs: Any) -> None:
        """Start new episodes with the next batch, in all envs."""
        self._still("reset")
        self._nodes.ask_all("reset", **kwargs)
        self._drop_episodes()

    def state_dict(self) -> dict[str, Any]:
        """Counters, the policy's weights here, and what each node can save of itself (see ``Collector.state_dict``)."""
        with self._held():
            self._require_open()
            states = {f"node{node}": own for node, own in self._ask_each("state_dict")}
            next_ids = {f"node{handle.node}": handle.next_own_id for handle in self._alive}
            return {**states, **self._counters(), "next_ids": next_ids}

    def _begin_ids_at(self, first: int) -> None:
        for handle in self._alive:
            handle.next_own_id = max(handle.next_own_id, -(-first // handle.plan.ids.stride))
            self._nodes.ask(handle, "begin_ids_at", handle.next_own_id)

    def check_state(self, state_dict: Any, strict: bool) -> None:
        """Raise what nodes would raise, and change nothing."""
        who, expected = type(self).__name__, f"the state of a collector of {count(len(self._alive), 'node')}"
        require_counters(who, state_dict, expected)
        names, next_ids = numbered(state_dict, "node"), state_dict.get("next_ids")
        if len(names) != len(self._alive) or not isinstance(next_ids, Mapping) or next_ids.keys() != set(names):
            raise mismatch(who, state_dict, expected)
        for handle, name in zip(self._alive, names, strict=True):
            self._nodes.ask(handle, "check_state", state_dict[name], strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where ``state_dict`` was taken, with as many nodes; new episodes start.

        The policy that this collector was made with has its weights again, too.

        Raises:
            StateMismatch: it is the state of something else. Whatever is raised, nothing was changed.
        """
        self._require_open()
        self._require_still("load_state_dict")
        self.check_state(state_dict, strict)
        states = {name: state_dict[name] for name in numbered(state_dict, "node")}
        load_all_or_nothing(self.policy, state_dict, strict)
        self._still("load_state_dict")
        for handle, (name, own) in zip(self._alive, states.items(), strict=True):
            handle.next_own_id = max(handle.next_own_id, state_dict["next_ids"][name])
            self._nodes.ask(handle, "load_state_dict", own, strict, handle.next_own_id)
            weights, _ = copied_policy(own)
            if weights is not None and "policy" in self._schemes and self._loss.restarts:
                shared = self.share_weights(_tensors(weights))
                self._schemes["policy"].remember(shared, [handle.node], state_dict["policy_version"])
        self._load_counters(state_dict)

    # -- looking into nodes ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Where the collector stands, with a line for each node; never blocks."""
        return {
            **super().stats(),
            "policy_version": self._policy_version,
            "num_envs": self._num_envs,
            "num_nodes": self.num_nodes,
            "engine": self._engine.name,
            "nodes": [
                {**line, "orders_under_way": len(pending)}
                for line, pending in zip(self._nodes.describe(), self._scheduler.pending, strict=True)
            ],
        }

    def _ask_each(self, name: str, *args: Any, **kwargs: Any) -> list[tuple[int, Any]]:
        return [(handle.node, answer) for handle, answer in self._nodes.ask_all(name, *args, **kwargs)]

    def _ask_place(self, place: int, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._nodes.ask(self._nodes.handles[place], name, *args, **kwargs)

    @property
    def _first_place(self) -> int:
        return self._alive[0].node

    def get_distant_attr(self, path: str) -> list[Any]:
        """What a path leads to in each node's collector, or in each of its workers'; see ``Collector``."""
        return [value for values in super().get_distant_attr(path) for value in values]

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
        self._nodes.close(self._shutdown_timeout)
        self._tracks.end_gone()

    def _describe_places(self) -> str:
        return f"{self.num_nodes} nodes"


def storing(device: Any) -> torch.device | None:
    """Where batches are delivered: the first of several devices."""
    first = device[0] if isinstance(device, (list, tuple)) else device
    return None if first is None else torch.device(first)


def _tensors(source: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in flat_weights(source).items() if isinstance(tensor, torch.Tensor)}
