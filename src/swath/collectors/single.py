"""Collector: a rollout in the caller's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from swath.collectors.asking import arguments_of_calls, call_found, chosen_envs
from swath.collectors.backends import FRONT_DOOR, is_asked_for, make_collector, refuse_front_door
from swath.collectors.base import BaseCollector
from swath.collectors.budget import Budget
from swath.collectors.config import SingleConfig
from swath.collectors.devices import DeviceLike
from swath.collectors.front_door import explains_unknown
from swath.collectors.numbers import seed_number
from swath.collectors.profiling import ProfileConfig, RolloutProfiler
from swath.collectors.runner import FOR_WORKERS, Runner
from swath.collectors.scheme_ends import SchemeEnds
from swath.collectors.standing import TellsOfRunner
from swath.data.trajectories import TrajFormat
from swath.envs.base import EnvBase
from swath.envs.making import is_ready_made, make_env
from swath.envs.paths import parts_of
from swath.errors import EnvClosed
from swath.keys import Key, leaves_of
from swath.paths import resolve_path
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import Control
from swath.rollout.layout import Layout
from swath.rollout.loop import Rollout
from swath.rollout.plan import PolicyPlan
from swath.timeline.recorder import Kind
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.strategy import apply_to_all
from swath.weight_update.updaters import adopt_updater
from swath.weight_update.weights import apply_weights, choose_sources, weights_for_part


class Collector(TellsOfRunner, BaseCollector):
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

    _inner = FOR_WORKERS
    _assignable = BaseCollector._assignable | {"exploration_type", "reset_at_each_iter", "return_same_td"}

    @property
    def exploration_type(self) -> InteractionType | None:
        """How probabilistic policies choose. May be assigned."""
        return self.runner.exploration_type

    @exploration_type.setter
    def exploration_type(self, exploration_type: InteractionType | str | None) -> None:
        self.runner.explore(exploration_type)

    _gathering = Kind.COLLECT
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
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None,
        trust_policy: bool | None = None,
        compile_policy: bool | dict[str, Any] | None = None,
        cudagraph_policy: bool | dict[str, Any] | None = None,
        capture_policy: bool = True,
        no_cuda_sync: bool = False,
        track_policy_version: bool = False,
        track_traj_ids: bool = True,
        compact_obs: bool = False,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: TrajFormat | None = "padded",
        check_finite: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[Any], Any] | None = None,
        auto_register_policy_transforms: bool | None = None,
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
        self._build_around(env, config, is_made_here=not is_ready_made(config.create_env_fn))

    def _build_around(self, env: EnvBase, config: SingleConfig, is_made_here: bool) -> None:
        self._made_env = is_made_here
        try:
            self._set_up(env, config)
        except BaseException:
            if self.__dict__.pop("_made_env"):
                env.close(raise_if_closed=False)
            raise
        self._rollout.random_frames_left = self._init_random_frames = config.init_random_frames or 0
        self._stop = None if config.interruptor is None else config.interruptor.collection_stopped
        self._updater = adopt_updater(config.weight_updater, self)
        if config.control is None:  # or it is a part of what has the control: of a worker, of a node
            self._is_made()

    def _resolve_budget(self, frames_per_batch: Any, total_frames: Any, env: EnvBase) -> Budget:
        return Budget.resolve(frames_per_batch, total_frames, env.batch_size.numel())

    def _set_up(self, env: EnvBase, config: SingleConfig) -> None:
        self.reset_at_each_iter = config.reset_at_each_iter
        self.return_same_td = config.return_same_td
        self.worker_idx = config.worker_idx
        budget = self._resolve_budget(config.frames_per_batch, config.total_frames, env)
        postprocessing, assembler = config.postprocessing(), config.assembler()
        #: What hosts (``swath.remote``) use, too.
        self.runner = runner = Runner.of(type(self).__name__, env, config)
        self.env, self.policy = runner.env, runner.policy
        runner.build(partial(self._make_rollout, budget), config.call_options())
        self._structure = runner.structure
        if postprocessing.set_truncated:  # else nobody needs to know
            postprocessing.require_flags(runner.fields)
        super().__init__(budget, postprocessing, assembler, config.replay_buffer, config.extend_buffer)
        self._tally.fragments, self._tally.shares_fragments = runner.fragments, assembler is not None
        self._scheme_ends = SchemeEnds(self, self._apply_to, config)
        if assembler is not None:
            assembler.fragments = runner.fragments
        postprocessing.move(runner.devices.storing)
        for part in (runner.given_policy, runner.env):
            # Asked of its class: an env in processes gives any name, as its children's.
            if callable(getattr(type(part), "register_collector", None)):
                part.register_collector(self)

    @property
    def _rollout(self) -> Rollout:
        return self.runner.rollout

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

    def _make_rollout(self, budget: Budget, plan: PolicyPlan | None, layout: Layout) -> Rollout:
        return self.runner.in_step(budget.steps_per_batch, plan, layout)

    def _work(self) -> Any:
        work = super()._work()
        work.control = self._rollout.control
        return work

    # -- collecting ------------------------------------------------------------------------------------------------

    def _collect(self) -> TensorDictBase:
        return self._collect_batch(*self._budget.next_batch(self._frames))

    def _collect_batch(self, num_steps: int, num_envs: int | None) -> TensorDictBase:
        if self._closed:
            raise self._is_closed()
        self._scheme_ends.wait_for_first()
        rollout = self._rollout
        self._restart_if_asked()
        with rollout.control.collecting(), self.runner.running():
            return rollout.collect(
                num_steps,
                policy_version=self.runner.policy_version,
                stop=self._stop,
                num_envs=num_envs,
                reuse_memory=self.return_same_td,
            )

    def _restart_if_asked(self) -> None:
        if self.runner.lost_its_place() or (self.reset_at_each_iter and self._iter):
            self._restart()

    # Batches for a host, who counts their frames:
    def collect_into(self, leaves: Mapping[Key, torch.Tensor], num_steps: int, random_frames: int = 0) -> int:
        """For a worker: a batch into memory of the runner's ``fields``; how many steps it got.

        If it raises, ``salvage_into()`` says how many were complete.
        """
        self._rollout.random_frames_left = random_frames
        self._restart_if_asked()
        with self.runner.running():
            num_steps = self._rollout.collect_into(leaves, num_steps)
        self._iter += 1
        return num_steps

    def salvage_into(self) -> int:
        return self._rollout.salvage_into()

    def collect_part(self, num_steps: int, num_envs: int | None, random_frames: int) -> tuple[TensorDictBase, int]:
        """For a node: a batch, of its first envs only (None: of all); and how many random frames were not taken."""
        self._rollout.random_frames_left = random_frames
        batch = self._collect_batch(num_steps, num_envs)
        self._iter += 1
        return batch, max(0, self._rollout.random_frames_left)

    def flat_rollout(self) -> TensorDictBase:
        """For a worker: a batch of the fields that go through shared memory; not as the env's TensorDicts are."""
        return self._collect_batch(self._budget.steps_per_batch, None)

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
        self._count_episodes(batch)  # those that go on in it end later
        if self._buffer_writer is not None or self._assembler is not None:
            self._rollout.give_up()
        if self._assembler is not None:
            self._assembler.drop_all()
        return self._restore(batch, self._objects(batch))

    def _objects(self, batch: TensorDictBase) -> Mapping[int, Any]:
        if self._structure is None or not self._structure.has_objects or not batch.batch_size.numel():
            return {}
        return self._structure.objects_of(dict(leaves_of(batch)), self.env.objects)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new episodes (in the envs of ``index``: indices or a bool mask) with the next batch."""
        self._require_still("reset")
        self._restart(None if index is None else chosen_envs(index, self._rollout.num_envs), **kwargs)

    def _restart(self, env_ids: list[int] | None = None, **kwargs: Any) -> None:
        if self._assembler is not None and env_ids is None:
            self._assembler.drop_all()
        elif self._assembler is not None:
            self._assembler.drop(self.runner.trajectories_of(env_ids))
        self._rollout.reset(env_ids, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed the envs, random actions and the policy's sampling; the next batch starts new episodes.

        Returns the seed for the next collector (the same one, if ``static_seed``).
        """
        self._require_still("set_seed")
        self._seed = seed_number(seed)
        self.runner.seed_random(self._seed)
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
        if worker_ids not in (None, 0, [0]):
            raise ValueError(f"a Collector has one worker, 0; there is no worker {worker_ids}")
        sources = choose_sources(policy_or_weights, weights, policy, weights_dict, model_id, policy_weights)
        self._raise_failure()
        for path in [name for name in sources if name != "policy"]:
            self._send_by_path(path, sources.pop(path))
        if not sources:
            return
        source = sources["policy"]
        with self._recorded_update():
            self._update_policy(source)

    def _update_policy(self, source: Any) -> None:
        if self._updater is not None:
            self._updater.push_weights(source)
            return
        if source is None and isinstance(self.runner.given_policy, torch.nn.Module):
            source = self.runner.given_policy
        if self._scheme_ends.passing_on.is_off("policy"):
            return
        # The user's own object may collect: what was trained is in it already.
        self.send_weights(None if source is self.policy else source)
        self._scheme_ends.passing_on.send("policy", source)

    def _send_by_path(self, path: str, weights: Any) -> None:
        passing_on = self._scheme_ends.passing_on
        weights = passing_on.weights_for(path, weights)
        if not passing_on.leaves_alone(path, self):
            self._apply_to(path, weights)
        passing_on.send(path, weights)

    def _apply_to(self, model_id: str, weights: Any, version: int | None = None) -> None:
        """Between two steps: weights of the policy (None if it has them), or of what a path leads to."""
        if model_id == "policy":
            policy = self.policy
            self.runner.change_weights(None if weights is None else lambda: apply_weights(policy, weights), version)
            return
        parts, weights = parts_of(self, model_id), weights_for_part(weights)
        self.runner.change_weights(lambda: apply_to_all(parts, weights), version, in_env=True)

    def send_weights(self, weights: Any, worker_ids: Any = None) -> None:
        """Weights of the policy, for updaters; None if it has them. Applied between two steps."""
        self._apply_to("policy", weights)

    @property
    def policy_version(self) -> int:
        """How often the weights were updated."""
        return self.runner.policy_version

    def get_policy_version(self) -> int:
        return self.runner.policy_version

    def increment_version(self) -> None:
        self.runner.policy_version += 1

    # -- state -----------------------------------------------------------------------------------------------------

    def _begin_ids_at(self, first: int) -> None:
        self.runner.begin_ids_at(first)

    def state_dict(self) -> dict[str, Any]:
        """Counters, trajectory ids, random state, the policy's weights, and what the env can save of itself."""
        with self._held():
            try:
                return self._state_dict()
            except EnvClosed:
                self._require_open_unless(False)  # envs in workers end with it
                raise

    def _state_dict(self) -> dict[str, Any]:
        return {**self.runner.state_dict(), "frames": self._frames, "iter": self._iter}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where ``state_dict`` was taken; with new episodes, since envs cannot be put into the middle of one.

        Raises:
            StateMismatch: it is the state of something else. Whatever is raised, nothing was changed.
        """
        self._require_open_unless(False)
        self._require_still("load_state_dict")
        self.runner.load_state_dict(state_dict, strict)
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
        if self._assembler is not None:
            self._assembler.drop_all()
        self._iterator = None

    # -- the rest --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "policy_version": self.policy_version, "num_envs": self._rollout.num_envs}

    def getattr_policy(self, name: str) -> Any:
        return getattr(self.policy, name)

    def getattr_env(self, name: str) -> Any:
        return getattr(self.env, name)

    def get_distant_attr(self, path: str) -> Any:
        """What a path leads to in this collector: ``"policy_version"``, ``"env.transform[0].loc"``.

        Of envs side by side (a ``SerialEnv``, a ``ParallelEnv``), what is in each of them, as a list.
        """
        return resolve_path(self, path)

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``path`` (such as ``"env.close"``, or ``"env.transform[0].freeze"``) where the envs are: here."""
        return call_found(resolve_path(self, path), path, args, kwargs)

    def map_fn(
        self, name: str, list_of_args: Sequence[Any] | None = None, list_of_kwargs: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call a method once with each of these arguments; a list of what it returned.

        >>> Collector("CartPole-v1", frames_per_batch=50).map_fn("env.set_seed", [(1, True), (2, True)])
        [1, 2]
        """
        calls = arguments_of_calls(list_of_args, list_of_kwargs)
        return [self.cascade_execute(name, *args, **kwargs) for args, kwargs in calls]

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros with every key, shape and dtype of a batch."""
        return self._restore(self._rollout.blank_batch(self._budget.steps_per_batch), {})

    def enable_profile(self, **config: Any) -> None:
        """Profile the first rollouts with torch's profiler; see ``ProfileConfig`` for the arguments."""
        if self._iter:
            raise RuntimeError("enable_profile must be called before the first batch is collected")
        self.runner.profiler = RolloutProfiler(ProfileConfig(**config))

    def disable_profile(self) -> None:
        self.runner.profiler = None

    def get_model(self, model_id: str) -> Any:
        if model_id != "policy":
            raise KeyError(f"there is no model {model_id!r}; this collector has 'policy'")
        return self.policy

    def _close(self, close_env: bool) -> None:
        if "_scheme_ends" in self.__dict__:
            self._scheme_ends.close()
        if close_env:
            self.env.close(raise_if_closed=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.env}, policy={type(self.policy).__name__}, "
            f"frames_per_batch={self.requested_frames_per_batch}, total_frames={self.total_frames}, "
            f"frames so far={self._frames:,})"
        )
