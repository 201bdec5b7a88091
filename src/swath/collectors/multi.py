"""MultiCollector: rollouts in worker processes. What the synchronous and the asynchronous one share."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType

from swath import platforms
from swath.collectors.arguments import alike_or_each
from swath.collectors.assignment import Assignment, check_counts, resolve_members, spread
from swath.collectors.base import (
    BaseCollector,
    Budget,
    truncated_keys,
)
from swath.collectors.config import WorkersConfig
from swath.collectors.devices import DeviceLike
from swath.collectors.free_run import FreeRun, can_run_free
from swath.collectors.front_door import explains_unknown
from swath.collectors.saved import load_all_or_nothing
from swath.collectors.single import Collector
from swath.data.trajectories import TrajFormat
from swath.envs.making import make_env
from swath.errors import CollectorClosed, EnvError, message_of
from swath.keys import Key, nested
from swath.process.ctrl_c import ctrl_c_waits
from swath.process.fair_lock import FairLock
from swath.process.seeding import derived_seed, draw_base_seed
from swath.process.start import StartMethod, check_start_method
from swath.remote.blocks import BlockPool
from swath.remote.requests import CollectRequest, WorkerDescription, WorkerSpec
from swath.states import count, mismatch, numbered, require_counters
from swath.warn import warn_user
from swath.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme
from swath.weight_update.hidden import HiddenWeights
from swath.weight_update.updaters import adopt_updater
from swath.weight_update.weights import (
    choose_sources,
    copied_policy,
    has_weights,
    require_findable,
    require_no_weights,
    save_own_policy,
    weights_for_copies,
    weights_for_part,
)
from swath.workers.layout import AUTO, WorkerLayout, available_cores
from swath.workers.pool import WorkerHandle, WorkerPool, weakly

WORKER: Key = ("collector", "worker")
ENV: Key = ("collector", "env")
#: ``num_workers="auto"`` looks for so long at how the first env spends its time.
_SECONDS_TO_MEASURE = 0.5
#: ``shutdown`` waits so long for another thread that sends weights to notice it.
_SECONDS_FOR_SENDERS = 2.0
#: A step that computes for less than this share of its time is one that waits.
_BUSY_SHARE = 0.5


class MultiCollector(BaseCollector):
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

    #: Whether a batch is put together from all envs.
    _is_shared = True
    #: Whether this process draws ids of trajectories, too.
    _names_trajectories = False

    _config_class = WorkersConfig

    def __new__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Self:
        if cls is MultiCollector:
            if sync is None:
                raise TypeError("MultiCollector needs sync=True or sync=False")
            from swath.collectors.multi_async import MultiAsyncCollector
            from swath.collectors.multi_sync import MultiSyncCollector

            return super().__new__(MultiSyncCollector if sync else MultiAsyncCollector)  # type: ignore[return-value, arg-type]
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
        traj_format: TrajFormat | None = "padded",
        check_finite: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[Any], Any] | None = None,
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
        if sync is not None and bool(sync) != self._is_shared:
            raise ValueError(
                f"a {type(self).__name__} has sync={self._is_shared}; use MultiCollector(..., sync={sync})"
            )
        self._build(WorkersConfig.of(self, locals()))

    @ctrl_c_waits  # for workers, mostly, and there it may come
    def _build(self, config: WorkersConfig) -> None:
        self._lock = FairLock()
        self._take_own(config)
        policy = config.policy
        self._restarts = config.restart_workers
        self._init_random_frames = self._random_frames_left = config.init_random_frames or 0
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
        self._method: StartMethod = method
        self._resets_each_iter = config.reset_at_each_iter
        self._tracked = [key for key, wanted in ((WORKER, config.track_worker), (ENV, config.track_env)) if wanted]
        self._interruptor = config.interruptor
        self.update_at_each_batch = config.update_at_each_batch
        self._policy_version = 0
        #: By worker.
        self._seeds: dict[int, tuple[int, bool]] = {}
        self._num_orders = 0
        #: None where each env was given a number of its own.
        self._asked_frames = config.frames_per_batch if isinstance(config.frames_per_batch, int) else None
        self._told_of_waiting = False
        common = config.for_workers()
        base_seed = draw_base_seed()

        def specs(crew: Assignment) -> list[WorkerSpec]:
            made = []
            for worker, numbers in enumerate(crew.layout.members):
                own = crew.of_worker(worker)
                devices = own[0].devices
                made.append(
                    WorkerSpec(
                        worker=worker,
                        members=numbers,
                        num_members=len(crew.members),
                        id_stride=len(crew.members) + self._names_trajectories,
                        factories=[member.factory for member in own],
                        env_kwargs=[member.kwargs for member in own],
                        make_env=make_env,
                        policy=None if own[0].policy_factory is not None else policy,
                        policy_factory=own[0].policy_factory,
                        frames=own[0].frames,
                        collector_class=config.collector_class,
                        collector_kwargs={**common, "env_device": devices.env, "policy_device": devices.policy},
                        base_seed=base_seed,
                        num_threads=config.num_sub_threads,
                        init_fn=config.init_fn,
                    )
                )
            return made

        if num_workers == AUTO:
            num_workers = self._measure(specs(Assignment(members[:1], WorkerLayout.spread(1, 1))), len(members))
        assert not isinstance(num_workers, str)
        self._assignment = Assignment(members, spread(members, num_workers, envs_per_worker))
        self._storing = members[0].devices.storing
        self._schemes = self._make_schemes(config.weight_sync_schemes, policy, config.policy_factory)
        self._workers: WorkerPool = None  # type: ignore[assignment]
        try:
            self._workers = WorkerPool(
                specs(self._assignment),
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
            budget = self._set_up(config.total_frames)
            if config.set_truncated and not truncated_keys((f.key, f) for f in self._description.fields):
                raise RuntimeError("set_truncated needs an env with a truncated key; call env.add_truncated_keys()")
            super().__init__(budget, config.postprocessing(), assembler, config.replay_buffer, config.extend_buffer)
            if hasattr(config.postproc, "to") and self._storing is not None:
                config.postproc.to(self._storing)  # type: ignore[union-attr]
            for scheme in self._schemes.values():
                scheme.connect()
            # A network that a function finds by its name may be another one where the function is imported.
            if (
                policy is not None
                and "policy" in self._schemes
                and (config.policy_factory or HiddenWeights(policy).tensors)
            ):
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

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _take_own(self, config: WorkersConfig) -> None:
        """Take what only this class is asked for."""

    def _set_up(self, total_frames: Any) -> Budget:
        """Prepare memory for what the workers describe."""
        raise NotImplementedError

    #: While workers write to a replay buffer by themselves.
    _free_run: FreeRun | None = None

    @property
    def _is_processed_elsewhere(self) -> bool:
        return self._free_run is not None

    def _work(self) -> Any:
        if self.replay_buffer is None or not can_run_free(self, self.replay_buffer):
            return super()._work()
        self._discard_all()
        self._free_run = FreeRun(self, self.replay_buffer)
        return self._free_run

    @property
    def _may_order_more(self) -> bool:
        """Whether it makes no difference to do several batches as one."""
        limit = getattr(self.replay_buffer, "rate_limiter", None)
        return limit is None and not self._resets_each_iter

    def _discard_all(self) -> None:
        """What is under way for who iterates is not wanted any more, and its episodes do not go on in the buffer."""
        if self._iter or any(self._has_work(handle) for handle in self._workers.handles):
            for handle in self._workers.handles:
                self._workers.send(handle, "void", True, wake=True)
            self._discard(self._workers.handles)
            self._workers.call("state_dict")  # when this is answered, they have stopped

    #: The blocks that batches are delivered in.
    _pools: Sequence[BlockPool] = ()

    @ctrl_c_waits
    def _gather(self) -> TensorDictBase | None:
        return super()._gather()

    def _give_up_episodes(self) -> None:
        """Workers may be ahead of what was delivered, and nobody waits for what they do."""
        for handle in self._workers.handles:
            self._workers.send(handle, "void", True, wake=True)
        self._abandon()
        self._drop_pending()

    def _abandon(self) -> None:
        """Forget what is under way; workers may still write into its blocks, so those are not used again."""

    def _has_work(self, handle: WorkerHandle) -> bool:
        """Whether there are frames of a worker that were not delivered."""
        return False

    def _discard(self, handles: Sequence[WorkerHandle]) -> None:
        """Forget what these workers have under way; they were told so. They may be in the middle of it: their blocks
        are not used again before they have stopped, since only they would be told to."""

    def _resume(self, handle: WorkerHandle) -> None:
        """A worker was started again: give it back its orders."""
        raise NotImplementedError

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _ended_meanwhile(self) -> Exception:
        """Why workers that somebody waits for were shut down."""
        background = self.__dict__.get("_background")
        failed = None if background is None else background.failure
        return CollectorClosed("shut down by another thread; make a new one") if failed is None else failed

    def _measure(self, specs: list[WorkerSpec], num_members: int) -> int:
        """How many workers keep the cores busy, by how much of its time the first env computes."""
        workers = WorkerPool(specs, method=self._method, receivers=lambda _: {}, started=lambda _: None)
        try:
            ((wall_s, cpu_s),) = workers.call("measure_steps", _SECONDS_TO_MEASURE)
        finally:
            workers.shutdown()
        return min(num_members, max(1, round(available_cores() * wall_s / max(cpu_s, 1e-9))))

    def _make_schemes(self, given: Any, policy: Any, policy_factory: Any) -> dict[str, WeightSyncScheme]:
        schemes: dict[str, WeightSyncScheme] = dict(given or {})
        if given is None and (has_weights(policy) or policy_factory is not None):
            schemes["policy"] = SharedMemWeightSyncScheme()
        for model_id, scheme in schemes.items():
            if model_id == "policy" and policy is not None and not has_weights(policy):
                raise TypeError(f"the policy ({type(policy).__name__}) is no nn.Module, so it has no weights to send")
            scheme.init_on_sender(model_id=model_id, context=self)
            if model_id == "policy":
                scheme._set_source(policy)
        return schemes

    def _halves_for(self, worker: int) -> dict[str, WeightSyncScheme]:
        halves = {}
        for model_id, scheme in self._schemes.items():
            if worker not in scheme._worker_ends:  # it was used by a worker that is gone
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
        for handle, other in zip(self._workers.handles[1:], rest, strict=True):
            assert isinstance(other, WorkerDescription)
            if (other.env_size, other.fields) != (first.env_size, first.fields):
                mine = {f.key: (tuple(f.shape), f.dtype) for f in first.fields}
                theirs = {f.key: (tuple(f.shape), f.dtype) for f in other.fields}
                differing = next((key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key)), None)
                what = (
                    f"env batch size {tuple(first.env_size)} against {tuple(other.env_size)}"
                    if differing is None
                    else f"{differing}: {mine.get(differing)} against {theirs.get(differing)}"
                )
                raise EnvError(f"{handle.who} delivers other data than worker 0: {what}; all envs must be alike")
        return first

    def _warn_of_rounding(self, frames_used: int) -> None:
        asked = self._asked_frames
        if asked is not None and asked != frames_used:
            warn_user(
                f"frames_per_batch={asked} does not divide over {self._num_envs} envs; {frames_used} will be used"
            )

    def _welcome_back(self, handle: WorkerHandle, error: BaseException) -> None:
        """A worker was started again: newest weights, a seed of its own, and its orders."""
        warnings.warn(
            f"{message_of(error)} It was started again as pid {handle.process.pid}; the episodes that it was in have "
            "ended without a done flag where they were delivered already, and go on under new ids",
            stacklevel=2,
        )
        for scheme in self._schemes.values():
            scheme.resend(handle.number)
        if handle.number in self._seeds:
            seed, static = self._seeds[handle.number]
            own = derived_seed(seed, handle.number, handle.incarnation.number)
            self._workers.call("set_seed", own, static, handles=[handle])
        if self._free_run is not None:
            self._free_run.resume(handle)
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

    # -- collecting ------------------------------------------------------------------------------------------------

    def _order(
        self,
        block: Any,
        steps: tuple[int, ...],
        members: range,
        random_frames: int,
        first_step: int = 0,
        anew: bool = False,
    ) -> CollectRequest:
        self._num_orders += 1
        return CollectRequest(self._num_orders, block.number, steps, members, first_step, random_frames, anew=anew)

    @property
    def next_traj_id(self) -> int:
        """No trajectory has this id yet, or a higher one."""
        return max(handle.page.integer("next_traj_id") for handle in self._workers.handles)

    def _committed(self, handle: WorkerHandle, order: CollectRequest) -> int:
        """Up to which step of an order a worker that is gone has left frames in their final place."""
        lost = self._structure is not None and self._structure.has_objects  # with the worker, what they refer to
        begun = handle.page.integer("order") == order.number
        return handle.page.integer("committed") if begun and not lost else order.first_step

    #: What goes with the batch that was delivered last.
    _delivered_objects: Mapping[int, Any] = {}

    def _objects(self, batch: TensorDictBase) -> Mapping[int, Any]:
        return self._delivered_objects

    def _as_batch(self, leaves: Mapping[Key, torch.Tensor], lead: Sequence[int]) -> TensorDictBase:
        """Leaves ``[envs, steps, *shape]`` as a TensorDict ``[*lead, steps]``."""
        steps = next(iter(leaves.values())).shape[1]
        tree = nested({key: leaf.view(*lead, steps, *leaf.shape[2:]) for key, leaf in leaves.items()})
        names: Any = [None] * len(lead) + ["time"]
        device = self._storing if self._storing is not None and self._storing.type == "cpu" else None
        batch = TensorDict(tree, batch_size=(*lead, steps), names=names, device=device)
        return batch if device is not None or self._storing is None else batch.to(self._storing)

    def _warn_if_waiting(self) -> None:
        """Tell once that envs which share a worker wait rather than compute."""
        if self._told_of_waiting or self._iter not in (1, 4, 16):
            return
        for handle in self._workers.handles:
            page, count = handle.page, len(handle.spec.members)
            busy_s, cpu_s, steps = page.seconds("busy_s"), page.seconds("cpu_s"), page.integer("steps")
            waits = page.integer("switches") >= steps / 2  # one that is only kept from its core does not give it away
            if count > 1 and steps > 10 and cpu_s < _BUSY_SHARE * busy_s and waits:
                self._told_of_waiting = True
                each = busy_s / steps * 1000
                warnings.warn(
                    f"the envs wait rather than compute: a step of {count} envs takes {each:.3g} ms, "
                    f"{cpu_s / busy_s:.0%} of it on the core. {self._assignment.layout} step one after the other; "
                    f"num_workers={len(self._assignment.members)} lets all wait at the same time "
                    "(num_workers='auto' measures)",
                    stacklevel=4,
                )
                return

    # -- weights ---------------------------------------------------------------------------------------------------

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
        """Send weights to the workers: a module's, a TensorDict's, a state dict's, or ``{worker: weights}``.

        Without arguments, those of the policy that the collector was made with. Returns when all workers (or those of
        ``worker_ids``) have applied them.
        """
        if policy_weights is not None:
            warnings.warn("policy_weights= is now called weights=", DeprecationWarning, stacklevel=2)
            weights = policy_weights
        sources = choose_sources(policy_or_weights, weights, policy, weights_dict, model_id)
        with self._while_open():
            self._update(sources, worker_ids, is_named=model_id is not None or weights_dict is not None)

    def _update(self, sources: Mapping[str, Any], worker_ids: int | Sequence[int] | None, *, is_named: bool) -> None:
        if self._updater is not None:
            if is_named:
                raise ValueError("a weight_updater knows one model: model_id and weights_dict need weight_sync_schemes")
            self._updater.push_weights(sources["policy"], worker_ids)
            return
        for name in sources.keys() - self._schemes.keys():
            self._refuse_model(name, sources[name])
        sent = {name: self._checked_source(name, sources[name]) for name in sources if name in self._schemes}
        # All that can be wrong is found out before anything is sent, or counted.
        for name, source in sent.items():
            addressed = self._schemes[name]._addressed(list(source) if is_per_worker(source) else worker_ids)
            if not addressed:
                return
        self._policy_version += bool(sent)
        for name, source in sent.items():
            self._schemes[name].send(source, worker_ids, version=self._policy_version)

    def _refuse_model(self, name: str, source: Any) -> None:
        if name != "policy":
            known = ", ".join(map(repr, self._schemes)) or "none"
            raise KeyError(
                f"there is no model {name!r} whose weights can be sent; weight_sync_schemes has {known}: give a scheme "
                "for it there"
            )
        if source is not None:
            raise TypeError(
                f"the policy ({type(self.policy).__name__}) is no nn.Module, so it has no weights to update"
            )
        require_no_weights(self.policy)

    def _checked_source(self, name: str, source: Any) -> Any:
        """What is sent for a source: before any worker gets some of it, that it fits."""
        if source is None and name == "policy" and self.policy is None:
            raise RuntimeError(
                "update_policy_weights_: the policy was made by policy_factory in the workers, so there are no weights "
                "here to send; give them, or give policy= as well as policy_factory="
            )
        if source is None and name == "policy":
            require_findable(self.policy)
        if source is not None and name == "policy" and self.policy is not None:
            if is_per_worker(source):
                return {worker: weights_for_copies(self.policy, each) for worker, each in source.items()}
            return weights_for_copies(self.policy, source)
        return source if name == "policy" else weights_for_part(source)

    def send_weights(self, weights: Any, worker_ids: int | Sequence[int] | None = None) -> None:
        """Weights of the policy, for updaters."""
        if "policy" not in self._schemes:
            self._refuse_model("policy", weights)
        with self._while_open():
            weights = self._checked_source("policy", weights)
            self._policy_version += 1
            self._schemes["policy"].send(weights, worker_ids, version=self._policy_version)

    @contextlib.contextmanager
    def _while_open(self) -> Iterator[None]:
        """For what several threads may do: one at a time, so that versions arrive as they were counted."""
        self._require_open()
        with self._lock:
            self._require_open()
            try:
                yield
            except Exception as error:
                if self._closed and not isinstance(error, CollectorClosed):  # by another thread, in the middle of it
                    self._require_open()
                raise

    @property
    def policy_version(self) -> int:
        """How often weights were sent."""
        return self._policy_version

    def get_policy_version(self) -> int:
        return self._policy_version

    def increment_version(self) -> None:
        self._policy_version += 1

    def receive_weights(self, policy_or_weights: Any = None) -> None:
        """As ``update_policy_weights_``; a collector in this process has no one to receive from."""
        self.update_policy_weights_(policy_or_weights)

    # -- control ---------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> FairLock:
        """Of weight schemes. Whoever holds it, no other thread sends weights, gives orders or starts workers again."""
        return self._lock

    def _require_open(self) -> None:
        if self._workers.owner_pid != os.getpid():
            raise RuntimeError(
                f"this collector's workers belong to process {self._workers.owner_pid}, and this is {os.getpid()}; "
                "make the collector in the process that iterates over it (a DataLoader: num_workers=0)"
            )
        self._require_open_unless(False)

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of workers, which go on afterwards with what they do."""
        self._require_open()
        return self._workers.call(name, *args, **kwargs)

    def _call_idle(
        self, name: str, *args: Any, handles: Sequence[WorkerHandle] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of workers that changes what they are in: what is under way is discarded.

        Before they are called, so that one that is started again meanwhile is not given back what nobody wants.
        """
        self._require_open()
        self._require_still(name)
        chosen = self._workers.handles if handles is None else handles
        for handle in chosen:
            self._workers.send(handle, "void", self._has_work(handle), wake=True)
        self._discard(chosen)
        return self._workers.call(name, *args, handles=chosen, **kwargs)

    def _begin_ids_at(self, first: int) -> None:
        self._workers.begin_ids_at(first)
        self._call_idle("begin_ids_at", first)

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed envs, random actions and policies of all workers, one after the other; new episodes start.

        Returns the seed for the next collector (the same one, if ``static_seed``).
        """
        following: int | None = int(seed)
        for handle in self._workers.handles:
            self._seeds[handle.number] = int(following or 0), static_seed
            (following,) = self._call_idle("set_seed", following, static_seed, handles=[handle])
        self._drop_pending()
        return following

    def _drop_pending(self) -> None:
        if self._assembler is not None:
            self._assembler.drop_all()

    def reset(self, reset_idx: Sequence[bool] | None = None, **kwargs: Any) -> None:
        """Start new episodes with the next batch: in all envs, or in those that ``reset_idx`` (a bool each) marks."""
        count = len(self._assignment.members)
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
        state: dict[str, Any] = {f"worker{i}": own for i, own in enumerate(self._workers.call("state_dict"))}
        state["frames"] = self._frames
        state["iter"] = self._iter
        state["policy_version"] = self._policy_version
        state["random_frames_left"] = self.random_frames_due
        return {**state, **save_own_policy(self.policy)}

    def check_state(self, state_dict: Any, strict: bool) -> None:
        """Raise what workers would raise, and change nothing: they go on with what they do."""
        who, expected = type(self).__name__, f"the state of a MultiCollector of {count(self.num_workers, 'worker')}"
        require_counters(who, state_dict, expected)
        names = numbered(state_dict, "worker")
        if len(names) != self.num_workers or numbered(state_dict, "node"):
            raise mismatch(who, state_dict, expected)
        for handle, name in zip(self._workers.handles, names, strict=True):
            self._ask("check_state", state_dict[name], strict, handles=[handle])

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
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
        self._policy_version = state_dict["policy_version"]
        self._random_frames_left = state_dict["random_frames_left"]
        self._drop_pending()
        self._iterator = None

    # -- looking into workers --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Where the collector stands, with a line for each worker; never blocks."""
        return {
            **super().stats(),
            "policy_version": self._policy_version,
            "num_envs": self._num_envs,
            "num_workers": self.num_workers,
            "layout": str(self._assignment.layout),
            "workers": self._workers.describe(self._seconds),
        }

    @property
    def _num_envs(self) -> int:
        return len(self._assignment.members) * self._description.env_size.numel()

    # -- what a node needs that hosts it ---------------------------------------------------------------------------

    @property
    def description(self) -> WorkerDescription:
        """What every worker says of itself."""
        return self._description

    @property
    def batch_lead(self) -> tuple[int, ...]:
        """Of a batch: ``[*lead, steps]``."""
        size = tuple(self._description.env_size)
        return (len(self._assignment.members), *size) if self._is_shared else size

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def first_env_of_batch(self) -> int:
        """Of the batch that was delivered last."""
        return self._first_env

    @property
    def sends_weights(self) -> bool:
        return bool(self._schemes)

    @property
    def random_frames_due(self) -> int:
        """As of what was delivered: those that are under way count, too."""
        return self._random_frames_left

    @property
    def seconds_of_workers(self) -> tuple[float, float]:
        """What envs and policies took, of the steps that were timed."""
        pages = [handle.page for handle in self._workers.handles]
        return sum(page.seconds("env_s") for page in pages), sum(page.seconds("policy_s") for page in pages)

    def deliver_flat(self) -> None:
        """From now on batches have flat leaves, and who gets them puts them together."""
        self._structure = None

    def set_weights(self, weights: Any, version: int, model_id: str) -> None:
        """As ``update_policy_weights_``, and they are of this version."""
        with self._lock:
            self._policy_version = version - 1
            self.update_policy_weights_(weights=weights, model_id=model_id)

    # -- looking into workers, one by one --------------------------------------------------------------------------

    def getattr_env(self, name: str) -> Any:
        """An attribute of the first worker's env."""
        return self._ask("getattr_env", name, handles=self._workers.handles[:1])[0]

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the first worker's policy."""
        return self._ask("getattr_policy", name, handles=self._workers.handles[:1])[0]

    def getattr_rb(self, name: str) -> Any:
        return getattr(self.replay_buffer, name)

    def get_distant_attr(self, path: str) -> list[Any]:
        """An attribute of each worker's collector by its dotted path, such as ``"env.batch_size"``."""
        return self._ask("get_distant_attr", path)

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``path`` (such as ``"env.set_level"``) in every worker."""
        return self._ask("cascade_execute", path, *args, **kwargs)

    def map_fn(
        self, name: str, list_of_args: Sequence[Any] | None = None, list_of_kwargs: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call a method of each worker's collector with its own arguments."""
        for what, given in (("list_of_args", list_of_args), ("list_of_kwargs", list_of_kwargs)):
            if given is not None and len(given) != self.num_workers:
                raise ValueError(f"map_fn: {what} has {len(given)} entries for {self.num_workers} workers")
        args = list_of_args or [()] * self.num_workers
        kwargs = list_of_kwargs or [{}] * self.num_workers
        return [
            self._ask("cascade_execute", name, *args[i], handles=[handle], **kwargs[i])[0]
            for i, handle in enumerate(self._workers.handles)
        ]

    def policy_plan(self) -> str:
        """How the policy is called in each worker, and why not faster; see ``Collector.policy_plan``."""
        return alike_or_each(self.cascade_execute("policy_plan"), "worker")

    def env_plan(self) -> str:
        """How each worker's envs are stepped, and why not faster; see ``Collector.env_plan``."""
        return alike_or_each(self.cascade_execute("env_plan"), "worker")

    def get_model(self, model_id: str) -> Any:
        if model_id != "policy":
            raise KeyError(f"there is no model {model_id!r} in this process; workers have it")
        return self.policy

    def enable_profile(self, **config: Any) -> None:
        """Profile the first rollouts of worker 0 with torch's profiler; see ``ProfileConfig`` for the arguments."""
        if self._iter:
            raise RuntimeError("enable_profile must be called before the first batch is collected")
        self._ask("cascade_execute", "enable_profile", handles=self._workers.handles[:1], **config)

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

    def __del__(self) -> None:
        self._say_that_it_is_gone()
        self.shutdown(raise_on_error=False)

    def __repr__(self) -> str:
        if "_budget" not in self.__dict__:
            return f"{type(self).__name__}(not started)"
        policy = "policy_factory" if self.policy is None else type(self.policy).__name__
        return (
            f"{type(self).__name__}({self._assignment.layout}, policy={policy}, "
            f"frames_per_batch={self.requested_frames_per_batch}, total_frames={self.total_frames}, "
            f"frames so far={self._frames:,})"
        )


def is_per_worker(source: Any) -> bool:
    """Whether weights are given as ``{worker: weights}``."""
    return isinstance(source, dict) and bool(source) and all(isinstance(key, int) for key in source)


def random_share(frames: Sequence[int], num_envs: int, wanted: int) -> int:
    """Of members with so many frames to deliver (the longest first), how many frames of all their steps must be random
    for ``wanted`` of those delivered to be: random frames come first, step by step.

    >>> random_share([10, 10], 1, 7), random_share([10, 4], 1, 12), random_share([20, 1], 2, 4)
    (7, 16, 5)
    """
    step = 0
    while step * num_envs < frames[0] and wanted > 0:
        delivered = sum(min(num_envs, max(0, each - step * num_envs)) for each in frames)
        if wanted < delivered:
            break
        wanted -= delivered
        step += 1
    return step * len(frames) * num_envs + (wanted if step * num_envs < frames[0] else 0)
