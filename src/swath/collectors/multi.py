"""MultiCollector: rollouts in worker processes. What the synchronous and the asynchronous one share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath import platforms
from swath.collectors.assignment import Assignment, check_counts, resolve_members, spread
from swath.collectors.auto_workers import measured_workers
from swath.collectors.budget import Budget
from swath.collectors.buffer_fill import BufferFill, FillPlan, workers_can_fill
from swath.collectors.config import WorkersConfig
from swath.collectors.devices import DeviceLike
from swath.collectors.front_door import explains_unknown, needs_sync
from swath.collectors.numbers import flag, seed_number
from swath.collectors.remote import ENV, WORKER, Delivers, is_per_place, warn_started_again
from swath.collectors.saved import load_all_or_nothing
from swath.collectors.single import Collector
from swath.collectors.waiting import WaitingWatch
from swath.collectors.worker_batches import WorkerBatches
from swath.collectors.worker_specs import SpecMaker
from swath.data.postprocessing import Processing
from swath.data.trajectories import TrajFormat
from swath.errors import CollectorClosed
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.seeding import derived_seed
from swath.process.start import check_start_method
from swath.remote.requests import WorkerDescription
from swath.states import count, mismatch, numbered, require_counters
from swath.warn import warn_user
from swath.weakly import weakly
from swath.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme
from swath.weight_update.updaters import adopt_updater
from swath.weight_update.weights import (
    copied_policy,
    has_weights,
)
from swath.workers.handle import WorkerHandle
from swath.workers.layout import AUTO
from swath.workers.pool import WorkerPool

#: ``shutdown`` waits so long for another thread that sends weights to notice it.
_SECONDS_FOR_SENDERS = 2.0


class MultiCollector(WorkerBatches):
    """Runs a policy in many envs, in worker processes.

    ``sync=True`` makes a ``MultiSyncCollector``, ``sync=False`` a ``MultiAsyncCollector``. Arguments are those of
    ``Collector``, and those of ``WorkersConfig`` (``help(MultiCollector)`` has all of it); first of all:

    Args:
        create_env_fn: a list with a factory for each env; or one factory, for ``num_workers`` (times
            ``envs_per_worker``) envs.
        frames_per_batch: of all envs together (sync) or of each (async); or a list.
        num_workers: how many processes share the envs; by default one for each, but not more than there are cores.
            "auto" measures first. The shape of what is delivered does not depend on it.

    Raises:
        WorkerDied, WorkerHangs: see ``swath.errors``; what an env or a policy raises keeps its type.

    >>> collector = MultiCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=100, sync=True)
    >>> [batch.shape for batch in collector]
    [torch.Size([2, 25]), torch.Size([2, 25])]
    """

    #: Whether this process draws ids of trajectories, too.
    _names_trajectories = False

    _config_class = WorkersConfig

    def __new__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Self:
        if cls is MultiCollector:
            if sync is None:
                raise needs_sync(cls, kwargs)
            from swath.collectors.multi_async import MultiAsyncCollector
            from swath.collectors.multi_sync import MultiSyncCollector

            return super().__new__(MultiSyncCollector if flag("sync", sync) else MultiAsyncCollector)  # type: ignore[return-value, arg-type]
        return super().__new__(cls)

    @explains_unknown
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int | Sequence[int] | None = None,
        total_frames: float | None = -1,
        num_workers: int | str | None = None,
        envs_per_worker: int | None = None,
        device: DeviceLike | Sequence[DeviceLike] = None,
        storing_device: DeviceLike | Sequence[DeviceLike] = None,
        policy_device: DeviceLike | Sequence[DeviceLike] = None,
        env_device: DeviceLike | Sequence[DeviceLike] = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        collector_class: type[Collector] = Collector,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        reset_when_done: bool = True,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        set_truncated: bool = False,
        use_buffers: bool | None = None,
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
        interruptor: Any = None,
        update_at_each_batch: bool = False,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        init_fn: Callable[[], Any] | None = None,
        mp_start_method: str | None = None,
        restart_workers: int = 0,
        step_timeout_s: float | None = None,
        sync: bool | None = None,
        cat_results: str | int | None = None,
        preemptive_threshold: float | None = None,
        max_policy_lag: int | None = None,
        on_policy_lag: str | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        if sync is not None and flag("sync", sync) != self._is_shared:
            raise ValueError(
                f"a {type(self).__name__} has sync={self._is_shared}; use MultiCollector(..., sync={sync})"
            )
        self._build(WorkersConfig.of(self, locals()))

    @ctrl_c_waits  # for workers, mostly, and there it may come
    def _build(self, config: WorkersConfig) -> None:
        self._begin()
        self._take_own(config)
        policy = config.policy
        self._restarts = config.restart_workers
        self._init_random_frames = config.init_random_frames or 0
        assembler = config.assembler()
        platforms.require(
            type(self).__name__,
            platforms.WORKERS,
            "use a Collector with a SerialEnv, or an AsyncBatchedCollector with env_backend='threading'",
        )
        method = check_start_method(config.mp_start_method)
        num_workers, envs_per_worker = check_counts(config.num_workers, config.envs_per_worker)
        members = resolve_members(config, self._is_shared, num_workers, envs_per_worker)
        self.policy = policy
        self._resets_each_iter = config.reset_at_each_iter
        self._tracked = [key for key, wanted in ((WORKER, config.track_worker), (ENV, config.track_env)) if wanted]
        self._interruptor = config.interruptor
        self.update_at_each_batch = config.update_at_each_batch
        self._seeds: dict[int, tuple[int, bool]] = {}  # by worker
        #: None where each env was given a number of its own.
        self._asked_frames = config.frames_per_batch if isinstance(config.frames_per_batch, int) else None
        specs = SpecMaker(config, stride_over=self._names_trajectories)
        if num_workers == AUTO:
            num_workers = measured_workers(specs.of_first(members), len(members), method, is_sync=self._is_shared)
        assert not isinstance(num_workers, str)
        self._assignment = Assignment(members, spread(members, num_workers, envs_per_worker))
        self._storing = members[0].devices.storing
        may_have_weights = has_weights(policy) or config.policy_factory is not None
        default = SharedMemWeightSyncScheme if may_have_weights else None
        self._schemes = self._make_schemes(config.weight_sync_schemes, policy, default)
        if "policy" in self._schemes:
            self._schemes["policy"].set_source(policy)
        self._workers: WorkerPool = None  # type: ignore[assignment]
        try:
            self._workers = WorkerPool(
                specs.of_all(self._assignment),
                method=method,
                # (Weakly: one that nobody has any more ends then, and not when cycles are looked for.)
                receivers=weakly(self._halves_for),
                started=weakly(self._scheme_halves_are_out),
                restarts=self._restarts,
                step_timeout_s=config.step_timeout_s,
                on_restart=weakly(self._welcome_back),
                closed=weakly(self._ended_meanwhile),
                lock=self._lock,
            )
            self._description = self._agree()
            self._structure = self._description.structure
            self._waiting = WaitingWatch(self._workers, self._assignment.layout)
            budget = self._set_up(config.total_frames)
            postprocessing = config.postprocessing()
            postprocessing.require_flags(self._description.fields)
            super().__init__(budget, postprocessing, assembler, config.replay_buffer, config.extend_buffer)
            self._schedule(budget, self.num_workers, self._init_random_frames)
            postprocessing.move(self._storing)
            for scheme in self._schemes.values():
                scheme.connect()
            if self._must_send_first(config.policy_factory):
                self._schemes["policy"].send(policy, version=0)
            self._updater = adopt_updater(config.weight_updater, self)
            self._threads_before: int | None = None
            if config.num_threads is not None:
                self._threads_before = torch.get_num_threads()
                torch.set_num_threads(int(config.num_threads))
        except BaseException:
            for scheme in self._schemes.values():
                scheme.shutdown()
            if self._workers is not None:
                self._workers.shutdown(timeout_s=1.0)
            raise
        self._is_made()

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _take_own(self, config: WorkersConfig) -> None:
        """Take what only this class is asked for."""

    def _set_up(self, total_frames: Any) -> Budget:
        """Prepare memory for what the workers describe."""
        raise NotImplementedError

    #: While workers write to a replay buffer by themselves.
    _buffer_fill: BufferFill | None = None

    @property
    def _is_processed_elsewhere(self) -> bool:
        return self._buffer_fill is not None

    def _work(self) -> Any:
        processing = Processing(self._postprocessing, 0 if self._assembler is None else self._assembler.most)
        if not self._workers_write(processing):
            return super()._work()
        self._discard_all()
        each = self._description.env_size.numel()
        buffer: Any = self.replay_buffer
        plan = FillPlan(
            buffer,
            self._description,
            self._assignment.layout,
            steps=[-(-self._assignment.of_worker(i)[0].frames // each) for i in range(self.num_workers)],
            processing=processing,
            tracked=self._tracked,
            may_join_batches=not (getattr(buffer, "rate_limiter", None) or self._resets_each_iter),
        )
        self._buffer_fill = BufferFill(
            self, self._workers, self._scheduler, self._progress, self._waiting, plan, self._budget, self._history
        )
        return self._buffer_fill

    def _workers_write(self, processing: Processing) -> bool:
        """Whether workers can fill the replay buffer by themselves: if nothing has to be asked of their owner."""
        post = self._postprocessing
        asks = post.pre_collect_hook or post.post_collect_hook or self._interruptor or self.update_at_each_batch
        # Which worker or env a frame is from is not known of what a postproc makes of it.
        is_mixed = self._tracked and not processing.is_nothing
        return not (asks or is_mixed) and workers_can_fill(self.replay_buffer, self._storing)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _ended_meanwhile(self) -> Exception:
        """Why workers that somebody waits for were shut down."""
        background = self.__dict__.get("_background")
        failed = None if background is None else background.failure
        return CollectorClosed("shut down by another thread; make a new one") if failed is None else failed

    def _halves_for(self, worker: int) -> dict[str, WeightSyncScheme]:
        halves = {}
        for model_id, scheme in self._schemes.items():
            if not scheme.is_waited_for(worker):  # it was used by a worker that is gone
                scheme.replace_worker(worker)
            halves[model_id] = scheme.for_worker(worker)
        return halves

    def _scheme_halves_are_out(self, worker: int) -> None:
        for scheme in self._schemes.values():
            scheme.started(worker)

    def _agree(self) -> WorkerDescription:
        """What all workers say of themselves; it must be the same."""
        first, *rest = (handle.description for handle in self._workers.handles)
        assert isinstance(first, WorkerDescription)
        delivered = Delivers(tuple(first.env_size), first.fields)
        for handle, other in zip(self._workers.handles[1:], rest, strict=True):
            assert isinstance(other, WorkerDescription)
            Delivers(tuple(other.env_size), other.fields).require_alike(delivered, handle.who, "worker 0")
        return first

    def _warn_of_rounding(self, frames_used: int) -> None:
        asked = self._asked_frames
        if asked is not None and asked != frames_used:
            warn_user(
                f"frames_per_batch={asked} does not divide over {self._num_envs} envs; {frames_used} will be used"
            )

    def _welcome_back(self, handle: WorkerHandle, error: BaseException) -> None:
        """A worker was started again: newest weights, a seed of its own, and its orders."""
        warn_started_again(error, f"pid {handle.process.pid}")
        for scheme in self._schemes.values():
            scheme.resend(handle.number)
        if handle.number in self._seeds:
            seed, static = self._seeds[handle.number]
            own = derived_seed(seed, handle.number, handle.incarnation.number)
            self._workers.call("set_seed", own, static, handles=[handle])
        if self._buffer_fill is not None:
            self._buffer_fill.resume(handle)
        else:
            self._resume(handle)

    # -- what a scheme needs ---------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self._assignment.layout.num_workers

    def wake_worker(self, worker: int, model_id: str) -> None:
        self._workers.send(self._workers.handles[worker], "weights", model_id, wake=True)

    def worker_answered(self, worker: int) -> None:
        self._workers.handles[worker].due -= 1

    def worker_sentinel(self, worker: int) -> int:
        return self._workers.handles[worker].sentinel

    def look_at_workers(self, workers: Sequence[int]) -> None:
        if self._closed:
            self._require_open()
        self._workers.look_after([self._workers.handles[worker] for worker in workers])

    def worker_gone(self, worker: int) -> None:
        if self._closed:  # it was told to leave
            self._require_open()
        self._workers.handle_end(self._workers.handles[worker])

    # -- weights ---------------------------------------------------------------------------------------------------

    def _update(self, sources: Mapping[str, Any], places: int | Sequence[int] | None, *, is_named: bool) -> None:
        if self._updater is None:
            super()._update(sources, places, is_named=is_named)
            return
        if is_named:
            raise ValueError("a weight_updater knows one model: model_id and weights_dict need weight_sync_schemes")
        self._updater.push_weights(sources["policy"], places)

    def _has_sent_weights(self) -> bool:
        return self._updater is not None or super()._has_sent_weights()  # how an updater sends them, only it knows

    def _send(self, sources: Mapping[str, Any], places: int | Sequence[int] | None) -> None:
        for name, source in sources.items():
            if not self._schemes[name].addressed(list(source) if is_per_place(source) else places):
                return
        self._policy_version += bool(sources)
        for name, source in sources.items():
            self._schemes[name].send(source, places, version=self._policy_version)

    # -- control ---------------------------------------------------------------------------------------------------

    def _begin_ids_at(self, first: int) -> None:
        self._workers.begin_ids_at(first)
        self._call_idle("begin_ids_at", first)

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed envs, random actions and policies of all workers, one after the other; new episodes start.

        Returns the seed for the next collector (the same one, if ``static_seed``).
        """
        following: int | None = seed_number(seed)
        self._seed = following
        for handle in self._workers.handles:
            self._seeds[handle.number] = int(following or 0), static_seed
            (following,) = self._call_idle("set_seed", following, static_seed, handles=[handle])
        self._drop_episodes()
        return following

    def reset(self, reset_idx: Sequence[bool] | None = None, **kwargs: Any) -> None:
        """Start new episodes with the next batch: in all envs, or in those that ``reset_idx`` (a bool each) marks."""
        count = len(self._assignment.members)
        if reset_idx is not None and not hasattr(reset_idx, "__len__"):
            raise TypeError(f"reset_idx must have a bool for each of {count} envs, got {reset_idx!r}")
        if reset_idx is not None and len(reset_idx) != count:
            raise ValueError(f"reset_idx has {len(reset_idx)} entries for {count} envs")
        chosen = [i for i in range(count) if reset_idx is None or reset_idx[i]]
        handles = [h for h in self._workers.handles if any(i in h.spec.members for i in chosen)]
        for cut in self._call_idle("reset", chosen, handles=handles, **kwargs):
            if self._assembler is not None:
                self._assembler.drop(cut)

    def state_dict(self) -> dict[str, Any]:
        """Counters, the policy's weights here, and what each worker can save of itself."""
        with self._held():
            return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        self._require_open()
        states = {f"worker{i}": own for i, own in self._ask_each("state_dict")}
        return {**states, **self._counters()}

    def check_state(self, state_dict: Any, strict: bool) -> None:
        """Raise what workers would raise, and change nothing: they go on with what they do."""
        who, expected = type(self).__name__, f"the state of a MultiCollector of {count(self.num_workers, 'worker')}"
        require_counters(who, state_dict, expected)
        names = numbered(state_dict, "worker")
        if len(names) != self.num_workers or numbered(state_dict, "node"):
            raise mismatch(who, state_dict, expected)
        for handle, name in zip(self._workers.handles, names, strict=True):
            self._ask_place(handle.number, "check_state", state_dict[name], strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where ``state_dict`` was taken, with as many workers; new episodes start.

        The policy that this collector was made with has its weights again, too.

        Raises:
            StateMismatch: it is the state of something else. Whatever is raised, nothing was changed.
        """
        self._require_open()
        self._require_still("load_state_dict")
        self.check_state(state_dict, strict)
        states = [state_dict[name] for name in numbered(state_dict, "worker")]
        load_all_or_nothing(self.policy, state_dict, strict)
        for handle, state in zip(self._workers.handles, states, strict=True):
            self._call_idle("load_state_dict", state, strict, handles=[handle])
        if self._restarts and "policy" in self._schemes:
            for handle, state in zip(self._workers.handles, states, strict=True):
                weights, version = copied_policy(state)
                if weights is not None:  # what its successor is sent must not be older than this
                    self._schemes["policy"].send(weights, [handle.number], version=version)
        self._load_counters(state_dict)

    # -- looking into workers --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Where the collector stands, with a line for each worker; never blocks."""
        return {
            **super().stats(),
            "policy_version": self._policy_version,
            "num_envs": self._num_envs,
            "num_workers": self.num_workers,
            "layout": str(self._assignment.layout),
            "workers": self._workers.describe(),
        }

    def _workers_of(self, envs: np.ndarray) -> np.ndarray:
        return self._assignment.layout.workers_of(envs // self._description.env_size.numel())

    @property
    def _num_envs(self) -> int:
        return len(self._assignment.members) * self._description.env_size.numel()

    def enable_profile(self, **config: Any) -> None:
        """Profile the first rollouts of worker 0 with torch's profiler; see ``ProfileConfig`` for the arguments."""
        if self._iter:
            raise RuntimeError("enable_profile must be called before the first batch is collected")
        self._ask_first("cascade_execute", "enable_profile", **config)

    # -- ending ----------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers, in ``timeout`` seconds (5 by default) at most; harmless when called again."""
        if not close_env and not self.__dict__.get("_closed", True):
            raise RuntimeError("close_env=False: envs in worker processes end with them")
        self._shutdown_timeout = timeout
        super().shutdown(timeout, close_env, raise_on_error)

    def _close(self, close_env: bool) -> None:
        self._workers.shutdown(self._shutdown_timeout)
        # Whoever sends weights meanwhile has seen the workers leave.
        came = self._lock.acquire(timeout=_SECONDS_FOR_SENDERS)
        for scheme in self._schemes.values():
            scheme.shutdown()
        if came:
            self._lock.release()
        for pool in self._pools:
            pool.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _describe_places(self) -> str:
        return str(self._assignment.layout)
