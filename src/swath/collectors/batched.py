"""AsyncBatchedCollector: envs step in workers, one policy runs here on whichever are ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath import platforms
from swath.collectors.arguments import random_specs
from swath.collectors.assignment import list_factories
from swath.collectors.budget import Budget
from swath.collectors.config import BatchedConfig
from swath.collectors.devices import DeviceLike
from swath.collectors.front_door import explains_unknown
from swath.collectors.numbers import positive_int
from swath.collectors.single import Collector
from swath.data.trajectories import TrajFormat
from swath.envs.base import EnvBase
from swath.envs.making import resolve_factories
from swath.envs.policy_transforms import PolicyTransforms
from swath.envs.pool import AsyncEnvPool, ProcessorAsyncEnvPool, ThreadingAsyncEnvPool
from swath.errors import PolicyError
from swath.keys import Key, as_key, show
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import Control
from swath.rollout.layout import Layout
from swath.rollout.loop import Rollout
from swath.rollout.plan import PolicyPlan
from swath.rollout.random_actions import for_all_envs
from swath.stepping.central import ENV_INDEX, VERSION, CentralRollout
from swath.weight_update.scheme import WeightSyncScheme
from swath.workers.layout import WorkerLayout, available_cores

#: What ``server_config`` may have, and which argument it stands for.
_SERVER_CONFIG = {"max_batch_size": "max_batch_size", "min_batch_size": "min_batch_size", "timeout": "server_timeout"}
_DEVICE_CONFIG = ("device", "policy_device", "env_device", "storing_device")


class AsyncBatchedCollector(Collector):
    """Steps envs in workers and runs one policy for all of them, on whichever are ready; yields batches ``[frames]``.

    No env waits for another. Every batch has exactly ``frames_per_batch`` frames; the frames of an env are in order,
    and ``env_index`` says whose they are. Envs go on while a batch is being used: the first frames of the next one may
    have been chosen by older weights, and ``policy_version`` says so.

    Arguments are those of ``Collector``, and those of ``BatchedConfig`` (``help(AsyncBatchedCollector)`` has all of
    it); first of all:

    Args:
        create_env_fn: a list with a function (or Gymnasium id) for every env.
        policy: as for ``Collector``, or a ``policy_factory``; the policy runs in this process.
        max_batch_size: most envs in a call of the policy.
        env_backend: "multiprocessing" (default), or "threading": for envs that wait for something outside.

    >>> from swath.collectors import RandomPolicy
    >>> from swath.envs import GymEnv
    >>> envs = [lambda: GymEnv("CartPole-v1")] * 4
    >>> collector = AsyncBatchedCollector(envs, policy=RandomPolicy(), frames_per_batch=50, total_frames=110)
    >>> [batch.shape for batch in collector]
    [torch.Size([50]), torch.Size([50]), torch.Size([10])]
    """

    @property
    def _rollout(self) -> CentralRollout:  # type: ignore[override]
        return self.runner.rollout  # type: ignore[return-value]

    _assignable = Collector._assignable - {"return_same_td"}

    _config_class = BatchedConfig

    @explains_unknown
    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int | None = None,
        total_frames: float | None = -1,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        server_timeout: float | None = None,
        backend: str | None = None,
        env_backend: str | None = None,
        policy_backend: str | None = None,
        envs_per_worker: int | None = None,
        num_workers: int | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: DeviceLike = None,
        policy_device: DeviceLike = None,
        env_device: DeviceLike = None,
        storing_device: DeviceLike = None,
        server_config: Any = None,
        device_config: Any = None,
        yield_completed_trajectories: bool = False,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: TrajFormat | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        policy_version: int = 0,
        track_policy_version: bool = True,
        mp_start_method: str | None = None,
        num_sub_threads: int | None = None,
        step_timeout_s: float | None = None,
        policy_version_key: str | None = "policy_version",
        weight_sync: Any = None,
        weight_sync_model_id: str = "policy",
        transport: Any = None,
        verbose: bool = False,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        split_trajs: bool | None = None,
        reset_when_done: bool = True,
        return_same_td: bool = False,
        interruptor: Any = None,
        set_truncated: bool = False,
        use_buffers: bool | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None,
        trust_policy: bool | None = None,
        compile_policy: bool | dict[str, Any] | None = None,
        cudagraph_policy: bool | dict[str, Any] | None = None,
        capture_policy: bool = True,
        no_cuda_sync: bool = False,
        track_traj_ids: bool = True,
        compact_obs: bool = False,
        check_finite: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[Any], Any] | None = None,
        auto_register_policy_transforms: bool | None = None,
        worker_idx: int | None = None,
        traj_pool: TrajectoryIds | None = None,
        control: Control | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        self._build(BatchedConfig.of(self, locals()))

    def _build(self, config: BatchedConfig) -> None:  # type: ignore[override]
        batching = _merged(
            "server_config",
            config.server_config,
            _SERVER_CONFIG,
            max_batch_size=config.max_batch_size,
            min_batch_size=config.min_batch_size,
            server_timeout=config.server_timeout,
        )
        devices = _merged(
            "device_config",
            config.device_config,
            dict(zip(_DEVICE_CONFIG, _DEVICE_CONFIG, strict=True)),
            device=config.device,
            policy_device=config.policy_device,
            env_device=config.env_device,
            storing_device=config.storing_device,
        )
        self._max_batch_size = positive_int("max_batch_size", batching.get("max_batch_size") or 64)
        self._min_batch_size = positive_int("min_batch_size", batching.get("min_batch_size") or 1)
        wait_s = batching.get("server_timeout")
        self._min_batch_wait_s = 0.01 if wait_s is None else float(wait_s)
        if self._min_batch_size > self._max_batch_size:
            raise ValueError(
                f"min_batch_size={self._min_batch_size} is more than max_batch_size={self._max_batch_size}"
            )
        if config.yield_completed_trajectories:
            if config.trajs_per_batch is not None or config.traj_format is not None:
                raise ValueError("yield_completed_trajectories yields single episodes; leave trajs_per_batch out")
            config = config.but(trajs_per_batch=1, traj_format="cat")
        factories = list_factories(config.create_env_fn, None, None)
        if config.auto_register_policy_transforms:  # where envs are made: rows of this process are theirs
            if config.policy_factory is not None:
                config = config.but(policy=config.policy_factory(), policy_factory=None)
            needed = PolicyTransforms.of(config.policy).without_primers(config.who)
            factories = [needed.around(factory) for factory in factories]
            config = config.but(auto_register_policy_transforms=None)
        pool = _make_pool(
            config.env_backend or config.backend,
            *resolve_factories("AsyncBatchedCollector", len(factories), factories, config.create_env_kwargs),
            num_workers=config.num_workers,
            envs_per_worker=config.envs_per_worker,
            max_steps=config.max_frames_per_traj,
            mp_start_method=config.mp_start_method,
            num_sub_threads=config.num_sub_threads,
            step_timeout_s=config.step_timeout_s,
        )
        self._build_around(pool, config.but(**devices), is_made_here=True)
        self.runner.policy_version = int(config.policy_version)
        self._rollout.goes_on = not config.reset_at_each_iter

    def _resolve_budget(self, frames_per_batch: Any, total_frames: Any, env: EnvBase) -> Budget:
        return Budget.resolve(frames_per_batch, total_frames, 1)  # exact, whatever the number of envs

    def _make_rollout(self, budget: Budget, plan: PolicyPlan | None, layout: Layout) -> Rollout:
        runner, env = self.runner, self.env
        assert isinstance(env, AsyncEnvPool)
        if plan is not None:
            _refuse_what_rows_cannot(plan)
        specs = random_specs(self.policy) or dict(env.full_action_spec.items(True, True))
        return CentralRollout(  # type: ignore[return-value]
            env.crew,
            plan,
            layout,
            budget.frames_per_batch,
            stamps=runner.stamps,
            ids=runner.ids,
            action_specs=_for_all_envs(specs, env),
            envs_per_group=min(_envs_per_group(env.crew.worker_layout), self._max_batch_size),
            max_batch_size=self._max_batch_size,
            min_batch_size=self._min_batch_size,
            min_batch_wait_s=self._min_batch_wait_s,
            device=runner.devices.storing,
        )

    @property
    def _num_envs(self) -> int:
        return self.env.batch_size.numel()

    @property
    def _mixes_envs(self) -> bool:
        return self._num_envs > 1

    def _count_lags(self, batch: TensorDictBase) -> None:
        versions = batch.get(VERSION, None)
        if versions is not None and versions.numel():
            for version, frames in zip(*np.unique(versions.cpu().numpy(), return_counts=True), strict=True):
                self._progress.lags.add([(0, int(version))], int(frames), 1, self.runner.policy_version)

    @property
    def _layout_in_words(self) -> str:
        return str(self._layout)

    def _envs_in(self, batch: TensorDictBase) -> np.ndarray:
        return batch.get(ENV_INDEX).reshape(-1).cpu().numpy()

    def _workers_of(self, envs: np.ndarray) -> np.ndarray:
        return self._layout.workers_of(envs)

    @property
    def _layout(self) -> WorkerLayout:
        return self.env.crew.worker_layout  # type: ignore[attr-defined]

    def _put(self, batch: Any, raw: TensorDictBase) -> None:
        index = batch.get(ENV_INDEX, None) if isinstance(batch, TensorDictBase) and batch.shape == raw.shape else None
        if index is None or self._assembler is not None:
            super()._put(batch, raw)
        else:
            assert self._buffer_writer is not None
            self._buffer_writer.write_mixed(batch, index.reshape(-1).numpy())

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """As ``Collector.set_seed``; what was collected before it and not delivered is dropped."""
        self._require_still("set_seed")
        self._rollout.abandon()
        return super().set_seed(seed, static_seed)

    def stats(self) -> dict[str, Any]:
        """As of every collector; and how many envs a call of the policy had."""
        rollout = self._rollout
        forwards = rollout.num_forwards
        return {
            **super().stats(),
            "layout": str(self._layout),
            "policy_calls": forwards,
            "mean_batch_size": rollout.num_forward_rows / forwards if forwards else 0.0,
        }


def _refuse_what_rows_cannot(plan: PolicyPlan) -> None:
    """Here a call of the policy is for whichever envs are ready: it has no memory of its own for each of them."""
    if plan.private_keys:
        raise PolicyError(
            f"the policy keeps {show(plan.private_keys[0])} from call to call, which an AsyncBatchedCollector cannot "
            "give back to it; use a Collector or a MultiCollector, or write it under 'next'"
        )


def _for_all_envs(specs: Mapping[Any, Any], env: EnvBase) -> dict[Key, Any]:
    fields = {field.key: field for field in env.row_layout().outputs}
    count = env.batch_size.numel()
    return {as_key(key): for_all_envs(spec, count, fields[as_key(key)]) for key, spec in specs.items()}


def _envs_per_group(layout: WorkerLayout) -> int:
    """How many envs of a worker are stepped together.

    While the policy runs for one group, the worker steps another: two groups, where there is a core for each. Where
    workers take all cores, the core that the policy runs on is taken from one of them anyway, and larger groups cost
    less: 20 µs of all cores a frame instead of 30, with 64 CartPoles in 2 workers on 2 cores.
    """
    most = max(len(members) for members in layout.members)
    crowded = 1 < layout.num_workers >= available_cores()
    return most if crowded else -(-most // 2)


def _merged(name: str, config: Any, known: Mapping[str, str], **loose: Any) -> dict[str, Any]:
    """Arguments that were given one by one, or all as one ``config``; not both."""
    if config is None:
        return {key: value for key, value in loose.items() if value is not None}
    given = [key for key, value in loose.items() if value is not None]
    if given:
        raise ValueError(f"give either {name} or {', '.join(given)}, not both")
    entries = config if isinstance(config, Mapping) else {key: getattr(config, key, None) for key in known}
    if unknown := [key for key in entries if key not in known]:
        raise ValueError(f"{name} has an unknown entry {unknown[0]!r}; it can have {', '.join(known)}")
    return {known[key]: value for key, value in entries.items() if value is not None}


def _make_pool(backend: str | None, factories: list[Any], kwargs: list[Mapping[str, Any]], **options: Any) -> Any:
    kinds = {
        None: ProcessorAsyncEnvPool,
        "multiprocessing": ProcessorAsyncEnvPool,
        "threading": ThreadingAsyncEnvPool,
    }
    if backend not in kinds:
        raise ValueError(f"env_backend must be 'multiprocessing' or 'threading', got {backend!r}")
    if backend != "threading":
        platforms.require(
            "AsyncBatchedCollector with envs in processes", platforms.STEPPING_WORKERS, "use env_backend='threading'"
        )
    if backend != "threading" and options["num_workers"] is None and options["envs_per_worker"] is None:
        options["num_workers"] = "cores"
    of_processes = {name: options.pop(name) for name in ("mp_start_method", "num_sub_threads")}
    if backend != "threading":
        options |= {name: value for name, value in of_processes.items() if value is not None}
    elif given := [name for name, value in of_processes.items() if value is not None]:
        raise ValueError(f"{given[0]} is for envs in processes; with env_backend='threading' leave it out")
    return kinds[backend](factories, create_env_kwargs=kwargs, **options)
