"""Delivery for envs with filler steps (vector envs in NEXT_STEP mode).

A filler is no transition and is left out, so the envs of a batch advance unevenly: steps are taken until every env
has enough, and what an env has too much waits for the next batch. That wait is bounded. An env whose episodes are so
much longer than the others' that it gets too far ahead is cut, with a warning: its frames are dropped until there is
room again, the last one kept is marked truncated, and what follows is another trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.keys import Key
from swath.rollout.boundaries import Boundaries
from swath.rollout.delivery import TRAJ_IDS, Batch, Stamps, strip_parts
from swath.rollout.layout import Layout
from swath.rollout.strip import Strip
from swath.warn import warn_user

#: How far ahead of the slowest an env may get, beyond a batch.
MAX_WAITING_STEPS = 4096
MAX_WAITING_BYTES = 256 * 2**20


class RaggedBatch:
    """As ``delivery.Batch``, with a column count for every env."""

    def __init__(
        self,
        layout: Layout,
        stamps: Stamps,
        num_steps: int,
        device: torch.device | None,
        stepper: Any,
    ) -> None:
        room = max(1, MAX_WAITING_BYTES // max(1, layout.bytes_per_step))
        self._capacity = num_steps + max(num_steps, min(MAX_WAITING_STEPS, room))
        self._memory = Batch(layout, stamps, device)
        self._memory.open(self._capacity)
        self._memory.allocate()
        self._delivered = Batch(layout, stamps, device)
        self._counts = np.zeros(layout.num_envs, dtype=np.int64)
        self._stepper = stepper
        self._wanted = 0
        #: Envs that were cut in the last strip, and the ids of what was kept of them.
        self.cuts: list[tuple[int, int]] = []
        self._warned = False

    #: What waits in private memory is not committed.
    num_committed = 0

    def open(self, num_steps: int, reuse_memory: bool = False, into: Mapping[Key, torch.Tensor] | None = None) -> None:
        self._wanted = num_steps
        self._delivered.open(num_steps, reuse_memory, into)
        if not self._delivered.leaves:
            self._delivered.allocate()

    def steps_missing(self) -> int:
        return max(0, self._wanted - int(self._counts.min()))

    @property
    def is_empty(self) -> bool:
        return int(self._counts.min()) == 0

    @property
    def num_taken(self) -> int:
        """Steps that every env has taken for this batch so far."""
        return int(self._counts.min())

    def drop_pending(self) -> None:
        """Forget what waits: all envs were reset."""
        self._counts[:] = 0

    def write(self, strip: Strip, boundaries: Boundaries, num_steps: int, version: int) -> None:
        valid = np.ones((strip.num_envs, num_steps), dtype=np.bool_)
        for t, env_ids in self._stepper.fillers:
            valid[env_ids, t] = False
        self._stepper.fillers.clear()
        target = self._counts[:, None] + np.cumsum(valid, axis=1) - 1
        overflowing = np.flatnonzero((valid & (target >= self._capacity)).any(axis=1))
        valid &= target < self._capacity
        envs, steps = np.nonzero(valid)
        columns = target[envs, steps]
        layout, stamps = self._memory.layout, self._memory.stamps
        for key, part in strip_parts(strip, boundaries, layout, stamps, num_steps, version).items():
            values = part.corrected()
            values = values[envs, steps] if values.dim() else values
            self._memory.leaves[key][envs, columns] = values.to(self._memory.leaves[key].device)
        self._counts += valid.sum(axis=1)
        self.cuts = [(env, self._cut(env)) for env in overflowing.tolist()]

    def _cut(self, env: int) -> int:
        """The memory of an env is full: mark the last frame kept; returns its trajectory's id."""
        leaves, last = self._memory.leaves, self._capacity - 1
        if not self._warned:
            self._warned = True
            warn_user(
                f"env {env} of a vector env in NEXT_STEP mode got {self._capacity:,} steps ahead of the slowest; its "
                "frames are dropped until the others caught up, which cuts its episodes. Make the vector env with "
                "AutoresetMode.DISABLED or SAME_STEP, where envs advance evenly"
            )
        if not leaves["next", "done"][env, last]:
            for flag in ("truncated", "done") if self._memory.layout.has_truncated else ("done",):
                leaves["next", flag][env, last] = True
        return int(leaves[TRAJ_IDS][env, last]) if TRAJ_IDS in leaves else -1

    def finish(self) -> int:
        """Move what every env has enough of to where it is delivered from; how many steps that is."""
        wanted = min(self._wanted, int(self._counts.min()))
        left = int(self._counts.max()) - wanted
        for key, leaf in self._memory.leaves.items():
            self._delivered.leaves[key][:, :wanted] = leaf[:, :wanted]
            leaf[:, :left] = leaf[:, wanted : wanted + left].clone()
        self._counts -= wanted
        self._delivered.filled = wanted
        return wanted

    def close(self, num_envs: int | None = None) -> TensorDict:
        self.finish()
        return self._delivered.close(num_envs)
