"""The other loop: one policy for envs that step elsewhere, whichever are ready.

Envs are in groups (``env_crew.py``), each with its progress here (``group_progress.py``). A group whose step is done
waits for its actions; the policy runs on the rows of all that wait; then they step again, while the policy runs on
others. What they write stays where it is, in rows of the group's own strip, until a batch is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.keys import Key
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import ThreadControl
from swath.rollout.delivery import TRAJ_IDS, Stamps, batch_fields, strip_parts
from swath.rollout.flat_batch import IS_RANDOM, FlatBatch
from swath.rollout.layout import CPU, Field, Layout
from swath.rollout.loop import StepTiming
from swath.rollout.plan import BoundPolicy, PolicyPlan
from swath.rollout.strip import MAX_BYTES, Column, Strip
from swath.specs import Categorical, OneHot, masked_rand
from swath.stepping.env_crew import EnvCrew
from swath.stepping.group_progress import GroupProgress
from swath.stepping.shared_steps import BUSY, ENDED, FAILED, RESET, STEP_AND_RESET
from swath.stepping.turns import RecordedTurns, Turns

ENV_INDEX: Key = ("env_index",)
VERSION: Key = ("policy_version",)


class _Rows:
    """Memory for a forward on so many rows, and the policy bound to it."""

    def __init__(self, plan: PolicyPlan, num_rows: int) -> None:
        sized = plan.resized(num_rows)
        self.strip = Strip(sized.layout, num_steps=1)
        self.policy: BoundPolicy = sized.bind(self.strip, remembers=False)  # its rows are other envs' each time
        self.epoch = -1


class CentralRollout:
    """A policy, envs elsewhere, and batches ``[frames]`` of whatever they did; each env's frames in order.

    Args:
        crew: the envs.
        plan: how to call the policy; None for random actions only.
        layout: the keys of env and policy together, for all envs.
        frames_per_batch: of a usual batch; says how long strips are.
        max_batch_size, min_batch_size: rows of a forward.
        min_batch_wait_s: how long to wait for ``min_batch_size`` rows.
    """

    def __init__(
        self,
        crew: EnvCrew,
        plan: PolicyPlan | None,
        layout: Layout,
        frames_per_batch: int,
        *,
        stamps: Stamps,
        ids: TrajectoryIds,
        action_specs: dict[Key, Any],
        envs_per_group: int,
        max_batch_size: int,
        min_batch_size: int = 1,
        min_batch_wait_s: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        self._crew = crew
        self._plan = plan
        self.layout = layout
        self._stamps = stamps
        self._action_specs = action_specs
        self._max_batch_size = max_batch_size
        self._min_batch_size = min_batch_size
        self._min_batch_wait_s = min_batch_wait_s
        #: Whether envs are given their next actions before a batch is handed over.
        self.goes_on = True
        self._device = device
        self.num_envs = crew.num_rows
        affordable = max(2, MAX_BYTES // max(1, layout.bytes_per_step))
        num_steps = min(2 * -(-frames_per_batch // self.num_envs) + 8, affordable)
        crew.lay_out(num_steps, {f.key: f for f in layout.outputs}, envs_per_group)
        self._groups = [GroupProgress(crew, group, _of_size(layout, len(group.rows)), ids) for group in crew.groups]
        fields = batch_fields(layout, stamps, device)
        self._fields = [*fields, Field(ENV_INDEX, torch.Size(), torch.int64, device or CPU)]
        self._output = FlatBatch(self._fields, device)
        self._forwards: dict[int, _Rows] = {}
        self._epoch = 0
        self._version = -1
        self._in_flight: list[GroupProgress] = []
        #: Lanes that wait for actions, the longest waiting first.
        self._waiting: list[GroupProgress] = []
        #: Envs that start anew before their next step, by group; None for all of a group.
        self._to_reset: set[int] = set(range(self.num_envs))
        self._reset_kwargs: dict[str, Any] = {}
        self._failed = False
        #: Frames that groups have taken and that are in no batch yet.
        self._undelivered = 0
        #: Random frames: that were not delivered yet, and that were not given to an env either.
        self._random_due = self._random_to_give = 0
        self.control = ThreadControl()
        #: What is not the policy is waiting for envs.
        self.timing = StepTiming()
        #: Forwards, and the rows in them.
        self.num_forwards = 0
        self.num_forward_rows = 0
        self.fragments: set[int] = set()

    # -- what a collector asks of a rollout --------------------------------------------------------------------------

    @property
    def boundaries(self) -> CentralRollout:
        """For who wants to know which trajectories are under way."""
        return self

    @property
    def traj_ids(self) -> np.ndarray:
        """Of each env's first frame that was not delivered: an earlier part of that trajectory may have been."""
        ids = np.concatenate([group.boundaries.traj_ids for group in self._groups])
        for env, traj_id in self._output.first_left_over(TRAJ_IDS, ENV_INDEX).items():
            ids[env] = traj_id
        return ids

    @property
    def random_frames_left(self) -> int:
        """Random frames that are still to be delivered."""
        return self._random_due

    @random_frames_left.setter
    def random_frames_left(self, count: int) -> None:
        self._random_due = self._random_to_give = count

    def rename_fresh(self) -> None:
        for group in self._groups:
            group.boundaries.rename_fresh()

    def collect(
        self, num_frames: int, *, policy_version: int = 0, stop: Callable[[], bool] | None = None, **_: Any
    ) -> TensorDict:
        """A batch of so many frames, fewer if ``stop`` says so.

        If a step raises, ``salvage()`` gives what came before.
        """
        if self._failed:
            self.abandon()
        self.control.policy_version = policy_version
        self._renew()
        self._output.open(num_frames)
        self._failed = True  # unless this comes to its end
        if self._to_reset:
            self._reset()
        recorder = self.control.recorder
        turns = Turns(self.timing) if recorder is None else RecordedTurns(self, recorder)
        self._act()
        while self._missing > 0 and not (self.control.stop_requested or (stop is not None and stop())):
            turns.acted()
            self._take_ready()
            turns.waited()
            if self.control.waiting[0]:  # between two calls of the policy
                self.control.read()
                self._renew()
            if self._missing > 0 or self.goes_on:
                self._act()
        turns.acted()
        turns.end()
        self._flush()
        self._failed = False
        self._random_due = max(0, self._random_due - self._output.num_random)
        return self._output.close()

    def _renew(self) -> None:
        """The weights may be others now."""
        if self.control.recorder is not None:
            self.control.recorder.acts_with(self.control.policy_version)
        self._epoch += 1
        self._version = self.control.policy_version

    def start_from(self, first_row: Mapping[Key, torch.Tensor]) -> None:
        """Go on from a reset of all envs that was made already."""
        for group in self._groups:
            for key, row in first_row.items():
                flat = row.reshape(self.num_envs, *row.shape[len(self.layout.batch_size) :])
                group.strip.carried[key].tensor[0] = flat[group.rows.start : group.rows.stop]
            group.begin()
        self._to_reset = set()
        self._waiting = list(self._groups)

    def reset(self, env_ids: list[int] | None = None, **kwargs: Any) -> None:
        """Let these envs (all by default) start anew with the next batch; what they have for it is dropped."""
        self._reset_kwargs |= kwargs
        if env_ids is None:
            self.abandon()
            return
        for env in env_ids:
            if not 0 <= env < self.num_envs:
                raise IndexError(f"there is no env {env} to reset: there are {self.num_envs}, counted from 0")
        self._to_reset |= set(env_ids)

    def abandon(self) -> None:
        """Forget what is under way and what waits to be delivered: every env starts anew, with a new trajectory id.

        Random frames among it are given again.
        """
        self._settle()
        self._output.forget()
        self._undelivered = 0
        self._random_to_give = self._random_due
        for group in self._groups:
            group.abandon()
        self._failed = False
        self._to_reset = set(range(self.num_envs))

    def give_up(self) -> None:
        """As ``abandon``, once nothing is under way any more."""
        self._failed = True

    def salvage(self) -> TensorDict | None:
        """After a step raised: the frames that were complete."""
        if not self._failed:
            return None
        self._flush()
        return self._output.close()

    def blank_batch(self, num_frames: int) -> TensorDict:
        """A batch of zeros."""
        output = FlatBatch(self._fields, self._device)
        output.open(num_frames)
        output.filled = num_frames
        return output.close().zero_()

    # -- the loop ----------------------------------------------------------------------------------------------------

    @property
    def _missing(self) -> int:
        """Frames of this batch that were not collected yet."""
        return self._output.num_frames - self._output.filled - self._undelivered

    def _take_ready(self) -> None:
        """Wait until a group is done; then take all that are."""
        crew = self._crew
        if not self._in_flight:
            return
        crew.wait()
        crew.watch()  # whoever is dead or stuck must not be forgotten over those who are not
        self._sort_ready()
        if self._min_batch_size > 1 and self._in_flight:
            deadline = time.monotonic() + self._min_batch_wait_s
            while sum(group.num_envs for group in self._waiting) < self._min_batch_size and self._in_flight:
                if not crew.wait_until(deadline):
                    break
                self._sort_ready()

    def _sort_ready(self) -> None:
        outcomes = self._crew.outcomes
        still: list[GroupProgress] = []
        failed = False
        for group in self._in_flight:
            outcome = outcomes[group.number]
            if outcome == BUSY:
                still.append(group)
            elif outcome == FAILED:
                failed = True
                if group.stale_rows:  # nothing of its own is in its strip
                    group.stale_rows = group.taken = 0
            else:
                group.complete_step(outcome == ENDED)
                self._undelivered += group.num_envs
                self._waiting.append(group)
        self._crew.take_posts(len(self._in_flight) - len(still) - 1)
        self._in_flight = still
        if failed:
            self._crew.raise_failures()

    def _act(self) -> None:
        """Give actions to all groups that wait for them, and let them step."""
        waiting, self._waiting = self._waiting, []
        while waiting:
            groups = [waiting.pop(0)]
            num_rows = groups[0].num_envs
            while waiting and num_rows + waiting[0].num_envs <= self._max_batch_size:
                groups.append(waiting.pop(0))
                num_rows += groups[-1].num_envs
            for group in groups:
                if group.is_full:
                    self._copy_out(group, is_under_way=False)
            self._choose_actions(groups, num_rows)
            for group in groups:
                group.versions[group.taken] = self._version
                self._crew.order(group.number, STEP_AND_RESET, group.taken)
                self._in_flight.append(group)

    def describe_policy(self) -> str:
        """How the policy is called, in words, for the numbers of rows that it was called with."""
        if self._plan is None:
            return "random actions"
        found: dict[str, list[int]] = {}
        for num_rows, forward in sorted(self._forwards.items()):
            found.setdefault(forward.policy.describe(), []).append(num_rows)
        return "; ".join(f"{how} ({', '.join(map(str, rows))} rows)" for how, rows in found.items()) or "not called yet"

    def _choose_actions(self, groups: list[GroupProgress], num_rows: int) -> None:
        if self._plan is None or self._random_to_give >= num_rows:
            for group in groups:
                self._draw(group, group.num_envs)
            self._random_to_give = max(0, self._random_to_give - num_rows)
            return
        forward = self._forwards.get(num_rows)
        if forward is None:
            forward = self._forwards[num_rows] = _Rows(self._plan, num_rows)
        if forward.epoch != self._epoch:
            forward.policy.prepare()
            forward.epoch = self._epoch
        memory = forward.strip
        at = 0
        for group in groups:
            _copy_row(group.strip.carried, group.taken, memory.carried, 0, slice(at, at + group.num_envs), into=True)
            at += group.num_envs
        forward.policy.act(0)
        self.num_forwards += 1
        self.num_forward_rows += num_rows
        at = 0
        for group in groups:
            where = slice(at, at + group.num_envs)
            _copy_row(group.strip.outputs, group.taken, memory.outputs, 0, where, into=False)
            for key in self.layout.policy_state:
                group.strip.carried[key].tensor[group.taken + 1] = memory.carried[key].tensor[1, where]
            at += group.num_envs
            if self._random_to_give:
                count = min(self._random_to_give, group.num_envs)
                self._draw(group, count)
                self._random_to_give -= count

    def _draw(self, group: GroupProgress, count: int) -> None:
        """Random actions for the first envs of a group; whatever else the policy would write is zero."""
        t = group.taken
        group.is_random[t, :count] = True
        mask = group.strip.carried.get(("action_mask",))
        for key, column in group.strip.outputs.items():
            row = column.tensor[t]
            spec = self._action_specs.get(key)
            if spec is not None:
                fits = mask is not None and isinstance(spec, (OneHot, Categorical)) and mask.field.shape == (spec.n,)
                if fits and mask is not None:
                    drawn = masked_rand(spec, mask.tensor[t])
                else:
                    drawn = spec.rand().reshape(self.num_envs, *column.field.shape)
                row[:count] = drawn[:count].to(row)
            else:
                row[:count] = 0
        for key in self.layout.policy_state:
            group.strip.carried[key].tensor[t + 1, :count] = 0

    # -- resets ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for what is under way. Steps that were taken for nobody are complete ones all the same."""
        crew = self._crew
        crew.drain()
        for group in self._in_flight:
            outcome = crew.outcomes[group.number]
            if outcome != FAILED:
                group.complete_step(outcome == ENDED)
                self._undelivered += group.num_envs
        self._in_flight = []
        self._waiting = []

    def _reset(self) -> None:
        """Start the episodes that are due, in row 0. What their envs have taken before would be cut within a batch."""
        self._settle()
        self._crew.raise_failures()  # also of a step that nobody wants any more
        for group in self._groups:
            self._copy_out(group, is_under_way=False)
        self._random_to_give += self._output.drop(ENV_INDEX, self._to_reset)
        kwargs, self._reset_kwargs = self._reset_kwargs, {}
        whole = [group for group in self._groups if set(group.rows) <= self._to_reset]
        for group in whole:
            if kwargs:
                self._reset_some(group, list(range(group.num_envs)), kwargs)
            else:
                self._crew.order(group.number, RESET, 0)
        if whole and not kwargs:
            self._crew.drain()
            self._crew.raise_failures()
        for group in self._groups:
            if group in whole:
                group.begin()
                continue
            own = sorted(env - group.rows.start for env in self._to_reset & set(group.rows))
            if own:
                self._reset_some(group, own, kwargs)
                group.boundaries.name_episodes(own)
                for key in self.layout.policy_state:
                    group.strip.carried[key].tensor[0, own] = 0
        self._to_reset = set()
        self._waiting = list(self._groups)

    def _reset_some(self, group: GroupProgress, env_ids: list[int], kwargs: dict[str, Any]) -> None:
        where = self._crew.groups[group.number]
        local = [where.local.start + env for env in env_ids]
        self._crew.hosts.call("reset", 0, local, kwargs, workers=[where.worker])

    # -- delivering --------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        under_way = {group.number for group in self._in_flight}
        for group in self._groups:
            self._copy_out(group, group.number in under_way)

    def _copy_out(self, group: GroupProgress, is_under_way: bool) -> None:
        """Everything that a group has taken becomes part of this batch, or of the next."""
        taken, num_envs = group.taken, group.num_envs
        if not taken:
            return
        parts = strip_parts(group.strip, group.boundaries, group.strip.layout, self._stamps, taken, 0)
        piece: dict[Key, torch.Tensor] = {}
        for field in self._fields:
            if field.key in parts:
                values = parts[field.key].corrected()
                size = (num_envs, taken, *field.shape)
                piece[field.key] = (values.expand(size) if values.dim() == 0 else values).flatten(0, 1)
        versions = torch.from_numpy(group.versions[:taken]).T.reshape(-1)
        for key in (VERSION, ("next", *VERSION)):
            if key in piece:
                piece[key] = versions
        piece[IS_RANDOM] = torch.from_numpy(group.is_random[:taken]).T.reshape(-1)
        piece[ENV_INDEX] = group.env_numbers.repeat_interleave(taken)
        self._output.add(piece)
        self._undelivered -= taken * num_envs
        group.forget_delivered(is_under_way)


def _of_size(layout: Layout, num_envs: int) -> Layout:
    return replace(layout, batch_size=torch.Size([num_envs]))


def _copy_row(
    ours: dict[Key, Column], row: int, theirs: dict[Key, Column], their_row: int, where: slice, *, into: bool
) -> None:
    """A row of a group into (or out of) some rows of a forward."""
    for key, column in theirs.items():
        mine = ours[key]
        if mine.array is not None and column.array is not None:
            if into:
                column.array[their_row, where] = mine.array[row]
            else:
                mine.array[row] = column.array[their_row, where]
        elif into:
            column.tensor[their_row, where] = mine.tensor[row]
        else:
            mine.tensor[row] = column.tensor[their_row, where]
