"""The other loop: one policy for envs that step elsewhere, whichever are ready.

Envs are in groups (``workers/env_crew.py``). A group whose step is done waits for its actions; the policy runs on the
rows of all that wait; then they step again, while the policy runs on others. What they write stays where it is, in
rows of the group's own strip, until a batch is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.envs.specs import Categorical, OneHot, masked_rand
from swath.rollout.boundaries import Boundaries, TrajectoryIds
from swath.rollout.delivery import Stamps, batch_fields, strip_parts
from swath.rollout.layout import CPU, Field, Key, Layout, nested
from swath.rollout.plan import BoundPolicy, PolicyPlan
from swath.rollout.strip import MAX_BYTES, Column, Strip
from swath.workers.env_crew import EnvCrew, Group
from swath.workers.stage import BUSY, ENDED, FAILED, RESET, STEP_AND_RESET

ENV_INDEX: Key = ("env_index",)
VERSION: Key = ("policy_version",)


class _Lane:
    """One group: its rows, its episodes, and how far it has come."""

    def __init__(self, crew: EnvCrew, group: Group, layout: Layout, ids: TrajectoryIds) -> None:
        self.number = group.number
        self.rows = group.rows
        self.num_envs = len(group.rows)
        stage = crew.stages[group.worker]
        self.strip = stage.strip.part(group.local, layout)
        self.boundaries = Boundaries(self.strip, None, ids)  # type: ignore[arg-type]  # envs are reset elsewhere
        env_keys = list(stage.strip.carried)
        self._last = dict(zip(env_keys, [column.part(group.local) for column in stage.last], strict=True))
        self._state = [self.strip.carried[key] for key in layout.policy_state]
        #: Of the weights that chose each row's actions.
        self.versions = np.zeros((self.strip.num_steps, self.num_envs), dtype=np.int64)
        #: Steps that are complete and not delivered; the row of the next one.
        self.taken = 0
        #: Rows before the one that is under way which were delivered meanwhile.
        self.stale_rows = 0
        self.env_numbers = torch.arange(group.rows.start, group.rows.stop)

    @property
    def is_full(self) -> bool:
        return self.taken == self.strip.num_steps

    def complete_step(self, has_ends: bool) -> None:
        """The step under way is done."""
        if self.stale_rows:
            self._move_to_front(self.stale_rows)
            self.stale_rows = 0
        t = self.taken
        if has_ends:
            over = (self.strip.terminated[t] | self.strip.truncated[t]).nonzero()[0].tolist()
            # In the order of the strip's carried columns; a policy's state has no last entry of its own.
            last = [
                self._last[key].take(t, over) if key in self._last else column.take(t + 1, over)
                for key, column in self.strip.carried.items()
            ]
            self.boundaries.record(t, over, last)
        self.taken = t + 1

    def _move_to_front(self, row: int) -> None:
        strip = self.strip
        for column in strip.carried.values():
            column.tensor[0].copy_(column.tensor[row])
            column.tensor[1].copy_(column.tensor[row + 1])
        for column in (*strip.outputs.values(), *strip.outcomes.values(), *self._last.values()):
            column.tensor[0].copy_(column.tensor[row])
        for flags in (strip.terminated, strip.truncated):
            flags[0] = flags[row]
            flags[row] = False
        self.versions[0] = self.versions[row]

    def forget_delivered(self, is_under_way: bool) -> None:
        """What was taken has been copied out."""
        strip, taken = self.strip, self.taken
        self.boundaries.rewind(taken)
        strip.terminated[:taken] = False
        strip.truncated[:taken] = False
        if is_under_way:  # its worker writes to the following rows: they are moved when it is done
            self.stale_rows = taken
        elif taken:
            for column in strip.carried.values():
                column.tensor[0].copy_(column.tensor[taken])
        self.taken = 0

    def begin(self) -> None:
        """All its envs were reset, into row 0."""
        for column in self._state:
            column.tensor[0] = 0
        self.boundaries.name_episodes(list(range(self.num_envs)))


class _Rows:
    """Memory for a forward on so many rows, and the policy bound to it."""

    def __init__(self, plan: PolicyPlan, num_rows: int) -> None:
        sized = plan.resized(num_rows)
        self.strip = Strip(sized.layout, num_steps=1)
        self.policy: BoundPolicy = sized.bind(self.strip)
        self.epoch = -1


class _Output:
    """A batch ``[num_frames]`` that is being put together, and what was left over from the one before."""

    def __init__(self, fields: list[Field]) -> None:
        self._fields = fields
        self.leaves: dict[Key, torch.Tensor] = {}
        self.num_frames = 0
        self.filled = 0
        self._spilled: list[dict[Key, torch.Tensor]] = []

    @property
    def num_spilled(self) -> int:
        return sum(len(next(iter(piece.values()))) for piece in self._spilled)

    def open(self, num_frames: int) -> None:
        self.num_frames, self.filled = num_frames, 0
        self.leaves = {f.key: torch.empty((num_frames, *f.shape), dtype=f.dtype, device=f.device) for f in self._fields}
        spilled, self._spilled = self._spilled, []
        for piece in spilled:
            self.add(piece)

    def add(self, piece: dict[Key, torch.Tensor]) -> None:
        count = len(next(iter(piece.values())))
        room = min(count, self.num_frames - self.filled)
        if room:
            for key, values in piece.items():
                self.leaves[key][self.filled : self.filled + room].copy_(values[:room])
            self.filled += room
        if room < count:
            self._spilled.append({key: values[room:].clone() for key, values in piece.items()})

    def forget(self) -> None:
        self._spilled.clear()
        self.filled = 0


class CentralRollout:
    """A policy, envs elsewhere, and batches ``[frames]`` of whatever they did; each env's frames in order.

    Args:
        crew: the envs.
        plan: how to call the policy; None for random actions only.
        layout: the keys of env and policy together, for all envs.
        frames_per_batch: of a usual batch; says how long strips are.
        max_batch_size, min_batch_size: rows of a forward.
        min_batch_wait_s: how long to wait for ``min_batch_size`` rows.
        goes_on: whether envs are given their next actions before a batch is handed over.
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
        goes_on: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self._crew = crew
        self._plan = plan
        self._layout = layout
        self._stamps = stamps
        self._action_specs = action_specs
        self._max_batch_size = max_batch_size
        self._min_batch_size = min_batch_size
        self._min_batch_wait_s = min_batch_wait_s
        self.goes_on = goes_on
        self._device = device
        self.num_envs = crew.num_rows
        affordable = max(2, MAX_BYTES // max(1, layout.bytes_per_step))
        num_steps = min(2 * -(-frames_per_batch // self.num_envs) + 8, affordable)
        crew.lay_out(num_steps, {f.key: f for f in layout.outputs}, envs_per_group)
        self._lanes = [_Lane(crew, group, _of_size(layout, len(group.rows)), ids) for group in crew.groups]
        fields = batch_fields(layout, stamps, device)
        self._fields = [*fields, Field(ENV_INDEX, torch.Size(), torch.int64, device or CPU)]
        self._output = _Output(self._fields)
        self._forwards: dict[int, _Rows] = {}
        self._epoch = 0
        self._version = -1
        self._in_flight: list[_Lane] = []
        #: Lanes that wait for actions, the longest waiting first.
        self._waiting: list[_Lane] = []
        #: Envs that start anew before their next step, by lane; None for all of a lane.
        self._to_reset: set[int] = set(range(self.num_envs))
        self._reset_kwargs: dict[str, Any] = {}
        self._failed = False
        #: Frames that lanes have taken and that are in no batch yet.
        self._undelivered = 0
        self.random_frames_left = 0
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
        return np.concatenate([lane.boundaries.traj_ids for lane in self._lanes])

    def collect(
        self, num_frames: int, *, policy_version: int = 0, stop: Callable[[], bool] | None = None, **_: Any
    ) -> TensorDict:
        """A batch of so many frames, fewer if ``stop`` says so.

        If a step raises, ``salvage()`` gives what came before.
        """
        if self._failed:
            self.abandon()
        self._epoch += 1
        self._version = policy_version
        self._output.open(num_frames)
        self._failed = True  # unless this comes to its end
        if self._to_reset:
            self._reset()
        self._act()
        while self._missing > 0 and not (stop is not None and stop()):
            self._take_ready()
            if self._missing > 0 or self.goes_on:
                self._act()
        self._flush()
        self._failed = False
        return self._deliver(self._output.filled)

    def start_from(self, first_row: Mapping[Key, torch.Tensor]) -> None:
        """Go on from a reset of all envs that was made already."""
        for lane in self._lanes:
            for key, row in first_row.items():
                flat = row.reshape(self.num_envs, *row.shape[len(self._layout.batch_size) :])
                lane.strip.carried[key].tensor[0] = flat[lane.rows.start : lane.rows.stop]
            lane.begin()
        self._to_reset = set()
        self._waiting = list(self._lanes)

    def reset(self, env_ids: list[int] | None = None, **kwargs: Any) -> None:
        """Let these envs start anew before their next step. All of them (the default) also with the next batch."""
        self._reset_kwargs |= kwargs
        if env_ids is None:
            self.abandon()
            return
        for env in env_ids:
            if not 0 <= env < self.num_envs:
                raise IndexError(f"there is no env {env} to reset: there are {self.num_envs}, counted from 0")
        self._to_reset |= set(env_ids)

    def abandon(self) -> None:
        """Forget what is under way and what waits to be delivered: every env starts anew, with a new trajectory id."""
        self._settle()
        self._output.forget()
        self._undelivered = 0
        for lane in self._lanes:
            lane.taken = lane.stale_rows = 0
            lane.boundaries.abandon()
            lane.strip.terminated[:] = False
            lane.strip.truncated[:] = False
        self._failed = False
        self._to_reset = set(range(self.num_envs))

    def salvage(self) -> TensorDict | None:
        """After a step raised: the frames that were complete."""
        if not self._failed:
            return None
        self._flush()
        return self._deliver(self._output.filled)

    def blank_batch(self, num_frames: int) -> TensorDict:
        """A batch of zeros."""
        output = _Output(self._fields)
        output.open(num_frames)
        return _as_batch({key: leaf.zero_() for key, leaf in output.leaves.items()}, num_frames, self._device)

    # -- the loop ----------------------------------------------------------------------------------------------------

    @property
    def _missing(self) -> int:
        """Frames of this batch that were not collected yet."""
        return self._output.num_frames - self._output.filled - self._undelivered

    def _take_ready(self) -> None:
        """Wait until a lane is done; then take all that are."""
        crew = self._crew
        if not self._in_flight:
            return
        crew.wait()
        crew.watch()  # whoever is dead or stuck must not be forgotten over those who are not
        self._sort_ready()
        if self._min_batch_size > 1 and self._in_flight:
            deadline = time.monotonic() + self._min_batch_wait_s
            while sum(lane.num_envs for lane in self._waiting) < self._min_batch_size and self._in_flight:
                if not crew.wait_until(deadline):
                    break
                self._sort_ready()

    def _sort_ready(self) -> None:
        outcomes = self._crew.outcomes
        still: list[_Lane] = []
        failed = False
        for lane in self._in_flight:
            outcome = outcomes[lane.number]
            if outcome == BUSY:
                still.append(lane)
            elif outcome == FAILED:
                failed = True
                if lane.stale_rows:  # nothing of its own is in its strip
                    lane.stale_rows = lane.taken = 0
            else:
                lane.complete_step(outcome == ENDED)
                self._undelivered += lane.num_envs
                self._waiting.append(lane)
        self._crew.take_posts(len(self._in_flight) - len(still) - 1)
        self._in_flight = still
        if failed:
            self._crew.raise_failures()

    def _act(self) -> None:
        """Give actions to all lanes that wait for them, and let them step."""
        waiting, self._waiting = self._waiting, []
        while waiting:
            lanes = [waiting.pop(0)]
            num_rows = lanes[0].num_envs
            while waiting and num_rows + waiting[0].num_envs <= self._max_batch_size:
                lanes.append(waiting.pop(0))
                num_rows += lanes[-1].num_envs
            for lane in lanes:
                if lane.is_full:
                    self._copy_out(lane, is_under_way=False)
            self._choose_actions(lanes, num_rows)
            for lane in lanes:
                lane.versions[lane.taken] = self._version
                self._crew.order(lane.number, STEP_AND_RESET, lane.taken)
                self._in_flight.append(lane)

    def _choose_actions(self, lanes: list[_Lane], num_rows: int) -> None:
        if self._plan is None or self.random_frames_left >= num_rows:
            for lane in lanes:
                self._draw(lane, lane.num_envs)
            self.random_frames_left = max(0, self.random_frames_left - num_rows)
            return
        forward = self._forwards.get(num_rows)
        if forward is None:
            forward = self._forwards[num_rows] = _Rows(self._plan, num_rows)
        if forward.epoch != self._epoch:
            forward.policy.prepare()
            forward.epoch = self._epoch
        memory = forward.strip
        at = 0
        for lane in lanes:
            _copy_row(lane.strip.carried, lane.taken, memory.carried, 0, slice(at, at + lane.num_envs), into=True)
            at += lane.num_envs
        forward.policy.act(0)
        self.num_forwards += 1
        self.num_forward_rows += num_rows
        at = 0
        for lane in lanes:
            where = slice(at, at + lane.num_envs)
            _copy_row(lane.strip.outputs, lane.taken, memory.outputs, 0, where, into=False)
            for key in self._layout.policy_state:
                lane.strip.carried[key].tensor[lane.taken + 1] = memory.carried[key].tensor[1, where]
            at += lane.num_envs
            if self.random_frames_left:
                count = min(self.random_frames_left, lane.num_envs)
                self._draw(lane, count)
                self.random_frames_left -= count

    def _draw(self, lane: _Lane, count: int) -> None:
        """Random actions for the first envs of a lane; whatever else the policy would write is zero."""
        t = lane.taken
        mask = lane.strip.carried.get(("action_mask",))
        for key, column in lane.strip.outputs.items():
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
        for key in self._layout.policy_state:
            lane.strip.carried[key].tensor[t + 1, :count] = 0

    # -- resets ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for what is under way. Steps that were taken for nobody are complete ones all the same."""
        crew = self._crew
        crew.drain()
        for lane in self._in_flight:
            outcome = crew.outcomes[lane.number]
            if outcome != FAILED:
                lane.complete_step(outcome == ENDED)
                self._undelivered += lane.num_envs
        self._in_flight = []
        self._waiting = []

    def _reset(self) -> None:
        """Start the episodes that are due, in row 0."""
        self._settle()
        for lane in self._lanes:
            self._copy_out(lane, is_under_way=False)
        kwargs, self._reset_kwargs = self._reset_kwargs, {}
        whole = [lane for lane in self._lanes if set(lane.rows) <= self._to_reset]
        for lane in whole:
            if kwargs:
                self._reset_some(lane, list(range(lane.num_envs)), kwargs)
            else:
                self._crew.order(lane.number, RESET, 0)
        if whole and not kwargs:
            self._crew.drain()
            self._crew.raise_failures()
        for lane in self._lanes:
            if lane in whole:
                lane.begin()
                continue
            own = sorted(env - lane.rows.start for env in self._to_reset & set(lane.rows))
            if own:
                self._reset_some(lane, own, kwargs)
                lane.boundaries.name_episodes(own)
                for key in self._layout.policy_state:
                    lane.strip.carried[key].tensor[0, own] = 0
        self._to_reset = set()
        self._waiting = list(self._lanes)

    def _reset_some(self, lane: _Lane, env_ids: list[int], kwargs: dict[str, Any]) -> None:
        group = self._crew.groups[lane.number]
        local = [group.local.start + env for env in env_ids]
        self._crew.hosts.call("reset", 0, local, kwargs, workers=[group.worker])

    # -- delivering --------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        under_way = {lane.number for lane in self._in_flight}
        for lane in self._lanes:
            self._copy_out(lane, lane.number in under_way)

    def _copy_out(self, lane: _Lane, is_under_way: bool) -> None:
        """Everything that a lane has taken becomes part of this batch, or of the next."""
        taken, num_envs = lane.taken, lane.num_envs
        if not taken:
            return
        parts = strip_parts(lane.strip, lane.boundaries, lane.strip.layout, self._stamps, taken, 0)
        piece: dict[Key, torch.Tensor] = {}
        for field in self._fields:
            if field.key in parts:
                values = parts[field.key].values
                size = (num_envs, taken, *field.shape)
                piece[field.key] = (values.expand(size) if values.dim() == 0 else values).reshape(-1, *field.shape)
        versions = torch.from_numpy(lane.versions[:taken]).T.reshape(-1)
        for key in (VERSION, ("next", *VERSION)):
            if key in piece:
                piece[key] = versions
        piece[ENV_INDEX] = lane.env_numbers.repeat_interleave(taken)
        self._output.add(piece)
        self._undelivered -= taken * num_envs
        lane.forget_delivered(is_under_way)

    def _deliver(self, num_frames: int) -> TensorDict:
        leaves = self._output.leaves
        if num_frames < self._output.num_frames:
            leaves = {key: leaf[:num_frames].clone() for key, leaf in leaves.items()}
        self._output.leaves = {}
        return _as_batch(leaves, num_frames, self._device)


def _as_batch(leaves: dict[Key, torch.Tensor], num_frames: int, device: torch.device | None) -> TensorDict:
    return TensorDict(nested(leaves), batch_size=(num_frames,), device=device)


def _of_size(layout: Layout, num_envs: int) -> Layout:
    return replace(layout, batch_size=torch.Size([num_envs]))


def _copy_row(
    ours: dict[Key, Column], row: int, theirs: dict[Key, Column], their_row: int, where: slice, *, into: bool
) -> None:
    """A row of a lane into (or out of) some rows of a forward."""
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
