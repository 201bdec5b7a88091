"""One group of envs that step elsewhere: how far it has come, and what of it was not delivered yet."""

from __future__ import annotations

import numpy as np
import torch

from swath.rollout.boundaries import Boundaries, TrajectoryIds
from swath.rollout.layout import Layout
from swath.stepping.env_crew import EnvCrew, Group


class GroupProgress:
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
        #: Which actions were drawn, instead of chosen.
        self.is_random = np.zeros_like(self.versions, dtype=np.bool_)
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
        for flags in (strip.terminated, strip.truncated, self.is_random):
            flags[0] = flags[row]
            flags[row] = False
        self.versions[0] = self.versions[row]

    def forget_delivered(self, is_under_way: bool) -> None:
        """What was taken has been copied out."""
        strip, taken = self.strip, self.taken
        self.boundaries.rewind(taken)
        strip.terminated[:taken] = False
        strip.truncated[:taken] = False
        self.is_random[:taken] = False
        if is_under_way:  # its worker writes to the following rows: they are moved when it is done
            self.stale_rows = taken
        elif taken:
            for column in strip.carried.values():
                column.tensor[0].copy_(column.tensor[taken])
        self.taken = 0

    def abandon(self) -> None:
        """Forget what was taken, and the episodes under way."""
        self.taken = self.stale_rows = 0
        self.boundaries.abandon()
        for flags in (self.strip.terminated, self.strip.truncated, self.is_random):
            flags[:] = False

    def begin(self) -> None:
        """All its envs were reset, into row 0."""
        for column in self._state:
            column.tensor[0] = 0
        self.boundaries.name_episodes(list(range(self.num_envs)))
