"""Boundaries: what happens where one episode ends and the next begins.

The step only reports which envs ended. Here the last observation is put aside, those envs (and only those) are
reset, a policy's state is zeroed, and a new trajectory id is drawn. Ids and step counts of a whole strip follow
from these few events, so that the step need not write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from swath.rollout.strip import Strip


class Stepper(Protocol):
    """An env bound to a strip: the row protocol."""

    #: Envs whose row of the current step is no transition (see ``envs/vector.py``); None where that cannot happen.
    fillers: list[tuple[int, list[int]]] | None

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        """Start new episodes in these envs; write their first observations into ``row`` of the carried columns.

        ``kwargs`` are the env's own (Gymnasium's ``options``).
        """
        ...

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        """Take the actions of row t (in these envs; all by default); write carried row t + 1, outcomes and flags.

        Returns the envs to reset, or None.
        """
        ...


class TrajectoryIds:
    """Draws 64-bit trajectory ids, each once. ``first`` and ``stride`` keep several drawers apart."""

    def __init__(self, first: int = 0, stride: int = 1) -> None:
        self.next_id = first
        self.stride = stride

    def draw(self, count: int) -> range:
        first, self.next_id = self.next_id, self.next_id + self.stride * count
        return range(first, self.next_id, self.stride)

    def begin_at(self, first: int) -> None:
        """Use no id below this; still none of another drawer's."""
        self.next_id += max(0, -(-(first - self.next_id) // self.stride)) * self.stride


class Boundaries:
    """The episode starts of one strip, and where each env's current episode stands."""

    def __init__(self, strip: Strip, stepper: Stepper, ids: TrajectoryIds) -> None:
        self._strip = strip
        self._stepper = stepper
        self._ids = ids
        self._policy_state = [strip.carried[key] for key in strip.layout.policy_state]
        self.traj_ids = np.full(strip.num_envs, -1, dtype=np.int64)
        self.first_row = np.zeros(strip.num_envs, dtype=np.int64)
        #: (step, envs, their new ids): new episodes start in row step + 1.
        self.starts: list[tuple[int, list[int], range]] = []
        #: Ids of trajectories that are not whole episodes, because frames had to be dropped (``ragged.py``).
        self.fragments: set[int] = set()
        #: For every entry of ``starts``: the carried columns' last entries of the old episodes.
        self.last_entries: list[list[np.ndarray | torch.Tensor]] = []

    def begin(self, env_ids: list[int], **kwargs: Any) -> None:
        """Start episodes in row 0, before the first step of a strip."""
        self._stepper.reset(0, env_ids, **kwargs)
        for column in self._policy_state:
            column.tensor[0, env_ids] = 0
        self.name_episodes(env_ids)

    def name_episodes(self, env_ids: list[int]) -> None:
        """Give ids to episodes that start in row 0. One of which no step was taken leaves its id to the next."""
        unnamed = [env for env in env_ids if self.traj_ids[env] < 0 or self.first_row[env] < 0]
        self.traj_ids[unnamed] = self._ids.draw(len(unnamed))
        self.first_row[env_ids] = 0

    def rename_fresh(self) -> None:
        """Give new ids to episodes of which nothing was delivered yet."""
        fresh = (self.traj_ids >= 0) & (self.first_row >= 0)
        self.traj_ids[fresh] = self._ids.draw(int(fresh.sum()))

    def cross(self, t: int, env_ids: list[int]) -> None:
        """Step t was the last of an episode in these envs."""
        row = t + 1
        last = [column.take(row, env_ids) for column in self._strip.carried.values()]
        self._stepper.reset(row, env_ids)
        # After the reset, which may raise: what is recorded here must be complete.
        self.record(t, env_ids, last)

    def record(self, t: int, env_ids: list[int], last: list[np.ndarray | torch.Tensor]) -> None:
        """These envs ended with step t, and were reset; ``last`` has the carried columns' last entries."""
        row = t + 1
        self.last_entries.append(last)
        self.starts.append((t, env_ids, self._ids.draw(len(env_ids))))
        for column in self._policy_state:
            column.tensor[row, env_ids] = 0

    def cut(self, env_id: int, last_kept_id: int) -> None:
        """Give an env a new id, without a reset: frames in between were dropped. Neither side is a whole episode."""
        self.fragments |= {last_kept_id, int(self.traj_ids[env_id])}
        self.traj_ids[env_id] = self._ids.draw(1)[0]
        self.fragments.add(int(self.traj_ids[env_id]))

    def ids_and_counts(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Trajectory ids ``[num_envs, num_steps]`` and the row in which each episode began, counted from row 0."""
        ids = np.empty((self._strip.num_envs, num_steps), dtype=np.int64)
        first = np.empty_like(ids)
        ids[:] = self.traj_ids[:, None]
        first[:] = self.first_row[:, None]
        for t, env_ids, new_ids in self.starts:
            for env, new_id in zip(env_ids, new_ids, strict=True):
                ids[env, t + 1 :] = new_id
                first[env, t + 1 :] = t + 1
        return ids, first

    def abandon(self) -> None:
        """Forget the strip and the episodes in it."""
        self.starts.clear()
        self.last_entries.clear()
        self.traj_ids[:] = -1

    def rewind(self, num_steps: int) -> None:
        """Forget a delivered strip's events; keep where each env stands."""
        for t, env_ids, new_ids in self.starts:
            self.traj_ids[env_ids] = new_ids
            self.first_row[env_ids] = t + 1
        self.first_row -= num_steps
        self.starts.clear()
        self.last_entries.clear()


class StepLimit:
    """Ends an episode that reached ``max_steps``: sets its truncated flag and reports it as ended.

    Wraps a stepper's ``step``. Only the earliest limit is compared on a step.
    """

    def __init__(self, step: Callable[[int], list[int] | None], strip: Strip, max_steps: int) -> None:
        self._step = step
        self._truncated = strip.truncated
        self._max_steps = max_steps
        self._last_allowed = np.full(strip.num_envs, max_steps - 1, dtype=np.int64)
        self._earliest = max_steps - 1

    def begin(self, env_ids: list[int]) -> None:
        """These envs start an episode in row 0."""
        self._restart(-1, env_ids)

    def step(self, t: int) -> list[int] | None:
        ended = self._step(t)
        if t >= self._earliest:
            late = np.flatnonzero(self._last_allowed <= t).tolist()
            self._truncated[t, late] = True
            ended = sorted({*late, *(ended or ())})
        if ended:
            self._restart(t, ended)
        return ended

    def _restart(self, t: int, env_ids: list[int]) -> None:
        self._last_allowed[env_ids] = t + self._max_steps
        self._earliest = int(self._last_allowed.min())

    def rewind(self, num_steps: int) -> None:
        self._last_allowed -= num_steps
        self._earliest -= num_steps
