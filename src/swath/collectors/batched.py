"""AsyncBatchedCollector: envs step in workers, one policy runs here on whichever are ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath import platforms
from swath.collectors.arguments import random_specs, step_limit
from swath.collectors.base import Budget, positive_int
from swath.collectors.crew import list_factories
from swath.collectors.devices import DeviceLike
from swath.collectors.single import Collector
from swath.collectors.trajectories import TrajectoryAssembler, TrajFormat
from swath.envs.base import EnvBase
from swath.envs.making import resolve_factories
from swath.envs.pool import AsyncEnvPool, ProcessorAsyncEnvPool, ThreadingAsyncEnvPool
from swath.errors import PolicyError
from swath.rollout.central import ENV_INDEX, CentralRollout
from swath.rollout.delivery import Stamps
from swath.rollout.layout import Key, as_key, show
from swath.rollout.loop import Rollout, first_observations
from swath.rollout.plan import CallOptions, PolicyPlan
from swath.rollout.random_actions import for_all_envs
from swath.workers.layout import WorkerLayout, available_cores

#: What ``server_config`` may have, and which argument it stands for.
_SERVER_CONFIG = {"max_batch_size": "max_batch_size", "min_batch_size": "min_batch_size", "timeout": "server_timeout"}
_DEVICE_CONFIG = ("device", "policy_device", "env_device", "storing_device")


class AsyncBatchedCollector(Collector):
    """Steps envs in workers and runs one policy for all of them, on whichever are ready; yields batches ``[frames]``.

    No env waits for another. Every batch has exactly ``frames_per_batch`` frames; the frames of an env are in order,
    and ``env_index`` says whose they are. Envs go on while a batch is being used: the first frames of the next one may
    have been chosen by older weights, and ``policy_version`` says so.

    Args:
        create_env_fn: a list with a function (or Gymnasium id) for every env.
        policy, policy_factory: one of them, as for ``Collector``; the policy runs in this process.
        max_batch_size: most envs in a call of the policy.
        min_batch_size: wait for so many envs before a call, but not longer than ``server_timeout`` seconds.
        env_backend, backend: "multiprocessing" (default), or "threading": for envs that wait for something outside.
        envs_per_worker, num_workers: how envs are packed; by default into as many processes as there are cores, and a
            thread for each.
        yield_completed_trajectories: yield single episodes ``[steps]`` as they end.
        server_config: ``max_batch_size``, ``min_batch_size`` and ``timeout`` as one mapping (or object).
        device_config: ``device``, ``policy_device``, ``env_device`` and ``storing_device`` as one mapping (or object).
        step_timeout_s: raise ``WorkerHangs`` if a step takes longer.

    The other arguments are those of ``Collector``.

    >>> from swath.collectors import RandomPolicy
    >>> from swath.envs import GymEnv
    >>> envs = [lambda: GymEnv("CartPole-v1")] * 4
    >>> collector = AsyncBatchedCollector(envs, policy=RandomPolicy(), frames_per_batch=50, total_frames=110)
    >>> [batch.shape for batch in collector]
    [torch.Size([50]), torch.Size([50]), torch.Size([10])]
    """

    _rollout: CentralRollout  # type: ignore[assignment]
    _assignable = Collector._assignable - {"return_same_td"}

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int | None = None,
        total_frames: int | None = -1,
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
        policy_version_key: str = "policy_version",
        weight_sync: Any = None,
        weight_sync_model_id: str = "policy",
        transport: Any = None,
        verbose: bool = False,
        **others: Any,
    ) -> None:
        self._closed = True  # until there is something to close
        if not isinstance(create_env_fn, Sequence) or isinstance(create_env_fn, str):
            raise TypeError("create_env_fn must be a list with a function for every env: [make_env] * 8")
        if (policy is None) == (policy_factory is None):
            raise TypeError("give either policy or policy_factory" + (", not both" if policy is not None else ""))
        for name, value in (("transport", transport), ("weight_sync", weight_sync)):
            if value is not None:
                raise TypeError(
                    f"AsyncBatchedCollector: {name} has no place here: the policy runs in this process, and "
                    "update_policy_weights_() updates it. To share a policy, give a PolicyClientModule as policy"
                )
        if others.get("mail") is not None:
            raise ValueError("mail is for a Collector inside of a worker")
        if others.get("return_same_td"):
            raise ValueError("return_same_td=True: frames of the next batch may come while this one is used")
        if weight_sync_model_id != "policy":
            raise ValueError(f"weight_sync_model_id={weight_sync_model_id!r}: there is one model here, 'policy'")
        if verbose:
            raise ValueError(
                "verbose=True: nothing is written to the terminal; ask stats(), or give post_collect_hook="
            )
        if policy_version_key != "policy_version":
            raise ValueError("policy_version_key: frames have their version as 'policy_version'; rename it in postproc")
        if policy_backend not in (None, "threading", "direct"):
            raise ValueError(
                f"policy_backend={policy_backend!r}: the policy runs in this process; to have it elsewhere, give a "
                "PolicyClientModule of an InferenceServer as policy"
            )
        batching = _merged(
            "server_config",
            server_config,
            _SERVER_CONFIG,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            server_timeout=server_timeout,
        )
        devices = _merged(
            "device_config",
            device_config,
            dict(zip(_DEVICE_CONFIG, _DEVICE_CONFIG, strict=True)),
            device=device,
            policy_device=policy_device,
            env_device=env_device,
            storing_device=storing_device,
        )
        self._max_batch_size = positive_int("max_batch_size", batching.get("max_batch_size") or 64)
        self._min_batch_size = positive_int("min_batch_size", batching.get("min_batch_size") or 1)
        wait_s = batching.get("server_timeout")
        self._min_batch_wait_s = 0.01 if wait_s is None else float(wait_s)
        if self._min_batch_size > self._max_batch_size:
            raise ValueError(
                f"min_batch_size={self._min_batch_size} is more than max_batch_size={self._max_batch_size}"
            )
        if yield_completed_trajectories:
            if trajs_per_batch is not None or traj_format is not None:
                raise ValueError("yield_completed_trajectories yields single episodes; leave trajs_per_batch out")
            trajs_per_batch, traj_format = 1, "cat"
        factories = list_factories(create_env_fn, None, None)
        pool = _make_pool(
            env_backend or backend,
            *resolve_factories("AsyncBatchedCollector", len(factories), factories, create_env_kwargs),
            num_workers=num_workers,
            envs_per_worker=envs_per_worker,
            max_steps=step_limit(max_frames_per_traj),
            mp_start_method=mp_start_method,
            num_sub_threads=num_sub_threads,
            step_timeout_s=step_timeout_s,
        )
        try:
            super().__init__(
                pool,
                policy,
                policy_factory=policy_factory,
                frames_per_batch=frames_per_batch,
                total_frames=total_frames,
                max_frames_per_traj=max_frames_per_traj,
                init_random_frames=init_random_frames,
                reset_at_each_iter=reset_at_each_iter,
                exploration_type=exploration_type,
                track_policy_version=track_policy_version,
                trajs_per_batch=trajs_per_batch,
                traj_format=traj_format,
                **devices,
                **others,
            )
        except BaseException:
            pool.close(raise_if_closed=False)
            raise
        self._made_env = True
        self._policy_version = int(policy_version)
        self._rollout.goes_on = not reset_at_each_iter

    def _resolve_budget(self, frames_per_batch: Any, total_frames: Any, env: EnvBase) -> Budget:
        return Budget.resolve(frames_per_batch, total_frames, 1)  # exact, whatever the number of envs

    def _make_rollout(
        self,
        env: EnvBase,
        budget: Budget,
        stamps: Stamps,
        max_frames_per_traj: int | None,
        call_options: CallOptions,
    ) -> Rollout:
        assert isinstance(env, AsyncEnvPool)
        devices = self._devices
        first_row = first_observations(env)
        plan = self._resolve_plan(env, first_row, call_options)
        if plan is not None:
            _refuse_what_rows_cannot(plan)
        specs = random_specs(self.policy) or dict(env.full_action_spec.items(True, True))
        rollout = CentralRollout(
            env._crew,
            plan,
            env.row_layout() if plan is None else plan.layout,
            budget.frames_per_batch,
            stamps=stamps,
            ids=self._traj_ids,
            action_specs=_for_all_envs(specs, env),
            envs_per_group=min(_envs_per_group(env._crew.worker_layout), self._max_batch_size),
            max_batch_size=self._max_batch_size,
            min_batch_size=self._min_batch_size,
            min_batch_wait_s=self._min_batch_wait_s,
            device=devices.storing,
        )
        rollout.start_from(first_row)
        return rollout  # type: ignore[return-value]

    def _assemble(self, assembler: TrajectoryAssembler, batch: TensorDictBase) -> None:
        """The frames of each env by themselves: in a row, one env's follow another's."""
        index = batch.get(ENV_INDEX)
        changes = (index[1:] != index[:-1]).nonzero().reshape(-1) + 1
        lengths = torch.diff(changes, prepend=changes.new_zeros(1), append=changes.new_tensor([len(index)]))
        for piece in batch.split(lengths.tolist(), 0):
            assembler.add(piece)

    @property
    def _num_envs(self) -> int:
        return self.env.batch_size.numel()

    @property
    def _mixes_envs(self) -> bool:
        return self._num_envs > 1

    def _put(self, batch: Any, raw: TensorDictBase) -> None:
        index = batch.get(ENV_INDEX, None) if isinstance(batch, TensorDictBase) and batch.shape == raw.shape else None
        if index is None or self._assembler is not None:
            super()._put(batch, raw)
        else:
            assert self._sink is not None
            self._sink.put_mixed(batch, index.reshape(-1).numpy())

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
            "layout": str(self.env._crew.worker_layout),  # type: ignore[attr-defined]
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
