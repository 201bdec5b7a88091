"""The rollout: act, step, mark boundaries. Every collector runs this loop, wherever it runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict

from swath.errors import EnvError, PolicyError, add_note
from swath.keys import Key
from swath.rollout.boundaries import Boundaries, StepLimit, TrajectoryIds
from swath.rollout.control import Control, ThreadControl
from swath.rollout.delivery import Batch, Stamps
from swath.rollout.layout import Layout
from swath.rollout.plan import PolicyPlan
from swath.rollout.ragged import RaggedBatch
from swath.rollout.random_actions import RandomActions
from swath.rollout.strip import Strip
from swath.timeline.recorder import STRETCH_S, Kind, Recorder


def first_observations(env: Any) -> dict[Key, torch.Tensor]:
    """Reset an env; its observations, ``[*batch_size, *shape]`` a key."""
    strip = Strip(env.row_layout(), num_steps=1)
    env.bind(strip).reset(0, list(range(strip.num_envs)))
    return {key: column.rows[0] for key, column in strip.carried.items()}


#: Modules in which a policy is called in a step.
_CALL_POLICIES = ("swath.rollout.plan", "swath.rollout.capture.captured")


#: A step is timed after so many, which no usual length of a batch is a multiple of.
_STEPS_BETWEEN_TIMED = 61


class StepTiming:
    """How the time of a step divides over env and policy, estimated from some steps."""

    def __init__(self) -> None:
        self.env_s = 0.0
        self.policy_s = 0.0
        #: How many steps there are before the next one that is timed.
        self._left = 0

    def pick(self, length: int) -> int | None:
        """Which of the next so many steps to time: one at most."""
        left = self._left
        if left >= length:
            self._left = left - length
            return None
        self._left = max(0, _STEPS_BETWEEN_TIMED - (length - left))
        return left

    def add_all(self, policy_s: float, whole_s: float) -> None:
        """Of steps that all were timed: they count as much as if some of them had been picked."""
        self.policy_s += policy_s / _STEPS_BETWEEN_TIMED
        self.env_s += max(0.0, whole_s - policy_s) / _STEPS_BETWEEN_TIMED

    def timed(self, act: Callable[[int], None]) -> Callable[[int], None]:
        def timed_act(t: int) -> None:
            started = perf_counter()
            act(t)
            self.policy_s += perf_counter() - started

        return timed_act


class Rollout:
    """One env, one policy and the memory between them.

    Args:
        env: the env, open; it is reset before the first step.
        plan: how to call the policy; None for random actions only.
        layout: the keys of env and policy together.
        num_steps: steps of a batch, per env.
        max_frames_per_traj: truncate an episode after this many steps.
        device: where batches are delivered; None for where each key was made.
        control: how others reach the rollout while it collects.
        action_specs: what random actions are drawn from; by default the env's.
    """

    def __init__(
        self,
        env: Any,
        plan: PolicyPlan | None,
        layout: Layout,
        num_steps: int,
        *,
        stamps: Stamps,
        ids: TrajectoryIds,
        max_frames_per_traj: int | None = None,
        device: torch.device | None = None,
        action_specs: dict[Any, Any] | None = None,
        control: Control | None = None,
    ) -> None:
        self._env = env
        self._stamps = stamps
        self._device = device
        self.layout = layout
        self.strip = strip = Strip.fitting(layout, num_steps)
        self.num_envs = layout.num_envs
        self._stepper = env.bind(strip)
        if hasattr(self._stepper, "expect_resets"):
            self._stepper.expect_resets()
        #: Envs that their user may have changed between two batches want to know when one begins.
        self._prepare_env: Callable[[], None] | None = getattr(self._stepper, "prepare", None)
        #: Those that their user may use between two batches want to know when one is over.
        self._settle_env: Callable[[], None] | None = getattr(self._stepper, "settle", None)
        self.boundaries = Boundaries(strip, self._stepper, ids)
        self._step: Callable[[int], list[int] | None] = self._stepper.step
        self._limit: StepLimit | None = None
        if max_frames_per_traj is not None:
            self._require_single_resets("max_frames_per_traj")
            self._limit = StepLimit(self._stepper.step, strip, max_frames_per_traj)
            self._step = self._limit.step
        self._random = RandomActions(action_specs or dict(env.full_action_spec.items(True, True)), strip)
        self._policy = None if plan is None else plan.bind(strip)
        self._needs_reset = set(range(self.num_envs))
        self._reset_kwargs: dict[str, Any] = {}
        #: How many frames still get random actions.
        self.random_frames_left = 0
        self.control: Control = ThreadControl() if control is None else control
        self.timing = StepTiming()
        #: (step, version): from which step of the last batch on which version of the weights acted.
        self.versions: list[tuple[int, int]] = []
        self._taken = 0
        self._unfinished = False
        self._batch: Batch | RaggedBatch
        if self._stepper.fillers is None:
            self._batch = Batch(layout, stamps, device)
        else:
            self._batch = RaggedBatch(layout, stamps, num_steps, device, self._stepper)

    def describe_policy(self) -> str:
        """How the policy is called, in words."""
        return "random actions, drawn many steps at once" if self._policy is None else self._policy.describe()

    def reset(self, env_ids: list[int] | None = None, **kwargs: Any) -> None:
        """Let these envs (all by default) start anew before the next step; ``kwargs`` go to the env's reset."""
        if env_ids is not None:
            self._require_single_resets("a reset of some envs")
            for env in env_ids:
                if not 0 <= env < self.num_envs:
                    raise IndexError(f"there is no env {env} to reset: there are {self.num_envs}, counted from 0")
        self._reset_kwargs |= kwargs
        self._needs_reset |= set(range(self.num_envs) if env_ids is None else env_ids)
        if len(self._needs_reset) == self.num_envs and isinstance(self._batch, RaggedBatch):
            self._batch.drop_pending()

    def _require_single_resets(self, what: str) -> None:
        if not self._env.resets_single_envs:
            raise EnvError(
                f"{what} needs an env whose parts can be reset one by one; {self._env} resets by itself. Make it with "
                "AutoresetMode.DISABLED, or wrap its envs in a TimeLimit"
            )

    def abandon(self) -> None:
        """Forget the episodes under way: every env starts anew, with a new trajectory id."""
        self.strip.terminated[:] = False
        self.strip.truncated[:] = False
        if self._stepper.fillers:
            self._stepper.fillers.clear()
        self.boundaries.abandon()
        self._taken = 0
        self._unfinished = False
        self.reset()

    def give_up(self) -> None:
        """As ``abandon``, once nothing is under way any more."""
        self._unfinished = True

    def begin(self) -> None:
        """Start the episodes that are due."""
        if self._needs_reset:
            env_ids = sorted(self._needs_reset)
            self.boundaries.begin(env_ids, **self._reset_kwargs)
            self._reset_kwargs = {}
            if self._limit is not None:
                self._limit.begin(env_ids)
            self._needs_reset.clear()

    def start_from(self, first_row: dict[Key, torch.Tensor]) -> None:
        """Go on from a reset that was made already (``first_observations``)."""
        for key, row in first_row.items():
            self.strip.carried[key].rows[0].copy_(row)
        self.boundaries.name_episodes(sorted(self._needs_reset))
        self._needs_reset.clear()

    def collect(
        self,
        num_steps: int,
        *,
        policy_version: int = 0,
        stop: Callable[[], bool] | None = None,
        num_envs: int | None = None,
        reuse_memory: bool = False,
    ) -> TensorDict:
        """A batch of ``num_steps`` steps.

        ``stop`` is asked after every step, and ends the batch early. ``num_envs`` delivers the first envs only.
        If a step raises, ``salvage()`` gives what came before.
        """
        self.control.policy_version = policy_version
        random_frames = self.random_frames_left
        self._batch.open(num_steps, reuse_memory)
        try:
            self._fill(stop)
        except BaseException:  # Ctrl-C, say: what was being collected is thrown away, and its random frames are due
            self.random_frames_left = random_frames
            raise
        return self._batch.close(num_envs)

    def collect_into(self, leaves: Mapping[Key, torch.Tensor], num_steps: int) -> int:
        """A batch into given memory, ``[num_envs, num_steps, *shape]`` a key; how many steps it got."""
        self._batch.open(num_steps, into=leaves)
        self._fill(None)
        return self._batch.finish()

    def _fill(self, stop: Callable[[], bool] | None) -> None:
        try:
            self._fill_batch(stop)
        finally:
            if self._settle_env is not None:
                self._settle_env()

    def _fill_batch(self, stop: Callable[[], bool] | None) -> None:
        batch, control = self._batch, self.control
        recorder = control.recorder
        if self._unfinished:  # a step raised: the envs are somewhere else than the strip says
            self.abandon()
        if self._prepare_env is not None:
            self._prepare_env()
        self._begin_recorded(recorder)
        if self._policy is not None:
            self._policy.prepare()
        self._unfinished = True
        self.versions = [(0, control.policy_version)]
        stopped = False
        while (missing := batch.steps_missing()) > 0 and (batch.is_empty or not (stopped or control.stop_requested)):
            act, length, num_random = self._next_stretch(min(missing, self.strip.num_steps))
            if recorder is not None:
                stopped = self._run_recorded(act, length, stop, recorder)
            else:
                stopped = self._run_watched(act, length, stop) if stop else self._run_sampled(act, length)
            self.random_frames_left -= num_random if num_random is not None else self._count_frames()
            started = perf_counter()
            batch.write(self.strip, self.boundaries, self._taken, self.versions[-1][1])
            self._rewind()
            for env, last_kept_id in batch.cuts:
                self.boundaries.cut(env, last_kept_id)
            control.commit(batch.num_committed)
            if recorder is not None:
                recorder.add(Kind.DELIVER, started, perf_counter())
            if control.waiting[0]:
                self._read_messages()
                recorder = control.recorder
        self._unfinished = False

    def _begin_recorded(self, recorder: Recorder | None) -> None:
        if recorder is None:
            self.begin()
            return
        recorder.acts_with(self.control.policy_version)
        if self._needs_reset:
            with recorder.during(Kind.RESET, len(self._needs_reset)):
                self.begin()

    def _read_messages(self) -> None:
        control = self.control
        control.read()
        if control.recorder is not None:
            control.recorder.acts_with(control.policy_version)
        if self.versions[-1][1] != control.policy_version:
            self.versions.append((self._batch.num_taken, control.policy_version))
            if self._policy is not None:
                self._policy.prepare()

    def blank_batch(self, num_steps: int) -> TensorDict:
        """A batch of zeros."""
        batch = Batch(self.strip.layout, self._stamps, self._device)
        batch.open(num_steps)
        batch.allocate()
        batch.filled = num_steps
        return batch.close().zero_()

    def salvage(self) -> TensorDict | None:
        """After a step raised: the steps of the unfinished batch that all envs completed."""
        return self._batch.close() if self._has_salvaged() else None

    def salvage_into(self) -> int:
        """As ``salvage``, for a batch in given memory: how many steps are in it."""
        return self._batch.finish() if self._has_salvaged() else 0

    def _has_salvaged(self) -> bool:
        """Whether there is such a batch; all that was taken is in it then."""
        if self._unfinished and self._taken:
            self._batch.write(self.strip, self.boundaries, self._taken, self.versions[-1][1])
            self._taken = 0
        return self._unfinished

    def _next_stretch(self, length: int) -> tuple[Callable[[int], None], int, int | None]:
        """What to do for how many steps, and how many of their frames are random (None: all)."""
        draw = self._random.act if self._random.follows_steps else _drawn_already
        if self._policy is None:
            self._random.fill(length)
            return draw, length, 0
        random_steps, mixed = divmod(self.random_frames_left, self.num_envs)
        if random_steps:
            length = min(length, random_steps)
            self._random.fill(length)
            return draw, length, None
        if mixed:
            act = self._policy.act
            fillers = getattr(self._env, "awaiting_reset", ())
            env_ids = [env for env in range(self.num_envs) if env not in fillers][:mixed]

            def act_partly_at_random(t: int) -> None:
                act(t)
                self._random.replace(t, env_ids)

            return act_partly_at_random, 1, len(env_ids)
        return self._policy.act, length, 0

    def _count_frames(self) -> int:
        fillers = sum(len(env_ids) for _, env_ids in self._stepper.fillers or ())
        return self._taken * self.num_envs - fillers

    def _run(self, act: Callable[[int], None], start: int, end: int) -> bool:
        """The loop."""
        step, cross = self._step, self.boundaries.cross
        waiting, beat = self.control.waiting, self.control.beat
        t, done = start, self._batch.num_taken + 1
        try:
            for t in range(start, end):
                act(t)
                ended = step(t)
                if ended is not None:
                    cross(t, ended)
                beat[0] = done + t
                if waiting[0]:
                    end = t + 1
                    break
            t = end
        except Exception as error:
            self._say_where(error, t)
            raise
        finally:
            self._taken = t
        return False

    def _run_sampled(self, act: Callable[[int], None], length: int) -> bool:
        """The loop, with a step timed now and then."""
        timing = self.timing
        chosen = timing.pick(length)
        if chosen is None:
            return self._run(act, 0, length)
        self._run(act, 0, chosen)
        if self._taken == chosen:
            self._run_timed(act, chosen)
            if not self.control.waiting[0]:
                self._run(act, chosen + 1, length)
        return False

    def _run_timed(self, act: Callable[[int], None], t: int) -> None:
        timing = self.timing
        policy_s, started = timing.policy_s, perf_counter()
        self._run(timing.timed(act), t, t + 1)
        timing.env_s += perf_counter() - started - (timing.policy_s - policy_s)

    def _run_recorded(
        self, act: Callable[[int], None], length: int, stop: Callable[[], bool] | None, recorder: Recorder
    ) -> bool:
        """The loop with a clock: who takes how long, in stretches. A step that is as long as one stands alone."""
        step, cross = self._step, self.boundaries.cross
        waiting, beat = self.control.waiting, self.control.beat
        t, done, stopped = 0, self._batch.num_taken + 1, False
        first, policy_s, reset_s = 0, 0.0, 0.0
        of_policy = 0.0
        began = started = before = perf_counter()
        try:
            for t in range(length):
                act(t)
                acted = perf_counter()
                of_policy += acted - before
                ended = step(t)
                now = stepped = perf_counter()
                if ended is not None:
                    cross(t, ended)
                    now = perf_counter()
                if now - started > STRETCH_S or waiting[0]:
                    if now - before > STRETCH_S and t > first:
                        recorder.add(Kind.STEPS, started, before, t - first, policy_s, reset_s)
                        started, first, policy_s, reset_s = before, t, 0.0, 0.0
                    recorder.add(
                        Kind.STEPS, started, now, t + 1 - first, policy_s + acted - before, reset_s + now - stepped
                    )
                    started, first, policy_s, reset_s = now, t + 1, 0.0, 0.0
                else:
                    policy_s += acted - before
                    reset_s += now - stepped
                before = now
                beat[0] = done + t
                if stop is not None and stop():
                    stopped = True
                if stopped or waiting[0]:
                    length = t + 1
                    break
            t = length
        except Exception as error:
            self._say_where(error, t)
            raise
        finally:
            self._taken = t
            self.timing.add_all(of_policy, before - began)
            if t > first:
                recorder.add(Kind.STEPS, started, before, t - first, policy_s, reset_s)
        return stopped

    def _say_where(self, error: Exception, t: int) -> None:
        """Add to an exception which step of the batch it came from, and whether the policy raised it."""
        by_policy = False
        traceback = error.__traceback__
        while traceback is not None:
            by_policy |= traceback.tb_frame.f_globals.get("__name__") in _CALL_POLICIES
            traceback = traceback.tb_next
        who = "raised by the policy, " if by_policy and not isinstance(error, PolicyError) else ""
        add_note(error, f"swath: {who}in step {self._batch.num_taken + t} of this batch")

    def _run_watched(self, act: Callable[[int], None], num_steps: int, stop: Callable[[], bool]) -> bool:
        """The loop, one step at a time; True if ``stop`` ended it."""
        chosen = self.timing.pick(num_steps)
        for t in range(num_steps):
            if t == chosen:
                self._run_timed(act, t)
            else:
                self._run(act, t, t + 1)
            if stop():
                return True
            if self.control.waiting[0]:
                break
        return False

    def _rewind(self) -> None:
        self.strip.rewind(self._taken)
        self.boundaries.rewind(self._taken)
        if self._limit is not None:
            self._limit.rewind(self._taken)
        self._taken = 0


def _drawn_already(t: int) -> None:
    """Random actions are drawn for a whole stretch at once."""
