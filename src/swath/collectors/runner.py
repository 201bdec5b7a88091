"""Runner: a rollout, and all that it runs in. What a collector collects with, and what a host may do to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict.nn import InteractionType

from swath.collectors.arguments import casting_device, on_device, prepare_for_limit, random_specs
from swath.collectors.config import SingleConfig
from swath.collectors.devices import Devices
from swath.collectors.profiling import RolloutProfiler
from swath.collectors.randomness import GENERATOR_LOCK, RandomStream
from swath.collectors.saved import SavedParts
from swath.collectors.threads import limited_threads, threads_left
from swath.envs.base import EnvBase
from swath.envs.policy_transforms import complete_env
from swath.keys import Key
from swath.modules.random_policy import RandomPolicy
from swath.process.spent import Spent
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import Control
from swath.rollout.delivery import Stamps, batch_fields
from swath.rollout.exploration import exploring
from swath.rollout.layout import CPU, Field, Layout
from swath.rollout.loop import Rollout, first_observations
from swath.rollout.plan import CallOptions, PolicyPlan
from swath.rollout.structure import Structure
from swath.timeline.recorder import Recorder
from swath.timeline.recording import Recording
from swath.warn import warn_user
from swath.workers.recordings import WorkerRecordings

#: What workers and hosts ask of a collector, besides what users do.
FOR_WORKERS = (
    *("collect_into", "collect_part", "flat_rollout", "runner"),
    *("salvage_into", "send_weights", "worker_idx"),
)


@dataclass
class Runner:
    """A policy in an env: their rollout, its trajectory ids, its random stream, the version of its weights.

    ``build`` makes the rollout. Nothing here counts frames, nor knows batches.
    """

    #: The collector's class, as errors name it.
    who: str
    env: EnvBase
    #: As the user gave it.
    given_policy: Any
    #: The same, or a copy where it collects.
    policy: Any
    devices: Devices
    stamps: Stamps
    max_frames_per_traj: int | None
    ids: TrajectoryIds
    control: Control | None
    exploration_type: InteractionType | None
    no_cuda_sync: bool
    policy_version: int = 0
    #: Whether steps were taken.
    has_begun: bool = False
    profiler: RolloutProfiler | None = None
    #: In which steps were taken.
    spent: Spent = field(default_factory=Spent)
    #: On an env: that this was the last that stepped it.
    mark: object = field(default_factory=object, init=False)
    _told_of_others: bool = False
    random: RandomStream = field(init=False)
    rollout: Rollout = field(init=False)
    #: What the env's keys are besides leaves of nested TensorDicts, if anything.
    structure: Structure | None = field(init=False)
    #: Envs in processes of their own need the cores more than torch does, whose idle threads spin.
    num_threads: int | None = field(init=False)

    @classmethod
    def of(cls, who: str, env: EnvBase, config: SingleConfig) -> Runner:
        """What was asked for, with the env and the policy made ready for each other."""
        devices, max_steps = config.devices(), config.max_frames_per_traj
        if max_steps is not None and env.limit_episodes(max_steps):
            max_steps = None
        given = config.policy_factory() if config.policy_factory is not None else config.policy
        if config.auto_register_policy_transforms:
            env = complete_env(env, given)
        stamps = Stamps(
            traj_ids=config.track_traj_ids,
            step_count=max_steps is not None,
            policy_version=config.track_policy_version,
            compact_obs=config.compact_obs,
        )
        if devices.env is not None and env.device != devices.env:
            env = env.to(devices.env)
        if stamps.step_count:
            prepare_for_limit(env)
        policy = on_device(given, devices.policy)
        env.complete_policy(policy)
        ids = TrajectoryIds() if config.traj_pool is None else config.traj_pool
        made = cls(who, env, given, policy, devices, stamps, max_steps, ids, config.control, None, config.no_cuda_sync)
        made.explore(config.exploration_type)
        return made

    def explore(self, exploration_type: InteractionType | str | None) -> None:
        """How probabilistic policies choose from now on."""
        self.exploration_type = None if exploration_type is None else InteractionType(exploration_type)

    def build(self, make: Callable[[PolicyPlan | None, Layout], Rollout], options: CallOptions) -> None:
        """Let ``make`` make the rollout of this policy in this env; it starts from the env's first observations."""
        self.random = RandomStream(self.devices.policy)
        self.num_threads = threads_left(getattr(self.env, "num_busy_processes", 0))
        with GENERATOR_LOCK, torch.inference_mode(False):  # the policy's first call puts random state back
            first_row = first_observations(self.env)
            plan = self._resolve_plan(first_row, options)
            self.rollout = make(plan, self.env.row_layout() if plan is None else plan.layout)
            self.rollout.start_from(first_row)
        self.env.stepped_by = self.mark
        self.structure = self.env.row_layout().structure

    def _resolve_plan(self, first_row: dict[Key, torch.Tensor], options: CallOptions) -> PolicyPlan | None:
        if isinstance(self.policy, RandomPolicy):
            return None
        device = self.devices.policy
        casts = casting_device(device, self.env) is not None
        with torch.no_grad():
            return PolicyPlan.resolve(self.policy, self.env, first_row, device=device, casts=casts, options=options)

    def in_step(self, num_steps: int, plan: PolicyPlan | None, layout: Layout) -> Rollout:
        """A rollout of all envs in step."""
        return Rollout(
            self.env,
            plan,
            layout,
            num_steps,
            stamps=self.stamps,
            ids=self.ids,
            max_frames_per_traj=self.max_frames_per_traj,
            device=self.devices.storing,
            action_specs=random_specs(self.policy),
            control=self.control,
        )

    def record(self, recorder: Recorder) -> None:
        """From now on record what is done here, and in the env's workers."""
        self.rollout.control.recorder = recorder
        for pool in self.env.worker_pools:
            pool.record(WorkerRecordings("env worker"))

    def stop_recording(self) -> list[Recording]:
        """What the env's workers did."""
        self.rollout.control.recorder = None
        return [recording for pool in self.env.worker_pools for recording in pool.stop_recording()]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, steps are taken: without gradients, with the exploration type and its own random stream."""
        for pool in self.env.worker_pools:
            pool.require_owner()
        if self.profiler is not None and self.profiler.finished:
            self.profiler = None
        with (
            limited_threads(self.num_threads),
            torch.inference_mode(False),  # what is delivered must be fit for training, wherever it is collected
            torch.no_grad(),
            exploring(self.exploration_type),
            self.random.active(),
            self.profiler.rollout() if self.profiler else contextlib.nullcontext(),
        ):
            self.has_begun = True
            self.spent.begin()
            try:
                yield
            finally:
                self.spent.end()
                self.env.stepped_by = self.mark
        if not self.no_cuda_sync:
            self.devices.synchronize()

    def lost_its_place(self) -> bool:
        """Whether someone else has reset or stepped the env: it is not where it was left. Told once."""
        if self.env.stepped_by is self.mark:
            return False
        if self.has_begun and not self._told_of_others:
            self._told_of_others = True
            warn_user(
                f"the env of this {self.who} was reset or stepped by someone else between two batches (by its own "
                "methods, or another collector): the episodes under way are cut there, and others begin. With an env "
                "of its own, each would go on"
            )
        return True

    @property
    def fields(self) -> list[Field]:
        """Every key of a batch in CPU memory."""
        return batch_fields(self.rollout.layout, self.stamps, CPU)

    # -- weights ---------------------------------------------------------------------------------------------------

    def change_weights(
        self, apply: Callable[[], Any] | None, version: int | None = None, *, in_env: bool = False
    ) -> None:
        """Between two steps, whichever thread collects; what follows is of the next version, or of this one.

        A policy that computes has all of the old weights or all of the new.
        """

        def change() -> None:
            if apply is not None:
                apply()
            if in_env:
                self.env_was_changed()
            self.policy_version = self.policy_version + 1 if version is None else version
            self.rollout.control.policy_version = self.policy_version

        self.rollout.control.run(change)

    def env_was_changed(self) -> None:
        """Before the first batch: what was observed when this was made is not what the env gives now."""
        if not self.has_begun:
            self.rollout.reset()

    # -- between two batches ---------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Frames were collected that nobody got: the episodes that they are of do not go on."""
        self.rollout.give_up()

    def begin_ids_at(self, first: int) -> None:
        """Draw no trajectory id below this any more."""
        self.ids.begin_at(first)
        self.rollout.boundaries.rename_fresh()

    def seed_random(self, seed: int) -> None:
        """Of random actions and of the policy's sampling."""
        self.random.seed(seed)

    def trajectories_of(self, rows: Any) -> list[int]:
        """The ids of the episodes that these envs are in."""
        return self.rollout.boundaries.traj_ids[rows].tolist()

    @property
    def fragments(self) -> set[int]:
        """Ids of trajectories that are no whole episodes."""
        return self.rollout.boundaries.fragments

    @property
    def versions(self) -> list[tuple[int, int]]:
        """(step, version): from which step of the last batch on which version of the weights acted."""
        return self.rollout.versions

    @property
    def seconds(self) -> tuple[float, float]:
        """What envs and the policy took, of the steps that were timed."""
        timing = self.rollout.timing
        return timing.env_s, timing.policy_s

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def _saved(self) -> SavedParts:
        return SavedParts(self.who, self.env, self.policy)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._saved.save(),
            "traj_pool": self.ids.next_id,
            "policy_version": self.policy_version,
            "random_frames_left": self.rollout.random_frames_left,
            "random_state": self.random.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Raise what ``load_state_dict`` would raise, and change nothing."""
        self._saved.check(state, strict)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """New episodes start; whatever is raised, nothing was changed."""
        self._saved.load(state, strict)
        self.ids.next_id = max(self.ids.next_id, state["traj_pool"])
        self.policy_version = state["policy_version"]
        self.rollout.random_frames_left = state["random_frames_left"]
        self.random.load_state_dict(state["random_state"])
        self.rollout.abandon()
