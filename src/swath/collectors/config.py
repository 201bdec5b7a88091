"""What a collector was asked for: one frozen object, made by its constructor, checked, and handed on.

Each argument has its type, its default, its documentation and its checks here, and nowhere else: constructors list the
names for editors and type checkers, and ``front_door.py`` puts this documentation into theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.collectors.arguments import make_assembler, policy_wrapper, random_frames, step_limit
from swath.collectors.devices import Devices
from swath.collectors.numbers import flag, positive_int, positive_number, whole_number
from swath.data.postprocessing import Postprocessing
from swath.data.trajectories import TrajectoryAssembler, TrajFormat
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import Control
from swath.rollout.plan import CallOptions
from swath.rollout.policies import refuse_rand_step


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """What any collector can be asked for.

    Args:
        create_env_fn: an env, or a function that makes one; a ``gymnasium`` env or its id will do.
        policy: see "Policies" in the docs; None draws random actions.
        policy_factory: a function that makes the policy, instead of ``policy``.
        frames_per_batch: frames of a batch over all envs, rounded up to whole steps.
        total_frames: when to stop, exactly; -1 for never.
        device: fills those of the other three that are not given.
        env_device: where the env steps.
        policy_device: where the policy runs; a policy that is elsewhere is copied there.
        storing_device: where batches are delivered.
        create_env_kwargs: for ``create_env_fn``.
        max_frames_per_traj: truncate episodes after this many steps; adds ``step_count``.
        init_random_frames: exactly so many frames get random actions first; other policy outputs are zero in them.
        reset_at_each_iter: start every batch with new episodes.
        reset_when_done: True; an env that is done is always reset.
        postproc: applied to each batch before it is delivered.
        split_trajs: deliver one row per trajectory, padded, with ``("collector", "mask")``.
        exploration_type: how probabilistic policies choose; random by default.
        set_truncated: mark the last step of every batch truncated (the env is not reset).
        use_buffers: accepted, since memory is always reused; not with a ``replay_buffer``.
        replay_buffer: where frames go, of ``swath.data`` or of TorchRL; iteration then yields None, and ``start()``
            collects in the background.
        extend_buffer: False calls a TorchRL buffer's ``add`` for every step.
        weight_updater: the older way to say how weights get into the policy.
        trust_policy: call the policy with a TensorDict without looking at its signature.
        compile_policy: True, or keywords for ``torch.compile``.
        cudagraph_policy: True, or keywords for ``CudaGraphModule``.
        capture_policy: False calls the policy in every step, instead of recording what it does and running that
            (``policy_plan()`` says which).
        no_cuda_sync: do not wait for copies from a GPU before a batch is handed over.
        track_policy_version: stamp every frame with ``policy_version``.
        track_traj_ids: False leaves ``("collector", "traj_ids")`` out.
        compact_obs: leave the observations out of ``next`` (they are in the following root).
        trajs_per_batch: deliver so many whole episodes at a time.
        trajs_per_write: of whole episodes that are complete, up to so many are written to the replay buffer at a time;
            by default each by itself.
        traj_format: how these are put together: "padded" or "cat".
        check_finite: raise on NaN and infinity.
        pre_collect_hook: called before a batch.
        post_collect_hook: called with each batch.
        auto_register_policy_transforms: True gives envs what a policy module needs and they lack: ``"is_init"``, and
            first values of the states of recurrent modules (``make_tensordict_primer()``). None and False: nothing.
        interruptor: its ``collection_stopped()`` is asked while a batch is collected, and makes it shorter.
    """

    #: The collector, in errors.
    who: str
    create_env_fn: Any
    policy: Any = None
    policy_factory: Any = None
    frames_per_batch: Any = None
    total_frames: Any = -1
    device: Any = None
    env_device: Any = None
    policy_device: Any = None
    storing_device: Any = None
    create_env_kwargs: Any = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    postproc: Callable[[TensorDictBase], Any] | None = None
    split_trajs: bool | None = None
    exploration_type: InteractionType | str | None = InteractionType.RANDOM
    set_truncated: bool = False
    use_buffers: bool | None = None
    replay_buffer: Any = None
    extend_buffer: bool = True
    weight_updater: Any = None
    trust_policy: bool | None = None
    compile_policy: bool | dict[str, Any] | None = None
    cudagraph_policy: bool | dict[str, Any] | None = None
    capture_policy: bool = True
    no_cuda_sync: bool = False
    track_policy_version: bool = False
    track_traj_ids: bool = True
    compact_obs: bool = False
    trajs_per_batch: int | None = None
    trajs_per_write: int | None = None
    traj_format: TrajFormat | None = "padded"
    check_finite: bool = False
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    auto_register_policy_transforms: bool | None = None
    interruptor: Any = None

    #: What of these a collector inside of a worker or a node is given as it is.
    _OF_WORKERS: ClassVar = (
        "max_frames_per_traj",
        "exploration_type",
        "reset_at_each_iter",
        "trust_policy",
        "compile_policy",
        "cudagraph_policy",
        "capture_policy",
        "no_cuda_sync",
        "track_policy_version",
        "track_traj_ids",
        "compact_obs",
    )

    @classmethod
    def of(cls, collector: Any, given: Mapping[str, Any]) -> Self:
        """From a constructor's own names (``locals()``)."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in given]
        return cls(who=type(collector).__name__, **{name: given[name] for name in names})

    def __post_init__(self) -> None:
        if self.frames_per_batch is None:
            raise TypeError(f"{self.who} needs frames_per_batch")
        for field in dataclasses.fields(self):
            if str(field.type).startswith("bool"):
                flag(field.name, getattr(self, field.name))
        if not self.reset_when_done:
            raise ValueError("reset_when_done=False is not supported: an env that is done is always reset")
        if self.replay_buffer is not None and self.use_buffers:
            raise TypeError("use_buffers=True does not go with a replay_buffer: nothing is returned")
        if self.split_trajs and not self.track_traj_ids:
            raise ValueError("split_trajs needs track_traj_ids=True")
        if self.auto_register_policy_transforms not in (True, False, None):
            given = self.auto_register_policy_transforms
            raise TypeError(f"auto_register_policy_transforms must be True, False or None; got {given!r}")
        self._check_policy()
        if isinstance(self.policy_factory, torch.nn.Module):
            kind = type(self.policy_factory).__name__
            raise TypeError(f"policy_factory must be a function that makes a policy; {kind} is one already: policy=")
        # As what they mean, from here on.
        self._set("max_frames_per_traj", step_limit(self.max_frames_per_traj))
        self._set("init_random_frames", random_frames(self.init_random_frames))
        self._set("track_policy_version", bool(self.track_policy_version))

    def _check_policy(self) -> None:
        if self.policy is not None and self.policy_factory is not None:
            raise TypeError("give either policy or policy_factory, not both")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # it is being made

    def but(self, **changes: Any) -> Self:
        """The same, but for these."""
        return dataclasses.replace(self, **changes)

    # -- as those who use it want it -------------------------------------------------------------------------------

    def postprocessing(self) -> Postprocessing:
        return Postprocessing(
            self.postproc,
            bool(self.split_trajs),
            self.set_truncated,
            self.check_finite,
            self.pre_collect_hook,
            self.post_collect_hook,
        )

    def assembler(self) -> TrajectoryAssembler | None:
        return make_assembler(self.trajs_per_batch, self.traj_format, self.replay_buffer, self.trajs_per_write)

    def call_options(self) -> CallOptions:
        wrapper = policy_wrapper(self.compile_policy, self.cudagraph_policy)
        return CallOptions(bool(self.trust_policy), wrapper, bool(self.capture_policy))

    def for_workers(self) -> dict[str, Any]:
        """Arguments of the collectors inside of workers and nodes."""
        return {name: getattr(self, name) for name in self._OF_WORKERS}


@dataclass(frozen=True, kw_only=True)
class SingleConfig(CollectorConfig):
    """What a ``Collector`` can be asked for, too.

    Args:
        return_same_td: yield the same memory each time, overwritten by the next batch.
        num_collectors: where to run. With a number (or a list of envs) and a ``backend``, what is made is a
            ``MultiCollector``, a ``RayCollector`` and so on.
        backend: "process", "ray", "distributed", "rpc" or "submitit"; "direct" is this process.
        backend_options: further arguments of the collector that is made.
        sync: of the collector that is made: True for batches of all, False for one after the other.
        worker_idx: for a collector inside of a worker: its number.
        traj_pool: for a collector inside of a worker: where trajectory ids come from.
        control: for a collector inside of a worker: how its owner reaches it.
        weight_recv_schemes: by model id ("policy", or a path such as "env.transform[0]"), schemes by which
            somebody else sends weights: they are applied between two steps.
        weight_sync_schemes: by model id, schemes by which updates go on to others: those that were initialised as
            senders, for receivers elsewhere. ``send`` of one that was not is ``update_policy_weights_``.
    """

    weight_sync_schemes: Mapping[str, Any] | None = None
    weight_recv_schemes: Mapping[str, Any] | None = None
    return_same_td: bool = False
    worker_idx: int | None = None
    traj_pool: TrajectoryIds | None = None
    control: Control | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError("give either weight_updater or weight_sync_schemes, not both")
        if self.replay_buffer is not None and self.return_same_td:
            raise TypeError("return_same_td does not go with a replay_buffer: nothing is returned")

    def devices(self) -> Devices:
        return Devices.resolve(self.device, self.env_device, self.policy_device, self.storing_device)


@dataclass(frozen=True, kw_only=True)
class BatchedConfig(SingleConfig):
    """What an ``AsyncBatchedCollector`` can be asked for, too.

    Args:
        create_env_fn: a list with a function (or Gymnasium id) for every env.
        policy: as for ``Collector``, or a ``policy_factory``; the policy runs in this process.
        create_env_kwargs: for the functions; may be a list with an entry for each env.
        frames_per_batch: exactly so many are in each batch.
        max_batch_size: most envs in a call of the policy.
        min_batch_size: wait for so many envs before a call, but not longer than ``server_timeout`` seconds.
        server_timeout: how long to wait for ``min_batch_size`` envs, in seconds.
        env_backend: "multiprocessing" (default), or "threading": for envs that wait for something outside.
        backend: the same as ``env_backend``.
        policy_backend: "threading" or "direct"; in both the policy runs in this process.
        envs_per_worker: how envs are packed; by default into as many processes as there are cores, and a thread for
            each.
        num_workers: how many processes (or threads) there are, instead of ``envs_per_worker``.
        server_config: ``max_batch_size``, ``min_batch_size`` and ``timeout`` as one mapping (or object).
        device_config: ``device``, ``policy_device``, ``env_device`` and ``storing_device`` as one mapping (or object).
        yield_completed_trajectories: yield single episodes ``[steps]`` as they end.
        policy_version: of the policy's weights at the start.
        policy_version_key: "policy_version"; None: frames have none, as with ``track_policy_version=False``.
        mp_start_method: "forkserver", "spawn" or "fork".
        num_sub_threads: torch's threads in each worker (1).
        step_timeout_s: raise ``WorkerHangs`` if a step takes longer.
        weight_sync: None: the policy runs in this process, and ``update_policy_weights_()`` updates it.
        weight_sync_model_id: "policy", the only model here.
        transport: None, as ``weight_sync``.
        verbose: False; nothing is written to the terminal.
    """

    max_batch_size: int | None = None
    min_batch_size: int | None = None
    server_timeout: float | None = None
    backend: str | None = None
    env_backend: str | None = None
    policy_backend: str | None = None
    envs_per_worker: int | None = None
    num_workers: int | None = None
    server_config: Any = None
    device_config: Any = None
    yield_completed_trajectories: bool = False
    traj_format: TrajFormat | None = None
    policy_version: int = 0
    track_policy_version: bool = True
    mp_start_method: str | None = None
    num_sub_threads: int | None = None
    step_timeout_s: float | None = None
    policy_version_key: str | None = "policy_version"
    weight_sync: Any = None
    weight_sync_model_id: str = "policy"
    transport: Any = None
    verbose: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.create_env_fn, Sequence) or isinstance(self.create_env_fn, str):
            raise TypeError("create_env_fn must be a list with a function for every env: [make_env] * 8")
        super().__post_init__()
        for name in ("transport", "weight_sync"):
            if getattr(self, name) is not None:
                raise TypeError(
                    f"{self.who}: {name} has no place here: the policy runs in this process, and "
                    "update_policy_weights_() updates it. To share a policy, give a PolicyClientModule as policy"
                )
        if self.control is not None:
            raise ValueError("control is for a Collector inside of a worker")
        if self.return_same_td:
            raise ValueError("return_same_td=True: frames of the next batch may come while this one is used")
        if self.weight_sync_model_id != "policy":
            raise ValueError(f"weight_sync_model_id={self.weight_sync_model_id!r}: there is one model here, 'policy'")
        if self.verbose:
            raise ValueError(
                "verbose=True: nothing is written to the terminal; ask stats(), or give post_collect_hook="
            )
        if self.policy_version_key is None:
            self._set("track_policy_version", False)
        elif self.policy_version_key != "policy_version":
            raise ValueError("policy_version_key: frames have their version as 'policy_version'; rename it in postproc")
        if self.policy_backend not in (None, "threading", "direct"):
            raise ValueError(
                f"policy_backend={self.policy_backend!r}: the policy runs in this process; to have it elsewhere, give "
                "a PolicyClientModule of an InferenceServer as policy"
            )

    def _check_policy(self) -> None:
        if (self.policy is None) == (self.policy_factory is None):
            both = ", not both" if self.policy is not None else ""
            raise TypeError("give either policy or policy_factory" + both)


class _Sends(CollectorConfig):
    """With a policy that may only be where weights come from."""

    def _check_policy(self) -> None:
        refuse_rand_step(self.policy)
        is_source = self.policy is not None and self.policy_factory is not None
        if is_source and not isinstance(self.policy, torch.nn.Module):
            raise TypeError("with a policy_factory, policy is only where weights come from: it must be an nn.Module")


@dataclass(frozen=True, kw_only=True)
class WorkersConfig(_Sends):
    """What a ``MultiCollector`` can be asked for, too.

    Args:
        create_env_fn: a list with a factory for each env; or one factory, for ``num_workers`` (times
            ``envs_per_worker``) envs.
        num_workers: how many processes share the envs; by default one for each, but not more than there are cores.
            "auto" measures first. The shape of what is delivered does not depend on it.
        envs_per_worker: instead of ``num_workers``.
        create_env_kwargs: for the factories; may be a list with an entry for each env.
        policy_factory: a function that makes the policy in a worker; may be a list with an entry for each env.
        device: fills those of the other three that are not given; may be a list, as they may.
        frames_per_batch: of all envs together (sync) or of each (async); or a list.
        policy: with a ``policy_factory``, only where weights come from.
        collector_class: what runs in a worker: ``Collector``, or a subclass of it.
        weight_sync_schemes: by model id; shared memory by default.
        update_at_each_batch: send the policy's weights with every batch.
        num_threads: torch's threads in this process.
        num_sub_threads: torch's threads in each worker (1).
        init_fn: called first in every worker.
        mp_start_method: "forkserver", "spawn" or "fork".
        restart_workers: how often a worker that died, raised or hangs is started again.
        step_timeout_s: how long a step may take before its worker counts as hanging; None for ever.
        track_worker: write the worker's number into ``("collector", "worker")``.
        track_env: write the env's number into ``("collector", "env")``.
        sync: True for batches of all workers, False for one worker's as they come.
        cat_results: with ``sync``: "stack" (the default) for ``[envs, *batch_size, T]``, 0 to join the envs in their
            first dimension, -1 in time.
        preemptive_threshold: with ``sync``: when this share of the envs has finished, the others stop at their next
            step. What they lack has trajectory id -1 and is False in ``("collector", "mask")``; joined in time, it is
            left out.
        max_policy_lag: without ``sync``: no frame is delivered whose weights are more than so many updates old.
        on_policy_lag: "hold" (the default) holds workers back so that their frames do not get that old, as long as
            there are not more updates per batch than there were before; "drop" lets them go on. Frames that are too
            old are dropped in either case, and others are collected instead.
    """

    num_workers: Any = None
    envs_per_worker: Any = None
    collector_class: Any = None
    track_worker: bool = False
    track_env: bool = False
    update_at_each_batch: bool = False
    weight_sync_schemes: Mapping[str, Any] | None = None
    num_threads: int | None = None
    num_sub_threads: int = 1
    init_fn: Callable[[], Any] | None = None
    mp_start_method: str | None = None
    restart_workers: int = 0
    step_timeout_s: float | None = None
    cat_results: str | int | None = None
    preemptive_threshold: float | None = None
    max_policy_lag: int | None = None
    on_policy_lag: str | None = None

    def __post_init__(self) -> None:
        if not self.reset_when_done and self.split_trajs:
            raise RuntimeError("reset_when_done=False is not supported: an env that is done is always reset")
        super().__post_init__()
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError("give either weight_updater or weight_sync_schemes, not both")
        self._set("restart_workers", whole_number("restart_workers", self.restart_workers))
        if self.step_timeout_s is not None:
            positive_number("step_timeout_s", self.step_timeout_s)


@dataclass(frozen=True, kw_only=True)
class NodesConfig(_Sends):
    """What a collector on nodes can be asked for, too.

    Args:
        create_env_fn: a list with a factory for each node; or one factory, for ``num_collectors`` nodes.
        policy: with a ``policy_factory``, only where weights come from.
        policy_factory: a function that makes the policy on a node; may be a list with an entry for each node.
        create_env_kwargs: for the factories; may be a list with an entry for each node.
        num_collectors: how many nodes, where ``create_env_fn`` is no list.
        frames_per_batch: of all nodes together (``sync``), or of each.
        device: fills those of the other three that are not given; may be a list, as they may.
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
        num_sub_threads: torch's threads on each node (1).
        restart_nodes: how often a node that was lost, or raised, is started again; 0 where that cannot be done.
        on_node_loss: "raise" (the default), or "continue" to go on with the others.
        start_timeout_s: how long nodes have to start.
        track_worker: write the node's number into ``("collector", "worker")``.
        track_env: write the env's number into ``("collector", "env")``.
    """

    sync: bool | None = None
    num_collectors: int | None = None
    collector_class: Any = None
    collector_kwargs: Any = None
    num_workers_per_collector: int = 1
    track_worker: bool = False
    track_env: bool = False
    update_after_each_batch: bool = False
    max_weight_update_interval: int = -1
    update_interval: int | None = None
    weight_sync_schemes: Mapping[str, Any] | None = None
    num_sub_threads: int = 1
    restart_nodes: int = 0
    on_node_loss: str = "raise"
    start_timeout_s: float = 120.0

    #: A node makes its envs by itself.
    _OF_WORKERS: ClassVar = (*CollectorConfig._OF_WORKERS, "auto_register_policy_transforms")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_interval is not None:
            positive_int("update_interval", self.update_interval)
