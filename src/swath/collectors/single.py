"""Collector: a rollout in the caller's own process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.collectors.arguments import (
    casting_device,
    on_device,
    prepare_for_limit,
    random_specs,
)
from swath.collectors.backends import FRONT_DOOR, is_asked_for, make_collector, refuse_front_door
from swath.collectors.base import BaseCollector, Budget, truncated_keys
from swath.collectors.config import SingleConfig
from swath.collectors.devices import DeviceLike
from swath.collectors.front_door import explains_unknown
from swath.collectors.profiling import ProfileConfig, RolloutProfiler
from swath.collectors.randomness import GENERATOR_LOCK, RandomStream
from swath.collectors.saved import SavedParts
from swath.collectors.threads import limited_threads, threads_left
from swath.data.trajectories import TrajFormat
from swath.envs.base import EnvBase
from swath.envs.making import make_env
from swath.envs.paths import parts_of, resolve_path
from swath.errors import CollectorClosed, EnvClosed
from swath.keys import Key, leaves_of
from swath.modules.random_policy import RandomPolicy
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import Control
from swath.rollout.delivery import Stamps, batch_fields
from swath.rollout.exploration import exploring
from swath.rollout.layout import CPU, Field
from swath.rollout.loop import Rollout, first_observations
from swath.rollout.plan import CallOptions, PolicyPlan
from swath.weight_update.strategy import WeightStrategy
from swath.weight_update.updaters import adopt_updater
from swath.weight_update.weights import apply_weights, choose_sources, weights_for_part


class Collector(BaseCollector):
    """Runs a policy in an env and yields batches ``[*env.batch_size, T]`` of what happened.

    Args:
        create_env_fn: an env, or a function that makes one; a ``gymnasium`` env or its id will do.
        policy: see "Policies" in the docs; None draws random actions.
        policy_factory: a function that makes the policy, instead of ``policy``.
        frames_per_batch: frames of a batch over all envs, rounded up to whole steps.
        total_frames: when to stop, exactly; -1 for never.

    What the others mean is said in ``CollectorConfig`` (``help(Collector)`` has all of it).

    Raises:
        TypeError: an unknown argument, or both ``policy`` and ``policy_factory``.
        PolicyError: the policy does not fit the env.

    >>> collector = Collector("CartPole-v1", frames_per_batch=50, total_frames=100)
    >>> [batch.shape for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    """

    _assignable = BaseCollector._assignable | {"exploration_type", "reset_at_each_iter", "return_same_td"}

    @property
    def exploration_type(self) -> InteractionType | None:
        """How probabilistic policies choose. May be assigned."""
        return self._exploration_type

    @exploration_type.setter
    def exploration_type(self, exploration_type: InteractionType | str | None) -> None:
        self._exploration_type = None if exploration_type is None else InteractionType(exploration_type)

    _config_class = SingleConfig
    _not_kept = FRONT_DOOR

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        is_front_door = issubclass(Collector, cls)  # it, and no subclass
        if not is_front_door:
            refuse_front_door(cls, kwargs, but=None if cls.__init__ is Collector.__init__ else cls.__init__)
        if not (is_front_door and is_asked_for(kwargs)):
            return super().__new__(cls)
        names = dict(zip(("create_env_fn", "policy"), args, strict=False))
        given = {**names, **kwargs}
        return make_collector(given.pop("create_env_fn"), given.pop("policy", None), given)

    @explains_unknown
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int | None = None,
        total_frames: float | None = -1,
        device: DeviceLike = None,
        storing_device: DeviceLike = None,
        policy_device: DeviceLike = None,
        env_device: DeviceLike = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        reset_when_done: bool = True,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        return_same_td: bool = False,
        interruptor: Any = None,
        set_truncated: bool = False,
        use_buffers: bool | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        weight_updater: Any = None,
        trust_policy: bool | None = None,
        compile_policy: bool | dict[str, Any] | None = None,
        cudagraph_policy: bool | dict[str, Any] | None = None,
        capture_policy: bool = True,
        no_cuda_sync: bool = False,
        track_policy_version: bool = False,
        track_traj_ids: bool = True,
        compact_obs: bool = False,
        trajs_per_batch: int | None = None,
        traj_format: TrajFormat | None = "padded",
        check_finite: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[Any], Any] | None = None,
        num_collectors: int | None = None,
        backend: str | None = None,
        backend_options: Mapping[str, Any] | None = None,
        sync: bool | None = None,
        worker_idx: int | None = None,
        traj_pool: TrajectoryIds | None = None,
        control: Control | None = None,
    ) -> None:
        if "_made_env" in self.__dict__:  # backend="direct": it was made by __new__
            return
        self._closed = True  # until there is something to close
        self._build(SingleConfig.of(self, locals()))

    def _build(self, config: SingleConfig) -> None:
        config.devices()  # one that is not there is found out before an env is made
        env = make_env(config.create_env_fn, config.create_env_kwargs)
        self._build_around(env, config, is_made_here=env is not config.create_env_fn)

    def _build_around(self, env: EnvBase, config: SingleConfig, is_made_here: bool) -> None:
        self._made_env = is_made_here
        try:
            self._set_up(env, config)
        except BaseException:
            if self.__dict__.pop("_made_env"):
                env.close(raise_if_closed=False)
            raise
        self._rollout.random_frames_left = self._init_random_frames = config.init_random_frames or 0
        self._profiler: RolloutProfiler | None = None
        self._stop = None if config.interruptor is None else config.interruptor.collection_stopped
        self._no_cuda_sync = config.no_cuda_sync
        self._updater = adopt_updater(config.weight_updater, self)

    def _resolve_budget(self, frames_per_batch: Any, total_frames: Any, env: EnvBase) -> Budget:
        return Budget.resolve(frames_per_batch, total_frames, env.batch_size.numel())

    def _set_up(self, env: EnvBase, config: SingleConfig) -> None:
        devices = config.devices()
        self.exploration_type = config.exploration_type
        self.reset_at_each_iter = config.reset_at_each_iter
        self.return_same_td = config.return_same_td
        self.worker_idx = config.worker_idx
        self._traj_ids = TrajectoryIds() if config.traj_pool is None else config.traj_pool
        self._control = config.control
        max_steps = config.max_frames_per_traj
        if max_steps is not None and env.limit_episodes(max_steps):
            max_steps = None
        policy = config.policy_factory() if config.policy_factory is not None else config.policy
        budget = self._resolve_budget(config.frames_per_batch, config.total_frames, env)
        stamps = Stamps(
            traj_ids=config.track_traj_ids,
            step_count=max_steps is not None,
            policy_version=config.track_policy_version,
            compact_obs=config.compact_obs,
        )
        postprocessing, assembler = config.postprocessing(), config.assembler()
        if devices.env is not None and env.device != devices.env:
            env = env.to(devices.env)
        if stamps.step_count:
            prepare_for_limit(env)
        self.env = env
        #: Envs in processes of their own need the cores more than torch does, whose idle threads spin.
        self._num_threads = threads_left(getattr(env, "num_busy_processes", 0))
        self._devices = devices
        self._stamps = stamps
        self._given_policy = policy
        self.policy = on_device(policy, devices.policy)
        env.complete_policy(self.policy)
        self._policy_version = 0
        self._has_begun = False
        self._random_stream = RandomStream(devices.policy)
        with GENERATOR_LOCK, torch.inference_mode(False):  # the policy's first call puts random state back
            self._rollout = self._make_rollout(env, budget, stamps, max_steps, config.call_options())
        self._structure = env.row_layout().structure
        if postprocessing.set_truncated and not truncated_keys((field.key, field) for field in self.fields):
            raise RuntimeError("set_truncated needs an env with a truncated key; call env.add_truncated_keys()")
        super().__init__(budget, postprocessing, assembler, config.replay_buffer, config.extend_buffer)
        if assembler is not None:
            assembler.fragments = self._rollout.boundaries.fragments
        if hasattr(postprocessing.postproc, "to") and devices.storing is not None:
            postprocessing.postproc.to(devices.storing)  # type: ignore[union-attr]
        for part in (policy, env):
            # Asked of its class: an env in processes gives any name, as its children's.
            if callable(getattr(type(part), "register_collector", None)):
                part.register_collector(self)

    def _resolve_plan(
        self, env: EnvBase, first_row: dict[Key, torch.Tensor], call_options: CallOptions
    ) -> PolicyPlan | None:
        if isinstance(self.policy, RandomPolicy):
            return None
        device = self._devices.policy
        casts = casting_device(device, env) is not None
        with torch.no_grad():
            return PolicyPlan.resolve(self.policy, env, first_row, device=device, casts=casts, options=call_options)

    def policy_plan(self) -> str:
        """How the policy is called, and why not faster.

        >>> collector = Collector("CartPole-v1", lambda observation: observation[..., :2] * 2, frames_per_batch=50)
        >>> for _, batch in zip(range(2), collector):
        ...     print(collector.policy_plan())
        captured, 1 operations
        captured, 1 operations
        """
        return self._rollout.describe_policy()

    def env_plan(self) -> str:
        """How the env is stepped, and why not faster.

        >>> Collector("CartPole-v1", frames_per_batch=50).env_plan()
        '1 Gymnasium env stepped on rows'
        """
        return self.env.plan()

    def _make_rollout(
        self,
        env: EnvBase,
        budget: Budget,
        stamps: Stamps,
        max_frames_per_traj: int | None,
        call_options: CallOptions,
    ) -> Rollout:
        devices = self._devices
        first_row = first_observations(env)
        plan = self._resolve_plan(env, first_row, call_options)
        rollout = Rollout(
            env,
            plan,
            env.row_layout() if plan is None else plan.layout,
            budget.steps_per_batch,
            stamps=stamps,
            ids=self._traj_ids,
            max_frames_per_traj=max_frames_per_traj,
            device=devices.storing,
            action_specs=random_specs(self.policy),
            control=self._control,
        )
        rollout.start_from(first_row)
        return rollout

    def _work(self) -> Any:
        work = super()._work()
        work.control = self._rollout.control
        return work

    # -- collecting ------------------------------------------------------------------------------------------------

    def _collect(self) -> TensorDictBase:
        return self._collect_batch(*self._budget.next_batch(self._frames))

    def _collect_batch(self, num_steps: int, num_envs: int | None) -> TensorDictBase:
        if self._closed:
            raise CollectorClosed(f"this collector was shut down after {self._frames:,} frames; make a new one")
        with self._rollout.control.collecting(), self._in_force():
            self._has_begun = True
            return self._rollout.collect(
                num_steps,
                policy_version=self._policy_version,
                stop=self._stop,
                num_envs=num_envs,
                reuse_memory=self.return_same_td,
            )

    def collect_into(self, leaves: Mapping[Key, torch.Tensor], num_steps: int, random_frames: int = 0) -> int:
        """For a worker: a batch into memory of ``fields``, not counted; how many steps it got.

        If it raises, ``salvage_into()`` says how many were complete.
        """
        self._rollout.random_frames_left = random_frames
        self._has_begun = True
        with self._in_force():
            num_steps = self._rollout.collect_into(leaves, num_steps)
        self._iter += 1
        return num_steps

    def salvage_into(self) -> int:
        return self._rollout.salvage_into()

    @property
    def fields(self) -> list[Field]:
        """Every key of a batch in CPU memory."""
        return batch_fields(self._rollout.strip.layout, self._stamps, CPU)

    @contextlib.contextmanager
    def _in_force(self) -> Iterator[None]:
        """No gradients, the exploration type, and the collector's own random stream."""
        if self.reset_at_each_iter and self._iter:
            self._restart()
        if self._profiler is not None and self._profiler.finished:
            self._profiler = None
        with (
            limited_threads(self._num_threads),
            torch.inference_mode(False),  # what is delivered must be fit for training, wherever it is collected
            torch.no_grad(),
            exploring(self.exploration_type),
            self._random_stream.active(),
            self._profiler.rollout() if self._profiler else contextlib.nullcontext(),
        ):
            yield
        if not self._no_cuda_sync:
            self._devices.synchronize()

    def _salvage(self) -> TensorDictBase | None:
        return self._rollout.salvage()

    def _give_up_episodes(self) -> None:
        self._rollout.give_up()

    def rollout(self) -> TensorDictBase:
        """One batch that is not counted, nor postprocessed.

        It is not written to the replay buffer either; where it would be missed there, or in whole episodes, new
        episodes start.
        """
        self._require_still("rollout")
        batch = self.flat_rollout()
        if self._sink is not None or self._assembler is not None:
            self._rollout.give_up()
        if self._assembler is not None:
            self._assembler.drop_all()
        return self._restore(batch, self._objects(batch))

    def flat_rollout(self) -> TensorDictBase:
        """For a worker: a batch of the fields that go through shared memory."""
        return self._collect_batch(self._budget.steps_per_batch, None)

    def _objects(self, batch: TensorDictBase) -> Mapping[int, Any]:
        if self._structure is None or not self._structure.has_objects or not batch.batch_size.numel():
            return {}
        return self._structure.objects_of(dict(leaves_of(batch)), self.env.objects)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new episodes (in the envs of ``index``: indices or a bool mask) with the next batch."""
        self._require_still("reset")
        env_ids = None
        if index is not None:
            num_envs = self._rollout.num_envs
            chosen = torch.arange(num_envs)[index] if isinstance(index, slice) else torch.as_tensor(index)
            if chosen.dtype == torch.bool:
                if chosen.numel() != num_envs:
                    raise IndexError(f"a mask of {chosen.numel()} entries for {num_envs} envs")
                chosen = chosen.reshape(-1).nonzero()
            env_ids = chosen.reshape(-1).tolist()
        self._restart(env_ids, **kwargs)

    def _restart(self, env_ids: list[int] | None = None, **kwargs: Any) -> None:
        if self._assembler is not None and env_ids is None:
            self._assembler.drop_all()
        elif self._assembler is not None:
            self._assembler.drop(self._rollout.boundaries.traj_ids[env_ids])
        self._rollout.reset(env_ids, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed the envs, random actions and the policy's sampling; the next batch starts new episodes.

        Returns the seed for the next collector (the same one, if ``static_seed``).
        """
        self._require_still("set_seed")
        self._random_stream.seed(int(seed))
        following = self.env.set_seed(seed, static_seed)
        self._restart()
        return following

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Let the policy that collects have these weights: a module's, a TensorDict's, a state dict's.

        Without arguments, those of the policy that the collector was made with. Counts the policy's version up. With
        ``model_id="env.transform[0]"``, or another path, what is there in the env gets them.
        """
        if policy_weights is not None:
            warnings.warn("policy_weights= is now called weights=", DeprecationWarning, stacklevel=2)
            weights = policy_weights
        if worker_ids not in (None, 0, [0]):
            raise ValueError(f"a Collector has one worker, 0; there is no worker {worker_ids}")
        sources = choose_sources(policy_or_weights, weights, policy, weights_dict, model_id)
        self._raise_failure()
        for path in [name for name in sources if name != "policy"]:
            self._send_by_path(path, sources.pop(path))
        if not sources:
            return
        source = sources["policy"]
        if self._updater is not None:
            self._updater.push_weights(source)
            return
        if source is None and isinstance(self._given_policy, torch.nn.Module):
            source = self._given_policy
        # The user's own object may collect: what was trained is in it already.
        self.send_weights(None if source is self.policy else source)

    def _send_by_path(self, path: str, weights: Any) -> None:
        if "." not in path:
            raise KeyError(
                f"there is no model {path!r}; this collector has 'policy', and what a path such as 'env.transform[0]' "
                "leads to"
            )
        if weights is None:
            raise TypeError(f"update_policy_weights_: give the weights for {path!r}")
        parts, weights = parts_of(self, path), weights_for_part(weights)

        def apply() -> None:
            for part in parts:
                WeightStrategy().apply_weights(part, weights)
            self.env_was_changed()
            self._policy_version += 1
            self._rollout.control.policy_version = self._policy_version

        self._rollout.control.run(apply)

    def env_was_changed(self) -> None:
        """Before the first batch: what was observed when this collector was made is not what the env gives now."""
        if not self._has_begun:
            self._restart()

    def send_weights(self, weights: Any, worker_ids: Any = None) -> None:
        """Weights of the policy, for updaters; None if it has them.

        Applied between two steps, whichever thread collects: a policy that computes has all of the old ones or all of
        the new.
        """

        def apply() -> None:
            if weights is not None:
                apply_weights(self.policy, weights)
            self._policy_version += 1
            self._rollout.control.policy_version = self._policy_version

        self._rollout.control.run(apply)

    @property
    def policy_version(self) -> int:
        """How often the weights were updated."""
        return self._policy_version

    def get_policy_version(self) -> int:
        return self._policy_version

    def increment_version(self) -> None:
        self._policy_version += 1

    # -- state -----------------------------------------------------------------------------------------------------

    def _begin_ids_at(self, first: int) -> None:
        self._traj_ids.begin_at(first)
        self._rollout.boundaries.rename_fresh()

    def state_dict(self) -> dict[str, Any]:
        """Counters, trajectory ids, random state, the policy's weights, and what the env can save of itself."""
        with self._held():
            try:
                return self._state_dict()
            except EnvClosed:
                self._require_open_unless(False)  # envs in workers end with it
                raise

    @property
    def _saved_parts(self) -> SavedParts:
        return SavedParts(type(self).__name__, self.env, self.policy)

    def _state_dict(self) -> dict[str, Any]:
        return {
            **self._saved_parts.save(),
            "frames": self._frames,
            "iter": self._iter,
            "traj_pool": self._traj_ids.next_id,
            "policy_version": self._policy_version,
            "random_frames_left": self._rollout.random_frames_left,
            "random_state": self._random_stream.state_dict(),
        }

    def _check_state(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Raise what ``load_state_dict`` would raise, and change nothing."""
        self._saved_parts.check(state_dict, strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where ``state_dict`` was taken; with new episodes, since envs cannot be put into the middle of one.

        Raises:
            StateMismatch: it is the state of something else. Whatever is raised, nothing was changed.
        """
        self._require_open_unless(False)
        self._require_still("load_state_dict")
        self._saved_parts.load(state_dict, strict)
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
        self._traj_ids.next_id = max(self._traj_ids.next_id, state_dict["traj_pool"])
        self._policy_version = state_dict["policy_version"]
        self._rollout.random_frames_left = state_dict["random_frames_left"]
        self._random_stream.load_state_dict(state_dict["random_state"])
        self._restart()
        self._rollout.abandon()
        self._iterator = None

    # -- the rest --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "policy_version": self._policy_version, "num_envs": self._rollout.num_envs}

    def getattr_policy(self, name: str) -> Any:
        return getattr(self.policy, name)

    def getattr_env(self, name: str) -> Any:
        return getattr(self.env, name)

    def getattr_rb(self, name: str) -> Any:
        return getattr(self.replay_buffer, name)

    def get_distant_attr(self, path: str) -> list[Any]:
        """An attribute of this collector by its path, for each worker: here, for the one there is.

        A path with an index (``"env.transform[0].loc"``) is followed in each env by itself: of several, it is a list.
        """
        parts = self._at(path)
        return parts if len(parts) == 1 else [parts]

    def _at(self, path: str) -> list[Any]:
        return parts_of(self, path) if "[" in path else [resolve_path(self, path)]

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``path`` (such as ``"env.close"``, or ``"env.transform[0].freeze"``) where the envs are: here."""
        results = [method(*args, **kwargs) for method in self._at(path)]
        return results[0] if len(results) == 1 else results

    def map_fn(
        self, name: str, list_of_args: Sequence[Any] | None = None, list_of_kwargs: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call a method of each worker with its own arguments: here, of the one there is."""
        for what, given in (("list_of_args", list_of_args), ("list_of_kwargs", list_of_kwargs)):
            if given is not None and len(given) != 1:
                raise ValueError(f"map_fn: {what} has {len(given)} entries for 1 worker")
        args = list_of_args[0] if list_of_args else ()
        kwargs = list_of_kwargs[0] if list_of_kwargs else {}
        return [self.cascade_execute(name, *args, **kwargs)]

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros with every key, shape and dtype of a batch."""
        return self._restore(self._rollout.blank_batch(self._budget.steps_per_batch), {})

    def enable_profile(self, **config: Any) -> None:
        """Profile the first rollouts with torch's profiler; see ``ProfileConfig`` for the arguments."""
        if self._iter:
            raise RuntimeError("enable_profile must be called before the first batch is collected")
        self._profiler = RolloutProfiler(ProfileConfig(**config))

    def disable_profile(self) -> None:
        self._profiler = None

    def get_model(self, model_id: str) -> Any:
        if model_id != "policy":
            raise KeyError(f"there is no model {model_id!r}; this collector has 'policy'")
        return self.policy

    def _close(self, close_env: bool) -> None:
        if close_env:
            self.env.close(raise_if_closed=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.env}, policy={type(self.policy).__name__}, "
            f"frames_per_batch={self.requested_frames_per_batch}, total_frames={self.total_frames}, "
            f"frames so far={self._frames:,})"
        )
